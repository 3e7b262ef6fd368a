"""Draft trees from path lists."""

import numpy as np
import pytest
from forests import Heads, check_against_oracle

from tree_attention_jax import TokenTree

PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def test_one_request_under_its_prompt():
    tree = TokenTree.from_paths(PATHS, 37)
    assert tree.parent.tolist() == [-1, 0, 1, 1, 2, 2, 3, 4]
    assert tree.kv_len.tolist() == [37] + [1] * 7
    assert tree.q_len.tolist() == [0] + [1] * 7
    assert tree.query_positions().tolist() == [37, 38, 38, 39, 39, 39, 40]


def test_without_a_root_token_drafts_hang_under_the_prompt():
    tree = TokenTree.from_paths(PATHS, 37, root=False)
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1, 2, 3]
    assert tree.query_positions().tolist() == [37, 37, 38, 38, 38, 39]


def test_without_a_prompt():
    assert TokenTree.from_paths([[0], [0, 0]], 0).parent.tolist() == [-1, 0, 1]
    forest = TokenTree.from_paths([[0], [1]], 0, root=False)
    assert forest.parent.tolist() == [-1, -1]
    assert forest.num_queries == 2


def test_one_list_for_every_request():
    tree = TokenTree.from_paths([[0], [0, 0]], [20, 0, 3])
    assert tree.parent.tolist() == [-1, 0, 1, 2, -1, 4, 5, -1, 7, 8, 9]
    assert tree.kv_len.tolist() == [20, 1, 1, 1, 1, 1, 1, 3, 1, 1, 1]
    assert tree.num_queries == 9


def test_a_list_for_each_request():
    tree = TokenTree.from_paths([[[0]], [[0], [1], [1, 0]]], [5, 6], root=False)
    assert tree.parent.tolist() == [-1, 0, -1, 2, 2, 4]
    assert TokenTree.from_paths([[[0]], [[1]]], 7, root=False).kv_len.tolist() == [7, 1, 7, 1]


def test_a_request_without_drafts():
    tree = TokenTree.from_paths([], [5, 6])
    assert tree.num_queries == 2
    assert TokenTree.from_paths([], 5, root=False).num_queries == 0


def test_packed_drafts_fill_the_prompts_last_page():
    """64 draft tokens and their root fill up 4 pages of 16 and a bit, not 64."""
    paths = [[i] for i in range(64)]
    tree = TokenTree.from_paths(paths, 10, page_size=16)
    tree.check_pages(16)
    assert sorted(tree.token_slots(16)) == list(range(10 + 1 + 64))
    assert len(np.unique(tree.page_indices)) == 5


def test_packed_requests_do_not_share_pages():
    tree = TokenTree.from_paths(PATHS, [37, 20], page_size=16)
    tree.check_pages(16)
    pages = tree.token_slots(16) // 16
    assert not set(pages[: 37 + 7]) & set(pages[37 + 7 :])


@pytest.mark.parametrize("page_size", [1, 16])
def test_verification_equals_the_oracle(page_size: int):
    tree = TokenTree.from_paths(PATHS, [37, 20, 0], page_size=page_size)
    check_against_oracle(tree, page_size, Heads(4, 2))


REFUSED = {
    "empty path": (([[0], []], 5), ValueError, r"paths\[1\] of request 0 is empty"),
    "repeated": (([[0], [1], [0]], 5), ValueError, r"paths\[2\] of request 0 repeats \[0\]"),
    "prefix missing": (([[0], [1, 0]], 5), ValueError, r"paths\[1\] of request 0 is \[1, 0\] but its prefix \[1\]"),
    "prefix late": (([[0, 0], [0]], 5), ValueError, r"paths\[0\] of request 0 is \[0, 0\] but its prefix \[0\]"),
    "negative choice": (([[0], [-1]], 5), ValueError, r"paths\[1\] of request 0 is \[-1\]"),
    "second request": (([[[0]], [[0], [0]]], 5), ValueError, r"paths\[1\] of request 1 repeats"),
    "negative prompt": (([[0]], [5, -2]), ValueError, r"prompt_len\[1\] is -2"),
    "float prompt": (([[0]], 5.0), TypeError, r"prompt_len must be an integer .* got 5.0"),
    "prompts do not match": (([[[0]], [[0]]], [1, 2, 3]), ValueError, "prompt_len has 3 entries but paths lists 2"),
    "fractional choice": (([[0.5]], 5), TypeError, r"paths\[0\] of request 0"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(arguments: tuple, error: type, message: str):
    with pytest.raises(error, match=message):
        TokenTree.from_paths(*arguments)


@pytest.mark.parametrize("page_size", [0, -4, 1.5])
def test_page_size_refused(page_size: int):
    with pytest.raises(ValueError, match=f"page_size is {page_size}"):
        TokenTree.from_paths([[0]], 5, page_size=page_size)
