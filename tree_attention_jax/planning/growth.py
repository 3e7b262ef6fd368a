"""Decoding leaves that grow on the device: what :meth:`TreePlan.advance` needs to know of each.

A plan with a horizon lists the entries that a leaf will fill, in order, behind the entries it has filled. One decode
step then adds one to the count of the entry it is in, and lengthens the item when an entry is begun; no host, no new
plan. The records live in the buffer like everything else.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout as lo
from tree_attention_jax._arrays import exclusive_cumsum
from tree_attention_jax.planning.entries import Entries
from tree_attention_jax.planning.lowering import Items
from tree_attention_jax.planning.problem import Problem

# Fields of a record: the leaf's query; where its next token stands among its pages' slots; where the places of its
# entries are listed, from the one that token goes into; the item's length field; the item's first entry; ints an entry.
GROW_SIZE = 8
QUERY, START, ENTRIES, LENGTH_AT, ITEM_BEGIN, ENTRY_SIZE = range(6)


def growth_records(
    problem: Problem, items: Items, launches: tuple[lo.Launch, ...], plain_at: int, masked_at: int
) -> tuple[np.ndarray, np.ndarray]:
    """int32 [leaves, GROW_SIZE] records (``ENTRIES`` counted from the lists' begin), and the lists."""
    tree = problem.tree
    leaves = np.flatnonzero(tree.is_leaf() & (tree.q_len == 1))
    leaf_of_node = np.full(tree.num_nodes, -1, np.int32)
    leaf_of_node[leaves] = np.arange(len(leaves))
    records = np.zeros((len(leaves), GROW_SIZE), np.int32)
    records[:, QUERY] = exclusive_cumsum(tree.q_len)[leaves]
    records[:, START] = tree.first_slot[leaves] + tree.kv_len[leaves]
    first_chunk = records[:, START] // items.tiles[0].unit
    record_at = _record_places(items, launches)
    found = []
    for table, at, size, begin, count, field in (
        (items.plain, plain_at, lo.PLAIN_SIZE, items.plain_begin, items.plain_count, lo.PLAIN_COUNT),
        (items.masked, masked_at, lo.MASKED_SIZE, items.masked_begin, items.masked_count, lo.MASKED_COUNT),
    ):
        last_item = _last_items(items, table, begin, count)
        leaf = leaf_of_node[table.node]
        entry = np.flatnonzero(leaf >= 0)
        entry = entry[table.chunk[entry] >= first_chunk[leaf[entry]]]
        leaf, item = leaf[entry], last_item[table.tile[entry]]
        records[leaf, LENGTH_AT] = record_at[item] + field
        records[leaf, ITEM_BEGIN] = begin[item] * size + at
        records[leaf, ENTRY_SIZE] = size
        found.append((leaf, table.chunk[entry], entry * size + at))
    leaf, chunk, place = (np.concatenate(parts) for parts in zip(*found))
    records[:, ENTRIES] = exclusive_cumsum(np.bincount(leaf, minlength=len(leaves)))[:-1]
    return records, place[np.lexsort((chunk, leaf))].astype(np.int32)


def _record_places(items: Items, launches: tuple[lo.Launch, ...]) -> np.ndarray:
    """Place in the buffer of each item's record."""
    first = np.searchsorted(items.launch, np.arange(len(launches)))
    items_at = np.array([launch.items_at for launch in launches])
    return items_at[items.launch] + (np.arange(len(items.launch)) - first[items.launch]) * lo.ITEM_SIZE


def _last_items(items: Items, table: Entries, begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The item that a tile's reserve belongs to: the one whose range ends where the tile's filled entries end."""
    tile_end = table.begin + table.real
    ends = np.flatnonzero((count > 0) & (begin + count == tile_end[items.tile]))
    last = np.full(len(tile_end), -1, np.int32)
    last[items.tile[ends]] = ends
    return last


def grow(buffer: jax.Array, shape: lo.WorkShape) -> jax.Array:
    """One more token in each growing leaf: its entry's count, its item's length, its position and its slot."""
    index = jnp.arange(shape.row_capacity)
    grows = index < buffer[lo.NUM_GROWING]
    nowhere = shape.buffer_size
    unit = shape.launches[0].tile.unit
    record_at = buffer[lo.GROWING_BEGIN] + index * GROW_SIZE

    def column(name: int) -> jax.Array:
        return buffer[jnp.where(grows, record_at + name, 0)]

    start = column(START)
    nth = (start + buffer[lo.STEPS_TAKEN]) // unit - start // unit
    entry = buffer[jnp.where(grows, column(ENTRIES) + nth, 0)]
    word = buffer[jnp.where(grows, entry + lo.WORD, 0)]
    slot = (word >> lo.SLOT_SHIFT) + (word & lo.COUNT_MASK)
    length = (entry - column(ITEM_BEGIN)) // jnp.maximum(column(ENTRY_SIZE), 1) + 1
    query = column(QUERY)

    def at(place: jax.Array) -> jax.Array:
        return jnp.where(grows, place, nowhere)

    buffer = buffer.at[at(entry + lo.WORD)].add(1, mode="drop")
    buffer = buffer.at[at(column(LENGTH_AT))].max(length, mode="drop")
    buffer = buffer.at[at(shape.positions_at + query)].add(1, mode="drop")
    buffer = buffer.at[at(shape.slots_at + query)].set(slot, mode="drop")
    return buffer.at[lo.STEPS_TAKEN].add(1)
