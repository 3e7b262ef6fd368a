"""Items to the packed int32 buffer of :mod:`pallas_kernels.layout`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels import layout as lo
from tree_attention_jax._arrays import exclusive_cumsum, ragged_ranges
from tree_attention_jax.planning.buckets import Buckets, grid_for
from tree_attention_jax.planning.lowering import Items
from tree_attention_jax.planning.problem import Problem

# Fields of the record of a growing leaf; behind it in the buffer stand the places of its entries.
GROW_SIZE = 8
GROW_QUERY, GROW_START, GROW_UNIT, GROW_ENTRIES, GROW_COUNT_AT, GROW_ITEM_BEGIN, GROW_ENTRY_SIZE = range(7)

MIN_ITEMS = 16
MIN_QUERIES = 16
MIN_PARTIALS = 1024
MIN_BUFFER = 4096
MAX_REDUCE_BLOCK = 16


@dataclass(frozen=True)
class Packed:
    """The buffer, its static description, and the real counts (kept on the host only)."""

    buffer: np.ndarray
    shape: lo.WorkShape
    num_items: tuple[int, ...]
    num_partials: int


def pack(problem: Problem, items: Items, buckets: Buckets) -> Packed:
    """Lay everything out, padded to buckets."""
    num_rows = problem.layout.num_rows
    row_capacity = buckets.capacity("queries", num_rows, MIN_QUERIES, growth=4)
    padding = _padding_items(items, num_rows, row_capacity, problem.group)
    launch_counts = np.bincount(items.launch, minlength=len(items.tiles))
    launch_counts[0] += len(padding)
    launches, cursor = [], lo.HEADER_SIZE
    for tile, count in zip(items.tiles, launch_counts.tolist()):
        capacity = buckets.capacity("items", count, MIN_ITEMS)
        head_tiles = -(-problem.group // tile.heads_per_tile(problem.group))
        launches.append(lo.Launch(tile, grid_for(capacity, problem.num_kv_heads * head_tiles), capacity, cursor))
        cursor += capacity * lo.ITEM_SIZE
    rows_at = cursor
    positions_at = rows_at + row_capacity
    slots_at = positions_at + row_capacity
    reduce_at = slots_at + row_capacity
    plain_at = reduce_at + row_capacity + 1
    masked_at = plain_at + len(items.plain.tile) * lo.PLAIN_SIZE
    lists_at = masked_at + len(items.masked.tile) * lo.MASKED_SIZE

    partial, num_partials, reduce_ptr, reduce_list = _partials(problem, items)
    growing, grow_lists = _growth(problem, items, launches, plain_at, masked_at)
    growing_at = lists_at + len(reduce_list)
    grow_lists_at = growing_at + growing.size
    growing[:, GROW_ENTRIES] += grow_lists_at
    size = buckets.capacity("buffer", grow_lists_at + len(grow_lists), MIN_BUFFER)

    buffer = np.zeros(size, np.int32)
    buffer[: len(launches)] = launch_counts
    buffer[lo.NUM_QUERIES] = num_rows
    buffer[lo.NUM_GROWING] = len(growing)
    buffer[lo.GROWING_BEGIN] = growing_at
    _write_items(buffer, items, launches, partial, padding, row_capacity, plain_at, masked_at)
    buffer[rows_at : rows_at + num_rows] = problem.layout.row_query
    buffer[rows_at + num_rows : positions_at] = np.arange(num_rows, row_capacity)
    buffer[positions_at : positions_at + num_rows] = problem.tree.query_positions()
    buffer[slots_at:reduce_at] = -1
    buffer[slots_at : slots_at + num_rows] = _new_token_slots(problem)
    buffer[reduce_at : reduce_at + num_rows + 1] = reduce_ptr + lists_at
    buffer[reduce_at + num_rows + 1 : plain_at] = reduce_ptr[-1] + lists_at
    plain, masked = items.plain, items.masked
    table = buffer[plain_at:masked_at].reshape(-1, lo.PLAIN_SIZE)
    for field, column in ((lo.WORD, plain.word), (lo.POSITION, plain.position)):
        table[:, field] = column
    table = buffer[masked_at:lists_at].reshape(-1, lo.MASKED_SIZE)
    for field, column in enumerate((masked.word, masked.position, masked.low, masked.high)):
        table[:, field] = column
    buffer[lists_at:growing_at] = reduce_list
    buffer[growing_at:grow_lists_at] = growing.ravel()
    buffer[grow_lists_at : grow_lists_at + len(grow_lists)] = grow_lists
    shape = lo.WorkShape(
        num_q_heads=problem.num_q_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        page_size=problem.page_size,
        launches=tuple(launches),
        row_capacity=row_capacity,
        rows_at=rows_at,
        positions_at=positions_at,
        slots_at=slots_at,
        reduce_at=reduce_at,
        reduce_block=_reduce_block(reduce_ptr),
        partial_rows=0 if num_partials == 0 else buckets.capacity("partials", num_partials, MIN_PARTIALS),
        buffer_size=size,
    )
    return Packed(buffer, shape, tuple(launch_counts.tolist()), num_partials)


def _padding_items(items: Items, num_rows: int, row_capacity: int, group: int) -> np.ndarray:
    """First rows of empty items: they write the 0 and -inf of the rows that pad the query bucket."""
    return np.arange(num_rows, row_capacity, items.tiles[0].queries_per_tile(group), dtype=np.int32)


def _partials(problem: Problem, items: Items):
    """Where each item writes (-1: straight to the output), and each query's list of partials."""
    num_rows = problem.layout.num_rows
    first, count = items.row_begin, items.num_rows
    cover = np.cumsum(np.bincount(first, minlength=num_rows + 1) - np.bincount(first + count, minlength=num_rows + 1))[
        :num_rows
    ]
    crowded = exclusive_cumsum(cover > 1)
    shared = crowded[first + count] > crowded[first]
    offset = exclusive_cumsum(np.where(shared, count, 0))
    partial = np.where(shared, offset[:-1], -1)
    _, row = ragged_ranges(first[shared], (first + count)[shared])
    query = problem.layout.row_query[row]
    reduce_list = np.argsort(query, kind="stable").astype(np.int32)
    return partial, int(offset[-1]), exclusive_cumsum(np.bincount(query, minlength=num_rows)), reduce_list


