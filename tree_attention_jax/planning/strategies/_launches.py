"""Launches as a whole: their modelled time, and how long their items may be.

An item that outlasts all others leaves the GPU idle, so it is split, at the price of more partials. Flash-Decoding
splits by a fixed count and FastTree by thresholds on the number of programs. Here each candidate length is priced: work
over all SMs, the longest item's latency, and the partials that the pieces write. Many launches are priced at once.
Often a bound shows that none of a few launches gains by it, or that few lengths may be the best.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from tree_attention_jax._arrays import any_of
from tree_attention_jax.planning.cost import NUMBERS, LaunchCosts, ShapeTable, launch_time, least_time
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.reduction import Reduction, reduction_of

MIN_TOKENS = 64
# Plain items run apart from masked ones where that gains so many times as much as their launch costs: if it gained
# little, a growing tree would meet both kinds of plan all the time.
SPLIT = 2.0
# A launch whose longest item takes no more than this share of it is not worth splitting.
SHORT_TAIL = 0.2
# Of more launches at once, one or the other gains by splitting nearly always; so do those that write partials anyhow.
FEW = 16
# Of more tiles it is worth to leave out those that are never split.
MANY_TILES = 64
# So few take less time one by one, each that gains by a split at each length: if all are likely to gain, and if not.
ALL_GAIN, SOME_GAIN = 2, 4
# Of more launches, one that could gain no more than this share by a split is looked at by itself: it hardly ever does.
LITTLE = 0.05
# What is larger by less than this may be as large.
ROUNDING = 1 + 1e-6


class Blocks(NamedTuple):
    """Equal row tiles, grouped by launch. Float64 but for the first two."""

    first: np.ndarray  # [L] each launch's first group
    launch: np.ndarray  # of each group
    tiles: np.ndarray | None  # in the group; None: a group is a tile
    tokens: np.ndarray  # of each tile
    rows: np.ndarray


def blocks_of(first: np.ndarray, launch: np.ndarray, tokens: np.ndarray, rows: np.ndarray) -> Blocks:
    """Tiles one by one, launch after launch; equal neighbours, of which a regular tree has many, as groups."""
    if len(tokens) > MANY_TILES:
        new = np.empty(len(tokens), bool)
        np.not_equal(tokens[1:], tokens[:-1], out=new[1:])
        new[1:] |= rows[1:] != rows[:-1]
        new[first] = True
        at = new.nonzero()[0]
        if 2 * len(at) < len(tokens):
            tiles = np.empty(len(at))
            np.subtract(at[1:], at[:-1], out=tiles[:-1])
            tiles[-1] = len(tokens) - at[-1]
            return Blocks(at.searchsorted(first), launch.take(at), tiles, tokens.take(at), rows.take(at))
    return Blocks(first, launch, None, tokens, rows)


class Launches(NamedTuple):
    """[L] each."""

    launch: np.ndarray  # shape * 2 + masked
    masked: np.ndarray  # share of the steps that are masked,
    one_sided: np.ndarray  # ... and of one half of a tile alone
    memory: np.ndarray  # time to read the launch's K/V once, with these tiles
    partials: np.ndarray | None  # that all rows of its plan write if nothing is split, one each or none; None: none


def launch_keys(
    problem: Problem, shapes: ShapeTable, key: np.ndarray, can_mask: np.ndarray, shape: np.ndarray, walked: np.ndarray
) -> np.ndarray:
    """``key`` + can_mask: masked and plain items run as launches of their own, as a mask costs registers and time.

    Unless that is not much more than the launch of the plain ones would cost.
    """
    has_masked = np.bincount(key, can_mask) > 0
    costs_us = shapes.mask_us.take(shape) * walked
    costs_us *= ~can_mask
    cheap = np.bincount(key, costs_us) < SPLIT * problem.profile.launch_us
    return key + (can_mask | (has_masked & cheap).take(key))


def price(
    problem: Problem,
    shapes: ShapeTable,
    launches: Launches,
    blocks: Blocks,
    hopeless: float = np.inf,
    gains: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Launches with items of different lengths.

    Args:
        problem: gives heads and rates.
        shapes: gives costs.
        launches: all that there are.
        blocks: of all launches.
        hopeless: launches that take more than so many times as long as the fastest one may be given any time that is
            longer still.
        gains: one that counts gains by a split, most likely: it takes no bound to show that.

    Returns:
        [L] microseconds with the best limit, with the partials that splitting adds, and [L] the limit: tokens that an
        item may have at most; 0: none is split.
    """
    profile, first, partials = problem.profile, blocks.first, launches.partials
    if partials is not None and not any_of(partials):
        partials = None
    longest, block_kv = blocks.tokens, shapes.launch_block_kv.take(launches.launch)
    steps = longest / (block_kv if len(longest) == len(first) else block_kv.take(blocks.launch))
    np.ceil(steps, out=steps)
    if blocks.tiles is not None:
        steps *= blocks.tiles
    if len(longest) > len(first):  # some launch has several groups
        longest, steps = np.maximum.reduceat(longest, first), np.add.reduceat(steps, first)
    if not gains and len(first) <= FEW and partials is None:
        load = steps, _items_of(blocks), longest, *_longest_tiles(blocks, longest)
        whole = _whole(problem, shapes, launches, load, hopeless)
        if whole is not None:
            return np.array(whole[0]), np.array(whole[1], np.int32)
    bits = max(int(longest[longest.argmax()]) - 1, 0).bit_length()
    length, limits = _lengths(bits)
    items, written = _splits(blocks, length, None if partials is None else partials > 0)
    # All repeated for each length: NumPy takes three times as long for short arrays that it has to broadcast.
    rows = shapes.launch_rows(launches.launch, launches.masked, launches.one_sided)
    rows[9], rows[10], rows[11] = steps, launches.memory, longest
    *of_each, steps, memory, longest, _ = rows[:, None].repeat(len(length), axis=1)
    costs = LaunchCosts(*of_each)
    tokens = np.minimum(length, longest)  # of the longest item
    most = np.ceil(tokens / costs.block_kv)
    time = launch_time(profile, costs, steps, items, most, memory)
    senseless = _misfits(shapes, bits).take(launches.launch, axis=1)
    senseless |= length >= longest
    senseless |= most[0] * costs.latency_us[0] <= SHORT_TAIL * time[0]
    reduction = reduction_of(problem)
    split = time[1:]
    if partials is None:
        split += reduction.time(written[1:])
    else:
        written += partials
        reduction_us = reduction.time(written)
        split += reduction_us[1:]
        split -= reduction_us[0]  # nothing is split there
    np.putmask(split, senseless[1:], np.inf)
    return np.minimum.reduce(time), limits.take(time.argmin(axis=0))


