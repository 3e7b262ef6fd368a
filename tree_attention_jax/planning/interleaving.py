"""The order in which a tile walks its masked entries, for Mosaic's kernels.

There two groups of warps compute half of a tile's rows each, and leave out what none of theirs sees. The tokens of one
subtree after those of another would keep one half waiting while the other works, as the steps in flight are few. So the
runs that only one half sees take turns, a part of a step at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pallas_kernels.mosaic_geometry import PART
from tree_attention_jax._arrays import all_of, any_of, exclusive_cumsum, starts_of
from tree_attention_jax.planning.pieces import Pieces
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiling import Tiling


class Turns(NamedTuple):
    """The order of a table's entries: that of ``lists`` stretches of as many entries, each in the same ``order``."""

    order: np.ndarray
    lists: int

    def of(self, column: np.ndarray) -> np.ndarray:
        """A column of the table in this order."""
        return column.reshape(self.lists, -1).take(self.order, axis=1).reshape(-1)


def take_turns(
    problem: Problem, tiling: Tiling, pieces: Pieces, start: np.ndarray, stop: np.ndarray, upto: np.ndarray, unit: int
) -> Turns | None:
    """The order in which masked entries of Mosaic tiles take turns; None where it is known to be that of the table.

    Args:
        problem: gives the rows that see each node.
        tiling: gives the tiles' halves.
        pieces: masked ones, sorted by tile, those that are reserved last.
        start, stop: the slots of each, counted from where its node's pages begin.
        upto: [pieces + 1] where the entries of each begin.
        unit: tokens that an entry holds at most.
    """
    group = problem.heads.group
    # Queries of the first half; 0 where a tile is not cut in two.
    halves = [tile.queries_per_tile(group) // 2 if tile.mosaic else 0 for tile in tiling.tiles]
    if not any(halves) or not len(start):
        return None
    tile, stays = pieces.tile, None
    middle = (tiling.row_begin + tiling.of_blocks(halves)).take(tile)
    second = problem.layout.row_begin.take(pieces.node) >= middle
    only_one = problem.layout.row_end.take(pieces.node) <= middle
    only_one |= second
    if problem.horizon:
        stays = pieces.reserve
    if not all(halves):
        triton = (np.array(halves) == 0).take(tiling.tile).take(tile)
        stays = triton if stays is None else stays | triton
    if stays is None and unit == problem.unit:
        kind = only_one.view(np.int8) + second
        each = _pieces_of_each(tile, kind, start, stop)
        if each:
            counts = upto[1 : each + 1] - upto[:each]
            return Turns(_of_one_tile(kind[:each], counts, PART // unit), len(tile) // each)
    order = _in_turns(problem.unit, tile - tile[0], second, only_one, start, stop, stays, upto, unit)
    return None if order is None else Turns(order, 1)


def _pieces_of_each(tile: np.ndarray, *columns: np.ndarray) -> int:
    """How many masked pieces each tile has that has any, if they are alike in all tiles, as in regular trees; else 0.

    ``tile``, in order, and ``columns`` are of all pieces. The order of one tile's entries is that of all tiles' then.
    """
    each = int(tile.searchsorted(tile[0], side="right"))
    firsts = tile[::each]
    if len(tile) % each or any_of(tile[each - 1 :: each] != firsts) or any_of(firsts[1:] == firsts[:-1]):
        return 0
    for column in columns:
        if not all_of(column[each:] == column[:-each]):
            return 0
    return each


def _of_one_tile(kind: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    """The order of one tile's entries, as :func:`_in_turns` has it, but entry by entry: they are few.

    Args:
        kind: int8, who sees each piece: 0 both halves, 1 the first, 2 the second.
        counts: entries of each piece.
        size: entries of a part.
    """
    kind = kind.repeat(counts)
    listed = kind.argsort(kind="stable")
    both, _, second = np.bincount(kind, minlength=3).tolist()
    # The first half goes on in the last part of both, the second in the one after it.
    place = np.arange(len(kind))
    of_second = place[len(kind) - second :]
    of_second += -(-both // size) * size - (len(kind) - second)
    place >>= size.bit_length() - 1
    place += place
    of_second += 1
    key = np.empty_like(place)
    key[listed] = place
    return key.argsort(kind="stable")


def _in_turns(list_unit: int, tile, second, only_one, start, stop, stays, upto, unit: int) -> np.ndarray | None:
    """The order of the entries of all tiles, part by part; None if they are in order.

    Args:
        list_unit: tokens of an entry as parts count them.
        tile: of each piece, in order, from 0.
        second: whether only the second half sees it.
        only_one: whether only one half does.
        stays: whether it takes no turns; None if all do.
        start, stop, upto, unit: see :func:`take_turns`.
    """
    bits, size = list_unit.bit_length() - 1, PART // list_unit  # bits are shifted in less time than divisions take
    first, count = start >> bits, stop + (list_unit - 1)
    count >>= bits
    count -= first
    if stays is not None:
        count[stays] = 0
    place = _places(tile, second, only_one, count, size)
    # Pieces are cut where parts end.
    part, last = place >> (size.bit_length() - 1), place + count
    last -= 1
    last >>= size.bit_length() - 1
    parts = last - part
    key = tile << 32
    key += part
    key += part
    key += second
    if stays is not None:
        parts[stays] = 0
        key[stays] = (tile[stays] << 32) + (1 << 31)  # behind all that take turns
    counts = parts.astype(np.intp)
    counts += 1
    before = starts_of(counts)[:-1]  # how many parts the pieces before have
    owner = np.arange(len(counts)).repeat(counts)
    nth = np.arange(len(owner))
    key -= 2 * before
    order = (key.take(owner) + 2 * nth).argsort(kind="stable")
    if all_of(order[1:] > order[:-1]):
        return None
    # Where parts begin in the table of entries: the first of a piece where that does, others where parts of lists do.
    edge = (part - before) * size
    edge += first
    edge -= place
    edge *= list_unit
    edge -= start & -unit
    edge >>= unit.bit_length() - 1
    edge += upto[:-1]
    edges = np.empty(len(owner) + 1, np.intp)
    edges[:-1], edges[-1] = edge.take(owner), upto[-1]
    begin = edges[:-1]
    begin += nth * (PART // unit)
    np.maximum(begin, upto.take(owner), out=begin)
    length = (edges[1:] - begin).take(order)
    begin = begin.take(order)
    begin -= starts_of(length)[:-1]
    entries = begin.repeat(length)
    entries += np.arange(len(entries))
    return entries


def _places(tile, second, only_one, count: np.ndarray, size: int) -> np.ndarray:
    """Where each piece's entries begin in one of their tile's lists: of both halves, of the first, or of the second.

    Args:
        tile, second, only_one: see :func:`_in_turns`.
        count: entries of each.
        size: entries of a part.
    """
    whose = 3 * tile
    whose += only_one
    whose += second
    order = whose.argsort(kind="stable")
    before = exclusive_cumsum(count.take(order))
    begins = before.take(starts_of(np.bincount(whose, minlength=3 * int(tile[-1]) + 3)))
    # The first half goes on in the last part of both, the second in the one after it.
    of_both = begins[1::3] - begins[:-1:3]
    shift = -begins[:-1]
    shift[1::3] += of_both
    of_both += size - 1
    of_both &= -size
    shift[2::3] += of_both
    place = np.empty_like(count)
    place[order] = before[:-1]
    place += shift.take(whose)
    return place
