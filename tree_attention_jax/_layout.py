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

from tree_attention_jax._arrays import all_of, exclusive_cumsum, ragged_places

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
        jumps = _jumps(parent)
        depth, position, size = _accumulate(parent, kv_len, jumps)
        preorder = _preorder(parent, size, jumps)
        order = np.empty_like(preorder)
        order[preorder] = np.arange(len(parent), dtype=np.int32)
        row_offset = exclusive_cumsum(q_len.take(order))
        row_begin = row_offset.take(preorder)
        query_node, nth = ragged_places(q_len)
        row_query = np.empty_like(nth)
        row_query[row_begin.take(query_node) + nth] = np.arange(len(nth), dtype=np.int32)
        return cls(
            depth=depth,
            position=position,
            preorder=preorder,
            order=order,
            subtree_nodes=size,
            row_begin=row_begin,
            row_end=row_offset.take(preorder + size),
            # A single new token is seen by its own row and all below, just like an old one.
            old_len=kv_len - q_len * (q_len > 1),
            row_query=row_query,
            query_node=query_node.astype(np.int32),
            query_position=(position + kv_len - q_len).take(query_node) + nth,
        )


def _jumps(parent: np.ndarray) -> list[np.ndarray]:
    """intp [N + 1] each: ancestors 1, 2, 4, ... levels up, N above the roots, and above N itself.

    log2(depth) passes over them sum along all paths: after each pass a node has twice as many of its ancestors.
    """
    above = np.empty(len(parent) + 1, np.intp)
    above[:-1] = parent
    np.copyto(above[:-1], len(parent), where=parent < 0)
    above[-1] = len(parent)
    jumps = []
    while above.min() < len(parent):
        jumps.append(above)
        above = above.take(above)
    return jumps


def _accumulate(parent: np.ndarray, kv_len: np.ndarray, jumps: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Depth, tokens of all proper ancestors, and subtree size."""
    path, size = np.zeros(len(parent) + 1, np.int64), np.ones(len(parent) + 1)
    if jumps:
        # Both sums along the path in one word: neither reaches 2^31.
        np.add(kv_len, np.int64(1 << 32), out=path[:-1])
        path = path.take(jumps[0])
    for above in jumps:
        size += np.bincount(above, size)
        path += path.take(above)
    return (path[:-1] >> 32).astype(np.int32), path[:-1].astype(np.int32), size[:-1].astype(np.int32)


def _preorder(parent: np.ndarray, size: np.ndarray, jumps: list) -> np.ndarray:
    """Depth-first rank: the parent's rank, plus one, plus the subtrees of earlier siblings."""
    if len(parent) == 0:
        return np.zeros(0, np.int32)
    by_parent = None if all_of(parent[1:] >= parent[:-1]) else np.argsort(parent, kind="stable")
    sorted_parent = parent if by_parent is None else parent[by_parent]
    sorted_size = size if by_parent is None else size[by_parent]
    before = exclusive_cumsum(sorted_size)[:-1]
    eldest = exclusive_cumsum(np.bincount(parent + 1))  # of each parent's children, by -1 for the roots
    before -= before.take(eldest.take(sorted_parent + 1))
    rank = np.zeros(len(parent) + 1, np.int32)
    rank[slice(-1) if by_parent is None else by_parent] = before
    rank[:-1] += parent >= 0
    for above in jumps:
        rank += rank.take(above)
    return rank[:-1]
