"""The order in which a tile walks its masked runs, for Mosaic's kernels.

There two groups of warps compute half of a tile's rows each, and leave out what none of theirs sees. The tokens of one
subtree after those of another would keep one half waiting while the other works, as the steps in flight are few. So the
runs that only one half sees take turns, a part of a step at a time.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.mosaic_geometry import PART
from tree_attention_jax._arrays import ceil_div, exclusive_cumsum
from tree_attention_jax.planning.pieces import Pieces
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiling import Tiling


def take_turns(problem: Problem, tiling: Tiling, pieces: Pieces) -> Pieces:
    """The same pieces; of the masked ones of a Mosaic tile, those that both halves see come first."""
    group = problem.heads.group
    # Queries of the first half; 0 where a tile is not cut in two.
    halves = np.array([tile.queries_per_tile(group) // 2 if tile.mosaic else 0 for tile in tiling.tiles], np.int32)
    if not halves.any():
        return pieces
    half = halves.take(tiling.tile).take(pieces.tile)
    which = (pieces.masked & ~pieces.reserve & (half > 0)).nonzero()[0]
    tile, node = pieces.tile.take(which), pieces.node.take(which)
    middle = tiling.row_begin.take(tile) + half.take(which)
    second = problem.layout.row_begin.take(node) >= middle
    only_one = second | (problem.layout.row_end.take(node) <= middle)
    # Three lists a tile: of both halves, of the first, of the second; and where in its list a piece begins, in slots.
    whose = 3 * tile.astype(np.int64) + np.where(only_one, 1 + second, 0)
    slots = ceil_div(pieces.end.take(which) - pieces.begin.take(which), problem.unit) * problem.unit
    order = whose.argsort(kind="stable")
    before = exclusive_cumsum(slots.take(order))
    lists = np.bincount(whose, minlength=3 * tiling.num_blocks)
    begins = before.take(exclusive_cumsum(lists))
    place = np.empty_like(slots)
    place[order] = before[:-1]
    place -= begins.take(whose)
    # The first part of the first half fills up the last one of both.
    place += (begins[1::3] - begins[:-1:3]).take(tile) * only_one % PART * ~second
    turn = (tile.astype(np.int64) << 40) + 2 * (place // PART + only_one) + second
    turn = turn.argsort(kind="stable")
    moved = np.arange(len(pieces.tile))
    moved[which] = which.take(turn)
    return pieces.take(moved)
