"""Forests from a serving engine's block tables, against plain per-sequence attention."""

import numpy as np
import pytest
from forests import Heads, assert_close, assert_lse_close, attend, plan_for
from hypothesis import given, settings
from hypothesis import strategies as st

import tree_attention_jax as ta
from tree_attention_jax import TokenTree

HEADS = Heads(2, 1, 16)


def filled_pool(pages: int, page_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(2, pages, page_size, HEADS.kv, HEADS.dim)).astype(np.float32))


def per_sequence(q, k, v, tables, kv_lens, q_lens, page_size):
    """Every sequence by itself: what the forest must equal, whatever it shares."""
    out, lse, row = [], [], 0
    for table, kv_len, q_len in zip(tables, kv_lens, q_lens):
        pages = -(-kv_len // page_size)
        single = TokenTree([-1], [kv_len], [q_len], [0, pages], table[:pages])
        o, s = ta.reference.dense_tree_attention(q[row : row + q_len], k, v, single, page_size, return_lse=True)
        out.append(o)
        lse.append(s)
        row += q_len
    return np.concatenate(out), np.concatenate(lse)


def check(tables, kv_lens, q_lens, page_size: int, run: bool = True) -> TokenTree:
    tree = TokenTree.from_block_tables(tables, kv_lens, q_lens, page_size)
    tree.check_pages(page_size)
    assert tree.num_queries == sum(q_lens)
    k, v = filled_pool(int(np.max(tables, initial=0)) + 1, page_size)
    q = np.random.default_rng(1).normal(size=(tree.num_queries, HEADS.q, HEADS.dim)).astype(np.float32)
    want = per_sequence(q, k, v, tables, kv_lens, q_lens, page_size)
    oracle = ta.reference.dense_tree_attention(q, k, v, tree, page_size, return_lse=True)
    np.testing.assert_allclose(oracle[0], want[0], atol=1e-12)
    np.testing.assert_allclose(oracle[1], want[1], atol=1e-12)
    if run:
        out, lse = attend(q, k, v, plan_for(tree, page_size, HEADS))
        assert_close(out, want[0], np.float32)
        assert_lse_close(lse, want[1], np.float32)
    return tree


def positions(kv_lens, q_lens) -> list[int]:
    return [p for kv, q in zip(kv_lens, q_lens) for p in range(kv - q, kv)]


def test_two_sequences_share_their_first_pages():
    tree = check([[3, 7, 1, 0], [3, 7, 2, 5]], [50, 60], [1, 3], 16)
    assert tree.parent.tolist() == [-1, 0, 0]
    assert tree.kv_len.tolist() == [32, 18, 28]
    assert tree.q_len.tolist() == [0, 1, 3]
    assert tree.query_positions().tolist() == positions([50, 60], [1, 3])


def test_nothing_shared_gives_one_node_a_sequence():
    tree = check([[3, 1], [2, 4]], [20, 25], [20, 1], 16)
    assert tree.parent.tolist() == [-1, -1]


def test_three_levels():
    tables = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5, 6], [0, 7, 8, 9]]
    tree = check(tables, [16, 15, 16, 13], [1, 1, 1, 1], 4)
    assert tree.num_nodes == 7
    assert tree.kv_len.sum() == 4 + 4 + 4 + 4 + 3 + 8 + 9


def test_a_sequence_that_is_the_prefix_of_another():
    """It ends inside the other's pages, in the middle of one; its last token is the other's history."""
    tree = check([[0, 1, 0], [0, 1, 2]], [22, 40], [1, 1], 16)
    assert tree.parent.tolist() == [-1, 0]
    assert tree.kv_len.tolist() == [22, 18]
    assert tree.first_slot.tolist() == [0, 6]
    assert tree.q_len.tolist() == [1, 1]


def test_equal_sequences_of_which_one_is_idle():
    tree = check([[0, 1], [0, 1]], [20, 20], [1, 0], 16)
    assert tree.kv_len.tolist() == [20]


def test_prefill_whose_prefix_is_cached_by_another():
    tree = check([[0, 1, 2, 9], [0, 1, 3, 4]], [33, 60], [1, 28], 16)
    assert tree.query_positions().tolist() == positions([33, 60], [1, 28])


def test_idle_and_empty_sequences():
    tree = check([[0, 0], [1, 2], [3, 0], [0, 0]], [0, 20, 5, 0], [0, 0, 1, 0], 16)
    assert tree.num_queries == 1
    assert tree.kv_len.sum() == 25


def test_entries_past_the_end_are_ignored():
    tree = TokenTree.from_block_tables([[3, 2**30, -1], [3, -7, 4]], [10, 16], [1, 0], 16)
    assert tree.kv_len.tolist() == [10, 6]
    assert tree.page_indices.tolist() == [3, 3]


