"""Items to the packed int32 buffer of :mod:`pallas_kernels.layout`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pallas_kernels import layout as lo
from tree_attention_jax._arrays import any_of, exclusive_cumsum, starts_of
from tree_attention_jax.planning.buckets import FEW_LAUNCHES, Buckets
from tree_attention_jax.planning.growth import ENTRIES, growth_records
from tree_attention_jax.planning.lowering import Items
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.reduction import reduce_block
from tree_attention_jax.planning.tiles import resident_programs


class Packed(NamedTuple):
    """The buffer, its static description, and the real counts (kept on the host only)."""

    buffer: np.ndarray
    shape: lo.WorkShape
    num_items: tuple[int, ...]
    num_partials: int


class _Places(NamedTuple):
    """Where each section of the buffer begins."""

    launches: tuple[lo.Launch, ...]
    rows: int
    positions: int
    slots: int
    reduce: int
    plain: int
    masked: int
    lists: int


def pack(problem: Problem, items: Items, buckets: Buckets) -> Packed:
    """Lay everything out at the lowest level that holds it."""
    num_rows = problem.layout.num_rows
    partial, num_partials, reduce_ptr, reduce_list = _partials(problem, items)
    launch_counts = np.bincount(items.launch, minlength=len(items.tiles))
    few = len(items.tiles) <= FEW_LAUNCHES
    level = buckets.level_for(queries=num_rows, partials=num_partials, items=0 if few else int(launch_counts.max()))
    launches: tuple[lo.Launch, ...] = ()
    while True:
        capacity = buckets.at_level(level)
        if not launches or not few:
            launches = _launches(problem, items, launch_counts.tolist(), buckets if few else capacity, few)
        places = _places(items, capacity, launches)
        growing_at = end = places.lists + len(reduce_list)
        if problem.horizon:
            growing, grow_lists = growth_records(problem, items, places.launches, places.plain, places.masked)
            grow_lists_at = growing_at + growing.size
            growing[:, ENTRIES] += grow_lists_at
            end = grow_lists_at + len(grow_lists)
        enough = buckets.level_for(buffer=end)
        if enough <= level:
            break
        level = enough  # at the levels between, the buffer would need at least as much
    row_capacity, size = capacity.queries, capacity.buffer
    assert row_capacity is not None
    assert size is not None

    buffer = np.zeros(size, np.int32)
    buffer[: len(launch_counts)] = launch_counts
    buffer[lo.NUM_QUERIES] = num_rows
    buffer[lo.GROWING_BEGIN] = growing_at
    _write_items(buffer, items, places, launch_counts, partial, problem.layout.row_query)
    buffer[places.rows : places.rows + num_rows] = problem.layout.row_query
    buffer[places.rows + num_rows : places.positions] = np.arange(num_rows, row_capacity)
    buffer[places.positions : places.positions + num_rows] = problem.layout.query_position
    buffer[places.slots : places.slots + num_rows] = _new_token_slots(problem)
    buffer[places.slots + num_rows : places.reduce] = -1
    buffer[places.reduce : places.plain] = places.lists + len(reduce_list)
    if num_partials:
        buffer[places.reduce : places.reduce + num_rows] = reduce_ptr[:-1] + places.lists
        buffer[places.lists : growing_at] = reduce_list
    plain, masked = items.plain, items.masked
    buffer[places.plain : places.masked] = plain.head.view(np.int32)  # an entry's fields are in the same order there
    table = buffer[places.masked : places.lists].view(np.int64)
    table[::2], table[1::2] = masked.head, masked.seen
    if problem.horizon:
        buffer[lo.NUM_GROWING] = len(growing)
        buffer[growing_at:grow_lists_at] = growing.ravel()
        buffer[grow_lists_at:end] = grow_lists
    partial_rows, with_partials = 0, 0
    if num_partials:
        assert capacity.partials is not None
        partial_rows, with_partials = capacity.partials, int(np.count_nonzero(reduce_ptr[1:] > reduce_ptr[:-1]))
    shape = lo.WorkShape(
        num_q_heads=problem.heads.num_q_heads,
        num_kv_heads=problem.heads.num_kv_heads,
        head_dim=problem.heads.head_dim,
        v_head_dim=problem.heads.v_head_dim,
        page_size=problem.cache_page_size,
        launches=places.launches,
        row_capacity=row_capacity,
        rows_at=places.rows,
        positions_at=places.positions,
        slots_at=places.slots,
        reduce_at=places.reduce,
        reduce_block=reduce_block(num_rows, num_partials, with_partials),
        partial_rows=partial_rows,
        buffer_size=size,
    )
    return Packed(buffer, shape, tuple(launch_counts.tolist()), num_partials)


def _launches(problem: Problem, items: Items, counts: list[int], buckets: Buckets, few: bool) -> tuple[lo.Launch, ...]:
    """Launches with their room for items, one after the other behind the header."""
    heads, tiles = problem.heads, items.tiles
    programs = [heads.num_kv_heads * -(-heads.group // tile.heads_per_tile(heads.group)) for tile in tiles]
    queries = [tile.queries_per_tile(heads.group) for tile in tiles]
    launches, cursor = [], lo.HEADER_SIZE
    for tile, room, each in zip(tiles, buckets.items_of(counts, programs, queries), programs):
        grid = room * each
        if not few:
            grid = min(grid, problem.profile.num_sms * resident_programs(heads, tile))
        launches.append(lo.Launch(tile, grid, room, cursor))
        cursor += room * lo.ITEM_SIZE
    return tuple(launches)


def _places(items: Items, capacity: Buckets, launches: tuple[lo.Launch, ...]) -> _Places:
    assert capacity.queries is not None
    cursor = launches[-1].items_at + launches[-1].capacity * lo.ITEM_SIZE
    reduce_at = cursor + 3 * capacity.queries
    plain_at = reduce_at + capacity.queries + 1
    masked_at = plain_at + len(items.plain.head) * lo.PLAIN_SIZE
    return _Places(
        launches=launches,
        rows=cursor,
        positions=cursor + capacity.queries,
        slots=cursor + 2 * capacity.queries,
        reduce=reduce_at,
        plain=plain_at,
        masked=masked_at,
        lists=masked_at + len(items.masked.head) * lo.MASKED_SIZE,
    )


def _partials(problem: Problem, items: Items):
    """Where each item writes (-1: straight to the output), and each query's list of partials."""
    num_rows = problem.layout.num_rows
    if int(np.add.reduce(items.num_rows)) == num_rows:  # each row has an item, as it sees its own token: none has two
        return -1, 0, np.zeros(num_rows + 1, np.int32), np.zeros(0, np.int32)
    counts, first = items.num_rows.astype(np.intp), items.row_begin.astype(np.intp)
    last = first + counts
    change = np.bincount(first, minlength=num_rows + 1)
    change -= np.bincount(last, minlength=num_rows + 1)
    crowded = starts_of(np.add.accumulate(change)[:num_rows] > 1)
    shared = crowded.take(last) > crowded.take(first)
    counts *= shared
    offset = starts_of(counts)
    partial = np.where(shared, offset[:-1], -1)
    row = (first - offset[:-1]).repeat(counts)
    row += np.arange(len(row))
    query = problem.layout.row_query.take(row)
    return partial, len(row), starts_of(np.bincount(query, minlength=num_rows)), query.argsort(kind="stable")


