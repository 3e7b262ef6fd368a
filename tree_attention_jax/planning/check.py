"""Proof that a plan is right: every visible (query, token) pair is covered exactly once, and nothing else.

It reads the packed buffer as the kernels do, item by item, and knows nothing of how the plan was made. For one token
the rows an item covers are an interval, and so are the rows that may see it; so the intervals that all items cover must
tile the visible one. That is a sort over (token, interval) pairs, linear in tokens x row tiles, never queries x tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels import layout as lo
from tree_attention_jax._arrays import ragged_arange, ragged_places, ragged_ranges
from tree_attention_jax.topology import TokenTree


def check_cover(buffer: np.ndarray, shape: lo.WorkShape, tree: TokenTree, sliding_window: int | None) -> None:
    """Raise ``AssertionError`` unless the items in ``buffer`` cover exactly what the queries of ``tree`` see."""
    layout = tree.layout
    num_rows = layout.num_rows
    rows = buffer[shape.rows_at : shape.rows_at + num_rows]
    _require((rows == layout.row_query), lambda i: f"row {i} is query {rows[i]}, not {layout.row_query[i]}")
    records = _records(buffer, shape)
    covered = [_covered(buffer, shape, records, masked) for masked in (False, True)]
    slot, low, high, position = (np.concatenate(x) for x in zip(*covered))
    keep = low < high
    slot, low, high, position = slot[keep], low[keep], high[keep], position[keep]

    token = _tokens_of_slots(tree, shape.page_size, slot)
    seen_low, seen_high, true_position = _visible(tree)
    _require(position == true_position[token], lambda i: f"token at slot {slot[i]} has position {position[i]}")
    order = np.lexsort((low, token))
    token, low, high = token[order], low[order], high[order]
    _require(low >= seen_low[token], lambda i: f"row {low[i]} must not see token {_name(tree, token[i])}")
    _require(high <= seen_high[token], lambda i: f"row {high[i] - 1} must not see token {_name(tree, token[i])}")
    same = token[1:] == token[:-1]
    _require(~same | (low[1:] >= high[:-1]), lambda i: f"row {low[i + 1]} sees token {_name(tree, token[i])} twice")
    if sliding_window is None:
        _require(~same | (low[1:] == high[:-1]), lambda i: f"row {high[i]} misses token {_name(tree, token[i])}")
        first, last = np.full_like(seen_low, -1), np.full_like(seen_low, -1)
        first[token[::-1]] = low[::-1]
        last[token] = high
        wanted = seen_low < seen_high
        _require(~wanted | (first == seen_low), lambda i: f"row {seen_low[i]} misses token {_name(tree, i)}")
        _require(~wanted | (last == seen_high), lambda i: f"row {seen_high[i] - 1} misses token {_name(tree, i)}")
    else:
        _check_window(tree, token, low, high, seen_low, seen_high, true_position, sliding_window)
    _check_outputs(buffer, shape, records, num_rows)


def _require(good: np.ndarray, describe) -> None:
    if not np.all(good):
        raise AssertionError(describe(int(np.argmin(good))))


def _name(tree: TokenTree, token: Any) -> str:
    begin = np.cumsum(tree.kv_len) - tree.kv_len
    node = int(np.searchsorted(np.cumsum(tree.kv_len), token, side="right"))
    return f"{token - begin[node]} of node {node}"


def _records(buffer: np.ndarray, shape: lo.WorkShape) -> np.ndarray:
    """All item records, with the index of their launch as one more column."""
    parts = []
    for index, launch in enumerate(shape.launches):
        count = int(buffer[index])
        if count > launch.capacity:
            raise AssertionError(f"launch {index} holds {count} items but has room for {launch.capacity}")
        table = buffer[launch.items_at : launch.items_at + count * lo.ITEM_SIZE].reshape(-1, lo.ITEM_SIZE)
        parts.append(np.column_stack([table, np.full(count, index)]))
    return np.concatenate(parts)


def _covered(buffer: np.ndarray, shape: lo.WorkShape, records: np.ndarray, masked: bool):
    """(slot, first row, end row, position) of every token of every item: what the kernel would let through."""
    size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
    begin = records[:, lo.MASKED_BEGIN if masked else lo.PLAIN_BEGIN]
    count = records[:, lo.MASKED_COUNT if masked else lo.PLAIN_COUNT]
    item, nth = ragged_places(count)
    at = begin[item] + nth * size
    filled = buffer[at + lo.WORD] & lo.COUNT_MASK
    most = np.array([launch.tile.entry_tokens(masked) for launch in shape.launches])[records[:, -1]]
    _require(filled <= most[item], lambda i: f"an entry holds {filled[i]} tokens")
    entry = np.repeat(np.arange(len(at)), filled)
    x = ragged_arange(filled)
    at, item = at[entry], item[entry]
    low = records[item, lo.ROW]
    high = low + records[item, lo.NUM_ROWS]
    if masked:
        seen_from = buffer[at + lo.LOW]
        low = np.maximum(low, np.where(seen_from < 0, ~seen_from + x, seen_from))
        high = np.minimum(high, buffer[at + lo.HIGH])
        _check_halves(buffer[at + lo.WORD], records[item], low, high, shape)
    return (buffer[at + lo.WORD] >> lo.SLOT_SHIFT) + x, low, high, buffer[at + lo.POSITION] + x


def _check_halves(word: np.ndarray, record: np.ndarray, low: np.ndarray, high: np.ndarray, shape: lo.WorkShape) -> None:
    """A half of a wide tile that sees a token is among those that its entry names."""
    halves = np.array([launch.tile.halves(shape.group) for launch in shape.launches])[record[:, -1]]
    first_end, second_begin = (record[:, lo.ROW, None] + halves).T
    missed = (low < first_end) & ((word >> lo.HALVES_SHIFT) & 1 == 0)
    missed |= (high > second_begin) & ((word >> lo.HALVES_SHIFT) & 2 == 0)
    missed &= np.array([launch.tile.rows > lo.HALF for launch in shape.launches])[record[:, -1]]
    _require(~missed | (low >= high), lambda i: f"row {low[i]} sees a token that its half of the tile leaves out")


def _tokens_of_slots(tree: TokenTree, page_size: int, slot: np.ndarray) -> np.ndarray:
    """Index (node order) of the token that owns each slot."""
    owned = tree.token_slots(page_size)
    if not len(owned):
        _require(np.zeros(len(slot), bool), lambda i: f"slot {slot[i]} belongs to no node")
        return slot
    order = np.argsort(owned, kind="stable")
    place = np.minimum(np.searchsorted(owned[order], slot), len(owned) - 1)
    _require(owned[order[place]] == slot, lambda i: f"slot {slot[i]} belongs to no node")
    return order[place]


def _visible(tree: TokenTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that see each token, and its absolute position, straight from the definition."""
    layout = tree.layout
    node = np.repeat(np.arange(tree.num_nodes), tree.kv_len)
    index = ragged_arange(tree.kv_len)
    nth_new = np.maximum(index - (tree.kv_len - tree.q_len)[node], 0)
    return layout.row_begin[node] + nth_new, layout.row_end[node], layout.position[node] + index