def test_query_order_is_batch_order_whatever_is_shared():
    tables = [[5, 1], [2, 3], [5, 4], [2, 6]]
    kv_lens, q_lens = [20, 32, 30, 17], [4, 16, 1, 1]
    tree = check(tables, kv_lens, q_lens, 16)
    assert tree.query_positions().tolist() == positions(kv_lens, q_lens)


REFUSED = {
    "one dimension": (([0, 1], [1], [1]), ValueError, r"block_tables has shape \(2,\)"),
    "floats": (([[0.0]], [1], [1]), TypeError, "block_tables has dtype float64"),
    "lengths short": (([[0], [1]], [1], [1, 1]), ValueError, "kv_lens has 1 entries where 2"),
    "queries short": (([[0], [1]], [1, 1], [1]), ValueError, "q_lens has 1 entries where 2"),
    "float lengths": (([[0]], [1.5], [1]), TypeError, "kv_lens has dtype float64"),
    "negative length": (([[0]], [-1], [0]), ValueError, r"kv_lens\[0\] is -1"),
    "more queries than tokens": (([[0], [1]], [1, 3], [1, 4]), ValueError, r"q_lens\[1\] is 4"),
    "negative queries": (([[0]], [3], [-1]), ValueError, r"q_lens\[0\] is -1"),
    "too few pages": (([[0, 1]], [33], [1]), ValueError, r"kv_lens\[0\] = 33 needs 3 of 16"),
    "negative page": (([[0, -1]], [20], [1]), ValueError, r"block_tables\[0, 1\] is -1"),
    "page beyond 32 bits": (([[2**31]], [5], [1]), ValueError, r"block_tables\[0, 0\] is 2147483648"),
    "two writers": (
        ([[0, 1], [0, 1]], [20, 20], [1, 1]),
        ValueError,
        "sequences 0 and 1 would both write their token 19",
    ),
    "writers of different lengths": (
        ([[0, 1], [0, 1]], [20, 24], [1, 6]),
        ValueError,
        "sequences 0 and 1 would both write their token 19",
    ),
    "continuation first": (([[0, 1], [0, 1]], [24, 20], [4, 1]), ValueError, "sequence 1 .* before it in the batch"),
    "page twice in a sequence": (([[4, 4]], [20], [1]), ValueError, "slot 0 of page 4 is owned twice"),
    "page size": (([[0]], [1], [1], 0), ValueError, "page_size is 0"),
    "fractional page size": (([[0]], [1], [1], 1.5), ValueError, "page_size is 1.5"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(arguments: tuple, error: type, message: str):
    with pytest.raises(error, match=message):
        TokenTree.from_block_tables(*arguments).check_pages(16)


@st.composite
def batches(draw):
    """A random radix tree of pages, as an engine grows it; each sequence writes on pages of its own or not at all."""
    page_size = draw(st.sampled_from([1, 2, 4]))
    sequences: list[tuple[list[int], int]] = []
    next_page, tables, kv_lens, q_lens = 0, [], [], []
    for _ in range(draw(st.integers(1, 7))):
        shared: list[int] = []
        if sequences and draw(st.booleans()):
            pages, length = draw(st.sampled_from(sequences))
            shared = pages[: draw(st.integers(0, length // page_size))]
        fresh = draw(st.integers(0, 3 * page_size))
        own = -(-fresh // page_size)
        table = shared + list(range(next_page, next_page + own))
        next_page += own
        tables.append(table)
        kv_lens.append(len(shared) * page_size + fresh)
        q_lens.append(draw(st.integers(0, fresh)))
        sequences.append((table, kv_lens[-1]))
    width = max(map(len, tables))
    padded = [table + [0] * (width - len(table)) for table in tables]
    names = draw(st.permutations(range(max(next_page, 1))))
    return np.array(names)[np.array(padded, int).reshape(len(tables), width)], kv_lens, q_lens, page_size


@settings(max_examples=150, deadline=None)
@given(batches())
def test_random_batches_equal_plain_attention_of_each_sequence(batch):
    tables, kv_lens, q_lens, page_size = batch
    tree = check(tables, kv_lens, q_lens, page_size, run=False)
    assert tree.query_positions().tolist() == positions(kv_lens, q_lens)
    # Nothing is stored twice: as many tokens as there are distinct slots in use.
    slots = {
        tables[i][t // page_size] * page_size + t % page_size for i, length in enumerate(kv_lens) for t in range(length)
    }
    assert int(tree.kv_len.sum()) == len(slots)
