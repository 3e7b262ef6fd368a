"""Blocks to items: cut rows into tiles, tokens into entries, and long items into pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pallas_kernels.layout import TileClass
from tree_attention_jax._arrays import ceil_div, ragged_ranges
from tree_attention_jax.planning.entries import Entries, make_entries
from tree_attention_jax.planning.pieces import cut_into_pieces
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiling import Tiling


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
    pieces = cut_into_pieces(problem, tiling, block, row0, row1)
    if mask_all:
        pieces = replace(pieces, masked=np.ones_like(pieces.masked))
    plain, masked, units = make_entries(problem, pieces, len(block))
    return _items(tiling, block, row0, row1, kind, plain, masked, units)


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
    has_masked = np.zeros(len(tiling.tiles), bool)
    has_masked[kind[masked.tile]] = True
    return Items(
        launch=launch,
        tile=tile,
        row_begin=row0[tile],
        num_rows=(row1 - row0)[tile],
        plain_begin=plain.begin[tile] + plain_begin,
        plain_count=plain_end - plain_begin,
        masked_begin=masked.begin[tile] + masked_begin,
        masked_count=masked_end - masked_begin,
        tokens=tokens[order],
        plain=plain,
        masked=masked,
        tiles=tuple(
            replace(t, unit=units[0], masked_unit=units[1] if m else 0) for t, m in zip(tiling.tiles, has_masked)
        ),
    )