def _whole(
    problem: Problem, shapes: ShapeTable, launches: Launches, load: tuple[np.ndarray, ...], hopeless: float
) -> tuple[list[float], list[int]] | None:
    """Times and limits of a few launches if (nearly) none that counts gains by splitting items; None if one may.

    ``load``: steps and items of each launch, tokens of its longest item, tiles as long as that, and rows of these.
    """
    columns = (launches.launch, launches.masked, launches.one_sided, launches.memory, *load)
    reduction, best, few, priced = reduction_of(problem), np.inf, len(launches.launch) <= SOME_GAIN, []
    seen: dict[tuple[float, ...], tuple[float, int]] = {}  # a candidate may be there twice
    for numbers in zip(*[c.tolist() for c in columns]):
        if numbers not in seen:
            found = _alone(problem, reduction, shapes, numbers, hopeless * best, few)
            if found is None:
                return None
            seen[numbers], best = found, min(best, found[0])
        priced.append(seen[numbers])
    return [time for time, _ in priced], [limit for _, limit in priced]


def _alone(
    problem: Problem,
    reduction: Reduction,
    shapes: ShapeTable,
    numbers: tuple[Any, ...],
    hopeless_us: float,
    few: bool,
) -> tuple[float, int] | None:
    """Time and limit of a launch, infinite if hopeless; None if it may well gain by a split, and not ``few`` do."""
    launch, masked, one_sided, memory, steps, items, longest, tiles, rows = numbers
    profile, costs = problem.profile, shapes.launch(launch, masked, one_sided)
    if hopeless_us < np.inf and least_time(profile, costs, steps, items, memory) > ROUNDING * hopeless_us:
        return np.inf, 0
    most = math.ceil(longest / costs.block_kv)
    time = launch_time(profile, costs, steps, items, most, memory, NUMBERS)
    if most * costs.latency_us <= SHORT_TAIL * time:
        return time, 0
    # With the longest tiles in p >= 2 pieces there are more items; each piece writes partials, which one more launch
    # merges; and it takes a p-th of the time: x / p + p * y is 2 * sqrt(x * y) at least.
    partials = rows * reduction.partial_us
    split = least_time(profile, costs, steps, items + tiles, memory) + 2 * partials
    split = max(split, profile.launch_us + 2 * math.sqrt(longest / costs.block_kv * costs.latency_us * partials))
    split += reduction.fixed_us
    if split > ROUNDING * min(time, hopeless_us):
        return time, 0
    if tiles < items or not (few or split >= (1 - LITTLE) * time):
        return None
    at_once = int(shapes.at_once[launch >> 1])
    return _best_split(problem, reduction, costs, at_once, (steps, items, longest, rows, memory), time)


