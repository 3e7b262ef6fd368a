"""The dynamic programme of ``auto``: the cheapest way to cut all root-to-leaf paths into segments.

All nodes of a level are done together, in two passes: costs upwards, choices downwards. So are several lists of times,
as a short array takes as long as a few of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._segments import BELOW, FROM, SegmentTable


def options_of(problem: Problem, table: SegmentTable, times: np.ndarray, prices: list[float]) -> np.ndarray:
    """Bottom-up: [2, spans, I, C], the least cost of all below an inner node if its segment spans so many levels.

    From it (0 levels: the node by itself), and below it (0: its children begin segments of their own).

    Args:
        problem: gives the time of partials: what rows pay for having several segments.
        table: all segments.
        times: [lists, F] of each of them.
        prices: factors of that of partials. C is all lists with the first one, then with the next.
    """
    cost, levels = costs_of(problem, table.partial_rows, times, prices), table.levels
    depth, spans, inner, leaf, count = levels.depth, levels.spans, levels.inner, levels.leaf, cost.shape[1]
    all_options = table.by_node(cost)
    all_options[BELOW, 0] = 0
    all_options[FROM, 0] = np.inf  # until the best below is known
    own_cost = cost[len(leaf) :]  # span 0 from inner nodes is listed first
    from_it, below_it = np.zeros((2, levels.num_nodes, count))
    from_it[leaf] = cost[: len(leaf)]
    # Prefix sums of them, which start anew at each level: then sums over a level's stretch are differences.
    sums = np.zeros((2, levels.sums_size, count))
    sums_from, sums_below, flat, ends = sums[FROM], sums[BELOW], sums.reshape(-1, count), levels.sums_at
    for level in reversed(range(depth - 1)):
        low, high, shift = levels.begin[level + 1], levels.begin[level + 2], level + 2
        first, last = levels.inner_begin[level], levels.inner_begin[level + 1]
        np.add.accumulate(from_it[low:high], out=sums_from[low + shift : high + shift])
        if last < levels.inner_begin[level + 2]:  # nothing is below leaves
            np.add.accumulate(below_it[low:high], out=sums_below[low + shift : high + shift])
        reach, at = min(spans, depth - level), inner[first:last]
        under, options = flat.take(ends[:reach, :, first:last], axis=0), all_options[:, :reach, first:last]
        options += under[:, 1] - under[:, 0]
        if level == 0:
            break  # nothing is above the virtual root, and no segment begins with it
        longer, below = np.minimum.reduce(options, axis=1)
        below_it[at] = below
        alone = np.add(own_cost[first:last], below, out=options[FROM, 0])
        from_it[at] = np.minimum(longer, alone)
    return all_options


def costs_of(problem: Problem, partial_rows: np.ndarray, times: np.ndarray, prices: list[float]) -> np.ndarray:
    """[F, C]: times of segments with the partials that so many rows of each write; lists and prices as there."""
    num_lists = len(times)
    cost = np.empty((times.shape[1], len(prices) * num_lists))
    for nth, price in enumerate(prices):
        each_us = price * problem.heads.partial_bytes / problem.profile.partial_bytes_per_us
        partials = (partial_rows * each_us)[:, None]
        np.add(partials, times.T, out=cost[:, nth * num_lists : (nth + 1) * num_lists])
    return cost


class Optima:
    """Top-down: the C segmentations with the least costs, as places of their segments in the table.

    Those that are a single segment take a look; all others are found when the first one of them is asked for.
    """

    def __init__(self, table: SegmentTable, options: np.ndarray):
        self._table, self._options = table, options
        self._found = _single_segments(table, options)

    def __getitem__(self, which: int) -> np.ndarray:
        if which not in self._found:
            self._found = dict(enumerate(_follow(self._table, self._options)))
        return self._found[which]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[which] for which in range(self._options.shape[3]))


def _single_segments(table: SegmentTable, options: np.ndarray) -> dict[int, np.ndarray]:
    """The segment that holds everything, from the virtual root on or from the only root, where that is the best."""
    levels = table.levels
    last, only_root = levels.depth - 1, levels.depth > 2 and levels.begin[2] == 2
    from_roots, below_roots = options[:, :, :2].argmin(axis=1).tolist()
    found = {}
    for which, below in enumerate(below_roots[0]):
        if below == last:
            found[which] = (BELOW, last, 0)
        elif only_root and below == 0 and from_roots[1][which] == last - 1:
            found[which] = (FROM, last - 1, 1)
    place_of = {segment: np.array([table.place(*segment)]) for segment in set(found.values())}
    return {which: place_of[segment] for which, segment in found.items()}


def _follow(table: SegmentTable, options: np.ndarray) -> list[np.ndarray]:
    """Follow the best options from the virtual root."""
    levels, count = table.levels, options.shape[3]
    span_from, span_below = options.argmin(axis=1)
    inner, above_each = levels.inner, levels.above
    above = above_each.take(inner)
    # How many levels the segment that a node is in goes on below it; if none, the one that begins right below it.
    left = np.empty((len(inner), count), np.intp)
    left.fill(levels.depth)
    left[0] = span_below[0]
    begun = np.where(span_from > 0, span_from, span_below)  # the same of a node that begins one
    for level in range(levels.depth - 1):
        first, end = levels.inner_begin[level], levels.inner_begin[level + 1]
        if level > 0:
            goes_on = left.take(above[first:end], axis=0)
            ended = np.where(goes_on == 1, span_below[first:end], begun[first:end])
            left[first:end] = np.where(goes_on > 1, goes_on - 1, ended)
        if np.minimum.reduce(left[first:end], axis=None) >= levels.depth - 1 - level:
            break  # no segment begins any deeper
    goes_on = left.take(above, axis=0)
    goes_on[0] = 1  # as if a segment ended with the virtual root
    begins = goes_on == 0
    below_begins = begins & (span_from == 0)
    below_begins |= goes_on == 1
    below_begins &= span_below > 0
    leaf_begins = left.take(above_each.take(levels.leaf), axis=0) == 0
    from_it, below_it, leaf = (which.reshape(-1).nonzero()[0] for which in (begins, below_begins, leaf_begins))
    spans = span_from.reshape(-1).take(from_it), span_below.reshape(-1).take(below_it)
    if count == 1:
        places = [table.place(FROM, spans[0], from_it), table.place(BELOW, spans[1], below_it), leaf]
        return [np.concatenate(places)]
    places = [table.place(FROM, spans[0], from_it // count), table.place(BELOW, spans[1], below_it // count)]
    owner = np.concatenate([from_it, below_it, leaf])
    owner %= count
    all_places = np.concatenate([*places, leaf // count]).take(owner.argsort(kind="stable"))
    ends = [0, *np.add.accumulate(np.bincount(owner, minlength=count)).tolist()]
    return [all_places[begin:end] for begin, end in itertools.pairwise(ends)]
