"""The dynamic programme of ``auto``: the cheapest way to cut all root-to-leaf paths into segments.

All nodes of a level are done together, in two passes: costs upwards, choices downwards.
"""

from __future__ import annotations

import numpy as np

from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._segments import BELOW, FROM, SegmentTable


def cheapest(problem: Problem, table: SegmentTable, time: np.ndarray, price: float = 1.0) -> np.ndarray:
    """The segmentation with the least sum of times: places of its segments in the table.

    Args:
        problem: gives the time of partials: what rows pay for having several segments.
        table: all segments.
        time: of each of them.
        price: factor of that of partials.
    """
    each = price * problem.heads.partial_bytes / problem.profile.partial_bytes_per_us
    partial = table.levels.rows * each
    return _trace(table, _options(table, time, partial))


def _options(table: SegmentTable, times: np.ndarray, partial: np.ndarray) -> np.ndarray:
    """Bottom-up: [2, spans, I], the least time for all below an inner node if its segment spans so many levels.

    From it (0 levels: the node by itself), and below it (0: its children begin segments of their own).
    """
    levels = table.levels
    depth, spans, inner, leaf = levels.depth, levels.spans, levels.inner, levels.leaf
    time, leaf_time = table.by_node(times)
    time += partial.take(inner)
    # Segments that reach from a root, or from the virtual root, to the deepest leaf below write final results.
    roots = levels.inner_begin[2]
    ends = levels.bounds[1:, :, :roots]
    final = (ends[:, 0] == ends[:, 1]) * partial.take(inner[:roots])
    time[BELOW, :, 0] -= final[:, 0]
    time[FROM, :, 1:roots] -= final[:, 1:]
    own_time = time[FROM, 0].copy()
    time[BELOW, 0] = 0
    time[FROM, 0] = np.inf  # until the best below is known

    leaf_partial = partial.take(leaf)
    leaf_partial[: levels.begin[2] - roots] = 0  # leaves that are roots
    leaf_partial += leaf_time
    from_it, below_it = np.zeros(levels.num_nodes), np.zeros(levels.num_nodes)
    from_it[leaf] = leaf_partial
    # Prefix sums of the values, which start anew at each level: then sums over a level's stretch are differences.
    sums = np.zeros((2, levels.sums_size))
    sums_from, sums_below, flat, ends = sums[FROM], sums[BELOW], sums.reshape(-1), levels.sums_at
    for level in reversed(range(depth - 1)):
        nodes, begin = slice(levels.begin[level + 1], levels.begin[level + 2]), levels.begin[level + 1] + level + 2
        into = slice(begin, begin + nodes.stop - nodes.start)
        np.add.accumulate(from_it[nodes], out=sums_from[into])
        here = slice(levels.inner_begin[level], levels.inner_begin[level + 1])
        if here.stop < levels.inner_begin[level + 2]:  # nothing is below leaves
            np.add.accumulate(below_it[nodes], out=sums_below[into])
        reach, at = min(spans, depth - level), inner[here]
        under, options = flat.take(ends[:reach, :, here]), time[:, :reach, here]
        options += under[:, 1] - under[:, 0]
        longer, below = np.minimum.reduce(options, axis=1)
        below_it[at] = below
        alone = np.add(own_time[here], below, out=options[FROM, 0])
        from_it[at] = np.minimum(longer, alone)
    return time


def _trace(table: SegmentTable, options: np.ndarray) -> np.ndarray:
    """Top-down: follow the best options from the virtual root."""
    levels = table.levels
    # Often one segment holds everything, from the virtual root on or from the only root.
    last, (from_root, below_root) = levels.depth - 1, options[:, :, :2].argmin(axis=1)
    if below_root[0] == last:
        return np.array([table.place(BELOW, last, 0)])
    if last > 1 and levels.begin[2] == 2 and below_root[0] == 0 and from_root[1] == last - 1:
        return np.array([table.place(FROM, last - 1, 1)])
    chosen = options.argmin(axis=1)
    inner, above_each = levels.inner, levels.above
    above = above_each.take(inner)
    # How many levels the segment that a node is in goes on below it; if none, the one that begins right below it.
    left = np.full(len(inner), levels.depth)
    left[0] = chosen[BELOW, 0]
    begun = np.where(chosen[FROM] > 0, chosen[FROM], chosen[BELOW])  # the same of a node that begins one
    for level in range(levels.depth - 1):
        here = slice(levels.inner_begin[level], levels.inner_begin[level + 1])
        if level > 0:
            goes_on = left.take(above[here])
            ended = np.where(goes_on == 1, chosen[BELOW, here], begun[here])
            left[here] = np.where(goes_on > 1, goes_on - 1, ended)
        if left[here].min() >= levels.depth - 1 - level:
            break  # no segment begins any deeper
    goes_on = left.take(above)
    goes_on[0] = 1  # as if a segment ended with the virtual root
    begins = goes_on == 0
    below_begins = (chosen[BELOW] > 0) & ((goes_on == 1) | (begins & (chosen[FROM] == 0)))
    from_it, below_it = begins.nonzero()[0], below_begins.nonzero()[0]
    leaf = (left.take(above_each.take(levels.leaf)) == 0).nonzero()[0]
    return np.concatenate(
        [
            table.place(FROM, chosen[FROM].take(from_it), from_it),
            table.place(BELOW, chosen[BELOW].take(below_it), below_it),
            leaf,
        ]
    )