def _best_split(
    problem: Problem,
    reduction: Reduction,
    costs: LaunchCosts,
    at_once: int,
    load: tuple[float, ...],
    whole_us: float,
) -> tuple[float, int]:
    """The least time of a launch of equal tiles, and the limit that it takes, if it takes so long without one.

    ``load``: steps, tiles, tokens of each tile, rows of all, and time to read the K/V.
    """
    profile, (steps, tiles, tokens, rows, memory) = problem.profile, load
    best, best_limit = whole_us, 0
    _, limits = _lengths(max(int(tokens) - 1, 0).bit_length())
    for limit in reversed(limits.tolist()):
        if limit >= tokens or limit < costs.block_kv or limit % at_once or limit == 0:
            continue
        pieces = math.ceil(tokens / limit)
        reduction_us = reduction.fixed_us + pieces * rows * reduction.partial_us  # at least
        if least_time(profile, costs, steps, pieces * tiles, memory) + reduction_us > ROUNDING * best:
            break  # more pieces take longer still
        most = math.ceil(limit / costs.block_kv)
        time = launch_time(profile, costs, steps, pieces * tiles, most, memory, NUMBERS)
        if time + reduction_us > ROUNDING * best:
            continue
        time += reduction.time_of(pieces * rows)
        if time < best or (time == best and best_limit):
            best, best_limit = time, limit
    return best, best_limit


def _items_of(blocks: Blocks) -> np.ndarray:
    """[L]: all tiles of each launch."""
    first, launch, tiles, _, _ = blocks
    if tiles is None:
        return np.bincount(launch)
    return tiles if len(first) == len(tiles) else np.add.reduceat(tiles, first)


def _longest_tiles(blocks: Blocks, longest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[L] each: tiles of a launch that are as long as its longest one, and rows of all of them."""
    first, launch, tiles, tokens, rows = blocks
    if tiles is not None:
        rows = rows * tiles
        if len(first) == len(rows):
            return tiles, rows
    as_long = (tokens == longest.take(launch)).astype(np.float64)
    rows = rows * as_long
    return np.add.reduceat(as_long if tiles is None else tiles * as_long, first), np.add.reduceat(rows, first)


@functools.lru_cache(maxsize=64)
def _lengths(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """[lengths, 1]: tokens that items may have. Row 0: whole items; others: powers of two, up to so many bits, and what
    is half way between. And the same as limits: [lengths], 0 for none."""
    shorter = MIN_TOKENS << np.arange(max(bits - (MIN_TOKENS - 1).bit_length(), 0))
    limits = np.concatenate([[0], np.outer(shorter, [1, 1.5]).ravel()]).astype(np.int32)
    length = limits.astype(np.float64)[:, None]
    length[0] = np.inf
    for array in (length, limits):
        array.setflags(write=False)
    return length, limits


@functools.lru_cache(maxsize=64)
def _misfits(shapes: ShapeTable, bits: int) -> np.ndarray:
    """bool [lengths, 2 * S]: items that end within what launches load at once or in a step, and take as long as larger
    ones."""
    limits = _lengths(bits)[1][:, None]
    return (limits % shapes.at_once.repeat(2) > 0) | (limits < shapes.launch_block_kv)


def _splits(blocks: Blocks, length: np.ndarray, reduced: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """[lengths, L] each: items, and partials written that were not written before; ``reduced``: None if none is."""
    first, launch, tiles, tokens, rows = blocks
    few = False
    if len(tokens) > MANY_TILES:
        long = (tokens > MIN_TOKENS).nonzero()[0]
        few = 2 * len(long) < len(tokens)  # the others are never split, so need not be looked at
    if few:
        items, written = np.empty((len(length), len(first))), np.zeros((len(length), len(first)))
        items[:] = _items_of(blocks)
        if len(long) == 0:
            return items, written
        launch, tokens, rows = launch.take(long), tokens.take(long), rows.take(long)
        tiles = None if tiles is None else tiles.take(long)
        first = starts(launch)
        which = launch.take(first)
        items[:, which] -= np.bincount(launch).take(which) if tiles is None else np.add.reduceat(tiles, first)
    added = np.empty((2, len(length), len(tokens)))
    pieces, partials = added
    np.divide(tokens, length, out=pieces)
    np.ceil(pieces, out=pieces)
    np.maximum(pieces, 1.0, out=pieces)
    np.multiply(pieces if reduced is None else pieces - reduced.take(launch), pieces > 1.0, out=partials)
    partials *= rows if tiles is None else rows * tiles
    if tiles is not None:
        pieces *= tiles
    if len(first) < len(tokens):
        pieces, partials = np.add.reduceat(added, first, axis=2)
    if not few:
        return pieces, partials
    items[:, which] += pieces
    written[:, which] = partials
    return items, written


def starts(values: np.ndarray) -> np.ndarray:
    """Where each run of equal values begins."""
    new = np.empty(len(values), bool)
    new[:1] = True
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return new.nonzero()[0]


def spread(first: np.ndarray, length: int) -> np.ndarray:
    """The group of each of so many elements, if groups begin at ``first``."""
    opens = np.zeros(length, np.intp)
    opens[first[1:]] = 1
    return np.add.accumulate(opens, out=opens)
