"""Pieces to entries: the stretches of cache slots that kernels walk."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pallas_kernels import layout as lo
from tree_attention_jax._arrays import all_of, any_of, ceil_div, exclusive_cumsum
from tree_attention_jax.planning.pieces import Pieces
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiling import Tiling


class Entries(NamedTuple):
    """A table of entries. Tile i has ``real[i]`` of them from ``begin[i]`` on, which other tiles may have too.

    Behind those of a tile with growing leaves lies its reserve: room for the tokens that they will append.
    """

    word: np.ndarray  # slot and count, packed
    position: np.ndarray
    # Of masked entries: rows that see them.
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
    num_tiles = tiling.num_blocks
    # Plain pieces first, either kind in order of its tiles.
    border = len(pieces.masked) - int(np.count_nonzero(pieces.masked))
    if not all_of(pieces.masked[border:]):
        pieces = pieces.take(pieces.masked.argsort(kind="stable"))
    start = problem.tree.first_slot.take(pieces.node) + pieces.begin
    units = (problem.unit, problem.unit) if tiling.uniform else _units(problem, pieces, border, start)
    repeats = _repeats(pieces, border, num_tiles)
    plain_entries, masked_entries = _expand(problem, pieces, border, start, units, tiling, repeats)
    if repeats is None:
        return plain_entries, masked_entries, units
    same_as = np.arange(num_tiles)
    same_as *= ~repeats
    np.maximum.accumulate(same_as, out=same_as)
    begin, real = plain_entries.begin.take(same_as), plain_entries.real.take(same_as)
    return plain_entries._replace(begin=begin, real=real), masked_entries, units


def _units(problem: Problem, pieces: Pieces, border: int, start: np.ndarray) -> tuple[int, int]:
    """Tokens that a plain entry and a masked entry hold.

    Plain entries are no shorter than masked ones: a growing tree would meet one more combination. And a leaf that grows
    on the device moves on from entry to entry, wherever its entries are: then it is one unit for all.
    """
    if problem.horizon:
        unit = problem.unit_for(problem.tree.first_slot, problem.tree.kv_len)
        return unit, unit
    tokens = pieces.end - pieces.begin
    masked_unit = problem.unit_for(start[border:], tokens[border:])
    if masked_unit > 1 and border < len(tokens):
        return masked_unit, masked_unit
    return problem.unit_for(start[:border], tokens[:border]), masked_unit


def _repeats(pieces: Pieces, num_plain: int, num_tiles: int) -> np.ndarray | None:
    """bool [num_tiles]: tiles with the same plain pieces (the first ones) as the tile before; None if there are none.

    The row tiles of a segment all walk its top, and a thousand copies of a prompt's entries would be most of a plan.
    """
    tile, node, begin, end = (column[:num_plain] for column in pieces[:4])
    count = np.bincount(tile, minlength=num_tiles)
    same = np.zeros(num_tiles, bool)
    np.equal(count[1:], count[:-1], out=same[1:])
    same &= count > 0
    if not any_of(same):
        return None
    # The piece at the same place in the tile before, if that has as many.
    before = np.arange(num_plain) - count.take(tile - 1)
    differs = node != node.take(before)
    differs |= begin != begin.take(before)
    differs |= end != end.take(before)
    differs |= pieces.reserve[:num_plain]
    same &= np.bincount(tile, differs, num_tiles) == 0
    return same if any_of(same) else None


def _expand(
    problem: Problem,
    pieces: Pieces,
    num_plain: int,
    start: np.ndarray,
    units: tuple[int, int],
    tiling: Tiling,
    repeats: np.ndarray | None,
) -> tuple[Entries, Entries]:
    """Entries of the first ``num_plain`` pieces, but for tiles whose plain ones are repeated, and of the others.

    What does not change within a piece is worked out for the pieces, of which there are few, and then spread.
    """
    layout, node, num_tiles = problem.layout, pieces.node, tiling.num_blocks
    before = start - pieces.begin  # slots before the node's first token
    stop = before + pieces.end
    unit: Any = units[0] if units[0] == units[1] else np.where(pieces.masked, units[1], units[0])
    chunk0 = start // unit
    if problem.horizon:
        # A reserve that begins in the middle of an entry goes on in that entry, which exists already.
        chunk0 = np.where(pieces.reserve, ceil_div(start, unit), chunk0)
    counts: np.ndarray = (ceil_div(stop, unit) - chunk0).astype(np.intp)  # as repeat would make them each time
    if repeats is not None:
        counts[:num_plain] *= ~repeats.take(pieces.tile[:num_plain])
    upto = exclusive_cumsum(counts)
    border = int(upto[num_plain])
    chunk = np.arange(upto[-1], dtype=np.int32)
    chunk += (chunk0 - upto[:-1]).repeat(counts)
    none: np.ndarray = np.zeros(0, np.int32)
    piece = none
    if problem.horizon:
        piece = np.arange(len(counts)).repeat(counts)
        order = _with_reserves_last(pieces, piece, chunk)
        piece, chunk = piece.take(order), chunk.take(order)

    masked_counts = counts[num_plain:]

    def spread(values: np.ndarray) -> np.ndarray:
        return values.take(piece) if problem.horizon else values.repeat(counts)

    def spread_masked(values: np.ndarray) -> np.ndarray:
        return values.take(piece[border:]) if problem.horizon else values[num_plain:].repeat(masked_counts)

    if units[0] != units[1]:
        unit = spread(unit)
    begin = chunk * unit
    count = begin + unit
    np.minimum(count, spread(stop), out=count)
    np.maximum(begin, spread(start), out=begin)
    count -= begin
    if problem.horizon:
        count[pieces.reserve.take(piece)] = 0
    word = problem.slots(spread(problem.first_page.take(node)), begin)
    word <<= lo.SLOT_SHIFT
    word |= count
    word[border:] |= spread_masked(_halves(problem, pieces, tiling))
    position = spread(layout.position.take(node) - before)
    position += begin
    # Only masked entries say who sees them.
    low, high = spread_masked(layout.row_begin.take(node)), spread_masked(layout.row_end.take(node))
    if any_of(pieces.causal):
        seen_from = spread_masked((layout.row_begin - layout.old_len).take(node) - before) + begin[border:]
        low = np.where(spread_masked(pieces.causal), ~seen_from, low)
    tile, node, chunk = (pieces.tile.take(piece), node.take(piece), chunk) if problem.horizon else (none, none, none)

    # Of the plain entries of each tile, then of the masked ones.
    lists = pieces.tile + num_tiles * pieces.masked
    held = real = np.bincount(lists, counts, 2 * num_tiles).astype(np.int32)
    if problem.horizon:
        real = np.bincount(lists, counts * ~pieces.reserve, 2 * num_tiles).astype(np.int32)
    begins = exclusive_cumsum(held)
    plain = Entries(
        word[:border],
        position[:border],
        none,
        none,
        begins[:num_tiles],
        real[:num_tiles],
        tile[:border],
        node[:border],
        chunk[:border],
    )
    masked = Entries(
        word[border:],
        position[border:],
        low,
        high,
        begins[num_tiles:-1] - border,
        real[num_tiles:],
        tile[border:],
        node[border:],
        chunk[border:],
    )
    return plain, masked


def _halves(problem: Problem, pieces: Pieces, tiling: Tiling) -> np.ndarray:
    """Bits of the halves of their tiles that may see the tokens of pieces."""
    ends, begins = zip(*(tile.halves(problem.heads.group) for tile in tiling.tiles))
    kind, row = tiling.tile, tiling.row_begin
    first_end, second_begin = row + np.array(ends, np.int32).take(kind), row + np.array(begins, np.int32).take(kind)
    first = problem.layout.row_begin.take(pieces.node) < first_end.take(pieces.tile)
    second = problem.layout.row_end.take(pieces.node) > second_begin.take(pieces.tile)
    return (first + 2 * second).astype(np.int32) << lo.HALVES_SHIFT


def _with_reserves_last(pieces: Pieces, piece: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """The order of entries in which each tile's reserves follow, step by step, all that it has filled."""
    nth = chunk - chunk.take(np.searchsorted(piece, piece))
    later = np.where(pieces.reserve[piece], nth + 1, 0)
    return np.lexsort((later, pieces.tile[piece], pieces.masked[piece]))
