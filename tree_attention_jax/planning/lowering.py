"""Blocks to items: cut rows into tiles, tokens into entries, and long items into pieces.

For each (tile, run) pair the tile's rows are compared with the rows that see the run. All of them: plain entries.
Some: masked entries. None: dropped. New tokens of a node with several queries are causal among its own rows, so such
a run has a plain beginning, a masked diagonal, and an end nobody in the tile sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pallas_kernels.layout import COUNT_BITS, TileClass
from tree_attention_jax._arrays import ceil_div, exclusive_cumsum, ragged_ranges
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiling import Tiling


@dataclass(frozen=True)
class Entries:
    """A table of entries, sorted by tile; ``indptr`` is per tile and ``real`` is how many of a tile's hold tokens.

    The rest of a tile's entries is its reserve: room for the tokens that growing leaves will append.
    """

    tile: np.ndarray
    word: np.ndarray  # slot and count, packed
    position: np.ndarray
    low: np.ndarray  # complemented where the entry is causal
    high: np.ndarray
    node: np.ndarray
    chunk: np.ndarray  # (first_slot + token index) // unit: which stretch of its node's pages this is
    indptr: np.ndarray
    real: np.ndarray


@dataclass(frozen=True)
class Items:
    """Work items, sorted by launch and longest first within a launch; ranges index the entry tables."""

    launch: np.ndarray
    tile: np.ndarray  # row tile of the item, as in the entry tables
    row_begin: np.ndarray
    num_rows: np.ndarray
    plain_begin: np.ndarray
    plain_count: np.ndarray
    masked_begin: np.ndarray
    masked_count: np.ndarray
    tokens: np.ndarray  # token slots walked: entries x unit
    plain: Entries
    masked: Entries
    tiles: tuple[TileClass, ...]


def lower(problem: Problem, tiling: Tiling, *, mask_all: bool = False) -> Items:
    """Turn a tiling into items. ``mask_all`` sends plain runs down the masked path too, to time it."""
    queries_per_tile = np.array([t.queries_per_tile(problem.heads.group) for t in tiling.tiles], np.int32)
    step = queries_per_tile[tiling.tile]
    rows = tiling.row_end - tiling.row_begin
    cuts = ceil_div(rows, step)
    if (cuts == 1).all():
        block = np.arange(len(cuts), dtype=np.int32)
        row0 = tiling.row_begin
    else:
        block, nth = ragged_ranges(np.zeros_like(cuts), cuts)
        row0 = tiling.row_begin[block] + nth * step[block]
    row1 = np.minimum(row0 + step[block], tiling.row_end[block])
    kind = tiling.tile[block]
    pieces = _pieces(problem, tiling, block, row0, row1)
    if mask_all:
        pieces = replace(pieces, masked=np.ones_like(pieces.masked))
    units = _units(problem, pieces)
    plain, masked = _entries(problem, pieces, units, len(block))
    return _items(tiling, block, row0, row1, kind, plain, masked, units)


@dataclass(frozen=True)
class _Pieces:
    """Parts of (tile, run) pairs that are visible to all rows of the tile, or to some (``masked``)."""

    tile: np.ndarray
    node: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    masked: np.ndarray
    causal: np.ndarray
    reserve: np.ndarray  # token range is not filled yet

    def take(self, which: np.ndarray) -> _Pieces:
        return _Pieces(**{name: getattr(self, name)[which] for name in self.__dataclass_fields__})

    @staticmethod
    def join(parts: list[_Pieces]) -> _Pieces:
        names = _Pieces.__dataclass_fields__
        return _Pieces(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})


def _pieces(problem: Problem, tiling: Tiling, block: np.ndarray, row0: np.ndarray, row1: np.ndarray) -> _Pieces:
    layout = problem.layout
    tile, run = ragged_ranges(tiling.run_indptr[block], tiling.run_indptr[block + 1])
    node = tiling.node[run]
    low, high = layout.row_begin[node], layout.row_end[node]
    first, last = row0[tile], row1[tile]
    touched = (low < last) & (first < high)
    if not touched.all():
        tile, run, node = tile[touched], run[touched], node[touched]
        low, high, first, last = low[touched], high[touched], first[touched], last[touched]
    begin, end, old = tiling.begin[run], tiling.end[run], layout.old_len[node]
    if problem.sliding_window is not None and len(tile):
        begin = _trim_to_window(problem, tile, node, begin, end, row0, row1)
    whole = (low <= first) & (last <= high)
    no = np.zeros(len(tile), bool)
    parts = [_Pieces(tile, node, begin, np.minimum(end, old), ~whole, no, no)]
    fresh = np.flatnonzero(end > old)
    if len(fresh):
        tile, node, low, old, first, last = (x[fresh] for x in (tile, node, low, old, first, last))
        begin, end = np.maximum(begin[fresh], old), end[fresh]
        seen_by_all = np.clip(np.where(whole[fresh], old + first - low + 1, begin), begin, end)
        seen_by_any = np.clip(old + last - low, seen_by_all, end)
        no, yes = np.zeros(len(fresh), bool), np.ones(len(fresh), bool)
        parts.append(_Pieces(tile, node, begin, seen_by_all, no, no, no))
        parts.append(_Pieces(tile, node, seen_by_all, seen_by_any, yes, yes, no))
    if problem.horizon:
        parts.append(_reserve(problem, parts[0]))
    pieces = _Pieces.join(parts) if len(parts) > 1 else parts[0]
    filled = pieces.begin < pieces.end
    if not filled.all():
        pieces = pieces.take(filled)
    if len(parts) > 1:
        # Reserved stretches come last in their tile, in the order in which they start to fill.
        pieces = pieces.take(np.lexsort((pieces.reserve, pieces.tile)))
    return pieces


def _trim_to_window(problem, tile, node, begin, end, row0, row1) -> np.ndarray:
    """Drop tokens that are too old for every row of the tile; the kernel masks the rest."""
    position = problem.layout.query_position[problem.layout.row_query]
    edges = np.stack([row0, row1], axis=1).ravel()
    padded = np.append(position, np.iinfo(np.int32).max)
    youngest = np.minimum.reduceat(padded, edges)[::2]
    oldest_seen = youngest[tile] - problem.sliding_window + 1
    return np.clip(oldest_seen - problem.layout.position[node], begin, end)


def _reserve(problem: Problem, old: _Pieces) -> _Pieces:
    """Token ranges that decoding leaves will fill within the horizon."""
    tree = problem.tree
    growing = np.flatnonzero((tree.q_len[old.node] == 1) & (old.end == tree.kv_len[old.node]) & (old.begin < old.end))
    growing = growing[tree.is_leaf()[old.node[growing]]]
    part = old.take(growing)
    return replace(part, begin=part.end, end=part.end + problem.horizon, reserve=np.ones(len(growing), bool))


def _units(problem: Problem, pieces: _Pieces) -> tuple[int, int]:
    """Tokens that a plain entry and a masked entry hold.

    A leaf that grows on the device moves on from entry to entry, wherever its entries are: then it is one unit for all.
    """
    first_slot = problem.tree.first_slot
    if problem.horizon:
        unit = problem.unit_for(first_slot, problem.tree.kv_len)
        return unit, unit
    begin, tokens = first_slot[pieces.node] + pieces.begin, pieces.end - pieces.begin
    plain = ~pieces.masked
    return (
        problem.unit_for(begin[plain], tokens[plain]),
        problem.unit_for(begin[pieces.masked], tokens[pieces.masked]),
    )


def _entries(problem: Problem, pieces: _Pieces, units: tuple[int, int], num_tiles: int) -> tuple[Entries, Entries]:
    """Entries of the plain pieces, and of the masked ones."""
    layout, first_slot = problem.layout, problem.tree.first_slot
    page_size = problem.page_size
    plain_first = np.flatnonzero(~pieces.masked)
    num_plain = len(plain_first)
    if 0 < num_plain < len(pieces.masked):
        pieces = pieces.take(np.concatenate([plain_first, np.flatnonzero(pieces.masked)]))
    unit = np.where(pieces.masked, units[1], units[0])
    slot0 = first_slot[pieces.node]
    start, stop = slot0 + pieces.begin, slot0 + pieces.end
    chunk0 = start // unit
    if problem.horizon:
        # A reserve that begins in the middle of an entry goes on in that entry, which exists already.
        chunk0 = np.where(pieces.reserve, ceil_div(start, unit), chunk0)
    piece, chunk = ragged_ranges(chunk0, ceil_div(stop, unit))
    if problem.horizon:
        nth = np.where(pieces.reserve[piece], chunk - chunk0[piece] + 1, 0)
        order = np.lexsort((nth, pieces.tile[piece], pieces.masked[piece]))
        piece, chunk = piece[order], chunk[order]
    node, unit = pieces.node[piece], unit[piece]
    begin = np.maximum(chunk * unit, start[piece])
    count = np.minimum((chunk + 1) * unit, stop[piece]) - begin
    tile = pieces.tile[piece]
    filled = tile
    border = int(np.searchsorted(piece, num_plain)) if not problem.horizon else int((piece < num_plain).sum())
    filled_border = border
    if problem.horizon:
        reserve = pieces.reserve[piece]
        count[reserve] = 0
        filled, filled_border = tile[~reserve], border - int(reserve[:border].sum())
    indptr, indices = problem.pages
    page = begin // page_size
    word = (indices[indptr[node] + page] * page_size + (begin - page * page_size)) << COUNT_BITS | count
    token = begin - first_slot[node]
    low = layout.row_begin[node]
    causal = pieces.causal[piece]
    if causal.any():
        low = np.where(causal, ~(low + token - layout.old_len[node]), low)
    position, high = layout.position[node] + token, layout.row_end[node]

    def part(which: slice, real: np.ndarray) -> Entries:
        return Entries(
            tile=tile[which],
            word=word[which],
            position=position[which],
            low=low[which],
            high=high[which],
            node=node[which],
            chunk=chunk[which],
            indptr=exclusive_cumsum(np.bincount(tile[which], minlength=num_tiles)),
            real=np.bincount(real, minlength=num_tiles).astype(np.int32),
        )

    return (
        part(slice(0, border), filled[:filled_border]),
        part(slice(border, len(tile)), filled[filled_border:]),
    )


def _items(tiling: Tiling, block, row0, row1, kind, plain: Entries, masked: Entries, units: tuple[int, int]) -> Items:
    """Split each tile's token slots, plain ones first, into pieces of about equal length, and order the items."""
    step = np.array([t.block_kv for t in tiling.tiles], np.int32)[kind]
    plain_slots = plain.real * units[0]
    total = plain_slots + masked.real * units[1]
    limit = tiling.max_tokens[block]
    pieces = np.where(limit > 0, ceil_div(total, np.maximum(limit, 1)), 1)
    size = ceil_div(total, np.maximum(pieces, 1))
    size = np.maximum(ceil_div(size, step), 1) * step
    pieces = np.maximum(ceil_div(total, size), 1)
    if (pieces == 1).all():
        tile = np.arange(len(row0), dtype=np.int32)
        begin, end = np.zeros(len(row0), np.int32), total
    else:
        tile, nth = ragged_ranges(np.zeros_like(pieces), pieces)
        begin = nth * size[tile]
        end = np.minimum(begin + size[tile], total[tile])
    tokens, launch = end - begin, kind[tile]
    order = np.argsort(launch.astype(np.int64) * 2**32 - tokens, kind="stable")
    tile, begin, end, launch = tile[order], begin[order], end[order], launch[order]
    border = plain_slots[tile]
    # An entry goes to the piece that it ends in: two pieces that meet round alike.
    plain_begin, plain_end = np.minimum(begin, border) // units[0], np.minimum(end, border) // units[0]
    masked_begin, masked_end = np.maximum(begin - border, 0) // units[1], np.maximum(end - border, 0) // units[1]
    has_masked = np.bincount(kind, weights=np.diff(masked.indptr) > 0, minlength=len(tiling.tiles)) > 0
    return Items(
        launch=launch,
        tile=tile,
        row_begin=row0[tile],
        num_rows=(row1 - row0)[tile],
        plain_begin=plain.indptr[tile] + plain_begin,
        plain_count=plain_end - plain_begin,
        masked_begin=masked.indptr[tile] + masked_begin,
        masked_count=masked_end - masked_begin,
        tokens=tokens[order],
        plain=plain,
        masked=masked,
        tiles=tuple(
            replace(t, unit=units[0], masked_unit=units[1] if m else 0) for t, m in zip(tiling.tiles, has_masked)
        ),
    )
