"""The tree by levels, for dynamic programming: sums over any node's descendants are differences of prefix sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree_attention_jax._arrays import exclusive_cumsum, ragged_ranges
from tree_attention_jax.planning.problem import Problem


@dataclass(frozen=True)
class Levels:
    """The nodes that have rows, under a virtual root, level by level and depth-first within a level.

    In that order the descendants of a node some levels down are neighbours: ``low[k, i] .. high[k, i] - 1`` are those
    of node i exactly k levels down.
    """

    rows: np.ndarray  # queries that see the node
    tokens: np.ndarray
    row_begin: np.ndarray
    row_end: np.ndarray
    level: np.ndarray  # 0 for the virtual root, then depth + 1
    begin: list[int]  # [depth + 1] first node of each level
    low: np.ndarray  # [spans + 1, N]
    high: np.ndarray

    @property
    def num_nodes(self) -> int:
        return len(self.rows)

    @property
    def depth(self) -> int:
        """Levels, the virtual root's included."""
        return len(self.begin) - 1

    @property
    def spans(self) -> int:
        """Levels a segment may hold."""
        return len(self.low) - 1

    @staticmethod
    def of(problem: Problem, max_span: int) -> Levels:
        tree, layout = problem.tree, problem.layout
        # Nodes without rows have no descendants with rows, so leaving them out leaves a forest. In a stable sort by
        # depth the depth-first order survives within each level.
        order = layout.order
        rows = layout.row_end - layout.row_begin
        if not rows.all():
            order = order[rows[order] > 0]
        depth = layout.depth[order]
        node = order[np.argsort(depth, kind="stable")]
        counts = np.bincount(depth)
        begin = [0, *(exclusive_cumsum(counts) + 1).tolist()]
        children = np.zeros(tree.num_nodes + 1, np.int32)
        if len(counts) > 1:
            children[:-1] = np.bincount(tree.parent[node[counts[0] :]], minlength=tree.num_nodes)
        child_begin = np.empty(len(node) + 2, np.int32)  # children of i: child_begin[i] .. child_begin[i + 1] - 1
        child_begin[0] = 1
        child_begin[1:] = begin[2] + exclusive_cumsum(children[node])
        low = np.empty((min(len(begin) - 1, max_span) + 1, len(node) + 1), np.int32)
        high = np.empty_like(low)
        low[0] = np.arange(len(node) + 1, dtype=np.int32)
        high[0] = low[0] + 1
        for k in range(len(low) - 1):
            child_begin.take(low[k], out=low[k + 1])
            child_begin.take(high[k], out=high[k + 1])

        def with_root(root: int, values: np.ndarray) -> np.ndarray:
            out = np.empty(len(node) + 1, np.int32)
            out[0] = root
            values.take(node, out=out[1:])
            return out

        return Levels(
            rows=with_root(layout.num_rows, rows),
            tokens=with_root(0, tree.kv_len),
            row_begin=with_root(0, layout.row_begin),
            row_end=with_root(layout.num_rows, layout.row_end),
            level=with_root(-1, layout.depth) + 1,
            begin=begin,
            low=low,
            high=high,
        )

    def sum_down(self, value: np.ndarray) -> np.ndarray:
        """[spans, N]: the sum of ``value`` over node i and its descendants down to k levels below, for each k."""
        prefix = np.zeros(self.num_nodes + 1)
        np.cumsum(value, out=prefix[1:], dtype=np.float64)
        sums = prefix[self.high[:-1]] - prefix[self.low[:-1]]
        return np.cumsum(sums, axis=0, dtype=np.float32)


def nodes_of_tiles(problem: Problem, row0, row1, first_depth, last_depth) -> tuple[np.ndarray, np.ndarray]:
    """(tile, node) pairs, sorted by tile: nodes between the two depths that any row of the tile sees."""
    layout, parent = problem.layout, problem.tree.parent
    order = layout.order
    begin = layout.row_begin[order]  # ascending: depth-first order
    # Nodes that begin inside the tile stand together in depth-first order ...
    tile, rank = ragged_ranges(np.searchsorted(begin, row0, "left"), np.searchsorted(begin, row1, "left"))
    node = order[rank]
    depth = layout.depth[node]
    inside = (depth >= first_depth[tile]) & (depth <= last_depth[tile])
    parts = [(tile[inside], node[inside])]
    # ... and those that began before it are ancestors of its first row.
    tile = np.flatnonzero(row0 > 0).astype(np.int32)
    node = problem.tree.query_nodes()[layout.row_query[row0[tile]]]
    while len(tile):
        depth = layout.depth[node]
        wanted = (depth <= last_depth[tile]) & (layout.row_begin[node] < row0[tile]) & (depth >= first_depth[tile])
        if wanted.any():
            parts.append((tile[wanted], node[wanted]))
        node = parent[node]
        alive = (depth > first_depth[tile]) & (node >= 0)
        tile, node = tile[alive], node[alive]
    if len(parts) == 1:
        return parts[0]
    tile = np.concatenate([p[0] for p in parts])
    node = np.concatenate([p[1] for p in parts])
    by_tile = np.argsort(tile, kind="stable")
    return tile[by_tile], node[by_tile]
