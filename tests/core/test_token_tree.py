"""TokenTree: what a forest means, and every input it refuses."""

import numpy as np
import pytest
from forests import lay_out

import tree_attention_jax as ta
from tree_attention_jax import TokenTree


def test_queries_default_to_one_for_each_leaf_that_has_tokens():
    tree = TokenTree([-1, 0, 0, 1], [5, 4, 0, 3])
    assert tree.q_len.tolist() == [0, 0, 0, 1]
    assert tree.num_queries == 1
    assert TokenTree([-1, 0, 0], [5, 4, 2]).q_len.tolist() == [0, 1, 1]


def test_positions_count_all_ancestors():
    tree = TokenTree([-1, 0, 1, 0, -1], [10, 4, 3, 2, 6], [2, 0, 3, 1, 1])
    assert tree.query_positions().tolist() == [8, 9, 14, 15, 16, 11, 5]
    assert tree.query_nodes().tolist() == [0, 0, 2, 2, 2, 3, 4]


def test_levels():
    tree = TokenTree.from_levels([1, 4, 16], [256, 64, 32])
    assert tree.num_nodes == 21
    assert tree.parent.tolist() == [-1] + [0] * 4 + [1 + i // 4 for i in range(16)]
    assert tree.kv_len.tolist() == [256] + [64] * 4 + [32] * 16
    assert tree.num_queries == 16
    assert (tree.query_positions() == 256 + 64 + 32 - 1).all()


def test_uneven_levels_and_several_roots():
    assert TokenTree.from_levels([2, 3], [5, 1]).parent.tolist() == [-1, -1, 0, 0, 1]
    assert TokenTree.from_levels([4, 2], [5, 1]).parent.tolist() == [-1, -1, -1, -1, 0, 2]


def test_an_empty_forest():
    tree = TokenTree([], [])
    assert (tree.num_nodes, tree.num_queries) == (0, 0)
    assert len(tree.query_positions()) == 0
    assert len(tree.token_slots(16)) == 0


def test_tokens_without_a_table_lie_on_consecutive_pages():
    tree = TokenTree([-1, 0, 0], [5, 3, 4])
    assert tree.token_slots(4).tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 12, 13, 14, 15]
    explicit = tree.with_pages(4)
    assert explicit.page_indptr.tolist() == [0, 2, 3, 4]
    assert explicit.token_slots(4).tolist() == tree.token_slots(4).tolist()


def test_reserve_goes_to_decoding_leaves():
    tree = TokenTree([-1, 0, 0, -1], [5, 3, 0, 4]).with_pages(4, reserve=2)
    assert np.diff(tree.page_indptr).tolist() == [2, 2, 0, 2]


def test_first_slot_lets_nodes_share_a_page():
    tree = TokenTree([-1, 0, 0], [6, 1, 2], None, [0, 2, 3, 5], [7, 2, 2, 2, 0], [0, 2, 3])
    tree.check_pages(4)
    assert tree.token_slots(4).tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 0]


def test_random_layouts_give_every_token_a_slot_of_its_own():
    tree = TokenTree([-1, 0, 0, 2, -1], [33, 1, 5, 0, 17])
    for page_size in (1, 2, 7, 16):
        laid = lay_out(tree, page_size, sharing=True)
        laid.check_pages(page_size)
        slots = laid.token_slots(page_size)
        assert len(np.unique(slots)) == len(slots) == 56


def test_arrays_are_private_and_immutable():
    parent = np.array([-1, 0])
    tree = TokenTree(parent, [3, 4])
    parent[1] = -1
    assert tree.parent.tolist() == [-1, 0]
    with pytest.raises(ValueError, match="read-only"):
        tree.kv_len[0] = 9


def test_repr_says_what_it_is():
    assert repr(TokenTree([-1, 0, -1], [3, 4, 0])) == "TokenTree(3 nodes, 2 roots, 7 tokens, 1 queries)"


