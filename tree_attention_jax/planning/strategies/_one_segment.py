"""Whether one segment for a whole tree is the best segmentation, for much less than the dynamic programme takes.

It often is. Any other segmentation of a tree has a segment from the root that ends k levels down, above the deepest
leaf, and others below. The time of that one is known, and the others cost at least

- for work: a node that s rows see is walked by one tile at least, and by s / queries (:meth:`.Sums.walked`). What is
  walked there of a node by itself, or of the top of a joined segment, has no masks; of any other node half is masked
  (:func:`.masked_tokens`). A leaf by itself has a tile, and a joined segment has one for every ``queries`` rows;
- for memory: each token is read once, at the full rate;
- for partials: each row of the one segment writes one, and each row below writes one more.

No choice of shapes is cheaper than the cheapest shape for each node. If all of this is more than the time of the one
segment, for every k, then the programme would choose that one. If it is nearly as much, what the programme would find
is better by less than these estimates can tell.
"""

from __future__ import annotations

import functools

import numpy as np

from tree_attention_jax.planning.cost import OVERLAP, ShapeTable
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._levels import Levels
from tree_attention_jax.planning.strategies._segments import NodeTokens, SegmentTable, Sums, segment_times

# The programme adds up times that are float32: one that is worse by less than this may be chosen all the same.
ROUNDING = 1 + 1e-4
# Launches are modelled within 8%. So the programme is not asked where it could find nothing that is better by more than
# this: no tree of our suites gets a slower plan by that (at 0.9 one does, by 3.5%), and the largest one's takes a
# millisecond less.
NEARLY_BEST = 0.92
# Where the root holds more than this share of all tokens, a segment of its own, which needs no masks, is likely to pay.
# The bound hardly ever shows the contrary then: it is not worth its time.
LONG_ROOT = 1 / 8


def one_segment(
    problem: Problem, shapes: ShapeTable, levels: Levels, nodes: NodeTokens, price: float, enough: float = NEARLY_BEST
) -> tuple[SegmentTable, np.ndarray, int] | None:
    """A table of few segments, their times, and the place of the one that is best.

    With such a price of partials, as a factor, or a higher one; with all shapes, or the best of that segment alone.
    None: there may be a segmentation that takes less than ``enough`` times as long. None as well where the bounds do
    not hold: several trees, whose segments write no partials; queries above leaves.
    """
    last = levels.depth - 2  # levels below the root
    if levels.begin[2] != 2 or last == 0 or levels.depth > levels.spans:
        return None
    if nodes.tokens[1] > LONG_ROOT * nodes.sums[-1]:
        return None
    num_rows = problem.layout.num_rows
    if len(levels.leaf) < num_rows and int(np.add.reduce(levels.rows.take(levels.leaf))) < num_rows:
        return None
    of_nodes = np.empty((4, levels.num_nodes))
    of_nodes[0], of_nodes[1], of_nodes[2] = nodes.tokens, nodes.extra, levels.rows
    of_nodes[3] = _least_work(shapes, levels, nodes)
    of_levels = np.add.reduceat(of_nodes, levels.begin[:-1], axis=1)
    tokens, extra, _, work = np.add.accumulate(of_levels, axis=1)
    table = _segments_from_root(levels, nodes, tokens, extra)
    time = segment_times(problem, shapes, table)

    profile, heads = problem.profile, problem.heads
    work = work[-1] - work[1:-1]  # below each k
    memory = (tokens[-1] - tokens[1:-1]) * (heads.token_bytes / profile.bytes_per_us)
    least = np.maximum(work, memory) + OVERLAP * np.minimum(work, memory)
    rows = of_levels[2]
    least += (rows[1] + rows[2:]) * (price * heads.partial_bytes / profile.partial_bytes_per_us)
    best = np.minimum.reduce(time)
    best[0] = min(best[0], best[last + 1])  # the root by itself, with masks or without
    least += best[:last]
    return (table, time, last) if best[last] * enough < np.minimum.reduce(least) else None


def _segments_from_root(levels: Levels, nodes: NodeTokens, total: np.ndarray, extra: np.ndarray) -> SegmentTable:
    """Segments from the only root, by span; below the virtual root that of the root, and the one that holds everything.

    ``total`` and ``extra`` are sums over all levels down to each, the virtual root's included.
    """
    count, below = levels.depth + 1, levels.depth - 1
    top, span, ends = _tops_and_spans(levels.depth)
    exact = np.empty((4, count), np.float32)
    exact[0] = levels.rows[1]
    exact[1], exact[2] = total.take(ends), extra.take(ends)
    exact[3] = levels.tokens[1]
    return SegmentTable(
        levels=levels,
        top=top,
        span=span,
        pairs=span[:0],
        first=span[:0],
        num_alone=1,
        first_below=below,
        sums=Sums(exact[0], exact[1], exact[2], nodes.tokens[1:2].repeat(count)),
        exact=exact,
        token_sums=nodes.sums,
        partial_rows=span[:0],
    )


@functools.lru_cache(maxsize=64)
def _tops_and_spans(depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of those segments in a tree of so many levels: the top, the levels below it, and the deepest level."""
    deepest = np.array([*range(1, depth), 1, depth - 1])
    top = np.array([1] * (depth - 1) + [0, 0])
    span = deepest - top
    for array in (top, span, deepest):
        array.setflags(write=False)
    return top, span, deepest


def _least_work(shapes: ShapeTable, levels: Levels, nodes: NodeTokens) -> np.ndarray:
    """[N]: the least work that the tokens of each node cost, wherever they are walked."""
    leaf, (token_us, row_us, leaf_us, tile_us) = levels.leaf, shapes.least_costs
    work = nodes.rows * row_us
    np.maximum(work, token_us, out=work)
    work *= nodes.tokens
    of_leaf = leaf_us * nodes.tokens.take(leaf)
    of_leaf += tile_us
    work[leaf] = np.minimum.reduce(of_leaf)
    return work
