"""Modelled GPU time of a finished plan, from its items: what ``explain`` shows and the benchmark holds against the
measured time. It prices the same things as ``auto``, but for the items that really came out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_geometry import PART
from tree_attention_jax.planning.cost import ShapeTable, launch_time, shapes_for
from tree_attention_jax.planning.plan import HostView, TreePlan
from tree_attention_jax.planning.reduction import reduction_of


@dataclass(frozen=True)
class LaunchTime:
    """One launch of a plan; microseconds.

    Attributes:
        name: tile class, or "reduce".
        items: its items.
        work_us: matrix work over all SMs, alone.
        memory_us: K/V bytes (or partials) at the rate of device memory, alone.
        us: the launch.
    """

    name: str
    items: int
    work_us: float
    memory_us: float
    us: float


@dataclass(frozen=True)
class LaunchLoad:
    """What a launch has to do, as :func:`.cost.launch_time` wants to know it.

    Attributes:
        items: its items; each is a program for every KV head (and part of a group).
        steps: of all items; ``longest``: of the longest.
        masked: share of the steps that compare intervals.
        one_sided: share of the steps that do, and that one half of a tile works on beyond those of the other half; 0
            for tiles without halves.
        tokens: cache slots read, each counted once.
        partials: rows it writes as partials.
    """

    items: int
    steps: int
    longest: int
    masked: float
    one_sided: float
    tokens: int
    partials: int


def modelled_time(plan: TreePlan) -> float:
    """Microseconds of one attention call, launches and reduction included."""
    return sum(launch.us for launch in launch_times(plan))


def launch_times(plan: TreePlan) -> list[LaunchTime]:
    """The plan's launches in order, then the reduction (writing of the partials included) if there is one.

    Raises:
        ValueError: the plan came out of a trace and has no host part.
    """
    host, shape = _host(plan), plan.shape
    profile, heads = host.problem.profile, host.problem.heads
    shapes = shapes_for(host.problem)
    times = []
    for launch, load in zip(shape.launches, launch_loads(plan)):
        which = 2 * _nearest(shapes, launch.tile) + launch.tile.masked
        costs = shapes.launches(which, load.masked, load.one_sided)
        memory = load.tokens * heads.token_bytes / profile.bytes_per_us
        work = (load.steps * costs.step_us + load.items * costs.item_us) * costs.programs
        reading = memory * shapes.launch_memory[which]
        us = launch_time(profile, costs, load.steps, max(load.items, 1e-9), load.longest, reading)
        times.append(LaunchTime(launch.tile.name(), load.items, float(work), memory, float(us)))
    if shape.partial_rows:
        memory = host.num_partials * heads.partial_bytes / profile.partial_bytes_per_us
        us = reduction_of(host.problem).time(np.array(host.num_partials))
        times.append(LaunchTime("reduce", host.num_queries, 0.0, memory, float(us)))
    return times


def launch_loads(plan: TreePlan) -> list[LaunchLoad]:
    """Of each launch, from the items that came out."""
    buffer = _host(plan).buffer
    loads = []
    for index, launch in enumerate(plan.shape.launches):
        count = int(buffer[index])
        records = buffer[launch.items_at : launch.items_at + count * lo.ITEM_SIZE].reshape(-1, lo.ITEM_SIZE)
        compared = records[:, lo.MASKED_COUNT].astype(np.int64) * launch.tile.masked_unit
        tokens = records[:, lo.PLAIN_COUNT].astype(np.int64) * launch.tile.unit + compared
        steps = -(-tokens // launch.tile.block_kv)
        loads.append(
            LaunchLoad(
                items=count,
                steps=int(steps.sum()),
                longest=int(steps.max(initial=0)),
                masked=float(compared.sum() / max(tokens.sum(), 1)),
                one_sided=_one_sided_tokens(buffer, records, launch.tile, plan.shape.group) / max(int(tokens.sum()), 1),
                tokens=_unique_tokens(buffer, records),
                partials=int(records[records[:, lo.PARTIAL] >= 0, lo.NUM_ROWS].sum()),
            )
        )
    return loads


def _host(plan: TreePlan) -> HostView:
    if plan.host is None:
        raise ValueError("this plan has passed through jax.jit, which keeps only its buffer: model the plan you made")
    return plan.host


def _nearest(shapes: ShapeTable, tile: lo.TileClass) -> int:
    """Index of the profile's shape nearest to a tile."""

    def distance(index: int) -> tuple[int, ...]:
        other = shapes.tiles[index]
        return (
            other.mosaic != tile.mosaic,
            abs(other.rows - tile.rows),
            abs(other.block_kv - tile.block_kv),
            abs(other.warps - tile.warps),
            abs(other.stages - tile.stages),
        )

    return min(range(len(shapes.tiles)), key=distance)


def _one_sided_tokens(buffer: np.ndarray, records: np.ndarray, tile: lo.TileClass, group: int) -> float:
    """Token slots, in parts of a step, that the busier half of each item's rows sees beyond half of all."""
    if not (tile.mosaic and tile.masked):
        return 0.0
    owner, nth, at = _listed(records, lo.MASKED_BEGIN, lo.MASKED_COUNT, lo.MASKED_SIZE)
    low, high = buffer[at + lo.LOW], buffer[at + lo.HIGH]
    first = np.maximum(low, ~low)
    middle = (records[:, lo.ROW] + tile.queries_per_tile(group) // 2)[owner]
    part = nth // (PART // tile.masked_unit)
    begins = np.flatnonzero(np.diff(owner * (1 << 32) + part, prepend=-1))
    if len(begins) == 0:
        return 0.0
    anyone = first < high
    seen = [np.logical_or.reduceat(anyone & of_half, begins) for of_half in (first < middle, high > middle)]
    busier = np.maximum(*(np.bincount(owner[begins], half, len(records)) for half in seen))
    parts = np.bincount(owner[begins], minlength=len(records))
    return float(PART * np.maximum(2 * busier - parts, 0).sum())


def _listed(records: np.ndarray, begin: int, count: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of all entries of a kind: the item they are of, which of its entries they are, and where they are."""
    counts = records[:, count]
    owner = np.repeat(np.arange(len(records)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, nth, records[owner, begin] + nth * size


def _unique_tokens(buffer: np.ndarray, records: np.ndarray) -> int:
    """Cache slots that the items of a launch read, each counted once."""
    kinds = (lo.PLAIN_BEGIN, lo.PLAIN_COUNT, lo.PLAIN_SIZE), (lo.MASKED_BEGIN, lo.MASKED_COUNT, lo.MASKED_SIZE)
    words = [buffer[_listed(records, *kind)[2] + lo.WORD] for kind in kinds]
    word = np.unique(np.concatenate(words))
    return int((word & lo.COUNT_MASK).sum())
