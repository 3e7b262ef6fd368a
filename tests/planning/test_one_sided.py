"""What it costs that one half of a Mosaic tile sees more than the other."""

import pytest
from forests import Heads, halves_in_turns
from hypothesis import given
from random_forests import forests, quick

import tree_attention_jax as ta
from benchmarks.suites import cells
from pallas_kernels import layout as lo
from pallas_kernels.mosaic_geometry import PART
from tree_attention_jax.planning.model import launch_loads, modelled_time

UNEVEN = [cell for cell in cells("odd") if cell.num_kv_heads == 8]


def one_sided_tokens(plan: ta.TreePlan) -> int:
    """Slots, in parts, that the busier half of each item looks at beyond half of all: one entry at a time."""
    [launch], buffer = plan.shape.launches, plan.host.buffer
    size, half = PART // launch.tile.masked_unit, launch.tile.queries_per_tile(plan.shape.group) // 2
    total = 0
    for record in buffer[launch.items_at :][: buffer[0] * lo.ITEM_SIZE].reshape(-1, lo.ITEM_SIZE):
        entries = buffer[record[lo.MASKED_BEGIN] :][: record[lo.MASKED_COUNT] * lo.MASKED_SIZE]
        entries, middle, seen = entries.reshape(-1, lo.MASKED_SIZE), record[lo.ROW] + half, [set(), set()]
        for index, (low, high) in enumerate(entries[:, [lo.LOW, lo.HIGH]].tolist()):
            for row in range(max(low, ~low), high):
                seen[int(row >= middle)].add(index // size)
        total += max(0, 2 * max(map(len, seen)) - -(-len(entries) // size)) * PART
    return total


@quick
@given(forests())
def test_counted_one_by_one(drawn: tuple[ta.TokenTree, int]):
    plan = halves_in_turns(*drawn, Heads(4, 1))
    [launch] = plan.shape.launches
    if launch.tile.mosaic and launch.tile.masked:
        [load] = launch_loads(plan)
        records = plan.host.buffer[launch.items_at :][: load.items * lo.ITEM_SIZE].reshape(-1, lo.ITEM_SIZE)
        plain, masked = records[:, lo.PLAIN_COUNT] * launch.tile.unit, records[:, lo.MASKED_COUNT]
        slots = (plain + masked * launch.tile.masked_unit).sum()
        assert load.one_sided == pytest.approx(one_sided_tokens(plan) / max(slots, 1))


@pytest.mark.parametrize(("leaves", "share"), [(32, 0.0), (16, 1.0), (24, 1 / 3)])
def test_leaves_of_one_half_or_of_both(leaves: int, share: float):
    """A tile holds 32 of these queries: 24 leave the second half with half as much to do as the first."""
    [load] = launch_loads(halves_in_turns(ta.TokenTree.from_levels([1, leaves], [64, 64]), 16, Heads(4, 1)))
    assert load.one_sided == pytest.approx(share * load.masked, abs=0.01)


@pytest.mark.parametrize("cell", UNEVEN, ids=[cell.name for cell in UNEVEN])
def test_auto_leaves_the_tile_where_its_halves_idle(cell):
    """Estimates of what halves see are rough, so what comes out may be somewhat worse than without the tile."""
    options = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "gpu": "NVIDIA H200"}
    times = [modelled_time(ta.plan_tree(cell.tree(), 16, mosaic=mosaic, **options)) for mosaic in (True, False)]
    assert times[0] < 1.05 * times[1]


def test_tokens_that_no_one_sees():
    """A subtree without queries is no work of either half, though the tile may span it."""
    parent, kv_len = [-1, 0, -1, 0], [0, 1, 17, 22]
    loads = [
        launch_loads(halves_in_turns(ta.TokenTree(parent, kv_len, q_len), 16, Heads(4, 1)))
        for q_len in ([0, 1, 1, 0], [0, 1, 1, 1])
    ]
    assert [load[0].one_sided > 0 for load in loads] == [False, True]


def test_no_tile_without_halves_pays():
    plan = ta.plan_tree(ta.TokenTree.from_levels([1, 9], [64, 64]), 16, 4, 1, 64, strategy="flatten", mosaic=False)
    assert any(load.masked > 0 for load in launch_loads(plan))
    assert not any(load.one_sided for load in launch_loads(plan))
