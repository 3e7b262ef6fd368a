"""From a serving engine's block tables to a forest: sequences that begin with the same pages share nodes.

Sort the sequences by their page ids; sequences with a common beginning are then neighbours, and the length
of what two neighbours share decides where the nodes split (the suffix-array view of a radix tree).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tree_attention_jax._arrays import as_int_vector, ceil_div, exclusive_cumsum


class _Span(NamedTuple):
    """A node under construction: tokens [begin, end) of ``sequence``, which every member shares."""

    parent: int
    sequence: int
    begin: int
    end: int
    members: tuple[int, int]  # range of ranks in sorted order


def tree_arrays_from_block_tables(block_tables: Any, kv_lens: Any, q_lens: Any, page_size: int) -> tuple:
    """Arguments for ``TokenTree``: parent, kv_len, q_len, page_indptr, page_indices, first_slot."""
    tables, kv, q = _validated(block_tables, kv_lens, q_lens, page_size)
    ranked, shared = _sort_by_prefix(tables, kv, page_size)
    spans = _split(ranked, shared, kv)
    owner, q_len = _assign_queries(spans, ranked, kv - q, kv)
    order = _query_order(spans, owner)
    place = np.empty(len(spans), np.int64)
    place[order] = np.arange(len(spans))
    parent, kv_len, new, first_slot, pages = [], [], [], [], []
    for index in order:
        span = spans[index]
        parent.append(-1 if span.parent < 0 else place[span.parent])
        kv_len.append(span.end - span.begin)
        new.append(q_len[index])
        empty = span.end == span.begin
        first_slot.append(0 if empty else span.begin % page_size)
        first_page = span.begin // page_size
        pages.append(tables[span.sequence, first_page : first_page if empty else ceil_div(span.end, page_size)])
    parents = np.array(parent, np.int64)
    _check_batch_order(parents, [owner[index] for index in order])
    indptr = exclusive_cumsum(np.array([len(p) for p in pages], np.int64))
    indices = np.concatenate(pages) if pages else np.zeros(0, np.int32)
    return parents, np.array(kv_len, np.int64), np.array(new, np.int64), indptr, indices, np.array(first_slot, np.int64)


def _validated(block_tables: Any, kv_lens: Any, q_lens: Any, page_size: int):
    tables = np.asarray(block_tables)
    if tables.ndim != 2:
        raise ValueError(f"block_tables has shape {tables.shape}: it must be [batch, max_pages]")
    if tables.dtype.kind not in "iu":
        raise TypeError(f"block_tables has dtype {tables.dtype}: it must hold integers")
    if not isinstance(page_size, int | np.integer) or page_size < 1:
        raise ValueError(f"page_size is {page_size!r}: it must be a positive integer")
    kv = as_int_vector("kv_lens", kv_lens, len(tables))
    q = as_int_vector("q_lens", q_lens, len(tables))
    for i in range(len(tables)):
        if kv[i] < 0:
            raise ValueError(f"kv_lens[{i}] is {kv[i]}: it must not be negative")
        if not 0 <= q[i] <= kv[i]:
            raise ValueError(f"q_lens[{i}] is {q[i]}: it must lie in 0..kv_lens[{i}], which is {kv[i]}")
        need = ceil_div(int(kv[i]), page_size)
        if need > tables.shape[1]:
            raise ValueError(
                f"block_tables has {tables.shape[1]} pages a sequence but kv_lens[{i}] = {kv[i]} needs {need} of "
                f"{page_size}"
            )
    used = np.arange(tables.shape[1]) < ceil_div(kv, page_size)[:, None]
    bad = used & ((tables < 0) | (tables >= 2**31))
    if bad.any():
        i, j = np.argwhere(bad)[0]
        raise ValueError(f"block_tables[{i}, {j}] is {tables[i, j]}: a page in use must be a page id of at least 0")
    return np.where(used, tables, -1).astype(np.int32), kv, q


def _sort_by_prefix(tables: np.ndarray, kv: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences in prefix order, and how many leading tokens each shares with the one before it."""
    batch, width = tables.shape
    # Big-endian bytes compare like the integers do, so one argsort over opaque rows is a lexicographic sort. The
    # length goes last: of two sequences on the same pages the shorter is the prefix. Free entries (0) sort first.
    keys = np.empty((batch, width + 1), ">u4")
    keys[:, :-1] = tables + 1
    keys[:, -1] = kv
    ranked = np.argsort(np.ascontiguousarray(keys).view(f"V{4 * (width + 1)}").ravel(), kind="stable")
    rows = tables[ranked]
    same = (rows[1:] == rows[:-1]) & (rows[1:] >= 0)
    pages = np.where(same.all(axis=1), width, np.argmin(same, axis=1)) if width else np.zeros(max(batch - 1, 0), int)
    lengths = kv[ranked]
    shared = np.minimum(np.minimum(lengths[1:], lengths[:-1]), pages * page_size)
    return ranked, np.concatenate(([0], shared)) if batch else np.zeros(0, np.int64)


