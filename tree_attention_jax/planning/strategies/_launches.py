"""Launches as a whole: their modelled time, and how long their items may be.

An item that outlasts all others leaves the GPU idle, so it is split, at the price of more partials. Flash-Decoding
splits by a fixed count and FastTree by thresholds on the number of programs. Here each candidate length is priced: work
over all SMs, the longest item's latency, and the partials that the pieces write. Many launches are priced at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tree_attention_jax.planning.cost import ShapeTable, launch_time, mean_latency_us
from tree_attention_jax.planning.problem import Problem

MIN_TOKENS = 64
# A launch whose longest item takes no more than this share of it is not worth splitting.
SHORT_TAIL = 0.2


@dataclass(frozen=True)
class Blocks:
    """Equal row tiles, grouped by launch; ``first`` is [L], each launch's first group. Float64 but for ``first``."""

    first: np.ndarray
    count: np.ndarray  # tiles in the group
    tokens: np.ndarray  # of each tile
    rows: np.ndarray

    def launch(self) -> np.ndarray:
        """The launch of each group."""
        opens = np.zeros(len(self.tokens), np.intp)
        opens[self.first[1:]] = 1
        return np.add.accumulate(opens)


@dataclass(frozen=True)
class Pricing:
    """Per launch, [L].

    Attributes:
        limit: tokens an item may have at most; 0 where none is split.
        time: microseconds, with the partials that splitting adds.
    """

    limit: np.ndarray
    time: np.ndarray


def price(
    problem: Problem, shapes: ShapeTable, blocks: Blocks, memory, can_mask, masked, reduced: np.ndarray
) -> Pricing:
    """The best limit of every launch.

    Args:
        problem: gives heads and rates.
        shapes: of each launch, [L].
        blocks: of all launches.
        memory: [L] time to read the launch's K/V once.
        can_mask: [L] whether the programs can mask.
        masked: [L] share of the steps that do.
        reduced: [L] the rows have other partials, so that a split makes no final result partial.
    """
    profile, launch = problem.profile, blocks.launch()
    longest = np.maximum.reduceat(blocks.tokens, blocks.first)
    steps = np.bincount(launch, np.ceil(blocks.tokens / shapes.block_kv.take(launch)) * blocks.count)
    items = np.bincount(launch, blocks.count)
    length = _lengths(max(int(longest.max()) - 1, 0).bit_length())
    more, written = _splits(blocks, launch, length, reduced)
    most = np.ceil(np.minimum(length, longest) / shapes.block_kv)
    latency_us = mean_latency_us(shapes, can_mask, masked)
    time = launch_time(profile, shapes, steps, items + more, most, memory, can_mask, masked, latency_us)
    worth = most[0] * latency_us > SHORT_TAIL * time[0]
    split, shorter = time[1:], length[1:]
    split += written[1:] * (problem.heads.partial_bytes / profile.partial_bytes_per_us)
    split += np.where(reduced, 0.0, profile.launch_us)
    split[~(worth & (shorter >= shapes.block_kv) & (shorter < longest))] = np.inf
    best = time.argmin(axis=0)
    limit = np.where(best > 0, length[best, 0], 0).astype(np.int32)
    return Pricing(limit, time.min(axis=0))


@functools.lru_cache(maxsize=64)
def _lengths(bits: int) -> np.ndarray:
    """[lengths, 1]: tokens that items may have. Row 0: whole items; others: powers of two, up to so many bits, and what
    is half way between."""
    shorter = MIN_TOKENS << np.arange(max(bits - (MIN_TOKENS - 1).bit_length(), 0))
    length = np.concatenate([[np.inf], np.outer(shorter, [1, 1.5]).ravel()])[:, None]
    length.setflags(write=False)
    return length


def _splits(
    blocks: Blocks, launch: np.ndarray, length: np.ndarray, reduced: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[lengths, L] each: items that splitting adds, and partials written that were not written before."""
    added = np.zeros((2, len(length), len(blocks.first)))
    long = (blocks.tokens > MIN_TOKENS).nonzero()[0]
    if len(long) and len(length) > 1:
        launch, count = launch.take(long), blocks.count.take(long)
        first = starts(launch)
        pieces = np.maximum(np.ceil(blocks.tokens.take(long) / length), 1)
        of_block = np.empty((2, *pieces.shape))
        of_block[0] = (pieces - 1) * count
        of_block[1] = (pieces - reduced.take(launch)) * (pieces > 1) * (blocks.rows.take(long) * count)
        added[:, :, launch.take(first)] = np.add.reduceat(of_block, first, axis=2)
    return added[0], added[1]


def starts(values: np.ndarray) -> np.ndarray:
    """Where each run of equal values begins."""
    new = np.empty(len(values), bool)
    new[:1] = True
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return new.nonzero()[0]
