"""The cost model: tile shapes with their measured costs, and the time of a launch.

A launch takes ``launch_us + max(max(work, memory) + OVERLAP * min(work, memory), latency)``: matrix work over all SMs
and bytes overlap in part in short launches; programs that do not fit at once run in waves, the last one as long as a
full one; and no launch ends before its longest item. ``benchmarks/fit.py`` fits the constants to launches on an H200,
and says how well they meet trees that they were not fitted to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.layout import TileClass
from pallas_kernels.mosaic_geometry import SMALLEST_COPY
from tree_attention_jax._arrays import largest
from tree_attention_jax.planning.problem import Heads, Problem
from tree_attention_jax.planning.profile import GpuProfile, TileCost
from tree_attention_jax.planning.tiles import fitted, loaded_at_once, resident_programs, suits_mosaic

# How much of the shorter of work and bytes shows beside the longer one.
OVERLAP = 0.5
# ... up to so many microseconds: a long launch reaches a steady state.
MAX_EXPOSED_US = 60.0
# A single warp takes so many times as long for a step whose slots lie apart, each word a load (seen 1.1 to 1.3).
SLOTS_APART = 1.25
# Programs left over for a last wave are too few to keep the GPU busy: this share of what they wait shows.
LAST_WAVE = 0.25
# Beside its steps a program begins and ends: this share of what that takes while as many programs as fit do the same.
ENDS = 0.75
# Two groups of warps share a tile of Mosaic's kernels and leave out what they do not see: while one works on its
# masked steps, the other does on its own. Where one has nothing to do, a step costs so much more.
ONE_SIDED = 1.2
# So many times what it costs, nothing is chosen.
NEVER = 10.0
# Below its top, the share of a joined segment's steps that compare intervals: the rest are ancestors of the whole tile.
MASKED_SHARE = 0.5


@dataclass(frozen=True)
class SegmentCosts:
    """Costs of segments by shape: float32 [S, 1], microseconds.

    Attributes:
        queries: a tile holds.
        plain_us: of a token in a program that cannot mask.
        token_us: in one that can.
        masked_us: what a token costs more if it is masked.
        tile_us: of a tile beside its tokens.
        masked_memory: factor of the time that reading device memory takes in one that can mask.
        halved: int [H], the shapes whose tiles have two halves.
        one_sided_us: float64 [H], what a masked token costs more with them if only one half works.
    """

    queries: np.ndarray
    plain_us: np.ndarray
    token_us: np.ndarray
    masked_us: np.ndarray
    tile_us: np.ndarray
    masked_memory: np.ndarray
    halved: np.ndarray
    one_sided_us: np.ndarray


class LaunchCosts(NamedTuple):
    """Costs of launches: numbers, or arrays [L].

    As in :class:`ShapeTable`, but a step's are the mean over the launch, in which some steps mask.
    """

    block_kv: Any
    programs: Any
    resident: Any
    item_us: Any
    step_bytes: Any
    item_work_us: Any  # item_us of all programs of an item
    ends_us: Any  # what programs that begin and end wait for each other
    step_us: Any
    latency_us: Any


@dataclass(frozen=True, eq=False)  # compared, and hashed, by identity: there is one of each
class ShapeTable:
    """Tile shapes and what they cost here, as arrays [S]; microseconds of one SM unless said otherwise.

    Attributes:
        tiles: the shapes, narrow to wide.
        block_kv: tokens a step.
        at_once: tokens that a program loads at once.
        queries: queries a tile holds.
        programs: programs an item makes (KV heads x parts of a group), over the SMs.
        resident: programs an SM runs at once.
        item_us, step_us, mixed_step_us, masked_step_us: of a program, as in :class:`.TileCost`.
        latency_us, mixed_latency_us, masked_latency_us: of one step, seen by one program.
        step_bytes: K and V of a step, all heads.
        masked_memory: factor of the time that reading device memory takes where programs mask, at least 1.
        token_us, mixed_token_us, masked_token_us: of a token.
    """

    tiles: tuple[TileClass, ...]
    block_kv: np.ndarray
    at_once: np.ndarray
    queries: np.ndarray
    programs: np.ndarray
    resident: np.ndarray
    item_us: np.ndarray
    step_us: np.ndarray
    mixed_step_us: np.ndarray
    masked_step_us: np.ndarray
    latency_us: np.ndarray
    mixed_latency_us: np.ndarray
    masked_latency_us: np.ndarray
    step_bytes: np.ndarray
    masked_memory: np.ndarray
    token_us: np.ndarray
    mixed_token_us: np.ndarray
    masked_token_us: np.ndarray

    @functools.cached_property
    def int_queries(self) -> np.ndarray:
        return self.queries.astype(np.int32)

    @functools.cached_property
    def segment_costs(self) -> SegmentCosts:
        """What :func:`.segment_times` needs of the shapes."""
        several = self.queries > 1  # a tile of one query needs no masks
        plain_us = self.programs * self.token_us
        mixed_us = np.where(several, self.programs * self.mixed_token_us, plain_us)
        masked_us = np.where(several, self.programs * self.masked_token_us, plain_us)
        tile_us = self.programs * (self.item_us + 0.5 * self.step_us)
        halved = self.two_halves.nonzero()[0]

        def column(values: np.ndarray) -> np.ndarray:
            return values.astype(np.float32)[:, None]

        return SegmentCosts(
            queries=column(self.queries),
            plain_us=column(plain_us),
            token_us=column(mixed_us),
            masked_us=column(masked_us - mixed_us),
            tile_us=column(tile_us),
            masked_memory=column(self.masked_memory),
            halved=halved,
            one_sided_us=(ONE_SIDED * masked_us * several).take(halved),
        )

    @functools.cached_property
    def least_costs(self) -> tuple[np.float32, np.float32, np.ndarray, np.ndarray]:
        """Bounds of what a token costs in any segment: for its own and for each row that sees it; float32.

        And of a leaf's tokens, [lines, 1] each: microseconds a token, and beside the tokens. The least line counts.
        """
        costs = self.segment_costs
        joined_us = costs.token_us + np.float32(MASKED_SHARE) * costs.masked_us
        alone_us = np.minimum(costs.plain_us, costs.token_us)
        least_us = np.minimum(alone_us, joined_us)
        lines = [*zip(alone_us.ravel(), costs.tile_us.ravel())]
        lines += zip(joined_us.ravel(), (costs.tile_us / costs.queries).ravel())
        lines = [a for a in set(lines) if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in lines)]
        slope, offset = np.ascontiguousarray(np.array(lines, np.float32).T)[:, :, None]
        return least_us.min(), (least_us / costs.queries).min(), slope, offset

    @functools.cached_property
    def mask_us(self) -> np.ndarray:
        """What a token costs more in a program that can mask."""
        return self.programs * (self.mixed_token_us - self.token_us)

    @functools.cached_property
    def two_halves(self) -> np.ndarray:
        """bool: shapes whose tiles two groups of warps share, each leaving out what it does not see."""
        return np.array([tile.mosaic for tile in self.tiles])

    @functools.cached_property
    def launches_of_halves(self) -> np.ndarray:
        """bool [2 * S]: launches that mask, of such shapes."""
        return np.stack([np.zeros_like(self.two_halves), self.two_halves], axis=1).ravel()

    @functools.cached_property
    def launch_block_kv(self) -> np.ndarray:
        """[2 * S]: ``block_kv`` of plain and of masked launches of each shape."""
        return self.block_kv.repeat(2)

    @functools.cached_property
    def launch_memory(self) -> np.ndarray:
        """[2 * S]: factor of the time to read device memory, of plain and of masked launches of each shape."""
        return np.stack([np.ones(len(self.tiles)), self.masked_memory], axis=1).ravel()

    @functools.cached_property
    def usual(self) -> int:
        """The shape that suits narrow tiles of about any length: of the fewest rows, with the most warps."""
        narrow = [index for index, tile in enumerate(self.tiles) if tile.rows == self.tiles[0].rows]
        return max(narrow, key=lambda index: self.tiles[index].warps)

    def launches(self, launch: Any, masked: Any, one_sided: Any) -> LaunchCosts:
        """Costs of launches, ``shape * 2 + can_mask`` each, that mask such a share of their steps.

        ``one_sided``: the share of their steps that are masked and of one half alone, beyond those of the other.
        """
        return LaunchCosts(*self.launch_rows(launch, masked, one_sided)[:9])

    def launch_rows(self, launch: Any, masked: Any, one_sided: Any) -> np.ndarray:
        """The same as rows of an array, [13, L]; the last ones are nobody's."""
        costs = self._launches.take(launch, axis=1)
        step, of_masked, of_one_sided = costs[7:9], costs[9:11], costs[11:]
        of_masked *= masked
        of_one_sided *= one_sided
        step += of_masked
        step += of_one_sided
        return costs

    def launch(self, launch: int, masked: float, one_sided: float) -> LaunchCosts:
        """The same of one launch, in Python's numbers."""
        *costs, step_masked, latency_masked, step_alone, latency_alone = self._launch_numbers[launch]
        costs[7] += masked * step_masked
        costs[7] += one_sided * step_alone
        costs[8] += masked * latency_masked
        costs[8] += one_sided * latency_alone
        return LaunchCosts(*costs)

    @functools.cached_property
    def _launch_numbers(self) -> list[list[float]]:
        return self._launches.T.tolist()

    @functools.cached_property
    def _launches(self) -> np.ndarray:
        """[13, 2 * S]: of plain and of masked launches of each shape; of steps and latencies, what a masked one adds,
        and what one adds that only one half works on."""

        def both(plain: np.ndarray, masked: np.ndarray) -> np.ndarray:
            return np.stack([plain, masked], axis=1).ravel()

        nothing = np.zeros(len(self.tiles))
        item_work_us, ends_us = self.item_us * self.programs, ENDS * self.item_us * self.resident
        same = (self.block_kv, self.programs, self.resident, self.item_us, self.step_bytes, item_work_us, ends_us)
        return np.stack(
            [
                *(both(column, column) for column in same),
                both(self.step_us, self.mixed_step_us),
                both(self.latency_us, self.mixed_latency_us),
                both(nothing, self.masked_step_us - self.mixed_step_us),
                both(nothing, self.masked_latency_us - self.mixed_latency_us),
                both(nothing, ONE_SIDED * self.two_halves * self.masked_step_us),
                both(nothing, ONE_SIDED * self.two_halves * self.masked_latency_us),
            ]
        )


