"""Exact cover on random forests: every visible (query, token) pair once, whatever the strategy, horizon and buckets."""

import jax
import numpy as np
import pytest
from forests import Heads, every_strategy, plan_for, quick_compiler_options
from hypothesis import given, settings
from hypothesis import strategies as st
from random_forests import forests, grown, quick, thorough

import tree_attention_jax as ta

# Thousands of random forests: once is enough.
pytestmark = pytest.mark.slow

HEADS = [Heads(1, 1), Heads(4, 4), Heads(6, 2), Heads(7, 1), Heads(64, 1), Heads(96, 1, 128, 64)]
GPUS = [None, "NVIDIA H200", "NVIDIA L4"]
ROOMY = ta.Buckets(queries=128, items=1024, partials=16_384, buffer=1 << 19)

advance = jax.jit(ta.TreePlan.advance, compiler_options=quick_compiler_options())


def check_plan(strategy: str, case: tuple[ta.TokenTree, int], data: st.DataObject) -> None:
    """A plan for these arguments covers the tree, as does one in other buckets; equal buckets give an equal shape."""
    tree, page_size = case
    options = {
        "strategy": strategy,
        "gpu": data.draw(st.sampled_from(GPUS), "gpu"),
        "sliding_window": data.draw(st.one_of(st.none(), st.integers(1, 60)), "window"),
        "dtype": data.draw(st.sampled_from(["bfloat16", "float32"]), "dtype"),
    }
    heads = data.draw(st.sampled_from(HEADS), "heads")
    plan = plan_for(tree, page_size, heads, **options)
    plan.check(tree)
    roomy = plan_for(tree, page_size, heads, **options, buckets=ROOMY)
    roomy.check(tree)
    assert roomy.query_capacity == 128
    assert plan_for(tree, page_size, heads, **options, buckets=plan.buckets).shape.row_capacity == plan.query_capacity
    np.testing.assert_array_equal(plan.positions[: tree.num_queries], tree.query_positions())


def check_growth(strategy: str, case: tuple[ta.TokenTree, int], horizon: int, data: st.DataObject) -> None:
    """A plan with a horizon covers the tree of every step."""
    tree, page_size = case
    heads = data.draw(st.sampled_from(HEADS[:4]), "heads")
    plan = plan_for(tree, page_size, heads, strategy=strategy, horizon=horizon, buckets=ROOMY)
    plan.check(tree)
    for step in range(1, horizon + 1):
        plan = advance(plan)
        plan.check(grown(tree, step))


@every_strategy
@quick
@given(case=forests(), data=st.data())
def test_cover(strategy: str, case, data):
    check_plan(strategy, case, data)


@every_strategy
@settings(quick, max_examples=15)
@given(case=forests(decoding=True, reserve=5), data=st.data())
def test_cover_of_every_step(strategy: str, case, data):
    check_growth(strategy, case, 5, data)


@every_strategy
@thorough
@given(case=forests(max_nodes=40, max_tokens=300), data=st.data())
def test_cover_of_larger_forests(strategy: str, case, data):
    check_plan(strategy, case, data)


@every_strategy
@quick
@given(case=forests(max_nodes=30, max_tokens=90, decoding=True, reserve=40), data=st.data())
def test_cover_of_every_step_of_a_long_horizon(strategy: str, case, data):
    check_growth(strategy, case, 40, data)


@every_strategy
@pytest.mark.parametrize(
    "tree",
    [
        ta.TokenTree([], []),
        ta.TokenTree([-1], [0]),
        ta.TokenTree([-1, -1], [0, 0]),
        ta.TokenTree([-1, 0], [5, 0], [0, 0]),
        ta.TokenTree([-1, 0, 1, 2], [0, 0, 0, 3], [0, 0, 0, 1]),
        ta.TokenTree([-1], [1], [1]),
        ta.TokenTree(np.arange(-1, 299), np.ones(300, int), np.ones(300, int)),
        ta.TokenTree.from_levels([1, 3000], [7, 1]),
        ta.TokenTree([-1], [900], [600]),
    ],
    ids=["nothing", "empty", "two-empty", "no-queries", "empty-path", "one-token", "chain", "star", "prefill"],
)
def test_cover_of_extremes(strategy: str, tree: ta.TokenTree):
    plan = plan_for(tree, 16, Heads(4, 2), strategy=strategy)
    plan.check(tree)
    assert plan.query_capacity >= tree.num_queries
