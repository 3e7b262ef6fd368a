"""Depth-first numbering: the step that turns "who sees what" into intervals.

Number the queries in depth-first preorder of their nodes, a node's own first; call that number a *row*. Then
the rows that see a token form one interval: all rows of the subtree for an old token of a node, and the
subtree's rows from ``j`` on for the node's ``j``-th new token. Every tiling below is rectangles over rows x
tokens, and a mask is two integers a run of tokens, where DeFT packs one bit a query into words.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tree_attention_jax._arrays import all_of, ragged_places

if TYPE_CHECKING:
    from tree_attention_jax.topology import TokenTree


@dataclass(eq=False)  # frozen ones take three times as long to make
class Layout:
    """Per node, in node order, unless said otherwise; int32."""

    parent: np.ndarray
    above: np.ndarray  # intp [N + 1] the same counted from 1, behind a 0: 0 is what roots hang under
    children: np.ndarray  # [N + 1] roots, then children of each node
    depth: np.ndarray  # 0 for a root
    position: np.ndarray  # absolute position of the node's first token
    row_begin: np.ndarray  # rows of the subtree: [row_begin, row_end)
    row_end: np.ndarray
    rows: np.ndarray
    old_len: np.ndarray  # tokens that every row of the subtree sees; the rest is causal among the node's rows
    row_query: np.ndarray  # [num_queries] query index of each row
    query_node: np.ndarray  # [num_queries] in query order; intp
    query_position: np.ndarray  # [num_queries] absolute

    @property
    def num_rows(self) -> int:
        return len(self.row_query)

    @functools.cached_property
    def order(self) -> np.ndarray:
        """Nodes in depth-first order."""
        one = np.ones(len(self.parent), np.int32)
        rank, _, _ = _intervals(self.above, self.children, one, one)
        order = np.empty(len(rank), np.int32)
        order[rank] = np.arange(len(rank), dtype=np.int32)
        return order

    @classmethod
    def of(cls, tree: TokenTree) -> Layout:
        kv_len, q_len, children = tree.kv_len, tree.q_len, tree.num_children
        row_begin, rows, path = _intervals(tree.above, children, q_len, kv_len)
        position = path.astype(np.int32)
        query_node, old_len = (q_len > 0).nonzero()[0], kv_len
        num_rows = int(np.add.reduce(q_len))
        several = len(query_node) < num_rows
        if several:
            query_node, nth = ragged_places(q_len)
            # A single new token is seen by its own row and all below, just like an old one.
            old_len = kv_len - q_len * (q_len > 1)
        row = row_begin.take(query_node)
        query_position = (position + kv_len - q_len).take(query_node)
        if several:
            row += nth
            query_position += nth
        row_query = np.empty(num_rows, np.int32)
        row_query[row.astype(np.intp)] = np.arange(num_rows, dtype=np.int32)  # other indices are slow
        return cls(
            parent=tree.parent,
            above=tree.above,
            children=children,
            depth=(path >> 32).astype(np.int32),
            position=position,
            row_begin=row_begin,
            row_end=row_begin + rows,
            rows=rows,
            old_len=old_len,
            row_query=row_query,
            query_node=query_node,
            query_position=query_position,
        )


def _intervals(
    above: np.ndarray, children: np.ndarray, weight: np.ndarray, kv_len: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Intervals of subtrees, if each node takes up its weight and lies before all below it, and sums over ancestors.

    Returns:
        int32 [N] begin, int32 [N] length, and int64 [N] ``depth << 32 | tokens of all proper ancestors``: both are
        summed in one word, as neither reaches 2^31.
    """
    jumps, parent = _jumps(above), above[1:]
    below = np.zeros(len(above))
    below[1:] = weight
    for far_above in jumps:
        below += np.bincount(far_above, below, len(below))
    length = below[1:].astype(np.int32)

    # With `before` the length of all subtrees earlier in the order of parents, a node begins at its parent's own end
    # plus before[node] - before[the parent's eldest child]. So begin - before is a sum over all ancestors.
    before = np.zeros(len(above), np.int64)
    by_parent = None if all_of(parent[1:] >= parent[:-1]) else np.argsort(parent, kind="stable")
    before[1:] = length if by_parent is None else length.take(by_parent)
    np.add.accumulate(before, out=before)
    eldest = np.add.accumulate(children)[:-1]
    sums = np.zeros((len(above), 2), np.int64)
    of_depth, of_rank = sums[1:, 0], sums[1:, 1]
    np.add(kv_len, np.int64(1 << 32), out=of_depth)
    np.subtract(weight, before.take(eldest), out=of_rank)
    before = before[:-1]
    if by_parent is not None:
        sorted_before, before = before, np.empty_like(before)
        before[by_parent] = sorted_before
    of_rank += before
    sums = sums.take(above, axis=0)
    for far_above in jumps:
        sums += sums.take(far_above, axis=0)
    before += sums[1:, 1]
    return before.astype(np.int32), length, sums[1:, 0]


def _jumps(above: np.ndarray) -> list[np.ndarray]:
    """intp [N + 1] each: ancestors 1, 2, 4, ... levels up, counted from 1; 0 above the roots, and above 0 itself.

    log2(depth) passes over them sum along all paths: after each pass a node has twice as many of its ancestors.
    """
    jumps = [above]
    while np.count_nonzero(above := above.take(above)):
        jumps.append(above)
    return jumps
