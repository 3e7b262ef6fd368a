"""The dynamic programme of ``auto``: the cheapest way to cut all root-to-leaf paths into segments.

Several at once, which cost hardly more than one: arrays begin with an axis C of candidates, each with segment times of
its own. All nodes of a level are done together, in two passes: costs upwards, choices downwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree_attention_jax._arrays import exclusive_cumsum
from tree_attention_jax.planning.strategies._levels import Levels

# States of a node, and the index of its two segments: it begins a segment, or one begins right below it.
FROM, BELOW = 0, 1


@dataclass(frozen=True)
class Choices:
    """Levels that a segment spans if it begins at an inner node, [C, I], and what the whole then costs, [C].

    ``from_span`` 0: the node by itself. ``below_span`` 0: its children begin segments of their own.
    """

    from_span: np.ndarray
    below_span: np.ndarray
    cost: np.ndarray

    def take(self, which: np.ndarray) -> Choices:
        return Choices(self.from_span[which], self.below_span[which], self.cost[which])


@dataclass(frozen=True)
class Segments:
    """Chosen segments of all candidates; those of candidate c are ``indptr[c] .. indptr[c + 1] - 1``.

    Attributes:
        top: node, in level order.
        below: 1 where the top's own tokens are another segment's.
        span: levels below the top.
    """

    indptr: np.ndarray
    top: np.ndarray
    below: np.ndarray
    span: np.ndarray

    def and_one_below_the_root(self, span: int, times: int) -> Segments:
        """More candidates, of one segment each: so many levels below the virtual root."""
        more = np.arange(1, times + 1, dtype=np.int32)
        return Segments(
            np.concatenate([self.indptr, self.indptr[-1] + more]),
            np.concatenate([self.top, np.zeros_like(more)]),
            np.concatenate([self.below, np.ones_like(more)]),
            np.concatenate([self.span, np.full_like(more, span)]),
        )


class _Places:
    """Slots of a prefix sum that starts anew at each level: then sums over a level's stretch are differences."""

    def __init__(self, levels: Levels):
        down = np.arange(levels.spans + 1)[:, None] + levels.level[levels.inner]
        self.low = levels.low + down
        self.high = levels.high + down
        self.size = levels.num_nodes + levels.depth + levels.spans + 1


def choose(levels: Levels, inner_time: np.ndarray, leaf_time: np.ndarray, partial: np.ndarray) -> Choices:
    """Bottom-up.

    Args:
        levels: the tree.
        inner_time: [C, 2, spans, I] of an inner node's segments, from it or below it.
        leaf_time: [C, leaves].
        partial: [N] what a node's rows pay for having several segments: a partial written and read again.
    """
    count, depth, spans, inner = len(inner_time), levels.depth, levels.spans, levels.inner
    places = _Places(levels)
    time = inner_time + partial[inner]
    # Segments that reach from a root, or from the virtual root, to the deepest leaf below write final results.
    roots = slice(1, levels.inner_begin[2])
    ends = levels.low[1:] == levels.high[1:]
    time[:, BELOW, :, 0] -= np.where(ends[:, 0], partial[0], 0)
    time[:, FROM, :, roots] -= np.where(ends[:, roots], partial[inner[roots]], 0)
    value = np.zeros((count, 2, levels.num_nodes))
    value[:, FROM, levels.leaf] = leaf_time + np.where(levels.level[levels.leaf] > 1, partial[levels.leaf], 0)
    sums = np.zeros((count, 2, places.size))
    spanned = np.empty((count, 2, len(inner)), np.int32)
    for level in reversed(range(depth)):
        first, last = levels.begin[level], levels.begin[level + 1]
        here = slice(levels.inner_begin[level], levels.inner_begin[level + 1])
        if here.start < here.stop:
            reach = min(spans, depth - level)
            under = sums[:, :, places.high[:reach, here]] - sums[:, :, places.low[:reach, here]]
            options = time[:, :, :reach, here] + under[:, BELOW:]
            options[:, BELOW, 0] = under[:, FROM, 1]
            below = options[:, BELOW].min(axis=1)
            options[:, FROM, 0] += below
            options.argmin(axis=2, out=spanned[:, :, here])
            value[:, BELOW, inner[here]] = below
            value[:, FROM, inner[here]] = options[:, FROM].min(axis=1)
        np.cumsum(value[:, :, first:last], axis=2, out=sums[:, :, first + level + 1 : last + level + 1])
    return Choices(spanned[:, FROM], spanned[:, BELOW], value[:, BELOW, 0])


def trace(levels: Levels, choices: Choices) -> Segments:
    """Top-down: follow the choices from the virtual root."""
    places, inner = _Places(levels), levels.inner
    count, size = len(choices.cost), places.size
    below_to, below_down = (choices.below_span > 0).astype(np.int32), np.maximum(choices.below_span, 1)
    # Where a node in either state leads: to the nodes ``down`` levels below, which are then in state ``to``. A node by
    # itself goes on like one whose segment begins below it.
    alone = choices.from_span == 0
    to = np.stack([np.where(alone, below_to, BELOW), below_to], axis=1)
    down = np.stack([np.where(alone, below_down, choices.from_span), below_down], axis=1)
    nth = np.arange(len(inner))
    low, high = places.low[down, nth], places.high[down, nth]
    base = (np.arange(count)[:, None, None] * 2 + to) * size
    empty = low == high
    nowhere = np.where(empty, size - 1 - low, 0)  # so that no two stretches begin in the same slot
    begins, ends = base + low + nowhere, base + high + nowhere
    marks = np.zeros((count, 2, size), np.int32)
    flat = marks.reshape(-1)
    marks[:, BELOW, 0] = 1
    marks[:, BELOW, 1] = -1
    reached = np.zeros((count, 2, len(inner)), bool)
    for level in range(levels.depth):
        first, last = levels.begin[level], levels.begin[level + 1]
        here = slice(levels.inner_begin[level], levels.inner_begin[level + 1])
        if here.start == here.stop:
            continue
        within = marks[:, :, first + level : last + level].cumsum(axis=2)
        now = within[:, :, inner[here] - first] > 0
        reached[:, :, here] = now
        flat[begins[:, :, here][now]] += 1
        flat[ends[:, :, here][now]] -= 1
    leaves = marks[:, FROM].cumsum(axis=1)[:, levels.leaf + levels.level[levels.leaf]] > 0
    from_it = reached[:, FROM]
    below_it = (reached[:, BELOW] | (from_it & alone)) & (choices.below_span > 0)
    return _collect(levels, choices, from_it, below_it, leaves)


def _collect(levels: Levels, choices: Choices, from_it, below_it, leaves) -> Segments:
    """Segments in the order: candidate, then from inner nodes, below inner nodes, leaves."""
    parts: list[tuple[np.ndarray, ...]] = []
    for flags, node, below_it_only, spans in (
        (from_it, levels.inner, 0, choices.from_span),
        (below_it, levels.inner, 1, choices.below_span),
        (leaves, levels.leaf, 0, None),
    ):
        candidate, at = flags.nonzero()
        chosen = np.zeros(len(at), np.int32) if spans is None else spans[candidate, at]
        parts.append((candidate, node[at], np.full(len(at), below_it_only), chosen))
    candidate, top, below, span = (np.concatenate(part) for part in zip(*parts))
    counts = np.bincount(candidate, minlength=len(from_it))
    if len(counts) > 1:
        order = np.argsort(candidate, kind="stable")
        top, below, span = top[order], below[order], span[order]
    return Segments(exclusive_cumsum(counts), top, below, span)
