"""The cost model: tile shapes with their measured costs, and the time of a launch.

A launch takes ``launch_us + max(max(work, memory) + OVERLAP * min(work, memory), latency)``: matrix work over all SMs
and bytes overlap by half in short launches, and no launch ends before its longest item. The form was fitted to the
launches of the 45 cells on an H200, which it meets within 9% on average (docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.layout import TileClass
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.profile import GpuProfile, TileCost
from tree_attention_jax.planning.tiles import entry_unit, fitted, resident_programs

# How much of the shorter of work and bytes shows beside the longer one.
OVERLAP = 0.5
# ... up to so many microseconds: a long launch reaches a steady state.
MAX_EXPOSED_US = 60.0


# A masked step waits for the intervals too, before it can weigh what it loaded.
MASKED_LATENCY = 1.25


@dataclass(frozen=True)
class Shape:
    """A tile shape and what it costs here; microseconds of one SM unless said otherwise."""

    tile: TileClass
    queries: int  # queries a tile holds
    programs: float  # programs an item makes (KV heads x parts of a group), over the SMs
    item_us: float
    step_us: float
    masked_step_us: float
    latency_us: float  # of one step, seen by one program
    step_bytes: float  # K and V of a step, all heads
    slots: int  # programs the GPU runs at once

    @property
    def token_us(self) -> float:
        return self.step_us / self.tile.block_kv

    @property
    def masked_token_us(self) -> float:
        # About half of what a joined segment walks are ancestors of the whole tile, which take the plain path.
        return 0.5 * (self.step_us + self.masked_step_us) / self.tile.block_kv


def shapes_for(problem: Problem) -> list[Shape]:
    """The profile's shapes; costs grow with the head dim, and a group never spans more tiles than it must."""
    unit = entry_unit(problem)
    scale = (problem.head_dim + problem.v_head_dim) / 256
    token_bytes = float((problem.head_dim + problem.v_head_dim) * problem.itemsize * problem.num_kv_heads)

    def shape(cost: TileCost) -> Shape:
        tile = fitted(problem, cost, unit)
        per_step = scale * tile.block_kv / cost.block_kv
        parts = -(-problem.group // tile.heads_per_tile(problem.group))
        return Shape(
            slots=problem.profile.num_sms * resident_programs(problem, tile),
            tile=tile,
            queries=tile.queries_per_tile(problem.group),
            programs=problem.num_kv_heads * parts / problem.profile.num_sms,
            item_us=cost.item_us * scale,
            step_us=cost.step_us * per_step,
            masked_step_us=cost.masked_step_us * per_step,
            latency_us=cost.latency_us * per_step,
            step_bytes=token_bytes * tile.block_kv,
        )

    shapes = {shape(cost) for cost in problem.profile.tiles}
    return sorted(shapes, key=lambda s: (s.tile.rows, s.tile.block_kv, s.tile.warps, s.tile.stages))


def launch_time(
    profile: GpuProfile, shape: Shape, steps: float, items: float, longest: float, memory: float, masked: bool
) -> float:
    """Microseconds of a launch.

    Args:
        profile: rates of the GPU.
        shape: tile and costs.
        steps, items: of all items together.
        longest: steps of the longest item.
        memory: time to read the launch's K/V once.
        masked: the steps compare intervals.
    """
    step_us = shape.masked_step_us if masked else shape.step_us
    work = (steps * step_us + items * shape.item_us) * shape.programs
    programs = items * shape.programs * profile.num_sms
    # Programs that do not fit at once run in waves; each waits out its own loads.
    waves = max(1.0, programs / shape.slots)
    average = steps / max(items, 1.0) * shape.latency_us
    latency = max(longest * shape.latency_us, average * waves) * (MASKED_LATENCY if masked else 1.0)
    reread = steps * shape.step_bytes / profile.l2_bytes_per_us
    exposed = min(OVERLAP * min(work, memory), MAX_EXPOSED_US)
    return profile.launch_us + max(max(work, memory) + exposed, latency, reread)
