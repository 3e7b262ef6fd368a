"""Small pages side by side, seen as larger ones.

An entry holds tokens of one page, so that a cache with pages of a token would be read by the token. But a node's pages
often lie side by side: always in a cache without a page table, and wherever a prompt was written at once. Then nothing
is lost by another view of the same slots, in pages as long as an entry; nodes next to each other may share one.
"""

from __future__ import annotations

import math

import numpy as np

from pallas_kernels.layout import MAX_UNIT
from pallas_kernels.mosaic_geometry import SMALLEST_COPY
from tree_attention_jax._arrays import ceil_div, exclusive_cumsum, ragged_runs
from tree_attention_jax.topology import TokenTree


def in_larger_pages(tree: TokenTree, page_size: int) -> tuple[TokenTree, int]:
    """The tree over pages of ``MAX_UNIT`` slots, and that page size; both as they are where that is no gain or wrong.

    Pages of 8 slots and more stay: kernels copy 8 slots at once, and a cache need not end with a larger page. One with
    smaller pages must, for Mosaic's kernels: else Triton's run what was planned for them.
    """
    if math.gcd(page_size, MAX_UNIT) >= SMALLEST_COPY:
        return tree, page_size
    indptr = tree.page_offsets(page_size)
    first, counts = indptr[:-1], np.diff(indptr)
    if tree.page_indices is not None:  # else a page's place in the table is its id
        if not len(tree.page_indices):
            return tree, page_size
        first = tree.page_indices.take(first, mode="clip")
        if not np.array_equal(tree.page_indices, ragged_runs(first, counts)):
            return tree, page_size
    begin = first.astype(np.int64) * page_size
    end = begin + counts * page_size
    begin += tree.first_slot
    begin *= counts > 0
    first = begin // MAX_UNIT
    counts = (ceil_div(end, MAX_UNIT) - first) * (counts > 0)
    table = exclusive_cumsum(counts), ragged_runs(first, counts)
    return TokenTree(tree.parent, tree.kv_len, tree.q_len, *table, begin % MAX_UNIT), MAX_UNIT
