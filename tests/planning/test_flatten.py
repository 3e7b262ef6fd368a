"""DeFT-Flatten as a tiling: equal lengths, whatever the tree looks like."""

import numpy as np
import pytest
from forests import lay_out

import tree_attention_jax as ta
from tree_attention_jax.planning.plan import make_problem
from tree_attention_jax.planning.strategies.flatten import flatten


def block_tokens(tiling) -> np.ndarray:
    return np.add.reduceat(tiling.end - tiling.begin, tiling.run_indptr[:-1])


def test_hand_worked_blocks():
    # Depth first: root 48 tokens at 0, A at 48 (32), a at 80 (16), b at 96 (16), B at 112 (48). Rows: a 0, b 1, B 2.
    tree = ta.TokenTree([-1, 0, 0, 1, 1], [48, 32, 48, 16, 16])
    tiling = flatten(make_problem(tree), block=64)
    assert tiling.row_begin.tolist() == [0, 0, 2]
    assert tiling.row_end.tolist() == [3, 3, 3]
    runs = list(zip(tiling.node.tolist(), tiling.begin.tolist(), tiling.end.tolist()))
    blocks = [runs[a:b] for a, b in zip(tiling.run_indptr[:-1], tiling.run_indptr[1:])]
    assert blocks == [
        [(0, 0, 48), (1, 0, 16)],
        [(1, 16, 32), (3, 0, 16), (4, 0, 16), (2, 0, 16)],  # sees rows of a, b and B: all three
        [(2, 16, 48)],
    ]


def test_blocks_are_equally_long_over_short_nodes():
    tree = ta.TokenTree.from_levels([1, 2, 4, 8, 16, 64], [16] * 6)
    tokens = block_tokens(flatten(make_problem(tree)))
    assert tokens.sum() == tree.kv_len.sum()
    assert (tokens[:-1] == 128).all()


@pytest.mark.parametrize("page_size", [16, 48, 10])
def test_no_entry_is_read_in_two_halves(page_size: int):
    tree = lay_out(ta.TokenTree.from_levels([1, 3, 9], [70, 33, 21]), page_size, sharing=True)
    tiling = flatten(make_problem(tree, page_size=page_size), block=50)
    unit = tiling.tiles[0].unit
    inner = tiling.begin > 0
    assert inner.any()
    assert ((tree.first_slot[tiling.node] + tiling.begin)[inner] % unit == 0).all()
    assert (np.abs(block_tokens(tiling)[:-1] - 50) < unit).all()


def test_new_tokens_leave_out_the_rows_above_them():
    # 256 tokens, all new: the last block of 128 is seen by the last 128 rows only.
    tiling = flatten(make_problem(ta.TokenTree([-1], [256], [256])))
    assert tiling.row_begin.tolist() == [0, 128]
    assert tiling.row_end.tolist() == [256, 256]


@pytest.mark.parametrize("block", [1, 7, 100, 10_000])
def test_any_block_length_covers(block: int):
    tree = ta.TokenTree([-1, 0, 0, 1, 1, 2, -1], [63, 13, 0, 7, 33, 1, 40], [0, 13, 0, 7, 20, 1, 3])
    ta.plan_tree(tree, strategy="flatten", block=block).check(tree)


def test_growing_leaves_keep_their_blocks_exact():
    tree = ta.TokenTree.from_levels([2, 6], [37, 29]).with_pages(16, reserve=20)
    plan = ta.plan_tree(tree, strategy="flatten", block=40, horizon=20)
    for step in range(1, 21):
        plan = plan.advance()
        grown = tree.kv_len + np.where(tree.is_leaf(), step, 0)
        plan.check(ta.TokenTree(tree.parent, grown, tree.q_len, tree.page_indptr, tree.page_indices))


def test_block_must_be_positive():
    with pytest.raises(ValueError, match="block is 0"):
        ta.plan_tree(ta.TokenTree([-1], [5]), strategy="flatten", block=0)


def test_empty_forest():
    assert flatten(make_problem(ta.TokenTree([-1], [9], [0]))).num_blocks == 0
