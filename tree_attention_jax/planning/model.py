"""Modelled GPU time of a finished plan, from its items: what ``explain`` shows and the benchmark holds against the
measured time. It prices the same things as ``auto``, but for the items that really came out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels import layout as lo
from tree_attention_jax.planning.plan import TreePlan
from tree_attention_jax.planning.profile import GpuProfile, TileCost


@dataclass(frozen=True)
class LaunchTime:
    """One launch of a plan; microseconds."""

    name: str
    items: int
    work_us: float
    memory_us: float
    tail_us: float

    @property
    def us(self) -> float:
        return max(self.work_us, self.memory_us) + self.tail_us


def modelled_time(plan: TreePlan) -> float:
    """Microseconds of one attention call, launches and reduction included."""
    return sum(launch.us for launch in launch_times(plan))


def launch_times(plan: TreePlan) -> list[LaunchTime]:
    """The plan's launches in order, then the reduction if there is one.

    Raises:
        ValueError: the plan came out of a trace and has no host part.
    """
    if plan.host is None:
        raise ValueError("this plan has passed through jax.jit, which keeps only its buffer: model the plan you made")
    problem, buffer, shape = plan.host.problem, plan.host.buffer, plan.shape
    profile = problem.profile
    times = []
    for index, launch in enumerate(shape.launches):
        count = int(buffer[index])
        records = buffer[launch.items_at : launch.items_at + count * lo.ITEM_SIZE].reshape(-1, lo.ITEM_SIZE)
        tokens = (records[:, lo.PLAIN_COUNT] + records[:, lo.MASKED_COUNT]).astype(np.int64) * launch.tile.unit
        cost = cost_of(profile, launch.tile)
        steps = -(-tokens // launch.tile.block_kv)
        heads = shape.num_kv_heads * -(-shape.group // launch.tile.heads_per_tile(shape.group))
        work = float((cost.item_us + steps * cost.step_us).sum()) * heads / profile.num_sms
        width = (shape.head_dim + shape.v_head_dim) * problem.itemsize * shape.num_kv_heads
        memory = _unique_tokens(buffer, records, launch.tile.unit) * width / profile.bytes_per_us
        tail = profile.launch_us + float(steps.max(initial=0)) * cost.latency_us * 0.5
        times.append(LaunchTime(launch.tile.name(), count, work, memory, tail))
    if shape.partial_rows:
        moved = 8.0 * plan.host.num_partials * shape.num_q_heads * shape.v_head_dim
        times.append(
            LaunchTime("reduce", plan.host.num_queries, 0.0, moved / profile.partial_bytes_per_us, profile.launch_us)
        )
    return times


def cost_of(profile: GpuProfile, tile: lo.TileClass) -> TileCost:
    """The profile's tile nearest to this one."""
    return min(
        profile.tiles,
        key=lambda c: (abs(c.rows - tile.rows), abs(c.block_kv - tile.block_kv), abs(c.warps - tile.warps)),
    )


def _unique_tokens(buffer: np.ndarray, records: np.ndarray, unit: int) -> int:
    """Cache slots that the items of a launch read, each counted once."""
    words = []
    for begin, count, size in (
        (lo.PLAIN_BEGIN, lo.PLAIN_COUNT, lo.PLAIN_SIZE),
        (lo.MASKED_BEGIN, lo.MASKED_COUNT, lo.MASKED_SIZE),
    ):
        owner = np.repeat(np.arange(len(records)), records[:, count])
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(records[:, count]) - records[:, count], records[:, count])
        words.append(buffer[records[owner, begin] + nth * size + lo.WORD])
    word = np.unique(np.concatenate(words))
    return int((word & lo.COUNT_MASK).sum())
