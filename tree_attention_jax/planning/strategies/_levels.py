"""The tree by levels, for dynamic programming: sums over any node's descendants are differences of prefix sums."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tree_attention_jax._arrays import all_of, starts_of
from tree_attention_jax.planning.problem import Problem

# Many tiles' places among few are found by counting all of them, up to so many times as many as the tiles.
COUNTED = 8


class Tiles(NamedTuple):
    """Row tiles of segments."""

    row0: np.ndarray
    row1: np.ndarray
    owner: np.ndarray  # the segment of each


class Seen(NamedTuple):
    """Tile i sees nodes ``low[j] .. high[j] - 1`` for each j in its CSR range, one a level."""

    indptr: np.ndarray
    low: np.ndarray
    high: np.ndarray
    partly: np.ndarray  # bool: some of the tile's rows do not see them


@dataclass(eq=False)  # frozen ones take three times as long to make
class Levels:
    """The nodes that have rows, under a virtual root, level by level and depth-first within a level.

    In that order the descendants of a node some levels down are neighbours: ``bounds[k, 0, i] .. bounds[k, 1, i] - 1``
    are those of inner node i exactly k levels down. Leaves have none, and most nodes are leaves, so only inner nodes
    are listed.
    """

    node: np.ndarray  # in the tree; -1 for the virtual root
    rows: np.ndarray  # queries that see the node
    tokens: np.ndarray
    row_begin: np.ndarray
    row_end: np.ndarray
    level: np.ndarray  # 0 for the virtual root, then depth + 1
    depth: int  # levels, the virtual root's included
    begin: list[int]  # [depth + 1] first node of each level
    inner: np.ndarray  # [I] nodes with children
    leaf: np.ndarray  # the other nodes
    inner_begin: list[int]  # [depth + 1] first inner node of each level
    children: np.ndarray  # of each node, how many
    spans: int  # levels a segment may hold

    @property
    def num_nodes(self) -> int:
        return len(self.node)

    @staticmethod
    def of(problem: Problem, max_span: int) -> Levels:
        tree, layout = problem.tree, problem.layout
        # Nodes without rows have no descendants with rows, so leaving them out leaves a forest. The others have rows of
        # their own within a level, in depth-first order.
        depth, children = layout.depth, layout.children
        rank = depth.astype(np.int64)
        rank <<= 32
        rank |= layout.row_begin
        order = rank.argsort(kind="stable")
        if not all_of(layout.rows):
            order = order.compress(layout.rows.take(order))
            depth, children = depth.take(order), np.bincount(layout.parent.take(order) + 1, minlength=len(children))
        counts = np.bincount(depth)
        begin = [0, *itertools.accumulate(counts.tolist(), initial=1)]
        node = np.empty(len(order) + 1, np.intp)
        node[0] = -1  # reads the last node's fields, which are overwritten below
        node[1:] = order
        children = children[1:].take(node)
        children[0] = counts[0]
        is_leaf = children == 0
        inner, leaf = (~is_leaf).nonzero()[0], is_leaf.nonzero()[0]  # faster of bools than of integers

        def with_root(root: int, values: np.ndarray) -> np.ndarray:
            out = values.take(node)
            out[0] = root
            return out

        row_begin, row_end = with_root(0, layout.row_begin), with_root(layout.num_rows, layout.row_end)
        level = np.zeros(len(node), np.intp)
        level[1:] = np.arange(1, len(counts) + 1).repeat(counts)
        return Levels(
            node=node,
            rows=row_end - row_begin,
            tokens=with_root(0, tree.kv_len),
            row_begin=row_begin,
            row_end=row_end,
            level=level,
            depth=len(begin) - 1,
            begin=begin,
            inner=inner,
            leaf=leaf,
            inner_begin=inner.searchsorted(begin).tolist(),
            children=children,
            spans=min(len(counts) + 1, max_span),
        )

    @functools.cached_property
    def bounds(self) -> np.ndarray:
        """[spans + 1, 2, I]: where the descendants of inner nodes begin and end, so many levels down."""
        # Children of i: child_begin[i] .. child_begin[i + 1] - 1.
        child_begin = np.zeros(self.num_nodes + 1, np.intp)
        np.add.accumulate(self.children, out=child_begin[1:])
        child_begin += 1
        bounds = np.empty((self.spans + 1, 2, len(self.inner)), np.intp)
        bounds[0, 0] = self.inner
        bounds[0, 1] = self.inner + 1
        for k in range(self.spans):
            child_begin.take(bounds[k], out=bounds[k + 1], mode="clip")  # they are in range; without a mode it is slow
        return bounds

    @functools.cached_property
    def above(self) -> np.ndarray:
        """[N]: place among the inner nodes of each node's parent; 0 for the virtual root."""
        above = np.zeros(self.num_nodes, np.intp)
        above[1:] = np.arange(len(self.inner)).repeat(self.children.take(self.inner))
        return above

    @property
    def sums_size(self) -> int:
        """Length of prefix sums over all nodes that start anew, with a 0, at each level."""
        return self.num_nodes + self.depth + self.spans + 1

    @functools.cached_property
    def sums_at(self) -> np.ndarray:
        """[spans, 2, I]: where two such sums, end to end, hold those up to the ends of ``bounds``.

        For k = 0 of the children in the first sums, for other k of the descendants k levels down in the second.
        """
        zeros = np.arange(self.spans)[:, None] + self.level.take(self.inner)  # before such sums, but for the very first
        places = self.bounds[:-1] + zeros[:, None]
        places[1:] += self.sums_size
        np.add(self.bounds[1], zeros[1], out=places[0])
        return places

    def only_child(self) -> np.ndarray:
        """[I]: the inner nodes' children that have no siblings, as one root under the virtual one has none; else 0."""
        child, end = self.bounds[1]
        return child * (end - child == 1)

    def nodes_of_tiles(self, tiles: Tiles, top: np.ndarray, below: np.ndarray, span: np.ndarray) -> Seen:
        """Which nodes tiles walk, ``below .. span`` levels below the tops of their segments: these three of each."""
        row0, row1, owner = tiles
        # Within a level rows ascend, so over all levels (level, row) does.
        stride = int(self.row_end[0]) + 1
        above = self.level * stride
        begin, end = above + self.row_begin, above + self.row_end
        pairs = (span + 1 - below).take(owner)
        indptr = starts_of(pairs)
        at = (above.take(top) + below * stride).take(owner)  # where a tile begins in its first level
        at += row0
        at -= indptr[:-1] * stride
        low = np.arange(0, int(indptr[-1]) * stride, stride)
        low += at.repeat(pairs)
        high = low + (row1 - row0).repeat(pairs)
        size = self.depth * stride
        if size < COUNTED * len(low):
            first = np.add.accumulate(np.bincount(end, minlength=size)).take(low)
            last = np.add.accumulate(np.bincount(begin, minlength=size)).take(high - 1)
        else:
            first, last = end.searchsorted(low, "right"), begin.searchsorted(high)
        # None of the three is so if all rows of the tile see its only node.
        partly = last - first > 1
        partly |= begin.take(first, mode="clip") > low
        partly |= end.take(first, mode="clip") < high
        return Seen(indptr, first, last, partly)