def _split(ranked: np.ndarray, shared: np.ndarray, kv: np.ndarray) -> list[_Span]:
    """The radix tree of the sorted sequences, one node a run of tokens with the same set of sequences."""
    spans: list[_Span] = []

    def grow(low: int, high: int, begin: int, parent: int) -> None:
        stack = [(low, high, begin, parent)]
        while stack:
            low, high, begin, parent = stack.pop()
            end = int(kv[ranked[low]])  # the first in prefix order is the shortest of its prefix class
            if high - low > 1:
                end = min(end, int(shared[low + 1 : high].min()))
            if end > begin or (high - low == 1 and end == 0):
                spans.append(_Span(parent, int(ranked[low]), begin, end, (low, high)))
                parent = len(spans) - 1
            while low < high and kv[ranked[low]] == end:
                low += 1  # sequences that end here have no further node
            cuts = [i for i in range(low + 1, high) if shared[i] == end]
            edges = [low, *cuts, high]
            stack.extend((a, b, end, parent) for a, b in pairwise(edges) if a < b)

    low = 0
    for high in range(1, len(ranked) + 1):
        if high == len(ranked) or shared[high] == 0:
            grow(low, high, 0, -1)
            low = high
    return spans


def _assign_queries(spans: list[_Span], ranked: np.ndarray, old: np.ndarray, kv: np.ndarray):
    """Which sequence's new tokens each node holds (-1: none), and how many."""
    owner = np.full(len(spans), -1, np.int64)
    q_len = np.zeros(len(spans), np.int64)
    for index, span in enumerate(spans):
        members = ranked[span.members[0] : span.members[1]]
        if span.begin == span.end:
            owner[index] = members[0]
            continue
        writers = members[old[members] < span.end]
        if len(writers) > 1:
            a, b = sorted(writers[:2].tolist())
            slot = max(span.begin, int(old[[a, b]].max()))
            raise ValueError(
                f"block_tables: sequences {a} and {b} would both write their token {slot} to the same slot; "
                f"new tokens need pages of their own"
            )
        if len(writers):
            owner[index] = writers[0]
            q_len[index] = span.end - max(span.begin, int(old[writers[0]]))
    return owner, q_len


def _query_order(spans: list[_Span], owner: np.ndarray) -> list[int]:
    """Nodes so that parents come first and queries follow the batch.

    A node without queries takes the place of the nearest ancestor that has some, just after it.
    """
    keys: list[tuple] = []
    for index, span in enumerate(spans):
        above = keys[span.parent] if span.parent >= 0 else (-1, 0, 0)
        if owner[index] >= 0:
            keys.append((int(owner[index]), 0, span.begin))
        else:
            keys.append((above[0], 1, span.begin))
    return sorted(range(len(spans)), key=keys.__getitem__)


def _check_batch_order(parent: np.ndarray, owner: list) -> None:
    for node, above in enumerate(parent):
        if above >= node:
            raise ValueError(
                f"block_tables: sequence {owner[above]} is the beginning of sequence {owner[node]} and still has new "
                f"tokens, so it must come before it in the batch"
            )
