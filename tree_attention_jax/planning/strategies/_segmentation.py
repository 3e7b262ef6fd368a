"""The dynamic programme of ``auto``: the cheapest way to cut all root-to-leaf paths into segments.

All nodes of a level are done together, in two passes: costs upwards, choices downwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree_attention_jax.planning.strategies._levels import Levels

# States of a node, and the index of its segments: it begins a segment, or one begins right below it.
FROM, BELOW = 0, 1


@dataclass(frozen=True)
class Segments:
    """Chosen segments, [M].

    Attributes:
        top: node, in level order.
        below: 1 where the top's own tokens are another segment's.
        span: levels below the top.
    """

    top: np.ndarray
    below: np.ndarray
    span: np.ndarray

    def alone(self) -> np.ndarray:
        """bool [M]: segments of one node, with its own tokens."""
        return self.below + self.span == 0

    @staticmethod
    def whole_forest(levels: Levels) -> Segments:
        """One segment, from the virtual root to the deepest leaf."""
        zero = np.zeros(1, np.intp)
        return Segments(zero, zero + BELOW, zero + levels.depth - 1)


def cheapest(levels: Levels, inner_time: np.ndarray, leaf_time: np.ndarray, partial: np.ndarray) -> Segments:
    """The segmentation with the least sum of times.

    Args:
        levels: the tree.
        inner_time: [2, spans, I] of an inner node's segments, from it or below it.
        leaf_time: [leaves].
        partial: [N] what a node's rows pay for having several segments: a partial written and read again.
    """
    places = _Places(levels)
    return _trace(levels, places, _choose(levels, places, inner_time, leaf_time, partial))


class _Places:
    """Slots of a prefix sum that starts anew at each level: then sums over a level's stretch are differences."""

    def __init__(self, levels: Levels):
        down = np.arange(levels.spans + 1)[:, None] + levels.level[levels.inner]
        self.low = levels.low + down
        self.high = levels.high + down
        self.size = levels.num_nodes + levels.depth + levels.spans + 1


def _choose(levels: Levels, places: _Places, inner_time, leaf_time, partial) -> np.ndarray:
    """Bottom-up: [2, I], the levels that the best segment from, and below, each inner node spans.

    0 from it: the node by itself. 0 below it: its children begin segments of their own.
    """
    depth, spans, inner, leaf = levels.depth, levels.spans, levels.inner, levels.leaf
    time = inner_time + partial[inner]
    # Segments that reach from a root, or from the virtual root, to the deepest leaf below write final results.
    ends = levels.low[1:] == levels.high[1:]
    time[BELOW, :, 0] -= np.where(ends[:, 0], partial[0], 0)
    roots = slice(1, levels.inner_begin[2])
    if roots.start < roots.stop:
        time[FROM, :, roots] -= np.where(ends[:, roots], partial[inner[roots]], 0)
    value = np.zeros((2, levels.num_nodes))
    value[FROM, leaf] = leaf_time + np.where(levels.level[leaf] > 1, partial[leaf], 0)
    sums = np.zeros((2, places.size))
    chosen = np.empty((2, len(inner)), np.intp)
    for level in reversed(range(depth)):
        first, last = levels.begin[level], levels.begin[level + 1]
        here = slice(levels.inner_begin[level], levels.inner_begin[level + 1])
        if here.start < here.stop:
            reach = min(spans, depth - level)
            under = sums.take(places.high[:reach, here], axis=1)
            under -= sums.take(places.low[:reach, here], axis=1)
            options = time[:, :reach, here] + under[BELOW]
            options[BELOW, 0] = under[FROM, 1]
            options[FROM, 0] += options[BELOW].min(axis=0)
            chosen[:, here] = options.argmin(axis=1)
            value[:, inner[here]] = options.min(axis=1)
        value[:, first:last].cumsum(axis=1, out=sums[:, first + level + 1 : last + level + 1])
    return chosen


def _trace(levels: Levels, places: _Places, chosen: np.ndarray) -> Segments:
    """Top-down: follow the choices from the virtual root."""
    inner, size = levels.inner, places.size
    # Where a node in either state leads: to the nodes ``down`` levels below, which are then in state ``to``. A node by
    # itself goes on like one whose segment begins below it.
    leads = chosen.copy()
    alone = chosen[FROM] == 0
    leads[FROM, alone] = chosen[BELOW, alone]
    down = np.maximum(leads, 1)
    low, high = _along(places.low, down), _along(places.high, down)
    base = np.where(leads > 0, size, 0)
    base += np.where(low == high, size - 1 - low, 0)  # nowhere, so that no two stretches begin in the same slot
    begins, ends = base + low, base + high
    marks = np.zeros((2, size), np.int32)
    flat = marks.reshape(-1)
    marks[BELOW, :2] = 1, -1
    reached = np.zeros((2, len(inner)), bool)
    for level in range(levels.depth):
        here = slice(levels.inner_begin[level], levels.inner_begin[level + 1])
        if here.start < here.stop:
            first, last = levels.begin[level], levels.begin[level + 1]
            within = marks[:, first + level : last + level].cumsum(axis=1)
            now = within.take(inner[here] - first, axis=1) > 0
            reached[:, here] = now
            flat[begins[:, here][now]] += 1
            flat[ends[:, here][now]] -= 1
    begin_below = (reached[BELOW] | (reached[FROM] & alone)) & (chosen[BELOW] > 0)
    leaf = levels.leaf[marks[FROM].cumsum()[levels.leaf + levels.level[levels.leaf]] > 0]
    from_it, below_it = np.flatnonzero(reached[FROM]), np.flatnonzero(begin_below)
    counts = (len(from_it), len(below_it), len(leaf))
    return Segments(
        top=np.concatenate([inner[from_it], inner[below_it], leaf]),
        below=np.repeat((0, 1, 0), counts),
        span=np.concatenate([chosen[FROM, from_it], chosen[BELOW, below_it], np.zeros(len(leaf), np.intp)]),
    )


def _along(values: np.ndarray, row: np.ndarray) -> np.ndarray:
    """``values[row[i, j], j]``."""
    return values.ravel().take(row * values.shape[1] + np.arange(values.shape[1]))
