"""What a strategy is told: the forest, its depth-first layout, and the attention it is for."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from pallas_kernels.layout import MAX_UNIT
from tree_attention_jax._arrays import any_of
from tree_attention_jax._layout import Layout
from tree_attention_jax.planning.profile import GpuProfile
from tree_attention_jax.topology import TokenTree


@dataclass(frozen=True)
class Heads:
    """Head counts and widths of one attention; ``itemsize`` is bytes of a K/V element."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def token_bytes(self) -> int:
        """K and V of one token, all heads."""
        return (self.head_dim + self.v_head_dim) * self.itemsize * self.num_kv_heads

    @property
    def partial_bytes(self) -> int:
        """One query's partial, all heads, written and read again: float32 (its log-sum-exp is not counted)."""
        return 8 * self.num_q_heads * self.v_head_dim


@dataclass(eq=False)  # frozen ones take three times as long to make
class Problem:
    """One planning task.

    ``tree`` and ``page_size`` are the caller's; or, where small pages lie side by side, the same slots in larger pages
    (:mod:`._larger_pages`). ``cache_page_size`` and ``num_pages``, pages that the cache must have at least, are not.
    """

    tree: TokenTree
    layout: Layout
    page_size: int
    cache_page_size: int
    num_pages: int
    heads: Heads
    horizon: int
    sliding_window: int | None
    profile: GpuProfile
    mosaic: bool = True  # whether tiles may be for Mosaic's kernels

    @functools.cached_property
    def first_page(self) -> np.ndarray:
        """Where each node's pages begin in the forest's page table."""
        return self.tree.page_offsets(self.page_size)

    def slots(self, first_page: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Cache slots: of each, where its node's pages begin in the table, and its place among their slots."""
        if self.tree.page_indices is None:  # a page's place in the table is its id
            return first_page * self.page_size + place
        page = place // self.page_size
        slots = self.tree.page_indices.take(first_page + page)
        slots -= page
        slots *= self.page_size
        slots += place
        return slots

    @functools.cached_property
    def unit(self) -> int:
        """Tokens an entry holds at most, a power of two. It divides the page size, so no entry crosses a page."""
        return math.gcd(self.page_size, MAX_UNIT)

    def unit_for(self, begin: np.ndarray, tokens: np.ndarray) -> int:
        """Tokens an entry holds for runs of so many tokens that begin at such slots: ``unit``, or 1 if that pads many.

        64 one-token draft nodes side by side in a page would take 64 entries of 16, one token in each. One of two
        values, because each compiles programs of its own.
        """
        unit, total = self.unit, int(np.add.reduce(tokens))
        within = self.tree.page_indices is not None and any_of(begin)
        if total >= (1 + within) * unit * np.count_nonzero(tokens):
            return unit  # long runs: their ends pad less than they hold, if they begin within an entry both ends do
        # Powers of two: bits are picked and shifted in a fraction of the time that divisions take.
        slots = tokens + (unit - 1)
        if within:
            slots += (begin & (unit - 1)) * (tokens > 0)
        slots >>= unit.bit_length() - 1
        return 1 if pads_many(unit * int(np.add.reduce(slots)), total) else unit


def pads_many(slots: int, tokens: int) -> bool:
    """Whether entries of so many slots are too many for so many tokens: then they hold a token each."""
    return slots > 2 * tokens
