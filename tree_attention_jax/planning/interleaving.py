"""The order in which a tile walks its masked runs, for Mosaic's kernels.

There two groups of warps compute half of a tile's rows each, and leave out what none of theirs sees. The tokens of one
subtree after those of another would keep one half waiting while the other works, as the steps in flight are few. So the
runs that only one half sees take turns, a part of a step at a time.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.mosaic_geometry import PART
from tree_attention_jax._arrays import any_of, exclusive_cumsum, starts_of
from tree_attention_jax.planning.pieces import Pieces
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiling import Tiling


def take_turns(problem: Problem, tiling: Tiling, pieces: Pieces) -> Pieces:
    """The same tokens; the masked ones of a Mosaic tile in parts, those that both halves see first."""
    group, unit = problem.heads.group, problem.unit
    # Queries of the first half; 0 where a tile is not cut in two.
    halves = [tile.queries_per_tile(group) // 2 if tile.mosaic else 0 for tile in tiling.tiles]
    if not any(halves):
        return pieces
    turns = pieces.masked & ~pieces.reserve if problem.horizon else pieces.masked
    if not all(halves):
        turns = turns & (np.array(halves) > 0).take(tiling.tile).take(pieces.tile)
    which = turns.nonzero()[0]
    tile, node = pieces.tile.take(which), pieces.node.take(which)
    middle = (tiling.row_begin + tiling.of_blocks(halves)).take(tile)
    second = problem.layout.row_begin.take(node) >= middle
    only_one = problem.layout.row_end.take(node) <= middle
    only_one |= second
    # Three lists of entries a tile: of both halves, of the first, of the second. Where in its list a piece begins:
    bits = unit.bit_length() - 1  # bits are shifted in a fraction of the time that divisions take
    first_slot = None if problem.tree.page_indices is None else problem.tree.first_slot.take(node)
    first_entry, entries = pieces.begin.take(which), pieces.end.take(which)
    if first_slot is not None:
        first_entry += first_slot
        entries += first_slot
    first_entry >>= bits
    entries += unit - 1
    entries >>= bits
    entries -= first_entry
    whose = 3 * tile
    whose += only_one
    whose += second
    order = whose.argsort(kind="stable")
    before = exclusive_cumsum(entries.take(order))
    begins = before.take(starts_of(np.bincount(whose, minlength=3 * tiling.num_blocks)))
    # The first half goes on in the last part of both, the second in the one after it.
    size = PART // unit
    of_both = begins[1::3] - begins[:-1:3]
    shift = -begins[:-1]
    shift[1::3] += of_both
    of_both += size - 1
    of_both &= -size
    shift[2::3] += of_both
    place = np.empty_like(entries)
    place[order] = before[:-1]
    place += shift.take(whose)
    # Pieces are cut where parts end.
    bits = size.bit_length() - 1
    part, last = place >> bits, place + entries
    last -= 1
    last >>= bits
    parts = last - part
    cut = any_of(parts)
    key = tile << 32
    key += part
    key += part
    key += second
    if cut:
        counts = parts.astype(np.intp)
        counts += 1
        first = starts_of(counts)[:-1]  # place of each one's first part before they are sorted
        key -= 2 * first
        order, sorted_owner = _sorted_parts(key, counts)
    else:
        order = sorted_owner = key.argsort(kind="stable")
    others = (~turns).nonzero()[0]
    pieces = pieces.take(np.concatenate([others, which.take(sorted_owner)]))
    if cut:
        edge = (first_entry - place) * unit
        if first_slot is not None:
            edge -= first_slot
        edge += (part - first) * PART
        edge = edge.take(sorted_owner)
        edge += order * PART
        begin, end = pieces.begin[len(others) :], pieces.end[len(others) :]
        np.maximum(begin, edge, out=begin)
        np.minimum(end, edge + PART, out=end)
    return pieces


def _sorted_parts(key: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order of so many parts of each piece, and the piece that each one is of, in that order.

    ``key``: from piece to piece, what parts are sorted by, less twice their place before.
    """
    owner = np.arange(len(counts)).repeat(counts)
    key = key.take(owner)
    key += np.arange(0, 2 * len(owner), 2)
    order = key.argsort(kind="stable")
    return order, owner.take(order)
