"""The bound that saves the dynamic programme: it must never claim what the programme would not choose."""

import numpy as np
import pytest

import tree_attention_jax as ta
from tree_attention_jax.planning.cost import shapes_for
from tree_attention_jax.planning.plan import make_problem
from tree_attention_jax.planning.profile import load_profiles
from tree_attention_jax.planning.strategies._levels import Levels
from tree_attention_jax.planning.strategies._one_segment import NEARLY_BEST, ROUNDING, one_segment
from tree_attention_jax.planning.strategies._segmentation import Optima, options_of
from tree_attention_jax.planning.strategies._segments import NodeTokens, SegmentTable, segment_times
from tree_attention_jax.planning.strategies.auto import CHEAP, MAX_SPAN, SHORTEST_STEP


def random_tree(rng: np.random.Generator) -> ta.TokenTree:
    """Regular or not, sometimes with several queries a leaf, or with queries above leaves."""
    if rng.random() < 0.5:
        sizes = np.sort(rng.choice([1, 2, 3, 8, 10, 16, 64], int(rng.integers(2, 9))))
        sizes[0] = 1
        return ta.TokenTree.from_levels(sizes, 1 + rng.integers(0, rng.choice([4, 20, 300, 5000]), len(sizes)))
    nodes, reach = int(rng.integers(2, 120)), int(rng.integers(1, 40))
    parent = [-1, *(int(rng.integers(max(0, i - reach), i)) for i in range(1, nodes))]
    kv_len = rng.integers(0, rng.choice([4, 30, 3000]), nodes)
    kind = rng.integers(0, 3)
    if kind == 0:
        return ta.TokenTree(parent, kv_len)
    q_len = np.minimum(kv_len, rng.integers(0, 6, nodes))
    if kind == 1:
        q_len[parent[1:]] = 0
    return ta.TokenTree(parent, kv_len, q_len)


@pytest.mark.parametrize("gpu", load_profiles())
@pytest.mark.parametrize("heads", [(16, 1), (32, 8), (32, 32), (256, 1)], ids=str)
@pytest.mark.parametrize("price", [1.0, CHEAP])
def test_only_what_the_programme_chooses(gpu: str, heads: tuple[int, int], price: float):
    rng = np.random.default_rng(heads[0] + heads[1])
    claimed = 0
    for _ in range(60):
        problem = make_problem(random_tree(rng), int(rng.choice([1, 16])), *heads, gpu=gpu)
        if problem.layout.num_rows == 0:
            continue
        levels, shapes = Levels.of(problem, MAX_SPAN), shapes_for(problem, SHORTEST_STEP)
        nodes = NodeTokens.of(levels, problem.unit)
        found = one_segment(problem, shapes, levels, nodes, price, ROUNDING)
        if found is None:
            continue
        claimed += 1
        few, few_times, place = found
        table = SegmentTable.of(levels, nodes)
        times = segment_times(problem, shapes, table)
        least = times.min(axis=0)
        ((best,),) = Optima(table, options_of(problem, table, least[None], [price]))
        # Nor would it choose another one if partials cost more, or with the best shape alone.
        lists = np.stack([least, times[times[:, best].argmin()]])
        others = Optima(table, options_of(problem, table, lists, [1.0, price]))
        assert [other.tolist() for other in others] == [[best]] * 4
        assert (table.top[best], table.span[best]) == (few.top[place], few.span[place])
        for one, other in ((best, place), (table.all_in_one(), few.all_in_one())):
            np.testing.assert_array_equal(times[:, one], few_times[:, other])
            np.testing.assert_array_equal(table.exact[:, one], few.exact[:, other])
        np.testing.assert_array_equal(table.token_sums, few.token_sums)
    assert claimed > 5


def test_what_is_not_looked_for_is_hardly_better():
    rng, claimed = np.random.default_rng(5), 0
    while claimed < 15:
        problem = make_problem(random_tree(rng), 16, 32, 32, gpu="NVIDIA H200")
        if problem.layout.num_rows == 0:
            continue
        levels, shapes = Levels.of(problem, MAX_SPAN), shapes_for(problem, SHORTEST_STEP)
        nodes = NodeTokens.of(levels, problem.unit)
        arguments = problem, shapes, levels, nodes, 1.0
        found = one_segment(*arguments)
        if found is None or one_segment(*arguments, ROUNDING) is not None:
            continue
        claimed += 1
        _, times_of_few, place = found
        table = SegmentTable.of(levels, nodes)
        least = segment_times(problem, shapes, table).min(axis=0)
        (best,) = Optima(table, options_of(problem, table, least[None], [1.0]))
        us = float(least[best].sum())
        if len(best) > 1:
            rows = float(table.pick(best).rows.sum())
            us += rows * problem.heads.partial_bytes / problem.profile.partial_bytes_per_us
        assert us > 0.999 * NEARLY_BEST * times_of_few[:, place].min()
