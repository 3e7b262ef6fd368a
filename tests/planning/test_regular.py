"""The programme for regular trees finds what the programme for all trees does."""

import numpy as np
import pytest

import tree_attention_jax as ta
from tree_attention_jax.planning.cost import shapes_for
from tree_attention_jax.planning.plan import make_problem
from tree_attention_jax.planning.profile import load_profiles
from tree_attention_jax.planning.strategies._levels import Levels
from tree_attention_jax.planning.strategies._regular import RegularOptima, RegularTable
from tree_attention_jax.planning.strategies._segmentation import Optima, costs_of, options_of
from tree_attention_jax.planning.strategies._segments import NodeTokens, SegmentTable, segment_times
from tree_attention_jax.planning.strategies.auto import CHEAP, MAX_SPAN, SHORTEST_STEP


def random_regular_tree(rng: np.random.Generator) -> ta.TokenTree:
    """Of some roots, with as many children of each node of a level; sometimes with queries above leaves."""
    depth = int(rng.integers(1, rng.choice([4, 14])))
    most = 5 if depth < 5 else 3
    sizes = np.cumprod([int(rng.choice([1, 1, 4])), *rng.integers(1, most, depth - 1)])
    tokens = rng.integers(0, rng.choice([2, 40, 5000]), depth)
    tokens[-1] += 1
    tree = ta.TokenTree.from_levels(sizes[sizes < 400], tokens[sizes < 400])
    if rng.random() < 0.7:
        return tree
    queries = np.minimum(tree.kv_len, rng.integers(0, 4))
    return ta.TokenTree(tree.parent, tree.kv_len, queries) if queries.any() else tree


def tables(problem) -> tuple[SegmentTable, RegularTable | None]:
    levels = Levels.of(problem, MAX_SPAN)
    nodes = NodeTokens.of(levels, problem.unit)
    return SegmentTable.of(levels, nodes), RegularTable.of(levels, nodes)


@pytest.mark.parametrize("gpu", load_profiles())
@pytest.mark.parametrize("heads", [(16, 1), (32, 8), (32, 32)], ids=str)
def test_the_same_as_node_by_node(gpu: str, heads: tuple[int, int]):
    rng, found_all, ties, several = np.random.default_rng(heads), 0, 0, 0
    for _ in range(60):
        problem = make_problem(random_regular_tree(rng), int(rng.choice([1, 16])), *heads, gpu=gpu)
        table, regular = tables(problem)
        assert regular is not None
        for name in ("top", "span", "exact", "token_sums", "num_alone", "first_below"):
            np.testing.assert_array_equal(getattr(regular.table, name), getattr(table, name), err_msg=name)
        assert regular.table.all_in_one() == table.all_in_one()
        np.testing.assert_array_equal(regular.kinds.partial_rows.repeat(regular.counts), table.partial_rows)
        shapes = shapes_for(problem, SHORTEST_STEP)
        times = segment_times(problem, shapes, table)
        np.testing.assert_array_equal(segment_times(problem, shapes, regular.kinds).repeat(regular.counts, 1), times)
        lists, prices = np.concatenate([times.min(axis=0)[None], times]), [1.0, CHEAP]
        cost = costs_of(problem, table.partial_rows, lists, prices)
        of_all = Optima(table, options_of(problem, table, lists, prices))
        for which, (expected, found) in enumerate(zip(of_all, RegularOptima(problem, regular, lists, prices))):
            if found.tolist() != expected.tolist():  # as good: nodes that are alike may break ties in different ways
                assert cost[found, which].sum() == pytest.approx(cost[expected, which].sum(), rel=1e-12)
                ties += 1
            found_all += 1
            several += len(found) > 1
    assert several > 100
    assert ties < 0.1 * found_all


def test_what_is_not_regular_is_told():
    tree = ta.TokenTree.from_levels([1, 4, 16], [64, 32, 16])
    lengths, parents, queries = tree.kv_len.copy(), tree.parent.copy(), tree.q_len.copy()
    lengths[7] += 1
    parents[8] = 2
    queries[3] = 1
    others = [
        ta.TokenTree(tree.parent, lengths),
        ta.TokenTree(parents, tree.kv_len),  # other numbers of children
        ta.TokenTree(tree.parent, tree.kv_len, queries),
        ta.TokenTree([-1, 0, 0, 1], [64, 16, 16, 16]),  # leaves of two levels
    ]
    assert tables(make_problem(tree, 16))[1] is not None
    assert [tables(make_problem(other, 16))[1] for other in others] == [None] * 4
