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
from tree_attention_jax._arrays import ragged_arange
from tree_attention_jax.topology import TokenTree


def in_larger_pages(tree: TokenTree, page_size: int) -> tuple[TokenTree, int]:
    """The tree over pages of ``MAX_UNIT`` slots, and that page size; both as they are where that is no gain or wrong.

    Pages of 8 slots and more stay: kernels copy 8 slots at once, and a cache need not end with a larger page.
    """
    if math.gcd(page_size, MAX_UNIT) >= SMALLEST_COPY:
        return tree, page_size
    indptr, indices = tree.page_table(page_size)
    counts = np.diff(indptr)
    used = counts > 0
    first = indices[indptr[:-1][used]]
    if not np.array_equal(indices, np.repeat(first, counts[used]) + ragged_arange(counts[used])):
        return tree, page_size
    begin, end = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64)
    begin[used] = first.astype(np.int64) * page_size
    end[used] = begin[used] + counts[used] * page_size
    begin[used] += tree.first_slot[used]
    first_page = begin // MAX_UNIT
    counts = np.where(used, -(-end // MAX_UNIT) - first_page, 0)
    pages = np.repeat(first_page, counts) + ragged_arange(counts)
    place = np.concatenate([[0], np.cumsum(counts)])
    return TokenTree(tree.parent, tree.kv_len, tree.q_len, place, pages, begin % MAX_UNIT), MAX_UNIT
