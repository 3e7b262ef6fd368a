"""Launches as a whole: their modelled time, and how long their items may be.

An item that outlasts all others leaves the GPU idle, so it is split, at the price of more partials. Flash-Decoding
splits by a fixed count and FastTree by thresholds on the number of programs. Here each candidate length is priced: work
over all SMs, the longest item's latency, and the partials that the pieces write. Many launches are priced at once.
Often a bound shows that none of a few launches gains by it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from tree_attention_jax._arrays import all_of, any_of
from tree_attention_jax.planning.cost import LaunchCosts, launch_time, least_time
from tree_attention_jax.planning.problem import Problem

MIN_TOKENS = 64
# A launch whose longest item takes no more than this share of it is not worth splitting.
SHORT_TAIL = 0.2
# If more than this share of the launches look as if they gained by splitting, the others need no bound either. Those
# that write partials anyhow gain nearly always.
MOST_MAY_GAIN = 0.25
# In launches that take so many times as much as one more, SMs that have one program more than others cost as much.
LONG = 100
# What is larger by less than this may be as large.
ROUNDING = 1 + 1e-6


class Blocks(NamedTuple):
    """Equal row tiles, grouped by launch. Float64 but for the first two."""

    first: np.ndarray  # [L] each launch's first group
    launch: np.ndarray  # of each group
    tiles: np.ndarray  # in the group
    tokens: np.ndarray  # of each tile
    rows: np.ndarray


def price(
    problem: Problem,
    costs: LaunchCosts,
    blocks: Blocks,
    memory: np.ndarray,
    reduced: np.ndarray,
    hopeless: float = np.inf,
) -> tuple[np.ndarray, np.ndarray]:
    """Launches with items of different lengths.

    Args:
        problem: gives heads and rates.
        costs: of each launch, [L].
        blocks: of all launches.
        memory: [L] time to read the launch's K/V once.
        reduced: [L] the rows have other partials, so that a split makes no final result partial.
        hopeless: launches that take more than so many times as long as the fastest one may be priced without splits.

    Returns:
        [lengths, L] microseconds, with the partials that splitting adds, without end where a limit makes no sense, and
        [lengths] tokens that an item may have at most; 0: none is split. The first is 0; no others if none can be best.
    """
    profile, first = problem.profile, blocks.first
    longest, block_kv = blocks.tokens, costs.block_kv
    single = len(longest) == len(first)  # each launch has one group
    if not single:
        longest, block_kv = np.maximum.reduceat(longest, first), block_kv.take(blocks.launch)
    steps = np.ceil(blocks.tokens / block_kv)
    steps *= blocks.tiles
    if not single:
        steps = np.add.reduceat(steps, first)
    length, limits = _lengths(max(int(np.maximum.reduce(longest)) - 1, 0).bit_length())
    if not any_of(reduced):
        # With shorter items launches take as much all the same, and one more for the partials.
        items = blocks.tiles if single else np.add.reduceat(blocks.tiles, first)
        least = least_time(profile, costs, steps, items, memory)
        least += profile.launch_us
        most = np.ceil(longest / costs.block_kv)
        may_gain = most * costs.latency_us > least
        may_gain |= least > LONG * profile.launch_us
        if np.count_nonzero(may_gain) <= MOST_MAY_GAIN * len(first):
            time = launch_time(profile, costs, steps, items, most, memory)
            whole = least > ROUNDING * time
            if not all_of(whole) and hopeless < np.inf:
                whole |= np.minimum(least, time) > hopeless * ROUNDING * np.minimum.reduce(time)
            if all_of(whole):
                return time[None], limits[:1]
    items, written = _splits(blocks, length, reduced)
    # All repeated for each length: NumPy takes three times as long for short arrays that it has to broadcast.
    of_launches = np.array([*costs, steps, memory, longest])[:, None]
    *of_each, steps, memory, longest = of_launches.repeat(len(length), axis=1)
    costs = LaunchCosts(*of_each)
    tokens = np.minimum(length, longest)  # of the longest item
    most = np.ceil(tokens / costs.block_kv)
    time = launch_time(profile, costs, steps, items, most, memory)
    senseless = tokens < costs.block_kv
    senseless |= tokens >= longest
    senseless |= most[0] * costs.latency_us[0] <= SHORT_TAIL * time[0]
    written *= problem.heads.partial_bytes / profile.partial_bytes_per_us
    time += written
    split = time[1:]
    split += profile.launch_us * ~reduced
    np.copyto(split, np.inf, where=senseless[1:])
    return time, limits


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


def _splits(blocks: Blocks, length: np.ndarray, reduced: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[lengths, L] each: items, and partials written that were not written before."""
    first, launch, tiles, tokens, rows = blocks
    long = (tokens > MIN_TOKENS).nonzero()[0]
    few = 2 * len(long) < len(tokens)  # the others are never split, so need not be looked at
    if few:
        items, written = np.empty((len(length), len(first))), np.zeros((len(length), len(first)))
        items[:] = np.add.reduceat(tiles, first)
        if len(long) == 0:
            return items, written
        launch, tiles, tokens, rows = launch.take(long), tiles.take(long), tokens.take(long), rows.take(long)
        first = starts(launch)
        which = launch.take(first)
        items[:, which] -= np.add.reduceat(tiles, first)
    pieces = np.ceil(tokens / length)
    np.maximum(pieces, 1, out=pieces)
    partials = pieces - reduced.take(launch)
    partials *= pieces > 1
    partials *= rows * tiles
    pieces *= tiles
    added = pieces, partials
    if len(first) < len(tokens):
        added = np.add.reduceat(pieces, first, axis=1), np.add.reduceat(partials, first, axis=1)
    if not few:
        return added
    items[:, which] += added[0]
    written[:, which] = added[1]
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
