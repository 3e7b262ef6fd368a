"""Recorded tree-of-thoughts searches, step by step: ragged growth, forks and finishes, each step against the oracle.

Two runs come with the benchmarks; a checkout with ``shared/data`` in or beside it has ten for the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from forests import Heads, Inputs, assert_matches_oracle, attend, poisoned_inputs

import tree_attention_jax as ta
from benchmarks.suites.decoding import thoughts

HEADS = Heads(4, 2, 64)
# Thousands of steps, and the oracle takes most of the time.
SMALL_HEADS = Heads(2, 1, 16)
PAGE_SIZE = 16
ROOT = Path(__file__).parents[2]
Trace = list[list[int]]


def recorded(count: int) -> list[Trace]:
    """``count`` runs, half of each kind, where the data is at hand; else the two of the benchmarks."""
    for folder in (ROOT / "shared" / "data", ROOT.parent / "shared" / "data"):
        files = [folder / f"{name}ToT.json" for name in ("sorting128", "docmerge")]
        if all(file.exists() for file in files):
            kinds = [json.loads(file.read_text())["trees"] for file in files]
            return [run for kind in kinds for run in kind[: count // 2]]
    return [thoughts("sorting"), thoughts("docmerge")]


class Replay:
    """A run on a page table that holds all of it from the beginning, in random order."""

    def __init__(self, trace: Trace, seed: int = 0):
        self.parent, self.tokens, self.start = np.array(trace).T
        pages = -(-self.tokens // PAGE_SIZE)
        self.indptr = np.concatenate([[0], np.cumsum(pages)])
        self.pages = np.random.default_rng(seed).permutation(int(pages.sum()))
        self.last_step = int((self.start + self.tokens).max()) - 1

    def at(self, step: int) -> ta.TokenTree:
        """The forest of a step: a node has a token more each step from its first on, and that is its query."""
        begun = int((self.start <= step).sum())
        parent, tokens, start = self.parent[:begun], self.tokens[:begun], self.start[:begun]
        kv_len = np.where(start == 0, tokens, np.minimum(tokens, step - start + 1))
        q_len = ((start > 0) & (step < start + tokens)).astype(np.int64)
        return ta.TokenTree(parent, kv_len, q_len, self.indptr[: begun + 1], self.pages[: self.indptr[begun]])

    def steps(self, stride: int) -> Iterator[ta.TokenTree]:
        assert (np.diff(self.start) >= 0).all()
        for step in range(1, self.last_step + 1, stride):
            yield self.at(step)


def plan_of(tree: ta.TokenTree, heads: Heads = HEADS) -> ta.TreePlan:
    options = {"num_q_heads": heads.q, "num_kv_heads": heads.kv, "head_dim": heads.dim, "dtype": "float32"}
    return ta.plan_tree(tree, PAGE_SIZE, gpu="NVIDIA H200", **options)


@pytest.mark.parametrize("trace", recorded(4), ids=lambda trace: f"{len(trace)}-nodes-{sum(n for _, n, _ in trace)}")
def test_plans_cover_what_each_step_sees(trace: Trace):
    forests = list(Replay(trace).steps(stride=97))
    for tree in forests:
        plan_of(tree).check(tree)
    assert max(tree.num_nodes for tree in forests) == len(trace)
    assert max(tree.num_queries for tree in forests) >= 9


@pytest.mark.parametrize("name", ["sorting", "docmerge"])
def test_steps_equal_the_oracle(name: str):
    compare(thoughts(name), stride=600, implementation="xla")


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(10))
def test_every_step_equals_the_oracle(number: int):
    runs = recorded(10)
    compare(runs[number % len(runs)], stride=1, implementation="pallas_triton", heads=SMALL_HEADS)


def compare(trace: Trace, stride: int, implementation: str, heads: Heads = HEADS) -> None:
    """Attention of each step on one cache that holds the whole run."""
    replay = Replay(trace)
    everything = replay.at(replay.last_step)
    inputs = poisoned_inputs(everything, PAGE_SIZE, heads, pages=len(replay.pages))
    k_pages, v_pages = jnp.asarray(inputs.k_pages), jnp.asarray(inputs.v_pages)
    rng = np.random.default_rng(1)
    for tree in replay.steps(stride):
        plan = plan_of(tree, heads)
        q = rng.normal(size=(plan.query_capacity, heads.q, heads.dim)).astype(np.float32)
        out, lse = attend(jnp.asarray(q), k_pages, v_pages, plan, implementation)
        assert_matches_oracle(out, lse, tree, PAGE_SIZE, Inputs(q, inputs.k_pages, inputs.v_pages))
