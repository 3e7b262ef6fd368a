"""Which tokens a tile's rows see: each (tile, run) pair is cut where visibility changes.

All rows of the tile see it: plain. Some: masked. None: dropped. New tokens of a node with several queries are causal
among its own rows, so such a run has a plain beginning, a masked diagonal, and an end nobody in the tile sees.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tree_attention_jax._arrays import all_of
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiling import Tiling


class Pieces(NamedTuple):
    """Parts of (tile, run) pairs that are visible to all rows of the tile, or to some (``masked``)."""

    tile: np.ndarray
    node: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    masked: np.ndarray
    causal: np.ndarray
    reserve: np.ndarray  # token range is not filled yet

    def take(self, which: np.ndarray) -> Pieces:
        tile, node, begin, end, masked, causal, reserve = self
        # Both are the same where no piece is either.
        taken = np.zeros(len(which), bool) if reserve is causal else causal.take(which)
        return Pieces(
            tile.take(which),
            node.take(which),
            begin.take(which),
            end.take(which),
            masked.take(which),
            taken,
            taken if reserve is causal else reserve.take(which),
        )

    @staticmethod
    def join(parts: list[Pieces]) -> Pieces:
        return Pieces(*[np.concatenate(columns) for columns in zip(*parts)])


def cut_into_pieces(problem: Problem, tiling: Tiling) -> Pieces:
    """Pieces of all blocks, each of which is a tile, sorted by tile."""
    layout = problem.layout
    tile = np.arange(tiling.num_blocks).repeat(tiling.run_indptr[1:] - tiling.run_indptr[:-1])
    node, begin, end = tiling.node, tiling.begin, tiling.end
    low, high = layout.row_begin.take(node), layout.row_end.take(node)
    first, last = tiling.row_begin.take(tile), tiling.row_end.take(tile)
    if not tiling.cut:
        touched = low < last
        touched &= first < high
        if not all_of(touched):
            tile, node, begin, end, low, high, first, last = (
                x[touched] for x in (tile, node, begin, end, low, high, first, last)
            )
    all_old = layout.old_len is problem.tree.kv_len  # no node has several new tokens
    old = end if all_old else layout.old_len.take(node)
    if problem.sliding_window is not None and len(tile):
        begin = _trim_to_window(problem, tiling, tile, node, begin, end)
    masked = low > first
    masked |= last > high
    no = np.zeros(len(tile), bool)
    parts = [Pieces(tile, node, begin, end if all_old else np.minimum(end, old), masked, no, no)]
    if not all_old and len(fresh := (end > old).nonzero()[0]):
        tile, node, low, old, first, last = (x[fresh] for x in (tile, node, low, old, first, last))
        begin, end = np.maximum(begin[fresh], old), end[fresh]
        seen_by_all = np.clip(np.where(masked[fresh], begin, old + first - low + 1), begin, end)
        seen_by_any = np.clip(old + last - low, seen_by_all, end)
        no, yes = np.zeros(len(fresh), bool), np.ones(len(fresh), bool)
        parts.append(Pieces(tile, node, begin, seen_by_all, no, no, no))
        parts.append(Pieces(tile, node, seen_by_all, seen_by_any, yes, yes, no))
    if problem.horizon:
        parts.append(_reserve(problem, parts[0]))
    pieces = Pieces.join(parts) if len(parts) > 1 else parts[0]
    filled = pieces.begin < pieces.end
    if not all_of(filled):
        pieces = pieces.take(filled.nonzero()[0])
    if len(parts) > 1:
        # Reserved stretches come last in their tile, in the order in which they start to fill.
        pieces = pieces.take(np.lexsort((pieces.reserve, pieces.tile)))
    return pieces


def _trim_to_window(problem: Problem, tiling: Tiling, tile, node, begin, end) -> np.ndarray:
    """Drop tokens that are too old for every row of the tile; the kernel masks the rest."""
    position = problem.layout.query_position[problem.layout.row_query]
    edges = np.stack([tiling.row_begin, tiling.row_end], axis=1).ravel()
    padded = np.append(position, np.iinfo(np.int32).max)
    youngest = np.minimum.reduceat(padded, edges)[::2]
    oldest_seen = youngest[tile] - problem.sliding_window + 1
    return np.clip(oldest_seen - problem.layout.position[node], begin, end)


def _reserve(problem: Problem, old: Pieces) -> Pieces:
    """Token ranges that decoding leaves will fill within the horizon."""
    tree = problem.tree
    growing = np.flatnonzero((tree.q_len[old.node] == 1) & (old.end == tree.kv_len[old.node]) & (old.begin < old.end))
    growing = growing[tree.is_leaf()[old.node[growing]]]
    part = old.take(growing)
    return part._replace(begin=part.end, end=part.end + problem.horizon, reserve=np.ones(len(growing), bool))
