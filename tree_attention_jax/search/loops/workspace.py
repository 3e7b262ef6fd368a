"""Room for a loop on the device: a plan over its prompts, and cache slots for what will grow below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tree_attention_jax.cache.reserving import alloc
from tree_attention_jax.planning.plan import TreePlan
from tree_attention_jax.topology import TokenTree

if TYPE_CHECKING:
    from tree_attention_jax.search.decoder import TreeDecoder

__all__ = ["Workspace"]


@dataclass(frozen=True)
class Workspace:
    """A context manager: the pages go back to the pool at its end.

    plan: one query a row. Row i sees the prompt of its leaf, and one token of its own: the K/V of whatever the row
        computes is first written there, since a query always sees itself. So the plan stays the same at every step.
    slots: int32 [capacity], for `TreeState.create(slots=)`.
    prompt_lengths: int32 [rows], tokens of each row's prompt.
    """

    plan: TreePlan
    slots: np.ndarray
    prompt_lengths: np.ndarray
    pages: np.ndarray
    decoder: TreeDecoder

    @classmethod
    def below(cls, decoder: TreeDecoder, leaves: Sequence[int] | np.ndarray, capacity: int) -> Workspace:
        """Room for `capacity` tokens below prefilled leaves, one row for each entry of `leaves` (which may repeat).

        Raises:
            ValueError: a leaf with tokens that have no K/V yet. OutOfPages: nothing has changed then.
        """
        leaves = np.asarray(leaves, np.int64)
        if capacity < 1 or not leaves.size:
            raise ValueError(f"capacity must be at least 1 and leaves not empty, got {capacity} and {leaves.size}")
        page_size = decoder.page_size
        chains, at = _chains(decoder.tree, leaves)
        pages = alloc(decoder.tree.pool, decoder.tree.cache, -(-(leaves.size + capacity) // page_size))
        slots = (pages[:, None].astype(np.int64) * page_size + np.arange(page_size)).reshape(-1)
        try:
            tree = _with_rows(chains, at, slots[: leaves.size], page_size)
            plan = decoder.plan(tree)
        except BaseException:
            decoder.tree.pool.free(pages)
            raise
        prompt_lengths = tree.query_positions().astype(np.int32)
        return cls(plan, slots[leaves.size :].astype(np.int32), prompt_lengths, pages, decoder)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *unused: Any) -> None:
        self.decoder.tree.pool.free(self.pages)


def _chains(tree: Any, leaves: np.ndarray) -> tuple[TokenTree, np.ndarray]:
    """The nodes above and with `leaves`, without queries; and where each leaf is among them."""
    snapshot, handles = tree.snapshot(), tree.nodes()
    order = np.argsort(handles)
    at = order[np.minimum(np.searchsorted(handles, leaves, sorter=order), order.size - 1)]
    if (unknown := handles[at] != leaves).any():
        raise ValueError(f"leaves[{int(np.argmax(unknown))}] is {leaves[np.argmax(unknown)]}, which is not live")
    needed = np.zeros(snapshot.num_nodes, bool)
    needed[at] = True
    for node in range(snapshot.num_nodes - 1, -1, -1):
        if needed[node] and snapshot.parent[node] >= 0:
            needed[snapshot.parent[node]] = True
    if (pending := needed & (snapshot.q_len > 0)).any():
        raise ValueError(f"node {handles[np.argmax(pending)]} has tokens without K/V: forward() computes them")
    place = np.cumsum(needed) - 1
    parent = np.where(snapshot.parent[needed] >= 0, place[snapshot.parent[needed]], -1)
    counts = np.diff(snapshot.page_indptr)
    listed = snapshot.page_indices[np.repeat(needed, counts)]
    indptr = np.concatenate([[0], np.cumsum(counts[needed])])
    kept = TokenTree(
        parent, snapshot.kv_len[needed], np.zeros(len(parent), np.int32), indptr, listed, snapshot.first_slot[needed]
    )
    return kept, place[at]


def _with_rows(chains: TokenTree, at: np.ndarray, slots: np.ndarray, page_size: int) -> TokenTree:
    """One more leaf of one token under each node `at`, in the given slots."""
    ones = np.ones(at.size, np.int64)
    assert chains.page_indptr is not None
    assert chains.page_indices is not None
    return TokenTree(
        np.concatenate([chains.parent, at]),
        np.concatenate([chains.kv_len, ones]),
        np.concatenate([chains.q_len, ones]),
        np.concatenate([chains.page_indptr, chains.page_indptr[-1] + np.cumsum(ones)]),
        np.concatenate([chains.page_indices, slots // page_size]),
        np.concatenate([chains.first_slot, slots % page_size]),
    )
