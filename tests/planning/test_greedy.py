"""FastTree's edge assignment, worked out by hand, and what our tiling makes of it."""

import numpy as np
import pytest

import tree_attention_jax as ta
from tree_attention_jax.planning.plan import make_problem
from tree_attention_jax.planning.strategies._pulling import blocks_of, decide
from tree_attention_jax.planning.strategies.greedy import CostModel, greedy

# Group 4: a wide tile holds 16 queries, a narrow one 4; K/V steps of 32 tokens. So for nQ queries and nK tokens
#
#     mm(nQ, nK) = 0.66 * 4 * padQ * nK + 0.33 * 4 * padK * nQ = 2.64 padQ nK + 1.32 padK nQ
#
# with padQ to a multiple of 16 where nQ > 4, else of 4. A partial costs 0.1 a query.
#
#     root  100 tokens, 24 queries below
#     |-- A  40 tokens, 16 queries
#     |-- B  20 tokens,  3 queries
#     `-- C  64 tokens,  5 queries below
#         |-- D  10 tokens, 1 query
#         `-- E  48 tokens, 4 queries
#
# Root, child A. Stay: mm(24, 100) + mm(16, 40) + 1.6 = 2.64 * 8 * 100 + 0 + 1.6 = 2113.6.
#                Pull: mm(8, 100) + mm(16, 140)       = 2.64 * 8 * 100 + 0       = 2112.      A pulls: 8 queries remain.
#       child B. Stay: mm(8, 100) + mm(3, 20) + 0.3   = 2112 + (52.8 + 47.52) + 0.3 = 2212.62.
#                Pull: mm(5, 100) + mm(3, 120)        = 2904 + 316.8                = 3220.8.  B stays.
#       child C. Stay: mm(8, 100) + mm(5, 64) + 0.5   = 2112 + 1858.56 + 0.5        = 3971.06.
#                Pull: mm(3, 100) + mm(5, 164)        = 264 + 4762.56               = 5026.56. C stays.
# C,    child D. Stay: mm(5, 64) + mm(1, 10) + 0.1    = 1858.56 + (79.2 + 29.04) + 0.1 = 1966.9.
#                Pull: mm(4, 64) + mm(1, 74)          = 0 + 586.08                  = 586.08.  D pulls: 4 remain.
#       child E. Stay: mm(4, 64) + mm(4, 48) + 0.4    = 0.4.
#                Pull: mm(0, 64) + mm(4, 112)         = 0.                                     E pulls: none remain.
ROOT, A, B, C, D, E = range(6)
TREE = ta.TokenTree([-1, ROOT, ROOT, ROOT, C, C], [100, 40, 20, 64, 10, 48], [0, 16, 3, 0, 1, 4])
COSTS = CostModel(0.66, 0.33, 0.1, group=4, q_tiles=(16, 4), kv_tiles=(32, 32))


def problem(tree: ta.TokenTree = TREE, heads: tuple[int, int] = (32, 8)):
    return make_problem(tree, num_q_heads=heads[0], num_kv_heads=heads[1], gpu="NVIDIA H200")


def blocks(tiling) -> list[tuple[int, int, list[int]]]:
    """(first row, end row, nodes) of each block, in row order."""
    nodes = np.split(tiling.node, tiling.run_indptr[1:-1])
    return sorted((int(a), int(b), n.tolist()) for a, b, n in zip(tiling.row_begin, tiling.row_end, nodes))


@pytest.mark.parametrize(
    ("queries", "tokens", "cost"),
    [
        (24, 100, 2112.0),
        (16, 40, 0.0),
        (3, 20, 100.32),
        (5, 64, 1858.56),
        (1, 10, 108.24),
        (4, 112, 0.0),
        (0, 64, 0.0),
    ],
)
def test_cost_of_an_item(queries: int, tokens: int, cost: float):
    assert COSTS.item(queries, tokens) == pytest.approx(cost)


def test_a_child_pulls_only_where_that_is_cheaper():
    """Full tiles and long runs waste nothing either way: without a price of partials both cost nothing."""
    assert not CostModel(0.66, 0.33, 0.0, 4, (16, 4), (32, 32)).pulls(32, 100, 16, 40)
    assert COSTS.pulls(32, 100, 16, 40)


def test_published_assignment():
    pulling = decide(problem(), COSTS.pulls)
    assert np.flatnonzero(pulling.pulled).tolist() == [A, D, E]
    assert pulling.staying.tolist() == [8, 16, 3, 0, 1, 4]
    assert pulling.tokens.tolist() == [100, 140, 20, 64, 74, 112]


def test_assignment_where_reads_have_a_price():
    """Ours on purpose: 0.66 * 64 = 42.24 more for each token and tile.

    A adds no tile (2 of 16 rows before and after), so it still pulls. D and E would read C's 64 tokens once more, for
    42.24 * 64 = 2703.36; D saves 1380.82 by it. E's decision then is about 5 queries in C:
    mm(5, 64) + mm(4, 48) + 0.4 = 1858.96 against mm(1, 64) + mm(4, 112) = 506.88 and 2703.36 for the reads.
    """
    costs = CostModel(0.66, 0.33, 0.1, 4, (16, 4), (32, 32), price_reads=True)
    assert np.flatnonzero(decide(problem(), costs.pulls).pulled).tolist() == [A]
    tiling = greedy(problem(), price_reads=True, split_below=(0, 0))
    assert blocks(tiling) == [(0, 16, [ROOT, A]), (16, 19, [B]), (16, 24, [ROOT]), (19, 20, [D]), (19, 24, [C]),
                              (20, 24, [E])]  # fmt: skip