def _reduce_block(reduce_ptr: np.ndarray) -> int:
    """Partials merged at a time: what the query with the most partials needs, within what registers hold."""
    most = int(np.diff(reduce_ptr).max(initial=1))
    return min(1 << max(most - 1, 1).bit_length(), MAX_REDUCE_BLOCK)


def _write_items(buffer, items: Items, launches, partial, padding, row_capacity, plain_at: int, masked_at: int) -> None:
    cursor = 0
    for index, launch in enumerate(launches):
        end = cursor + int(np.count_nonzero(items.launch == index))
        records = buffer[launch.items_at : launch.items_at + launch.capacity * lo.ITEM_SIZE].reshape(-1, lo.ITEM_SIZE)
        here = records[: end - cursor]
        span = slice(cursor, end)
        here[:, lo.ROW] = items.row_begin[span]
        here[:, lo.NUM_ROWS] = items.num_rows[span]
        here[:, lo.PLAIN_BEGIN] = items.plain_begin[span] * lo.PLAIN_SIZE + plain_at
        here[:, lo.PLAIN_COUNT] = items.plain_count[span]
        here[:, lo.MASKED_BEGIN] = items.masked_begin[span] * lo.MASKED_SIZE + masked_at
        here[:, lo.MASKED_COUNT] = items.masked_count[span]
        here[:, lo.PARTIAL] = partial[span]
        here[:, lo.TOKENS] = items.tokens[span]
        if index == 0 and len(padding):
            empty = records[end - cursor : end - cursor + len(padding)]
            empty[:, lo.ROW] = padding
            empty[:, lo.NUM_ROWS] = np.diff(padding, append=row_capacity)
            empty[:, lo.PARTIAL] = -1
        cursor = end


