"""FlashInfer's cascade as a tiling: a launch a level, with one row tile and one chunk length each."""

import numpy as np
import pytest

import tree_attention_jax as ta
from tree_attention_jax.planning.plan import make_problem
from tree_attention_jax.planning.strategies.cascade import PROGRAMS_PER_SM, cascade
from tree_attention_jax.planning.tiles import resident_programs


def plan(tree: ta.TokenTree, heads: tuple[int, int] = (32, 8)):
    return cascade(make_problem(tree, num_q_heads=heads[0], num_kv_heads=heads[1], gpu="NVIDIA H200"))


def test_one_launch_a_level_with_a_tile_by_average_rows():
    # Matrix rows a node at group 4: 64 * 4, 16 * 4, 1 * 4.
    tiling = plan(ta.TokenTree.from_levels([1, 4, 64], [96, 96, 96]))
    assert [tile.rows for tile in tiling.tiles] == [128, 64, 16]
    assert tiling.tile.tolist() == [0] + [1] * 4 + [2] * 64
    # The average counts: one node of 61 * 4 rows beside three of 4 is 63.
    tree = ta.TokenTree([-1] * 4 + [0] * 61 + [1, 2, 3], [16] * 68)
    assert [tile.rows for tile in plan(tree).tiles] == [64, 16]
    tree = ta.TokenTree([-1] * 4 + [0] * 62 + [1, 2, 3], [16] * 69)
    assert [tile.rows for tile in plan(tree).tiles] == [128, 16]


@pytest.mark.parametrize("heads", [(16, 1), (32, 8), (32, 32)])
def test_two_programs_fit_on_an_sm(heads: tuple[int, int]):
    """It cuts K/V so that so many run at once, so its tiles must leave them room."""
    for levels in ([1, 4, 64], [1, 2, 512], [300]):
        problem = make_problem(ta.TokenTree.from_levels(levels, [256] * len(levels)), 16, *heads, gpu="NVIDIA H200")
        for tile in cascade(problem).tiles:
            assert resident_programs(problem.heads, tile) >= PROGRAMS_PER_SM


def test_levels_with_equal_tiles_remain_launches_of_their_own():
    launches = ta.plan_tree(ta.TokenTree.from_levels([2, 4, 4], [20, 20, 20]), strategy="cascade").shape.launches
    assert len(launches) == 3


@pytest.mark.parametrize(
    ("heads", "tokens", "chunk"),
    [
        # 132 SMs, two programs each, over 8 KV heads: 33. The root has 256 rows: 2 tiles, so at most 16 chunks of its
        # 256 pages: 16 pages.
        ((32, 8), 4096, 256),
        # 257 pages in at most 16 chunks: 17 pages.
        ((32, 8), 4097, 272),
        # 32 heads: 8 programs, one tile of 64 rows: 8 chunks.
        ((32, 32), 4096, 512),
        # Chunks below 128 tokens are not made, though 264 programs would fit.
        ((16, 1), 1024, 128),
    ],
)
def test_chunks_fill_two_programs_an_sm(heads: tuple[int, int], tokens: int, chunk: int):
    tiling = plan(ta.TokenTree.from_levels([1, 64], [tokens, 16]), heads)
    assert tiling.max_tokens[0] == chunk


def test_a_full_level_is_not_cut():
    tiling = plan(ta.TokenTree.from_levels([64], [1024]))
    assert (tiling.max_tokens >= 1024).all()


def test_deep_trees_share_the_last_launch():
    tree = ta.TokenTree(np.arange(12) - 1, [20] * 12)
    tiling = plan(tree)
    assert tiling.tile.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7]
    ta.plan_tree(tree, strategy="cascade").check(tree)


def test_levels_that_nobody_sees_make_no_launch():
    tree = ta.TokenTree([-1, 0, 1], [10, 0, 10])
    tiling = plan(tree)
    assert len(tiling.tiles) == 2
    assert plan(ta.TokenTree([-1], [9], [0])).num_blocks == 0
