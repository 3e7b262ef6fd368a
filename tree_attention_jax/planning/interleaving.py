"""The order in which a tile walks its masked runs, for Mosaic's kernels.

There two groups of warps compute half of a tile's rows each, and leave out what none of theirs sees. The tokens of one
subtree after those of another would keep one half waiting while the other works, as the steps in flight are few. So the
runs that only one half sees take turns, a part of a step at a time.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.mosaic_geometry import PART
from tree_attention_jax._arrays import ceil_div, exclusive_cumsum, ragged_places
from tree_attention_jax.planning.pieces import Pieces
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiling import Tiling


def take_turns(problem: Problem, tiling: Tiling, pieces: Pieces) -> Pieces:
    """The same tokens; the masked ones of a Mosaic tile in parts, those that both halves see first."""
    group, unit = problem.heads.group, problem.unit
    # Queries of the first half; 0 where a tile is not cut in two.
    halves = np.array([tile.queries_per_tile(group) // 2 if tile.mosaic else 0 for tile in tiling.tiles], np.int32)
    if not halves.any():
        return pieces
    half = halves.take(tiling.tile).take(pieces.tile)
    turns = pieces.masked & ~pieces.reserve & (half > 0)
    which = turns.nonzero()[0]
    cut, tile = pieces.take(which), pieces.tile.take(which)
    middle = tiling.row_begin.take(tile) + half.take(which)
    second = problem.layout.row_begin.take(cut.node) >= middle
    only_one = second | (problem.layout.row_end.take(cut.node) <= middle)
    # Three lists of entries a tile: of both halves, of the first, of the second. Where in its list a piece begins:
    first_slot = problem.tree.first_slot.take(cut.node)
    start, stop = first_slot + cut.begin, first_slot + cut.end
    first_entry = start // unit
    entries = ceil_div(stop, unit) - first_entry
    whose = 3 * tile + np.where(only_one, 1 + second, 0)
    order = whose.argsort(kind="stable")
    before = exclusive_cumsum(entries.take(order))
    begins = before.take(exclusive_cumsum(np.bincount(whose, minlength=3 * tiling.num_blocks)))
    place = np.empty_like(entries)
    place[order] = before[:-1]
    place -= begins.take(whose)
    # The first half goes on in the last part of both, the second in the one after it.
    size = PART // unit
    of_both = (begins[1::3] - begins[:-1:3]).take(tile)
    place += np.where(second, ceil_div(of_both, size) * size, of_both) * only_one
    # Pieces are cut where parts end.
    part = place // size
    owner, nth = ragged_places((place + entries - 1) // size - part + 1)
    part, place = part.take(owner) + nth, place.take(owner)
    edge = (first_entry.take(owner) - place + part * size) * unit - first_slot.take(owner)
    cut = cut.take(owner)
    cut = cut._replace(begin=np.maximum(cut.begin, edge), end=np.minimum(cut.end, edge + size * unit))
    order = ((cut.tile.astype(np.int64) << 32) + 2 * part + second.take(owner)).argsort(kind="stable")
    return Pieces.join([pieces.take((~turns).nonzero()[0]), cut.take(order)])
