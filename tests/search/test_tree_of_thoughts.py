import itertools

import numpy as np
import pytest

from tree_attention_jax.search import TreeOfThoughts, breadth_first


def test_keeps_the_best_and_forks_them():
    controller = TreeOfThoughts(keep=2, branch=3, depth=2)
    assert controller.decide([0.0]).parents.tolist() == [0, 0, 0]
    decision = controller.decide([0.1, 0.9, 0.5])
    assert decision.parents.tolist() == [1, 1, 1, 2, 2, 2]
    assert decision.tokens is None
    assert not decision.done
    decision = controller.decide([0, 0, 7, 0, 0, 8])
    assert decision.parents.tolist() == [5, 2]
    assert decision.done
    assert controller.values.tolist() == [8, 7]


def test_a_thought_that_is_good_enough_ends_it():
    controller = TreeOfThoughts(keep=2, branch=3, depth=9, good_enough=1.0)
    controller.decide([0.0])
    assert controller.decide([0, 1, 0]).done


def test_wide_enough_it_is_exhaustive():
    rng = np.random.default_rng(0)
    value_of = {p: rng.normal() for n in range(4) for p in itertools.product(range(3), repeat=n)}
    controller = TreeOfThoughts(keep=27, branch=3, depth=3, evaluate=lambda states: [value_of[s] for s in states])
    (best, value), *_ = breadth_first(controller, (), lambda state, k: [(*state, i) for i in range(k)])
    deep = [p for p in value_of if len(p) == 3]
    assert best == max(deep, key=value_of.get)
    assert value == value_of[best]


def test_sorting_by_swaps():
    """Each thought swaps two neighbours; the value counts pairs in order. Greedy enough to sort six numbers."""

    def propose(state, k):
        return [(*state[:i], state[i + 1], state[i], *state[i + 2 :]) for i in range(k)]

    def in_order(states):
        return [sum(a < b for a, b in itertools.combinations(s, 2)) for s in states]

    controller = TreeOfThoughts(keep=3, branch=5, depth=15, evaluate=in_order, good_enough=15)
    assert breadth_first(controller, (5, 2, 4, 0, 3, 1), propose)[0] == ((0, 1, 2, 3, 4, 5), 15.0)


def test_running_out_of_proposals_returns_what_is_there():
    controller = TreeOfThoughts(keep=1, branch=2, depth=9, evaluate=lambda states: [len(s) for s in states])
    found = breadth_first(controller, "", lambda s, k: [s + "x"] if len(s) < 3 else [])
    assert found == [("xxx", 3.0)]


def test_misuse():
    with pytest.raises(ValueError, match="at least 1"):
        TreeOfThoughts(keep=0, branch=1, depth=1)
    with pytest.raises(ValueError, match="one value for each leaf"):
        TreeOfThoughts(keep=1, branch=1, depth=1).decide([])
    with pytest.raises(ValueError, match=r"scores\[1\] is NaN"):
        TreeOfThoughts(keep=1, branch=1, depth=1).decide([0, np.nan])
    with pytest.raises(ValueError, match="evaluate="):
        breadth_first(TreeOfThoughts(keep=1, branch=1, depth=1), 0, lambda s, k: [])
