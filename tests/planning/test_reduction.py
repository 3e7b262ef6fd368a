"""What partials cost, by hand."""

import numpy as np
import pytest

import tree_attention_jax as ta
from pallas_kernels.layout import WorkShape
from tree_attention_jax.planning.model import launch_times
from tree_attention_jax.planning.plan import make_problem
from tree_attention_jax.planning.reduction import FEW_QUERIES, reduce_block, reduction_of

MB = 1e6 / (4 * 32 * 128)  # partials of 32 heads of 128 dims in a megabyte


def reduction_for(queries: int, heads: tuple[int, int] = (32, 8)):
    problem = make_problem(ta.TokenTree([-1], [queries], [queries]), 16, *heads, 128, gpu="NVIDIA H200")
    return reduction_of(problem), problem.profile.reduction


def test_nothing_to_merge_costs_nothing():
    reduction, _ = reduction_for(100)
    np.testing.assert_array_equal(reduction.time(np.zeros(3)), 0)


def test_few_partials_come_from_the_l2_and_the_others_from_device_memory():
    reduction, cost = reduction_for(4096)  # so many queries that all is one round
    near, far = cost.near_bytes / 1e6, 20.0
    few, all_near, more = reduction.time(np.array([MB, near * MB, (near + far) * MB]))
    written = 1e6 / cost.write_bytes_per_us
    assert few == pytest.approx(reduction.fixed_us + written + 1e6 / cost.read_bytes_per_us)
    assert all_near - few == pytest.approx((near - 1) * (written + 1e6 / cost.read_bytes_per_us))
    assert more - all_near == pytest.approx(far * (written + 1e6 / cost.far_bytes_per_us))


@pytest.mark.parametrize("queries", [1, FEW_QUERIES, FEW_QUERIES + 1, 500])
@pytest.mark.parametrize("each", [1, 4, 5, 8, 9, 16, 17, 40])
def test_rounds_are_those_of_the_kernel(queries, each):
    reduction, cost = reduction_for(queries)
    partials = np.array(queries * each)
    linear = reduction.fixed_us + partials * reduction.partial_us + max(partials - reduction.near, 0) * reduction.far_us
    rounds = -(-each // reduce_block(queries, int(partials), queries))
    assert reduction.time(partials) == pytest.approx(linear + (rounds - 1) * cost.round_us)


def test_a_plan_is_priced_with_the_block_that_it_has():
    tree = ta.TokenTree([-1] * 10, [20_000] * 10)
    plan = ta.plan_tree(tree, page_size=16, num_q_heads=16, num_kv_heads=1, head_dim=128, gpu="NVIDIA H200")
    assert plan.host is not None
    assert isinstance(plan.shape, WorkShape)
    assert plan.shape.partial_rows
    assert plan.shape.reduce_block == reduce_block(10, plan.host.num_partials, 10)
    reduction, _ = reduction_for(10, (16, 1))
    assert launch_times(plan)[-1].us == pytest.approx(float(reduction.time(np.array(plan.host.num_partials))))


def test_it_grows_with_every_partial():
    for queries in (10, 64, 300, 2000):
        reduction, _ = reduction_for(queries)
        counts = np.arange(queries, 4 * queries + 1)  # in one round
        assert (np.diff(reduction.time(counts)) > 0).all()


def test_no_numbers_take_no_time():
    reduction, _ = reduction_for(10)
    assert reduction.time(np.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("queries", [1, FEW_QUERIES, FEW_QUERIES + 1, 3000])
def test_numbers_cost_what_arrays_do(queries: int):
    reduction, _ = reduction_for(queries)
    partials = np.unique(np.geomspace(1, 1e7, 200).astype(int)).astype(float)
    assert [reduction.time_of(number) for number in partials.tolist()] == reduction.time(partials).tolist()
