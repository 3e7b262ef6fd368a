"""Small pages that lie side by side are planned as larger ones; where they do not, nothing changes."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from forests import Heads, check_against_oracle, plan_for
from hypothesis import given
from hypothesis import strategies as st
from random_forests import forests, grown, quick

import tree_attention_jax as ta
from pallas_kernels.layout import MAX_UNIT
from tree_attention_jax.planning._larger_pages import in_larger_pages

HEADS = Heads(4, 2, 64)
SMALL = [1, 2, 3, 4, 12, 20]
LARGE = [8, 16, 24, 64]


def side_by_side(tree: ta.TokenTree, page_size: int, reserve: int, gaps: list[int], first: int) -> ta.TokenTree:
    """A table where each node's pages lie side by side, ``gaps`` behind the last one's, from slot ``first`` on."""
    first_slot = np.where(tree.kv_len > 0, first % page_size, 0)
    counts = -(-(first_slot + tree.kv_len + reserve * tree.is_leaf()) // page_size)
    begin = np.cumsum(counts + np.resize(gaps, len(counts))) - counts
    indices = np.concatenate([np.arange(b, b + n) for b, n in zip(begin, counts)]) if len(counts) else []
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return ta.TokenTree(tree.parent, tree.kv_len, tree.q_len, indptr, indices, first_slot)


@quick
@given(
    forests(),
    st.sampled_from(SMALL),
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
    st.integers(0, 19),
    st.sampled_from(["auto", "per_node", "flatten", "pack"]),
)
def test_covers_exactly(drawn, page_size: int, gaps: list[int], first: int, strategy: str):
    tree = side_by_side(drawn[0], page_size, 0, gaps, first)
    larger, size = in_larger_pages(tree, page_size)
    assert size == (MAX_UNIT if len(tree.page_indices) else page_size)
    np.testing.assert_array_equal(larger.token_slots(size), tree.token_slots(page_size))
    plan = plan_for(tree, page_size, HEADS, strategy=strategy)
    plan.check(tree)
    assert plan.shape.page_size == page_size
    assert plan.host.num_pages == (int(tree.page_indices.max()) + 1 if len(tree.page_indices) else 0)


@pytest.mark.parametrize("page_size", SMALL)
def test_grows_exactly(page_size: int):
    tree = side_by_side(ta.TokenTree.from_levels([1, 3, 7], [50, 9, 5]), page_size, 20, [3, 0, 1], first=1)
    plan = plan_for(tree, page_size, HEADS, horizon=20)
    for step in range(20):
        plan.check(grown(tree, step))
        plan = plan.advance()
    plan.check(grown(tree, 20))


@pytest.mark.parametrize("page_size", SMALL)
def test_pages_apart_or_backwards_stay(page_size: int):
    tree = ta.TokenTree.from_levels([1, 3], [100, 60]).with_pages(page_size)
    indptr, indices = tree.page_table(page_size)
    for other in (indices[::-1].copy(), indices * 2):
        tree = ta.TokenTree(tree.parent, tree.kv_len, tree.q_len, indptr, other)
        assert in_larger_pages(tree, page_size) == (tree, page_size)
        plan = plan_for(tree, page_size, HEADS, strategy="per_node")
        assert {launch.tile.unit for launch in plan.shape.launches} == {math.gcd(page_size, MAX_UNIT)}
        plan.check(tree)


@pytest.mark.parametrize("page_size", LARGE)
def test_larger_pages_stay(page_size: int):
    tree = ta.TokenTree.from_levels([1, 3], [100, 60])
    assert in_larger_pages(tree, page_size) == (tree, page_size)


@pytest.mark.parametrize("heads", [Heads(16, 1, 128), Heads(32, 8, 128), Heads(32, 32, 128)], ids=str)
@pytest.mark.parametrize("levels", [([1, 16, 64], [1024, 256, 64]), ([1, 4, 16, 512], [1024, 256, 128, 64])])
def test_no_worse_than_larger_pages(levels: tuple, heads: Heads):
    """Nodes of whole pages lie in the same slots whatever the page size, so kernels are told the same."""
    one, sixteen = (plan_for(ta.TokenTree.from_levels(*levels), size, heads, gpu="NVIDIA H200") for size in (1, 16))
    assert one.shape.launches == sixteen.shape.launches
    np.testing.assert_array_equal(one.host.buffer, sixteen.host.buffer)


@pytest.mark.parametrize("page_size", [1, 4, 12])
def test_attends_and_appends_as_the_oracle(page_size: int):
    tree = side_by_side(ta.TokenTree([-1, 0, 0, 2], [37, 5, 20, 6], [0, 1, 0, 4]), page_size, 0, [2], first=3)
    check_against_oracle(tree, page_size, HEADS)
    plan = plan_for(tree, page_size, HEADS)
    slots = np.asarray(plan.slots)[: tree.num_queries]
    owned, ends = tree.token_slots(page_size), np.cumsum(tree.kv_len)
    new = [owned[end - n : end] for end, n in zip(ends, tree.q_len) if n]
    np.testing.assert_array_equal(slots, np.concatenate(new))
    pages = jnp.zeros((plan.host.num_pages, page_size, 2, 64))
    k_new = jnp.ones((tree.num_queries, 2, 64))
    k_pages, _ = ta.append_kv(pages, pages, k_new, k_new, plan)
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(k_pages).any(axis=(2, 3)).ravel()), np.sort(slots))
