"""What peers get to see of a forest, each form attended in NumPy, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

import tree_attention_jax as ta
from benchmarks.peers import Unsuitable
from benchmarks.peers._sequences import cascade_levels, padded, page_lists, query_slots, requests
from benchmarks.suites import Cell

HEADS, WIDTH = 2, 8


def arrays(tree: ta.TokenTree, page_size: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    pages = int(tree.page_table(page_size)[1].max()) + 1
    q = rng.normal(size=(tree.num_queries, HEADS, WIDTH))
    return q, *(rng.normal(size=(pages, page_size, HEADS, WIDTH)) for _ in range(2))


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None) -> tuple:
    """[Q, H, D] over [T, H, D]: (out, natural-log LSE [Q, H])."""
    logits = np.einsum("qhd,thd->hqt", q, k) * WIDTH**-0.5
    if mask is not None:
        logits = np.where(mask, logits, -np.inf)
    peak = logits.max(-1, keepdims=True)
    weight = np.exp(logits - peak)
    out = np.einsum("hqt,thd->qhd", weight / weight.sum(-1, keepdims=True), v)
    return out, (peak[..., 0] + np.log(weight.sum(-1))).T


def tokens(pages: np.ndarray, one) -> np.ndarray:
    """K or V of each sequence of page lists, as a library reads them."""
    pool = pages.reshape(-1, one.page_size, HEADS, WIDTH)
    lists = np.split(one.indices, one.indptr[1:-1])
    return [pool[own].reshape(-1, HEADS, WIDTH)[:length] for own, length in zip(lists, one.lengths)]


@pytest.mark.parametrize(("name", "page"), [("1,2,6_32,16,5", 16), ("1,2,6_8,16,5", 8), ("1,3_5,7", 1), ("3_40", 16)])
def test_page_lists_hold_each_query_s_tokens(name, page):
    tree = Cell(name, HEADS, HEADS).tree()
    q, k, v = arrays(tree, 16)
    lists = page_lists(query_slots(tree, 16), 16)
    assert lists.page_size == page
    out = [attend(q[i : i + 1], *kv)[0][0] for i, kv in enumerate(zip(tokens(k, lists), tokens(v, lists)))]
    np.testing.assert_allclose(out, ta.reference.dense_tree_attention(q, k, v, tree), rtol=1e-9)


@pytest.mark.parametrize("name", ["1,2,6_32,16,5", "1,2,6_8,20,5", "2,4,4_8,3,1", "1,2,4,8_1,2,3,4"])
def test_cascade_levels_merge_to_the_whole(name):
    tree = Cell(name, HEADS, HEADS).tree()
    q, k, v = arrays(tree, 16)
    states = []
    for indptr, lists in cascade_levels(tree, 16):
        assert indptr[-1] == tree.num_queries
        assert lists.page_size == 16
        parts = zip(np.split(q, indptr[1:-1]), tokens(k, lists), tokens(v, lists))
        outs, lses = zip(*(attend(*part) for part in parts))
        states.append((np.concatenate(outs), np.concatenate(lses)))
    out, lse = (np.stack(side) for side in zip(*states))
    weight = np.exp(lse - lse.max(0))
    merged = (out * weight[..., None]).sum(0) / weight.sum(0)[..., None]
    np.testing.assert_allclose(merged, ta.reference.dense_tree_attention(q, k, v, tree), rtol=1e-9)


@pytest.mark.parametrize("name", ["2x33+draft16", "1x16+draft32", "1,2,4_8,4,3"])
def test_requests_with_masks_are_the_forest(name):
    tree = Cell(name, HEADS, HEADS).tree()
    q, k, v = arrays(tree, 16)
    wanted = ta.reference.dense_tree_attention(q, k, v, tree)
    batch = requests(tree, 16)
    flat = [side.reshape(-1, HEADS, WIDTH) for side in (k, v)]
    for queries, slots, mask in zip(batch.queries, batch.slots, batch.masks):
        np.testing.assert_allclose(attend(q[queries], *(s[slots] for s in flat), mask)[0], wanted[queries], rtol=1e-9)
    assert sorted(np.concatenate(batch.queries)) == list(range(tree.num_queries))


def test_drafts_of_a_request_fill_whole_pages():
    """So one page list a request is enough: prompt and draft lie side by side."""
    batch = requests(Cell("2x32+draft16", HEADS, HEADS).tree(), 16)
    assert page_lists(batch.slots, 16).page_size == 16


def test_padding_is_at_the_end():
    table, lengths = padded([np.array([5, 6, 7]), np.array([9])])
    np.testing.assert_array_equal(table, [[5, 6, 7], [9, 0, 0]])
    np.testing.assert_array_equal(lengths, [3, 1])


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (ta.TokenTree([-1, 0, 1, 0], [4, 4, 4, 4]), "equal depth"),
        (ta.TokenTree([-1, 0], [4, 4], [0, 2]), "one query"),
        (ta.TokenTree([-1, 0, 0, 1, 2, 1], [4] * 6), "side by side"),
    ],
)
def test_forests_that_are_no_cascade_say_why(tree, reason):
    with pytest.raises(Unsuitable, match=reason):
        cascade_levels(tree, 16)
