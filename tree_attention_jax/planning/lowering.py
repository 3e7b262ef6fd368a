"""Blocks to items: cut rows into tiles, tokens into entries, and long items into pieces."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pallas_kernels.layout import TileClass
from pallas_kernels.mosaic_geometry import PART, SMALLEST_COPY
from tree_attention_jax._arrays import all_of, any_of, ceil_div, exclusive_cumsum, ragged_places, ragged_runs
from tree_attention_jax.planning.entries import Entries, make_entries
from tree_attention_jax.planning.pieces import cut_into_pieces
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiles import loaded_at_once
from tree_attention_jax.planning.tiling import Tiling


class Items(NamedTuple):
    """Work items, sorted by launch and longest first within a launch; ranges index the entry tables."""

    launch: np.ndarray
    tile: np.ndarray  # row tile of the item, as in the entry tables
    row_begin: np.ndarray
    num_rows: np.ndarray
    plain_begin: np.ndarray
    plain_count: np.ndarray
    masked_begin: np.ndarray
    masked_count: np.ndarray
    plain: Entries
    masked: Entries
    tiles: tuple[TileClass, ...]


def lower(problem: Problem, tiling: Tiling, *, mask_all: bool = False) -> Items:
    """Turn a tiling into items. ``mask_all`` sends plain runs down the masked path too, to time it."""
    tiling = _row_tiles(problem, tiling)
    pieces = cut_into_pieces(problem, tiling)
    if mask_all:
        pieces = pieces._replace(masked=np.ones_like(pieces.masked))
    plain, masked, units = make_entries(problem, pieces, tiling)
    return _items(tiling, plain, masked, units)


def _row_tiles(problem: Problem, tiling: Tiling) -> Tiling:
    """The same tiling in blocks of no more rows than a tile holds."""
    if tiling.cut:
        return tiling
    queries = [t.queries_per_tile(problem.heads.group) for t in tiling.tiles]
    step = np.array(queries, np.int32).take(tiling.tile)
    rows = tiling.row_end - tiling.row_begin
    if all_of(rows) and all_of(rows <= step):
        return tiling
    cuts = ceil_div(rows, step)
    block, nth = ragged_places(cuts)
    row_begin = tiling.row_begin[block] + nth * step[block]
    runs = np.diff(tiling.run_indptr)[block]
    run = ragged_runs(tiling.run_indptr[:-1][block], runs)
    return tiling._replace(
        row_begin=row_begin,
        row_end=np.minimum(row_begin + step[block], tiling.row_end[block]),
        run_indptr=exclusive_cumsum(runs),
        node=tiling.node[run],
        begin=tiling.begin[run],
        end=tiling.end[run],
        tile=tiling.tile[block],
        max_tokens=tiling.max_tokens[block],
    )


def _items(tiling: Tiling, plain: Entries, masked: Entries, units: tuple[int, int]) -> Items:
    """Split each tile's token slots, plain ones first, into pieces of about equal length, and order the items."""
    plain_slots = plain.real * units[0]
    total = plain_slots + masked.real * units[1]
    one_launch = len(tiling.tiles) == 1
    split = _split(tiling, total)
    tile: np.ndarray | None
    if split is None:
        tile, launch, rank = None, tiling.tile, -total
    else:
        tile, begin, end = split
        launch, rank = tiling.tile.take(tile), begin - end
    if not one_launch:
        rank = rank + (launch.astype(np.int64) << 32)
    if not all_of(rank[1:] >= rank[:-1]):  # those of regular trees are in order
        order = rank.argsort(kind="stable")
        launch = launch.take(order)
        if tile is None:
            tile = order
        else:
            tile, begin, end = tile.take(order), begin.take(order), end.take(order)

    def of_items(column: np.ndarray) -> np.ndarray:
        return column if tile is None else column.take(tile)

    plain_begin, masked_begin = of_items(plain.begin), of_items(masked.begin)
    plain_count, masked_count = of_items(plain.real), of_items(masked.real)
    if split is not None:
        border = of_items(plain_slots)
        slots = np.array([begin, end])  # where pieces begin and end
        # An entry goes to the piece that it ends in: two pieces that meet round alike. Units are powers of two.
        of_plain = np.minimum(slots, border)
        slots -= of_plain
        of_plain >>= units[0].bit_length() - 1
        slots >>= units[1].bit_length() - 1
        if any([t.mosaic for t in tiling.tiles]):  # their halves take turns part by part: no piece begins within one
            size = tiling.of_blocks([PART // units[1] if t.mosaic else 1 for t in tiling.tiles])
            size = size if one_launch else of_items(size)
            slots = np.where(slots < masked_count, slots & -size, slots)
        plain_begin, plain_count = plain_begin + of_plain[0], of_plain[1] - of_plain[0]
        masked_begin, masked_count = masked_begin + slots[0], slots[1] - slots[0]
    if one_launch:
        can_mask = [tiling.uniform or any_of(masked.real)]
    else:
        can_mask = ((np.bincount(tiling.tile, masked.real, len(tiling.tiles)) > 0) | tiling.uniform).tolist()
    return Items(
        launch=launch,
        tile=np.arange(len(total)) if tile is None else tile,
        row_begin=of_items(tiling.row_begin),
        num_rows=of_items(tiling.row_end - tiling.row_begin),
        plain_begin=plain_begin,
        plain_count=plain_count,
        masked_begin=masked_begin,
        masked_count=masked_count,
        plain=plain,
        masked=masked,
        tiles=tuple(_with_units(t, units[0], units[1] if m else 0) for t, m in zip(tiling.tiles, can_mask)),
    )


def _split(tiling: Tiling, total: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """``(tile, begin, end)`` of items: tiles with so many token slots, those that exceed their limit in pieces.

    None if none does.
    """
    limit = tiling.max_tokens
    long = total > limit
    long &= limit > 0
    if not any_of(long):
        return None
    step = tiling.of_blocks([loaded_at_once(t) for t in tiling.tiles])
    size = ceil_div(total, np.where(long, ceil_div(total, np.maximum(limit, 1)), 1))
    size += step - 1
    size &= -step  # steps are powers of two
    np.maximum(size, step, out=size)
    tile, nth = ragged_places(np.maximum(ceil_div(total, size), 1))
    size = size.take(tile)
    begin = nth * size
    size += begin
    return tile, begin, np.minimum(size, total.take(tile))


@functools.lru_cache(maxsize=256)
def _with_units(tile: TileClass, unit: int, masked_unit: int) -> TileClass:
    # Mosaic's kernels copy no shorter entries.
    mosaic = tile.mosaic and min(unit, masked_unit or unit) >= SMALLEST_COPY
    return replace(tile, unit=unit, masked_unit=masked_unit, mosaic=mosaic)
