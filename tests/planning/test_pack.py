"""PAT's packing and balancing, worked out by hand."""

import numpy as np
import pytest

import tree_attention_jax as ta
from tree_attention_jax.planning.plan import make_problem
from tree_attention_jax.planning.strategies.pack import _cut_long, items_wanted, pack


def problem(tree: ta.TokenTree, heads: tuple[int, int] = (32, 8), gpu: str = "NVIDIA A100"):
    return make_problem(tree, num_q_heads=heads[0], num_kv_heads=heads[1], gpu=gpu)


def blocks(tiling) -> list[tuple[int, int, list[int]]]:
    nodes = np.split(tiling.node, tiling.run_indptr[1:-1])
    return sorted((int(a), int(b), n.tolist()) for a, b, n in zip(tiling.row_begin, tiling.row_end, nodes))


# Group 4, so 16 queries a tile. Node 0 has 20 queries below: 16 in node 1, 3 in node 2, 1 in node 3.
#
#     node 1: ceil(20/16) - ceil(4/16) - ceil(16/16) = 2 - 1 - 1 = 0; 0 * tokens + 4 * 16 >= 0: leaves. 4 remain.
#     node 2: ceil(4/16) - ceil(1/16) - ceil(3/16) = -1; -tokens + 4 * 3 >= 0 for up to 12 tokens.
#     node 3: if node 2 stayed, -tokens + 4 * 1 >= 0 for up to 4 tokens; else it holds all that remain: leaves.
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (13, [(0, 16, [0, 1]), (16, 19, [2]), (16, 20, [0]), (19, 20, [3])]),
        (12, [(0, 16, [0, 1]), (16, 19, [0, 2]), (19, 20, [0, 3])]),
    ],
)
def test_a_child_leaves_where_the_saved_partials_are_worth_the_read(tokens: int, expected: list):
    tree = ta.TokenTree([-1, 0, 0, 0], [tokens, 40, 20, 10], [0, 16, 3, 1])
    assert blocks(pack(problem(tree))) == expected


def test_pulled_tokens_count_in_the_next_decision():
    # Node 1 holds all of node 0's queries and pulls its 10 tokens, so node 2 decides over 10 + 5 = 15 tokens: more than
    # 4 * 3. By node 1's own 5 it would have left.
    tree = ta.TokenTree([-1, 0, 1, 1], [10, 5, 20, 20], [0, 0, 3, 3])
    assert blocks(pack(problem(tree))) == [(0, 3, [2]), (0, 6, [0, 1]), (3, 6, [3])]
    tree = ta.TokenTree([-1, 0, 1, 1], [7, 5, 20, 20], [0, 0, 3, 3])
    assert blocks(pack(problem(tree))) == [(0, 3, [0, 1, 2]), (3, 6, [0, 1, 3])]


def test_items_are_one_row_tile_high():
    tiling = pack(problem(ta.TokenTree.from_levels([1, 40], [200, 300])))
    assert int((tiling.row_end - tiling.row_begin).max()) == 16


def test_items_longer_than_five_times_the_average_are_cut():
    # Nine items of 8 pages and one of 800: the average is 87.2 pages, 800 is more than 436, ceil(800 / 87) = 10 pieces.
    # The item of 3 pages is below 128 tokens and does not count.
    block, begin, end = _cut_long(np.array([128] * 9 + [48, 12_800]), 16)
    assert np.bincount(block).tolist() == [1] * 10 + [10]
    assert (end - begin)[block == 10].tolist() == [1280] * 10
    block, _, _ = _cut_long(np.array([128] * 9 + [48, 6_000]), 16)  # 375 pages, the average is 44.7: 9 pieces
    assert np.bincount(block)[-1] == 9
    block, _, _ = _cut_long(np.array([128] * 3 + [2_000]), 16)  # 125 pages, the average is 37.25
    assert len(block) == 4


@pytest.mark.parametrize(("kv_heads", "wanted"), [(1, 54), (4, 54), (8, 27), (16, 13), (32, 6)])
def test_an_a100_wants_as_many_items_as_published(kv_heads: int, wanted: int):
    tree = ta.TokenTree([-1], [16])
    assert items_wanted(problem(tree, (32, kv_heads))) == wanted
    assert items_wanted(problem(tree, (32, kv_heads), "NVIDIA H200")) == 264 // max(kv_heads, 4)


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "pages"),
    [
        # 6 wanted: 256 -> 128 128 -> 64 64 128 -> 64 64 64 64 -> 32 32 64 64 64 -> 32 32 32 32 64 64.
        (4096, 32, [32, 32, 32, 32, 64, 64]),
        # 27 wanted, but 10 pages halve to 5 and 5, and neither has 8.
        (160, 8, [5, 5]),
        # 54 wanted, but a query has at most 32 partials.
        (32_768, 4, [64] * 32),
        (128, 8, [4, 4]),
        (112, 8, [7]),
    ],
)
def test_the_longest_is_halved_until_there_are_enough(tokens: int, kv_heads: int, pages: list[int]):
    tree = ta.TokenTree([-1], [tokens])
    tiling = pack(problem(tree, (32, kv_heads)))
    assert sorted(((tiling.end - tiling.begin) // 16).tolist()) == pages
    ta.plan_tree(tree, num_kv_heads=kv_heads, strategy="pack", gpu="NVIDIA A100").check(tree)


def test_a_piece_of_new_tokens_takes_only_rows_that_see_it():
    # 64 tokens on pages of one, the last 16 of them new: pieces of 4 tokens, and row i is the first to see new token i.
    # Pages side by side would be seen as larger ones.
    tree = ta.TokenTree([-1], [64], [16], [0, 64], np.arange(64)[::-1])
    tiling = pack(make_problem(tree, page_size=1, gpu="NVIDIA A100"))
    by_token = np.argsort(tiling.begin)
    assert tiling.row_begin[by_token].tolist() == [0] * 12 + [0, 4, 8, 12]
    ta.plan_tree(tree, page_size=1, strategy="pack", gpu="NVIDIA A100").check(tree)


def test_growing_leaves_keep_their_pieces_exact():
    tree = ta.TokenTree.from_levels([1, 3], [700, 301]).with_pages(16, reserve=20)
    plan = ta.plan_tree(tree, strategy="pack", horizon=20)
    for step in range(1, 21):
        plan = plan.advance()
        grown = tree.kv_len + np.where(tree.is_leaf(), step, 0)
        plan.check(ta.TokenTree(tree.parent, grown, tree.q_len, tree.page_indptr, tree.page_indices))


def test_empty_forest():
    assert pack(problem(ta.TokenTree([-1], [9], [0]))).num_blocks == 0