def _new_token_slots(problem: Problem) -> np.ndarray:
    """Cache slot of each query's own token, in query order."""
    tree = problem.tree
    node = tree.query_nodes()
    place = tree.first_slot[node] + tree.query_positions() - problem.layout.position[node]
    indptr, indices = tree.page_table(problem.page_size)
    page_size = problem.page_size
    return indices[indptr[node] + place // page_size] * page_size + place % page_size


def _growth(problem: Problem, items: Items, launches, plain_at: int, masked_at: int):
    """Records that let :meth:`TreePlan.advance` append one token to every decoding leaf on the device."""
    if not problem.horizon:
        return np.zeros((0, GROW_SIZE), np.int32), np.zeros(0, np.int32)
    tree = problem.tree
    leaves = np.flatnonzero(tree.is_leaf() & (tree.q_len == 1))
    leaf_of_node = np.full(tree.num_nodes, -1, np.int32)
    leaf_of_node[leaves] = np.arange(len(leaves))
    records = np.zeros((len(leaves), GROW_SIZE), np.int32)
    query_begin = exclusive_cumsum(tree.q_len)
    records[:, GROW_QUERY] = query_begin[leaves]
    start = tree.first_slot[leaves] + tree.kv_len[leaves]
    records[:, GROW_START] = start
    lists: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for table, table_at, size, begin, count, count_field in (
        (items.plain, plain_at, lo.PLAIN_SIZE, items.plain_begin, items.plain_count, lo.PLAIN_COUNT),
        (items.masked, masked_at, lo.MASKED_SIZE, items.masked_begin, items.masked_count, lo.MASKED_COUNT),
    ):
        _grow_in_table(
            problem,
            items,
            launches,
            table,
            table_at,
            size,
            begin,
            count,
            count_field,
            leaf_of_node,
            start,
            records,
            lists,
        )
    leaf, chunk, place = (np.concatenate(x) for x in zip(*lists))
    order = np.lexsort((chunk, leaf))
    counts = np.bincount(leaf, minlength=len(leaves))
    records[:, GROW_ENTRIES] = exclusive_cumsum(counts)[:-1]
    return records, place[order].astype(np.int32)


def _grow_in_table(
    problem, items, launches, table, table_at, size, begin, count, count_field, leaf_of_node, start, records, lists
) -> None:
    """Fill in the leaves whose tail lies in one of the two entry tables."""
    # The item that a tile's reserve belongs to: the one whose range ends where the tile's filled entries end.
    tile_end = table.indptr[:-1] + table.real
    leaf = leaf_of_node[table.node]
    holds = np.flatnonzero((count > 0) & (begin + count == tile_end[items.tile]))
    last_item = np.full(len(tile_end), -1, np.int32)
    last_item[items.tile[holds]] = holds
    tile_units = np.array([t.unit for t in items.tiles], np.int32)
    unit_of_tile = np.zeros(len(tile_end), np.int32)
    unit_of_tile[items.tile[holds]] = tile_units[items.launch[holds]]
    unit = unit_of_tile[table.tile]
    grows = (leaf >= 0) & (unit > 0)
    grows[grows] &= table.chunk[grows] >= start[leaf[grows]] // unit[grows]
    entry = np.flatnonzero(grows)
    leaf, unit, item = leaf[entry], unit[entry], last_item[table.tile[entry]]
    first_of_launch = np.searchsorted(items.launch, np.arange(len(launches)))
    items_at = np.array([launch.items_at for launch in launches])
    launch = items.launch[item]
    record_at = items_at[launch] + (item - first_of_launch[launch]) * lo.ITEM_SIZE
    records[leaf, GROW_UNIT] = unit
    records[leaf, GROW_COUNT_AT] = record_at + count_field
    records[leaf, GROW_ITEM_BEGIN] = begin[item] * size + table_at
    records[leaf, GROW_ENTRY_SIZE] = size
    lists.append((leaf, table.chunk[entry], entry * size + table_at))
