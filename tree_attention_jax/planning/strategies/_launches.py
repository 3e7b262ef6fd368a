"""Launches as a whole: their modelled time, and how long their items may be.

An item that outlasts all others leaves the GPU idle, so it is split, at the price of more partials. Flash-Decoding
splits by a fixed count and FastTree by thresholds on the number of programs. Here each candidate length is priced: work
over all SMs, the longest item's latency, and the partials that the pieces write. Many launches are priced at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree_attention_jax.planning.cost import ShapeTable, launch_time
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

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Over each launch: [..., L]."""
        return np.add.reduceat(values, self.first, axis=-1)


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
    problem: Problem, shapes: ShapeTable, blocks: Blocks, memory: np.ndarray, masked: np.ndarray, reduced: np.ndarray
) -> Pricing:
    """The best limit of every launch.

    Args:
        problem: gives heads and rates.
        shapes: of each launch, [L].
        blocks: of all launches.
        memory: [L] time to read the launch's K/V once.
        masked: [L] share of the steps that compare intervals.
        reduced: [L] the rows have other partials, so that a split makes no final result partial.
    """
    profile = problem.profile
    longest = np.maximum.reduceat(blocks.tokens, blocks.first)
    steps = blocks.sums(np.ceil(blocks.tokens / np.repeat(shapes.block_kv, _sizes(blocks))) * blocks.count)
    items = blocks.sums(blocks.count)
    most = np.ceil(longest / shapes.block_kv)
    whole = launch_time(profile, shapes, steps, items, most, memory, masked)
    limit = np.zeros(len(longest), np.int32)
    halvings = int(np.ceil(np.log2(max(float(longest.max()) / MIN_TOKENS, 1.0))))
    worth = most * shapes.latency_us > SHORT_TAIL * whole
    if not halvings or not worth.any():
        return Pricing(limit, whole)
    length = MIN_TOKENS * 2.0 ** np.arange(halvings)[:, None]
    usable = worth & (length >= np.maximum(MIN_TOKENS, shapes.block_kv)) & (length < longest)
    more, written = _splits(blocks, length, reduced)
    time = launch_time(profile, shapes, steps, items + more, np.ceil(length / shapes.block_kv), memory, masked)
    time += np.where(reduced, 0.0, profile.launch_us) + written * (
        problem.heads.partial_bytes / profile.partial_bytes_per_us
    )
    time = np.where(usable, time, np.inf)
    best, nth = time.min(axis=0), time.argmin(axis=0)
    split = best < whole
    limit[split] = length[nth[split], 0].astype(np.int32)
    return Pricing(limit, np.where(split, best, whole))


def _sizes(blocks: Blocks) -> np.ndarray:
    return np.diff(np.append(blocks.first, len(blocks.tokens)))


def _splits(blocks: Blocks, length: np.ndarray, reduced: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[lengths, L] each: items that splitting adds, and partials written that were not written before."""
    long = np.flatnonzero(blocks.tokens > MIN_TOKENS)
    launch = np.repeat(np.arange(len(blocks.first)), _sizes(blocks))[long]
    pieces = np.ceil(blocks.tokens[long] / length)
    count = blocks.count[long]
    written = (pieces - reduced[launch]) * (pieces > 1) * (blocks.rows[long] * count)
    first = np.searchsorted(launch, np.arange(len(blocks.first)))
    has = np.append(first[1:], len(long)) > first
    more = np.zeros((len(length), len(first)))
    new = np.zeros_like(more)
    if len(long):
        more[:, has] = np.add.reduceat((pieces - 1) * count, first[has], axis=1)
        new[:, has] = np.add.reduceat(written, first[has], axis=1)
    return more, new
