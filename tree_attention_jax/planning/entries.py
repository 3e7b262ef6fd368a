"""Pieces to entries: the stretches of cache slots that kernels walk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pallas_kernels.layout import COUNT_BITS
from tree_attention_jax._arrays import ceil_div, exclusive_cumsum, ragged_places, ragged_runs
from tree_attention_jax.planning.pieces import Pieces
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiling import Tiling


@dataclass(frozen=True)
class Entries:
    """A table of entries. Tile i has ``real[i]`` of them from ``begin[i]`` on, which other tiles may have too.

    Behind those of a tile with growing leaves lies its reserve: room for the tokens that they will append.
    """

    word: np.ndarray  # slot and count, packed
    position: np.ndarray
    low: np.ndarray  # complemented where the entry is causal
    high: np.ndarray
    begin: np.ndarray
    real: np.ndarray
    # Of each entry, for leaves that grow: empty without a horizon.
    tile: np.ndarray  # whose list it was made for
    node: np.ndarray
    chunk: np.ndarray  # (first_slot + token index) // unit: which stretch of its node's pages this is


def make_entries(problem: Problem, pieces: Pieces, tiling: Tiling) -> tuple[Entries, Entries, tuple[int, int]]:
    """Entries of the plain pieces, entries of the masked ones, and how many tokens either hold."""
    num_plain = len(pieces.tile) - int(np.count_nonzero(pieces.masked))
    if num_plain < len(pieces.tile):
        pieces = pieces.take(np.argsort(pieces.masked, kind="stable"))
    units = (problem.unit, problem.unit) if tiling.uniform else _units(problem, pieces, num_plain)
    num_tiles = tiling.num_blocks
    repeats = _repeats(pieces, num_plain, num_tiles)
    if repeats is not None:
        kept = np.ones(len(pieces.tile), bool)
        kept[:num_plain] = ~repeats.take(pieces.tile[:num_plain])
        pieces, num_plain = pieces.take(kept.nonzero()[0]), int(np.count_nonzero(kept[:num_plain]))
    plain, masked = _expand(problem, pieces, num_plain, units, num_tiles)
    if repeats is not None:
        same_as = np.maximum.accumulate(np.where(repeats, 0, np.arange(num_tiles)))
        plain = replace(plain, begin=plain.begin[same_as], real=plain.real[same_as])
    return plain, masked, units


def _units(problem: Problem, pieces: Pieces, num_plain: int) -> tuple[int, int]:
    """Tokens that a plain entry and a masked entry hold.

    Plain entries are no shorter than masked ones: a growing tree would meet one more combination. And a leaf that grows
    on the device moves on from entry to entry, wherever its entries are: then it is one unit for all.
    """
    first_slot = problem.tree.first_slot
    if problem.horizon:
        unit = problem.unit_for(first_slot, problem.tree.kv_len)
        return unit, unit
    begin, tokens = first_slot.take(pieces.node) + pieces.begin, pieces.end - pieces.begin
    masked_unit = problem.unit_for(begin[num_plain:], tokens[num_plain:])
    if masked_unit > 1 and num_plain < len(tokens):
        return masked_unit, masked_unit
    return problem.unit_for(begin[:num_plain], tokens[:num_plain]), masked_unit


def _repeats(pieces: Pieces, num_plain: int, num_tiles: int) -> np.ndarray | None:
    """bool [num_tiles]: tiles with the same plain pieces (the first ones) as the tile before; None if there are none.

    The row tiles of a segment all walk its top, and a thousand copies of a prompt's entries would be most of a plan.
    """
    tile, node, begin, end = (x[:num_plain] for x in (pieces.tile, pieces.node, pieces.begin, pieces.end))
    count = np.bincount(tile, minlength=num_tiles)
    same = np.zeros(num_tiles, bool)
    same[1:] = (count[1:] == count[:-1]) & (count[1:] > 0)
    if not same.any():
        return None
    # The piece at the same place in the tile before, if that has as many.
    before = np.arange(num_plain) - count.take(tile - 1)
    differs = (node != node.take(before)) | (begin != begin.take(before)) | (end != end.take(before))
    differs |= pieces.reserve[:num_plain]
    same &= np.bincount(tile, differs, num_tiles) == 0
    return same if same.any() else None


def _expand(
    problem: Problem, pieces: Pieces, num_plain: int, units: tuple[int, int], num_tiles: int
) -> tuple[Entries, Entries]:
    """Entries of the first ``num_plain`` pieces, and of the others.

    What does not change within a piece is worked out for the pieces, of which there are few, and then spread.
    """
    layout, page_size, node = problem.layout, problem.page_size, pieces.node
    first_slot = problem.tree.first_slot.take(node)
    start, stop = first_slot + pieces.begin, first_slot + pieces.end
    unit: Any = units[0] if units[0] == units[1] else np.where(pieces.masked, units[1], units[0])
    chunk0 = start // unit
    if problem.horizon:
        # A reserve that begins in the middle of an entry goes on in that entry, which exists already.
        chunk0 = np.where(pieces.reserve, ceil_div(start, unit), chunk0)
    counts = (ceil_div(stop, unit) - chunk0).astype(np.intp)  # as repeat() wants it
    order = _with_reserves_last(pieces, counts) if problem.horizon else None

    def spread(column: np.ndarray) -> np.ndarray:
        return column.repeat(counts) if order is None else column.repeat(counts).take(order)

    chunk = ragged_runs(chunk0, counts)
    if order is not None:
        chunk = chunk.take(order)
    if units[0] != units[1]:
        unit = spread(unit)
    begin = chunk * unit
    count = np.minimum(begin + unit, spread(stop))
    np.maximum(begin, spread(start), out=begin)
    count -= begin
    if problem.horizon:
        count[spread(pieces.reserve)] = 0
    indptr, indices = problem.pages
    page = begin // page_size
    slot = (indices.take(spread(indptr.take(node)) + page) - page) * page_size + begin
    word = slot << COUNT_BITS | count
    low = spread(layout.row_begin.take(node))
    if pieces.causal.any():
        seen_from = spread((layout.row_begin - layout.old_len).take(node) - first_slot) + begin
        low = np.where(spread(pieces.causal), ~seen_from, low)
    high, position = spread(layout.row_end.take(node)), spread(layout.position.take(node) - first_slot) + begin
    if problem.horizon:
        tile, node = spread(pieces.tile), spread(node)
    else:
        tile = node = chunk = np.zeros(0, np.int32)

    def part(first: int, last: int, which: slice) -> Entries:
        of_tile, listed = pieces.tile[first:last], counts[first:last]
        held = real = np.bincount(of_tile, listed, num_tiles)
        if problem.horizon:
            real = np.bincount(of_tile, listed * ~pieces.reserve[first:last], num_tiles)
        return Entries(
            word=word[which],
            position=position[which],
            low=low[which],
            high=high[which],
            begin=exclusive_cumsum(held)[:-1],
            real=real.astype(np.int32),
            tile=tile[which],
            node=node[which],
            chunk=chunk[which],
        )

    border = int(counts[:num_plain].sum())
    return part(0, num_plain, slice(0, border)), part(num_plain, len(counts), slice(border, len(word)))


def _with_reserves_last(pieces: Pieces, counts: np.ndarray) -> np.ndarray:
    """The order of entries in which each tile's reserves follow, step by step, all that it has filled."""
    piece, nth = ragged_places(counts)
    later = np.where(pieces.reserve[piece], nth + 1, 0)
    return np.lexsort((later, pieces.tile[piece], pieces.masked[piece]))