REFUSED = {
    "parent after its child": (([-1, 2, 0], [1, 1, 1]), r"parent\[1\] is 2"),
    "own parent": (([-1, 1], [1, 1]), r"parent\[1\] is 1: a node cannot be its own parent"),
    "cycle": (([1, 0], [1, 1]), r"parent\[0\] is 1"),
    "parent out of range": (([-1, 7], [1, 1]), r"parent\[1\] is 7"),
    "parent below -1": (([-1, -2], [1, 1]), r"parent\[1\] is -2"),
    "negative length": (([-1, 0], [1, -4]), r"kv_len\[1\] is -4"),
    "lengths short": (([-1, 0], [1]), r"kv_len has 1 entries where 2"),
    "lengths long": (([-1, 0], [1, 2, 3]), r"kv_len has 3 entries where 2"),
    "negative queries": (([-1, 0], [1, 2], [0, -1]), r"q_len\[1\] is -1"),
    "more queries than tokens": (([-1, 0], [1, 2], [0, 3]), r"q_len\[1\] is 3 but kv_len\[1\] is 2"),
    "queries short": (([-1, 0], [1, 2], [0]), r"q_len has 1 entries where 2"),
    "parent is a matrix": (([[-1, 0]], [1, 2]), r"parent has shape \(1, 2\)"),
    "lengths are a matrix": (([-1, 0], [[1, 2]]), r"kv_len has shape \(1, 2\)"),
    "parent is a scalar": ((-1, [1]), r"parent has shape \(\)"),
    "too many tokens": (([-1, 0], [2**30, 2**30]), r"kv_len sums to 2147483648"),
    "length beyond 32 bits": (([-1], [2**40]), r"kv_len\[0\] is 1099511627776"),
    "indptr alone": (([-1], [1], None, [0, 1]), r"page_indptr was given without page_indices"),
    "indices alone": (([-1], [1], None, None, [0]), r"page_indices was given without page_indptr"),
    "slots alone": (([-1], [1], None, None, None, [0]), r"first_slot was given without a page table"),
    "indptr short": (([-1, 0], [1, 1], None, [0, 1], [0]), r"page_indptr has 2 entries where 3"),
    "indptr from 1": (([-1], [1], None, [1, 1], [0]), r"page_indptr\[0\] is 1"),
    "indptr falls": (
        ([-1, 0], [1, 1], None, [0, 2, 1], [0]),
        r"page_indptr\[2\] is 1, below .* which is 2",
    ),
    "indptr ends early": (([-1], [1], None, [0, 1], [0, 1]), r"page_indptr ends at 1 but page_indices has 2"),
    "indptr ends late": (([-1], [1], None, [0, 2], [0]), r"page_indptr ends at 2 but page_indices has 1"),
    "negative page": (([-1], [1], None, [0, 1], [-3]), r"page_indices\[0\] is -3"),
    "negative slot": (([-1], [1], None, [0, 1], [0], [-1]), r"first_slot\[0\] is -1"),
    "slots short": (([-1, 0], [1, 1], None, [0, 1, 2], [0, 1], [0]), r"first_slot has 1 entries where 2"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_value_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        TokenTree(*arguments)


@pytest.mark.parametrize("name", ["parent", "kv_len", "q_len", "page_indptr", "page_indices", "first_slot"])
@pytest.mark.parametrize("dtype", [np.float32, bool, "U1"], ids=str)
def test_type_refused(name: str, dtype):
    arguments = {
        "parent": [-1],
        "kv_len": [1],
        "q_len": [1],
        "page_indptr": [0, 1],
        "page_indices": [0],
        "first_slot": [0],
    }
    arguments[name] = np.array(arguments[name]).astype(dtype)
    with pytest.raises(TypeError, match=rf"{name} has dtype .*: it must hold integers"):
        TokenTree(**arguments)


PAGES_REFUSED = {
    "table too short": (
        ([-1, 0], [5, 9], None, [0, 2, 4], [0, 1, 2, 3]),
        r"node 1 has 2 pages for 9 tokens from slot 0, which need 3 pages of 4",
    ),
    "too short by its first slot": (
        ([-1], [6], None, [0, 2], [0, 1], [3]),
        r"node 0 has 2 pages for 6 tokens from slot 3, which need 3 pages of 4",
    ),
    "no page": (([-1], [1], None, [0, 0], []), r"node 0 has 0 pages for 1 tokens"),
    "first slot outside": (([-1], [1], None, [0, 1], [0], [4]), r"first_slot\[0\] is 4: pages have 4 slots"),
    "one page for two nodes": (
        ([-1, 0], [3, 2], None, [0, 1, 2], [9, 9]),
        r"slot 0 of page 9 is owned twice, by node [01] and node [01]",
    ),
    "overlap by one slot": (
        ([-1, 0], [3, 2], None, [0, 1, 2], [9, 9], [0, 2]),
        r"slot 2 of page 9 is owned twice, by node 0 and node 1",
    ),
    "one node lists a page twice": (([-1], [8], None, [0, 2], [5, 5]), r"slot 0 of page 5 is owned twice"),
}


@pytest.mark.parametrize(("arguments", "message"), PAGES_REFUSED.values(), ids=PAGES_REFUSED)
def test_page_table_refused(arguments: tuple, message: str):
    tree = TokenTree(*arguments)
    with pytest.raises(ValueError, match=message):
        tree.check_pages(4)
    with pytest.raises(ValueError, match=message):
        ta.plan_tree(tree, 4, 1, 1, 64)


def test_a_table_that_just_fits():
    TokenTree([-1], [5], None, [0, 2], [0, 1], [3]).check_pages(4)


def test_pages_beyond_the_tokens_may_be_listed_twice():
    """Reserve pages that hold nothing yet are nobody's."""
    TokenTree([-1, 0], [2, 2], None, [0, 2, 4], [0, 9, 1, 9]).check_pages(4)


LEVELS_REFUSED = [
    (([], []), "nodes_per_level is empty"),
    (([1, 0], [3, 3]), r"nodes_per_level\[1\] is 0"),
    (([1, 2], [3]), "tokens_per_node has 1 entries where 2"),
    (([1, 2], [3, -1]), r"kv_len\[1\] is -1"),
]


@pytest.mark.parametrize(("arguments", "message"), LEVELS_REFUSED)
def test_levels_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        TokenTree.from_levels(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "page_size is 0"),
        ((1.5,), "page_size is 1.5"),
        ((16, -1), "reserve is -1"),
        ((4, 0.5), "reserve is 0.5"),
    ],
)
def test_with_pages_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        TokenTree([-1], [5]).with_pages(*arguments)
