"""Group sizes, head dims and page sizes, odd ones on purpose."""

import pytest
from forests import Heads, check_against_oracle, lay_out

import tree_attention_jax as ta

GROUPS = [Heads(9, 3), Heads(5, 1), Heads(12, 2), Heads(28, 4), Heads(24, 2), Heads(1, 1), Heads(20, 1), Heads(64, 1)]
DIMS = [
    Heads(2, 1, 80),
    Heads(2, 2, 96),
    Heads(2, 1, 128),
    Heads(2, 2, 192),
    Heads(2, 1, 256),
    Heads(2, 1, 192, 128),
    Heads(2, 1, 64, 96),
    Heads(3, 1, 72, 40),
]
PAGE_SIZES = [1, 2, 3, 4, 10, 16, 48, 64, 256]


def forest() -> ta.TokenTree:
    """Few rows and short nodes: one tile class, so one kernel to compile."""
    return ta.TokenTree([-1, 0, 0, -1], [63, 33, 5, 20], [0, 2, 1, 2])


def pallas_fast(values: list, fast: list) -> list:
    """Every value on XLA; on Pallas' slow interpreter the rest of them leaves the fast part."""
    params = [pytest.param("xla", value, id=f"xla-{value}") for value in values]
    for value in values:
        marks = () if value in fast else pytest.mark.slow
        params.append(pytest.param("pallas_triton", value, id=f"pallas_triton-{value}", marks=marks))
    return params


@pytest.mark.parametrize(("implementation", "heads"), pallas_fast(GROUPS, GROUPS[:2] + GROUPS[-1:]))
def test_group(implementation: str, heads: Heads):
    check_against_oracle(forest(), 16, heads, implementation=implementation)


@pytest.mark.parametrize(("implementation", "heads"), pallas_fast(DIMS, DIMS[:2] + DIMS[-1:]))
def test_head_dim(implementation: str, heads: Heads):
    check_against_oracle(forest(), 16, heads, implementation=implementation)


@pytest.mark.parametrize("sharing", [False, True], ids=["own-pages", "shared-pages"])
@pytest.mark.parametrize(("implementation", "page_size"), pallas_fast(PAGE_SIZES, [1, 10, 256]))
def test_page_size(implementation: str, page_size: int, sharing: bool):
    tree = lay_out(forest(), page_size, seed=page_size, sharing=sharing)
    pages = -(-200 // page_size) + 8  # the same for both layouts, so that they share a program
    check_against_oracle(tree, page_size, Heads(3, 1), implementation=implementation, pages=pages)
