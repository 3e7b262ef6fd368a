"""Depth-first numbering: the step that turns "who sees what" into intervals.

Number the queries in depth-first preorder of their nodes, a node's own first; call that number a *row*. Then
the rows that see a token form one interval: all rows of the subtree for an old token of a node, and the
subtree's rows from ``j`` on for the node's ``j``-th new token. Every tiling below is rectangles over rows x
tokens, and a mask is two integers a run of tokens, where DeFT packs one bit a query into words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tree_attention_jax._arrays import exclusive_cumsum

if TYPE_CHECKING:
    from tree_attention_jax.topology import TokenTree


@dataclass(frozen=True)
class Layout:
    """Per node, in node order, unless said otherwise; int32."""

    depth: np.ndarray  # 0 for a root
    position: np.ndarray  # absolute position of the node's first token
    preorder: np.ndarray  # depth-first rank of the node
    order: np.ndarray  # its inverse: nodes in depth-first order
    subtree_nodes: np.ndarray  # nodes of the subtree, the node included
    row_begin: np.ndarray  # rows of the subtree: [row_begin, row_end)
    row_end: np.ndarray
    old_len: np.ndarray  # tokens that every row of the subtree sees; the rest is causal among the node's rows
    row_query: np.ndarray  # [num_queries] query index of each row
    query_node: np.ndarray  # [num_queries] in query order
    query_position: np.ndarray  # [num_queries] absolute

    @property
    def num_rows(self) -> int:
        return len(self.row_query)

    @classmethod
    def of(cls, tree: TokenTree) -> Layout:
        parent, kv_len, q_len = tree.parent, tree.kv_len, tree.q_len
        depth, position, size = _accumulate(parent, kv_len)
        preorder = _preorder(parent, size, depth)
        order = np.empty_like(preorder)
        order[preorder] = np.arange(len(parent), dtype=np.int32)
        row_offset = exclusive_cumsum(q_len[order])
        row_begin = row_offset[preorder]
        query_begin = exclusive_cumsum(q_len)[:-1]
        query_node = np.repeat(np.arange(len(parent), dtype=np.int32), q_len)
        nth = np.arange(len(query_node), dtype=np.int32) - query_begin[query_node]
        row_query = np.empty_like(query_node)
        row_query[row_begin[query_node] + nth] = np.arange(len(query_node), dtype=np.int32)
        return cls(
            depth=depth,
            position=position,
            preorder=preorder,
            order=order,
            subtree_nodes=size,
            row_begin=row_begin,
            row_end=row_offset[preorder + size],
            # A single new token is seen by its own row and all below, just like an old one.
            old_len=np.where(q_len > 1, kv_len - q_len, kv_len),
            row_query=row_query,
            query_node=query_node,
            query_position=(position + kv_len - q_len)[query_node] + nth,
        )


def _accumulate(parent: np.ndarray, kv_len: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Depth, tokens of all proper ancestors, and subtree size, by pointer doubling: log2(depth) passes."""
    above = parent.copy()
    alive = np.flatnonzero(above >= 0)
    # Both sums in one word: neither reaches 2^31.
    path = np.zeros(len(parent), np.int64)
    path[alive] = (kv_len.astype(np.int64) + (1 << 32))[parent[alive]]
    size = np.ones(len(parent), np.int32)
    while len(alive):
        up = above[alive]
        size += np.bincount(up, size[alive], len(parent)).astype(np.int32)
        path[alive] += path[up]
        above[alive] = up = above[up]
        alive = alive[up >= 0]
    return (path >> 32).astype(np.int32), path.astype(np.int32), size


def _preorder(parent: np.ndarray, size: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """Depth-first rank: the parent's rank, plus one, plus the subtrees of earlier siblings."""
    if len(parent) == 0:
        return np.zeros(0, np.int32)
    by_parent = None if (parent[1:] >= parent[:-1]).all() else np.argsort(parent, kind="stable")
    sorted_parent = parent if by_parent is None else parent[by_parent]
    sorted_size = size if by_parent is None else size[by_parent]
    before = np.cumsum(sorted_size) - sorted_size
    opens = np.ones(len(parent), bool)
    np.not_equal(sorted_parent[1:], sorted_parent[:-1], out=opens[1:])
    before -= before[np.flatnonzero(opens)][opens.cumsum() - 1]
    offset = np.empty(len(parent), np.int32)
    offset[slice(None) if by_parent is None else by_parent] = before
    rank = offset + (parent >= 0)
    above = parent.copy()
    alive = np.flatnonzero(above >= 0)
    while len(alive):  # pointer doubling again
        up = above[alive]
        rank[alive] += rank[up]
        above[alive] = up = above[up]
        alive = alive[up >= 0]
    return rank