def _write_items(buffer, items: Items, places: _Places, launch_counts, partial, row_query) -> None:
    records = np.empty((len(items.launch), lo.ITEM_SIZE), np.int32)
    records[:, lo.ROW] = items.row_begin
    records[:, lo.NUM_ROWS] = items.num_rows
    records[:, lo.PLAIN_BEGIN] = items.plain_begin * lo.PLAIN_SIZE + places.plain
    records[:, lo.PLAIN_COUNT] = items.plain_count
    records[:, lo.MASKED_BEGIN] = items.masked_begin * lo.MASKED_SIZE + places.masked
    records[:, lo.MASKED_COUNT] = items.masked_count
    records[:, lo.PARTIAL] = partial
    first, last = items.row_begin, items.row_begin + items.num_rows - 1
    records[:, lo.QUERY] = row_query.take(first)
    if any_of(row_query[1:] < row_query[:-1]):  # else they are all in order
        breaks = exclusive_cumsum(row_query[1:] - row_query[:-1] != 1)
        records[breaks.take(last) > breaks.take(first), lo.QUERY] = -1
    flat, begin = records.reshape(-1), 0
    for launch, count in zip(places.launches, launch_counts.tolist()):
        size = count * lo.ITEM_SIZE
        buffer[launch.items_at : launch.items_at + size] = flat[begin : begin + size]
        begin += size


def _new_token_slots(problem: Problem) -> np.ndarray:
    """Cache slot of each query's own token, in query order."""
    tree, layout = problem.tree, problem.layout
    node = layout.query_node
    before = -layout.position if tree.page_indices is None else tree.first_slot - layout.position
    place = before.take(node) + layout.query_position
    return problem.slots(problem.first_page.take(node), place)
