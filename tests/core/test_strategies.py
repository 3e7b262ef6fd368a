"""Every strategy on every backend over every kind of forest, against the oracle."""

import numpy as np
import pytest
from forests import (
    IMPLEMENTATIONS,
    Case,
    Heads,
    attend,
    check_against_oracle,
    every_strategy,
    every_strategy_slowly,
    lay_out,
    plan_for,
    poisoned_inputs,
)

from tree_attention_jax import TokenTree

# The 26-token tree that Medusa's authors tuned for 7B models, cut to depth 3.
DRAFT = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 0, 1], [4], [2, 0], [0, 1, 0]]


def ragged() -> TokenTree:
    """Inner nodes with queries, leaves without, several queries a node."""
    return TokenTree([-1, 0, 0, 1, 1, 2], [63, 13, 20, 7, 33, 1], [0, 13, 0, 7, 20, 1])


def draft_and_chunk() -> TokenTree:
    return TokenTree([-1, 0, 0], [60, 3, 63], [0, 2, 3])


CASES = [
    Case("decode", lambda: TokenTree.from_levels([1, 3, 12], [63, 60, 5]), Heads(6, 2)),
    Case("ragged-multi-query", ragged, Heads(9, 3, 80), page_size=10),
    Case("chunked-prefill", lambda: TokenTree([-1, 0, -1], [63, 60, 95], [0, 60, 63]), Heads(7, 1, 96), page_size=64),
    Case("draft", lambda: TokenTree.from_paths(DRAFT, [63, 60], page_size=16), Heads(12, 1, 64, 80)),
    Case("long-node", lambda: TokenTree.from_levels([1, 3], [530, 3]), Heads(3, 1)),
    Case("forest-of-roots", lambda: TokenTree.from_levels([4, 9], [63, 20]), Heads(10, 2), page_size=2),
    Case("shuffled-pages", lambda: lay_out(ragged(), 1), Heads(4, 4), page_size=1),
    Case("shared-pages", lambda: lay_out(ragged(), 16, sharing=True), Heads(6, 1, 192, 128)),
    Case("empty-request", lambda: TokenTree([-1, -1, 0], [0, 9, 0]), Heads(32, 32)),
    Case(
        "padding-rows",
        lambda: lay_out(TokenTree([-1, 0, 0], [60, 3, 63], [0, 2, 3]), 256, 3, True),
        Heads(5, 5),
        256,
        11,
    ),
]


# On these plain XLA stays in the fast part, where the kernels run on all.
FAST_CASES = ("decode", "ragged-multi-query", "draft")


def check(case: Case, implementation: str, strategy: str) -> None:
    plan = {"strategy": strategy}
    check_against_oracle(
        case.tree(), case.page_size, case.heads, implementation=implementation, padding=case.padding, plan=plan
    )


# The strategy varies fastest: plans of equal shape then run the program of the test before.
@every_strategy_slowly
@pytest.mark.parametrize("case", [case for case in CASES if case.name in FAST_CASES], ids=str)
def test_xla_equals_the_oracle(case: Case, strategy: str):
    check(case, "xla", strategy)


@pytest.mark.slow
@every_strategy
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in FAST_CASES], ids=str)
def test_xla_equals_the_oracle_on_the_rest(case: Case, strategy: str):
    check(case, "xla", strategy)


@every_strategy_slowly
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pallas_equals_the_oracle(case: Case, strategy: str):
    check(case, "pallas_triton", strategy)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_free_slots_do_not_matter(implementation: str, poison: float):
    """Bit for bit the output of a cache whose free slots are zero."""
    tree, heads = lay_out(ragged(), 16, sharing=True), Heads(2, 1)
    clean, poisoned = (poisoned_inputs(tree, 16, heads, poison=(fill,)) for fill in (0.0, poison))
    plan = plan_for(tree, 16, heads)
    for have, want in zip(*(attend(*x.on_device(), plan, implementation) for x in (poisoned, clean))):
        np.testing.assert_array_equal(have, want)
