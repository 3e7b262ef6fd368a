"""A forest as libraries without trees take it: one list of pages a query, one run of pages a level, or one mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.peers import Unsuitable
from tree_attention_jax import TokenTree


@dataclass(frozen=True)
class PageLists:
    """Pages of each sequence, as FlashInfer's wrappers take them."""

    page_size: int
    indptr: np.ndarray
    indices: np.ndarray
    last_page_len: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        pages = np.diff(self.indptr)
        return np.where(pages > 0, (pages - 1) * self.page_size + self.last_page_len, 0)


def is_prefill(tree: TokenTree) -> bool:
    """Whether it is no tree at all: sequences that share nothing, each with some new tokens."""
    return bool((tree.parent < 0).all() and (tree.q_len > 1).all())


def query_slots(tree: TokenTree, page_size: int) -> list[np.ndarray]:
    """The cache slots that each query sees, by position."""
    slots = np.split(tree.token_slots(page_size), np.cumsum(tree.kv_len)[:-1])
    above: list[np.ndarray] = []
    found: list[np.ndarray] = []
    for node, parent in enumerate(tree.parent):
        path = np.concatenate([above[parent], slots[node]]) if parent >= 0 else slots[node]
        above.append(path)
        new = int(tree.q_len[node])
        found += [path[: len(path) - new + 1 + i] for i in range(new)]
    return found


def page_lists(slots: list[np.ndarray], page_size: int) -> PageLists:
    """Sequences of slots as pages, the largest that they fill: all but a sequence's last page must be full.

    A pool with pages of 16 is also one with pages of 8, 4, 2 and 1.
    """
    size = page_size
    while size > 1 and not all(_fills(one, size) for one in slots):
        size //= 2
    pages = [one[::size] // size for one in slots]
    lengths = np.array([len(one) for one in slots])
    return PageLists(
        size,
        np.concatenate([[0], np.cumsum([len(one) for one in pages])]).astype(np.int32),
        np.concatenate(pages).astype(np.int32),
        ((lengths - 1) % size + 1).astype(np.int32),
    )


def _fills(slots: np.ndarray, size: int) -> bool:
    place = np.arange(len(slots))
    first = slots[place // size * size]
    return bool((first % size == 0).all() and (slots == first + place % size).all())


def cascade_levels(tree: TokenTree, page_size: int) -> list[tuple[np.ndarray, PageLists]]:
    """(query indptr, pages of each node) of each level, the root's first."""
    parent, leaf = tree.parent, tree.is_leaf()
    if (tree.q_len != leaf).any():
        raise Unsuitable("a level of a cascade is one node a query: only leaves with one query")
    queries = np.flatnonzero(leaf)
    path = [queries]
    while (path[0] >= 0).any():
        path.insert(0, np.where(path[0] >= 0, parent[path[0]], -1))
    columns = path[1:]
    if any((column < 0).any() for column in columns):
        raise Unsuitable("a cascade needs leaves of equal depth")
    slots = np.split(tree.token_slots(page_size), np.cumsum(tree.kv_len)[:-1])
    levels = []
    for column in columns:
        begin = np.flatnonzero(np.diff(column, prepend=-1))
        nodes = column[begin]
        if len(np.unique(nodes)) < len(nodes):
            raise Unsuitable("a cascade needs the queries below a node side by side")
        indptr = np.append(begin, len(queries)).astype(np.int32)
        levels.append((indptr, page_lists([slots[node] for node in nodes], page_size)))
    sizes = {pages.page_size for _, pages in levels}
    if len(sizes) > 1:
        raise Unsuitable(f"the levels would need pages of different sizes: {sorted(sizes)}")
    return levels


@dataclass(frozen=True)
class Requests:
    """Each root's whole tree as one sequence, and a mask that says which query sees which token."""

    queries: list[np.ndarray]
    slots: list[np.ndarray]
    masks: list[np.ndarray]


def requests(tree: TokenTree, page_size: int) -> Requests:
    """One request a root: its queries, its tokens in node order, and bool [queries, tokens]."""
    root = np.arange(tree.num_nodes)
    for node, parent in enumerate(tree.parent):
        if parent >= 0:
            root[node] = root[parent]
    slots = tree.token_slots(page_size)
    token_root = np.repeat(root, tree.kv_len)
    query_root = root[tree.query_nodes()]
    seen = query_slots(tree, page_size)
    found = Requests([], [], [])
    for one in np.flatnonzero(tree.parent < 0):
        queries, own = np.flatnonzero(query_root == one), slots[token_root == one]
        if len(queries):
            place = np.full(int(slots.max()) + 1, -1)
            place[own] = np.arange(len(own))
            mask = np.zeros((len(queries), len(own)), bool)
            for row, query in enumerate(queries):
                mask[row, place[seen[query]]] = True
            found.queries.append(queries)
            found.slots.append(own)
            found.masks.append(mask)
    return found


def padded(slots: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(slots [B, longest], lengths [B]); padding repeats slot 0."""
    lengths = np.array([len(one) for one in slots], np.int32)
    table = np.zeros((len(slots), int(lengths.max(initial=0))), np.int64)
    for row, one in enumerate(slots):
        table[row, : len(one)] = one
    return table, lengths