def test_blocks_of_the_published_assignment():
    tiling = greedy(problem(), split_below=(0, 0))
    # C's own block is empty. B and C, which stay with the root, are neighbours: one block.
    assert blocks(tiling) == [
        (0, 16, [ROOT, A]),
        (16, 19, [B]),
        (16, 24, [ROOT]),
        (19, 20, [C, D]),
        (20, 24, [C, E]),
    ]
    rows = [tiling.tiles[kind].rows for kind in tiling.tile]
    assert [r for _, r in sorted(zip(tiling.row_begin.tolist(), rows))] == [64, 16, 64, 16, 16]
    assert (tiling.max_tokens == 1024).all()


def test_too_few_programs_get_the_short_split_and_then_the_other_tile():
    # With 8 KV heads phase 0 has 2 items, 16 programs, below 132; phase 1 has 3, 24 programs, below 528: both split at
    # 128. A's 140 tokens are two pieces now: 24 programs in phase 0, still below 132, so all go to the narrow tile.
    # Deciding anew with tiles of 4: A pulls (0 against 1.6), B stays (100.62 against 792 + 316.8), C stays (507.38
    # against 264 + 1298.88), D pulls (615.22 against 586.08), E pulls (0.4 against 0).
    tiling = greedy(problem())
    assert (tiling.max_tokens == 128).all()
    assert [tile.rows for tile in tiling.tiles] == [16]
    assert [block for block in blocks(tiling) if block[0] < 16] == [(4 * i, 4 * i + 4, [ROOT, A]) for i in range(4)]


def test_enough_programs_stop_after_the_first_round():
    tree = ta.TokenTree.from_levels([1, 1024], [2048, 32])
    tiling = greedy(problem(tree, (32, 32)))
    assert set(tiling.max_tokens.tolist()) == {1024}
    assert sorted(tile.rows for tile in tiling.tiles) == [16, 64]


def test_only_the_short_phase_splits():
    # 64 leaves in phase 1: 64 * 8 = 512 programs, below 528. The root's items in phase 0: 2 splits x 4 tiles x 8 = 64.
    tree = ta.TokenTree.from_levels([1, 64], [2048, 32])
    tiling = greedy(problem(tree), split_below=(0, 528), retile_below=(0, 0))
    last_node = tiling.node[tiling.run_indptr[1:] - 1]
    assert (tiling.max_tokens == np.where(last_node == 0, 1024, 128)).all()
    assert (last_node == 0).any()


def test_tiles_of_one_query_lose_all_sharing():
    """The published flaw: nothing is ever padded, so every edge merges and the root is read for each leaf."""
    tree = ta.TokenTree.from_levels([1, 8], [512, 16])
    tiling = greedy(problem(tree, (16, 1)), q_tiles=(1, 1))
    assert blocks(tiling) == [(row, row + 1, [0, row + 1]) for row in range(8)]


def test_rows_that_stay_apart_make_two_blocks():
    tree = ta.TokenTree.from_levels([1, 3], [100, 10])
    pulled = np.array([False, False, True, False])
    made = blocks_of(problem(tree), pulled)
    got = sorted(zip(made.owner.tolist(), made.row_begin.tolist(), made.row_end.tolist()))
    assert got == [(0, 0, 1), (0, 2, 3), (1, 0, 1), (2, 1, 2), (3, 2, 3)]
    assert made.node[made.run_indptr[made.owner.tolist().index(2)] :][:2].tolist() == [0, 2]


def test_rows_beyond_the_last_wide_tile_go_to_the_narrow_one():
    tree = ta.TokenTree.from_levels([1, 18], [100, 32])  # wide tiles of 16: 16 rows and 2 rows
    tiling = greedy(problem(tree), split_below=(0, 0), gamma=-1e9)  # nothing pulls
    of_root = np.flatnonzero(tiling.node == 0)
    assert tiling.row_begin[of_root].tolist() == [0, 16]
    assert tiling.row_end[of_root].tolist() == [16, 18]
    assert [tiling.tiles[kind].rows for kind in tiling.tile[of_root]] == [64, 16]


@pytest.mark.parametrize(
    "options",
    [{"price_reads": True}, {"gamma": 1e6}, {"gamma": -1e6}, {"q_tiles": (3, 2)}, {"kv_splits": (50, 7)}],
    ids=str,
)
def test_any_constants_cover(options: dict):
    rng = np.random.default_rng(5)
    for _ in range(30):
        num_nodes = int(rng.integers(1, 30))
        parent = [int(rng.integers(-1, i)) if i else -1 for i in range(num_nodes)]
        kv_len = rng.integers(0, 90, num_nodes)
        tree = ta.TokenTree(parent, kv_len, np.minimum(rng.integers(0, 9, num_nodes), kv_len))
        ta.plan_tree(tree, strategy="greedy", **options).check(tree)


@pytest.mark.parametrize("name", ["q_tiles", "kv_tiles", "kv_splits"])
def test_impossible_constants(name: str):
    with pytest.raises(ValueError, match=rf"{name} is \(0, 4\)"):
        greedy(problem(), **{name: (0, 4)})