def _check_window(tree, token, low, high, seen_low, seen_high, position, window: int) -> None:
    """Rows the cover leaves out must all be outside the window. Expands pairs: for tests."""
    row_position = tree.query_positions()[tree.layout.row_query]
    num_rows = len(row_position)
    owner, row = ragged_ranges(low, high)
    have = np.unique(token[owner].astype(np.int64) * num_rows + row)
    owner, row = ragged_ranges(seen_low, seen_high)
    young = row_position[row] - position[owner] < window
    need = owner[young].astype(np.int64) * num_rows + row[young]
    missing = ~np.isin(need, have)
    _require(~missing, lambda i: f"row {need[i] % num_rows} misses token {_name(tree, need[i] // num_rows)}")


def _check_outputs(buffer: np.ndarray, shape: lo.WorkShape, records: np.ndarray, num_rows: int) -> None:
    """Each row ends in one place: one final item, or partials that its reduction lists once each, in order."""
    item, row = ragged_ranges(records[:, lo.ROW], records[:, lo.ROW] + records[:, lo.NUM_ROWS])
    partial = records[item, lo.PARTIAL]
    final = np.bincount(row[partial < 0], minlength=shape.row_capacity)
    place = (partial + row - records[item, lo.ROW])[partial >= 0]
    query = buffer[shape.rows_at + row[partial >= 0]]
    _require(np.bincount(place, minlength=1) <= 1, lambda i: f"partial {i} is written twice")
    _require(place < shape.partial_rows, lambda i: f"partial {place[i]} lies outside the buffer")
    written = {int(p): int(q) for p, q in zip(place, query)}
    ends = buffer[shape.reduce_at : shape.reduce_at + shape.row_capacity + 1]
    listed, at = ragged_ranges(ends[:-1], ends[1:])
    for query_index, p in zip(listed.tolist(), buffer[at].tolist()):
        if written.pop(p, None) != query_index:
            raise AssertionError(f"the reduction of query {query_index} lists partial {p}, which is not its own")
    if written:
        p, q = next(iter(written.items()))
        raise AssertionError(f"partial {p} of query {q} is never reduced")
    rows = buffer[shape.rows_at : shape.rows_at + num_rows]
    reduced = (ends[1:] > ends[:-1])[rows]
    final = final[:num_rows]
    _require(final + reduced == 1, lambda i: f"row {i} is written {final[i] + reduced[i]} times")
