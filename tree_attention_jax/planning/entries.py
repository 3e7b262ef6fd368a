"""Pieces to entries: the stretches of cache slots that kernels walk."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pallas_kernels.layout import COUNT_BITS
from tree_attention_jax._arrays import ceil_div, exclusive_cumsum, ragged_ranges
from tree_attention_jax.planning.pieces import Pieces
from tree_attention_jax.planning.problem import Problem


@dataclass(frozen=True)
class Entries:
    """A table of entries. Tile i has ``real[i]`` of them from ``begin[i]`` on, which other tiles may have too.

    Behind those of a tile with growing leaves lies its reserve: room for the tokens that they will append.
    """

    tile: np.ndarray  # whose list an entry was made for
    word: np.ndarray  # slot and count, packed
    position: np.ndarray
    low: np.ndarray  # complemented where the entry is causal
    high: np.ndarray
    node: np.ndarray
    chunk: np.ndarray  # (first_slot + token index) // unit: which stretch of its node's pages this is
    begin: np.ndarray
    real: np.ndarray


def make_entries(problem: Problem, pieces: Pieces, num_tiles: int) -> tuple[Entries, Entries, tuple[int, int]]:
    """Entries of the plain pieces, entries of the masked ones, and how many tokens either hold."""
    units = _units(problem, pieces)
    plain = np.flatnonzero(~pieces.masked)
    same_as = _first_with_the_same(pieces, plain, num_tiles)
    if same_as is not None:
        plain = plain[same_as[pieces.tile[plain]] == pieces.tile[plain]]
    if len(plain) < len(pieces.masked):
        pieces = pieces.take(np.concatenate([plain, np.flatnonzero(pieces.masked)]))
    first, second = _expand(problem, pieces, len(plain), units, num_tiles)
    if same_as is not None:
        first = replace(first, begin=first.begin[same_as], real=first.real[same_as])
    return first, second, units


def _units(problem: Problem, pieces: Pieces) -> tuple[int, int]:
    """Tokens that a plain entry and a masked entry hold.

    Plain entries are no shorter than masked ones: a growing tree would meet one more combination. And a leaf that grows
    on the device moves on from entry to entry, wherever its entries are: then it is one unit for all.
    """
    first_slot = problem.tree.first_slot
    if problem.horizon:
        unit = problem.unit_for(first_slot, problem.tree.kv_len)
        return unit, unit
    begin, tokens = first_slot[pieces.node] + pieces.begin, pieces.end - pieces.begin
    plain = ~pieces.masked
    masked_unit = problem.unit_for(begin[pieces.masked], tokens[pieces.masked])
    if masked_unit > 1 and not plain.all():
        return masked_unit, masked_unit
    return problem.unit_for(begin[plain], tokens[plain]), masked_unit


def _first_with_the_same(pieces: Pieces, plain: np.ndarray, num_tiles: int) -> np.ndarray | None:
    """For each tile the first of its neighbours with the same plain pieces; None if no two have the same.

    The row tiles of a segment all walk its top, and a thousand copies of a prompt's entries would be most of a plan.
    """
    count = np.bincount(pieces.tile[plain], minlength=num_tiles)
    if num_tiles < 2 or not (count[1:] == count[:-1]).any():
        return None
    first = exclusive_cumsum(count)
    tile = pieces.tile[plain]
    nth = np.arange(len(plain)) - first[tile]
    # Where the tile before has fewer pieces this compares with anything, and the counts decide.
    here, before = plain, plain[np.minimum(first[tile - 1] + nth, len(plain) - 1)]
    differs = (
        (pieces.node[here] != pieces.node[before])
        | (pieces.begin[here] != pieces.begin[before])
        | (pieces.end[here] != pieces.end[before])
        | pieces.reserve[here]
    )
    same = np.bincount(tile[differs], minlength=num_tiles) == 0
    same[1:] &= (count[1:] == count[:-1]) & (count[1:] > 0)
    same[0] = False
    if not same.any():
        return None
    return np.maximum.accumulate(np.where(same, 0, np.arange(num_tiles)))


def _expand(
    problem: Problem, pieces: Pieces, num_plain: int, units: tuple[int, int], num_tiles: int
) -> tuple[Entries, Entries]:
    """Entries of the first ``num_plain`` pieces, and of the others."""
    layout, first_slot = problem.layout, problem.tree.first_slot
    page_size = problem.page_size
    unit = np.where(pieces.masked, units[1], units[0])
    slot0 = first_slot[pieces.node]
    start, stop = slot0 + pieces.begin, slot0 + pieces.end
    chunk0 = start // unit
    if problem.horizon:
        # A reserve that begins in the middle of an entry goes on in that entry, which exists already.
        chunk0 = np.where(pieces.reserve, ceil_div(start, unit), chunk0)
    piece, chunk = ragged_ranges(chunk0, ceil_div(stop, unit))
    border = int(np.searchsorted(piece, num_plain))
    reserve = np.zeros(0, bool)
    if problem.horizon:
        reserve = pieces.reserve[piece]
        nth = np.where(reserve, chunk - chunk0[piece] + 1, 0)
        order = np.lexsort((nth, pieces.tile[piece], pieces.masked[piece]))
        piece, chunk, reserve = piece[order], chunk[order], reserve[order]
    node, unit, start = pieces.node[piece], unit[piece], start[piece]
    begin = np.maximum(chunk * unit, start)
    count = np.minimum((chunk + 1) * unit, stop[piece]) - begin
    if problem.horizon:
        count[reserve] = 0
    indptr, indices = problem.pages
    page = begin // page_size
    word = (indices[indptr[node] + page] * page_size + (begin - page * page_size)) << COUNT_BITS | count
    tile, token = pieces.tile[piece], begin - first_slot[node]
    low = layout.row_begin[node]
    causal = pieces.causal[piece]
    if causal.any():
        low = np.where(causal, ~(low + token - layout.old_len[node]), low)
    position, high = layout.position[node] + token, layout.row_end[node]

    def part(which: slice) -> Entries:
        listed = np.bincount(tile[which], minlength=num_tiles)
        filled = np.bincount(tile[which][~reserve[which]], minlength=num_tiles) if problem.horizon else listed
        return Entries(
            tile=tile[which],
            word=word[which],
            position=position[which],
            low=low[which],
            high=high[which],
            node=node[which],
            chunk=chunk[which],
            begin=exclusive_cumsum(listed)[:-1],
            real=filled.astype(np.int32),
        )

    return part(slice(0, border)), part(slice(border, len(tile)))