def shapes_for(problem: Problem, shortest_step: int = 0) -> ShapeTable:
    """The profile's shapes: all, or those to choose from that have steps of so many tokens at least.

    Costs grow with the head dim, and a group never spans more tiles than it must.
    """
    mosaic = problem.mosaic and suits_mosaic(problem.heads, problem.unit)
    masked_unit = _masked_unit(problem) if mosaic else 0
    return shape_table(problem.profile, problem.heads, problem.unit, masked_unit, shortest_step)


def _masked_unit(problem: Problem) -> int:
    """What masked entries will hold, most likely: a wide tile has masks for what lies below the roots.

    As in :func:`.entries._chunks`, a block of decode steps has one unit for all.
    """
    tree = problem.tree
    if problem.horizon:
        return problem.unit_for(tree.first_slot, tree.kv_len)
    if tree.num_children[0] == 1:  # the root comes first
        return problem.unit_for(tree.first_slot[1:], tree.kv_len[1:])
    return problem.unit_for(tree.first_slot, tree.kv_len * (tree.parent >= 0))


@functools.lru_cache(maxsize=64)
def shape_table(profile: GpuProfile, heads: Heads, unit: int, masked_unit: int, shortest_step: int = 0) -> ShapeTable:
    """The same; ``masked_unit``: tokens that an entry of a Mosaic tile would hold if masked; 0: no such tiles."""
    scale = (heads.head_dim + heads.v_head_dim) / 256
    cost_of: dict[TileClass, TileCost] = {}
    for cost in profile.tiles:
        if cost.mosaic and 0 < masked_unit < SMALLEST_COPY:  # then it is for what needs no masks
            cost = replace(cost, mixed_step_us=NEVER * cost.step_us, masked_step_us=NEVER * cost.step_us)
        if cost.block_kv >= shortest_step and (masked_unit or not cost.mosaic):
            cost_of.setdefault(fitted(heads, cost, unit), cost)
    if shortest_step and heads.num_kv_heads > 1:
        # Fewer warps for the same tile pay where a single KV head leaves SMs idle. With more heads they would gain 3%
        # in one of 85 trees, and be one more program that a growing tree meets.
        most = {_fit(tile): tile.warps for tile in sorted(cost_of, key=lambda tile: tile.warps)}
        cost_of = {tile: cost for tile, cost in cost_of.items() if tile.warps == most[_fit(tile)]}
    tiles = sorted(cost_of, key=lambda tile: (tile.rows, tile.block_kv, tile.warps, tile.stages, tile.mosaic))
    group = heads.group

    def column(value: Callable[[TileClass, TileCost], float]) -> np.ndarray:
        return np.array([value(tile, cost_of[tile]) for tile in tiles], np.float64)

    apart = SLOTS_APART if unit == 1 else 1.0
    per_step = column(lambda tile, cost: scale * tile.block_kv / cost.block_kv * (apart if tile.warps == 1 else 1))
    block_kv = column(lambda tile, cost: tile.block_kv)
    step_us = column(lambda tile, cost: cost.step_us) * per_step
    mixed_step_us = column(lambda tile, cost: cost.mixed_step_us) * per_step
    masked_step_us = column(lambda tile, cost: cost.masked_step_us) * per_step
    parts = column(lambda tile, cost: -(-group // tile.heads_per_tile(group)))
    return ShapeTable(
        tiles=tuple(tiles),
        block_kv=block_kv,
        at_once=np.array([loaded_at_once(tile) for tile in tiles], np.int32),
        queries=column(lambda tile, cost: tile.queries_per_tile(group)),
        programs=heads.num_kv_heads * parts / profile.num_sms,
        resident=column(lambda tile, cost: resident_programs(heads, tile)),
        item_us=column(lambda tile, cost: cost.item_us) * scale,
        step_us=step_us,
        mixed_step_us=mixed_step_us,
        masked_step_us=masked_step_us,
        latency_us=column(lambda tile, cost: cost.latency_us) * per_step,
        mixed_latency_us=column(lambda tile, cost: cost.mixed_latency_us) * per_step,
        masked_latency_us=column(lambda tile, cost: cost.masked_latency_us) * per_step,
        step_bytes=float(heads.token_bytes) * block_kv,
        masked_memory=column(lambda tile, cost: cost.masked_memory),
        token_us=step_us / block_kv,
        mixed_token_us=mixed_step_us / block_kv,
        masked_token_us=masked_step_us / block_kv,
    )


def _fit(tile: TileClass) -> tuple[int, int, bool]:
    return tile.rows, tile.block_kv, tile.mosaic


# What the next two functions need of NumPy, for plain numbers: those of a few launches take less time one by one.
NUMBERS = SimpleNamespace(maximum=max, minimum=min, ceil=math.ceil, sqrt=math.sqrt)


def launch_time(profile: GpuProfile, costs: LaunchCosts, steps, items, longest, memory, ops: Any = np) -> Any:
    """Microseconds of launches; arguments from the second to the last but one are numbers, or arrays of a shape.

    Args:
        profile: rates of the GPU.
        costs: of the launches.
        steps, items: of all items together, of which there are some.
        longest: steps of the longest item.
        memory: time to read the launch's K/V once, with these tiles.
        ops: ``NUMBERS`` if all are Python's numbers.
    """
    ceil, maximum, minimum = ops.ceil, ops.maximum, ops.minimum
    an_sm = items * costs.programs
    work = items * costs.item_work_us
    work += steps * (costs.step_us * costs.programs)
    # Some SMs have one program more than others: work lasts longer by the root of that ratio. What follows rounds up
    # quotients that may be a whole number and a little.
    work *= ops.sqrt(ceil(an_sm - 1e-9) / an_sm)
    # Programs that do not fit at once run in waves; each waits out its own loads.
    fill = an_sm / costs.resident
    waves = ceil(fill - 1e-9)
    wave = steps * costs.latency_us
    wave /= items
    wave += costs.ends_us
    latency = maximum(longest * costs.latency_us + costs.ends_us, wave * waves)
    busy = maximum(work, memory)
    busy += minimum(OVERLAP * minimum(work, memory), MAX_EXPOSED_US)
    if (waves if ops is NUMBERS else largest(waves)) > 1:
        last = (fill - waves + 1.0) / fill  # its share of the programs
        waits = (waves > 1.0) & (fill < waves - 1e-9)
        busy = busy + LAST_WAVE * maximum(wave - busy * last, 0.0) * waits
    least = maximum(latency, steps * costs.step_bytes / profile.l2_bytes_per_us)
    return profile.launch_us + maximum(busy, least)


def least_time(profile: GpuProfile, costs: LaunchCosts, steps: float, items: float, memory: float) -> float:
    """No more than :func:`launch_time`, whatever the longest item is, and of as many items or more; of numbers."""
    work = items * costs.item_work_us + steps * (costs.step_us * costs.programs)
    busy = max(work, memory) + min(OVERLAP * min(work, memory), MAX_EXPOSED_US)
    waves = (steps * costs.latency_us + items * costs.ends_us) * (costs.programs / costs.resident)
    return profile.launch_us + max(busy, waves, steps * costs.step_bytes / profile.l2_bytes_per_us)
