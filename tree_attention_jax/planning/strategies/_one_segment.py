"""Whether one segment for a whole tree is the best segmentation, for much less than the dynamic programme takes.

It often is. Any other segmentation of a tree has a segment from the root that ends k levels down, above the deepest
leaf, and others below. Its time is known; it writes partials; and what the others cost is at least

- for tokens: each is walked by a node's own segment, or by a joined one; a node that s rows see is walked by s / queries
  tiles at least, and by one (:meth:`.Sums.walked`). A joined segment masks half of what it walks but for its top, and
  has a tile for each ``queries`` rows, of which a leaf's are its own;
- for memory: each token is read once;
- for partials: each row below writes one more.

Of each node the cheapest of all shapes counts, so no choice of shapes is cheaper. If for every k all of this is more than
the time of the one segment, the programme would choose that one.
"""

from __future__ import annotations

import numpy as np

from tree_attention_jax.planning.cost import MASKED_SHARE, OVERLAP, ShapeTable
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._levels import Levels
from tree_attention_jax.planning.strategies._segments import NodeTokens, SegmentTable, Sums, segment_times

# The programme's times are float32: what is not better by so much may be chosen all the same.
ROUNDING = 1 + 1e-4


def one_segment(
    problem: Problem, shapes: ShapeTable, levels: Levels, nodes: NodeTokens
) -> tuple[SegmentTable, np.ndarray] | None:
    """The segments from the root, the last one of which holds everything, and their times; None: it may not be the best.

    None as well where the bounds do not hold: several trees, whose segments write no partials; queries above leaves.
    """
    last = levels.depth - 2  # levels below the root
    if levels.begin[2] != 2 or last == 0 or levels.depth > levels.spans:
        return None
    if int(np.add.reduce(levels.rows.take(levels.leaf))) != problem.layout.num_rows:
        return None
    tokens, extra, rows = (np.bincount(levels.level, values) for values in (nodes.tokens, nodes.extra, levels.rows))
    table = _segments_from_root(levels, nodes, np.add.accumulate(tokens), np.add.accumulate(extra))
    time = segment_times(problem, shapes, table)
    best = np.minimum.reduce(time)

    profile, heads = problem.profile, problem.heads
    below = _least_work(shapes, levels, nodes)
    work, tokens = (np.add.accumulate(values[:1:-1])[::-1] for values in (below, tokens))  # of levels k + 1, ...
    memory = tokens * (heads.token_bytes / profile.bytes_per_us)
    least = np.maximum(work, memory) + OVERLAP * np.minimum(work, memory)
    least += (rows[1] + rows[2:]) * (heads.partial_bytes / profile.partial_bytes_per_us)
    best[0] = min(best[0], best[last + 1])  # the root by itself, with masks or without
    least += best[:last]
    return (table, time) if best[last] * ROUNDING < np.minimum.reduce(least) else None


def _segments_from_root(levels: Levels, nodes: NodeTokens, total: np.ndarray, extra: np.ndarray) -> SegmentTable:
    """Segments from the only root, by span; below the virtual root that of the root, and the one that holds everything.

    ``total`` and ``extra`` are sums over all levels down to each, the virtual root's included.
    """
    ends = np.append(np.arange(1, levels.depth), (1, levels.depth - 1))  # the deepest level of each
    count, below = len(ends), len(ends) - 2
    exact = np.empty((4, count), np.float32)
    exact[0] = levels.rows[1]
    exact[1], exact[2] = total.take(ends), extra.take(ends)
    exact[3] = levels.tokens[1]
    top, span = np.ones(count, np.intp), ends.copy()
    top[below:] = 0
    span[:below] -= 1
    return SegmentTable(
        levels=levels,
        top=top,
        span=span,
        pairs=span[:0],
        first=span[:0],
        num_alone=1,
        first_below=below,
        sums=Sums(exact[0], exact[1], exact[2], np.full(count, nodes.tokens[1])),
        exact=exact,
        token_sums=nodes.sums(),
    )


def _least_work(shapes: ShapeTable, levels: Levels, nodes: NodeTokens) -> np.ndarray:
    """[depth]: the least work that the tokens of each level cost, wherever they are walked."""
    costs, inner, leaf = shapes.segment_costs, levels.inner, levels.leaf
    work = np.empty(levels.num_nodes)
    joined_us = costs.token_us + np.float32(MASKED_SHARE) * costs.masked_us
    tokens = nodes.tokens.take(leaf)
    alone = np.minimum(costs.plain_us, costs.token_us) * tokens
    alone += costs.tile_us
    joined = joined_us * tokens
    joined += costs.tile_us / costs.queries
    work[leaf] = np.minimum.reduce(np.minimum(alone, joined, out=alone))
    tiles = nodes.rows.take(inner) / costs.queries
    np.maximum(tiles, 1, out=tiles)
    tiles *= np.minimum(np.minimum(costs.plain_us, costs.token_us), joined_us)
    work[inner] = np.minimum.reduce(tiles) * nodes.tokens.take(inner)
    return np.bincount(levels.level, work)
