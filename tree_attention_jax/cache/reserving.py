"""Pages for tokens to come, inside a `SequenceTree`."""

import numpy as np

from tree_attention_jax.cache.node_table import NO_NODE
from tree_attention_jax.cache.page_pool import OutOfPages


def reserve(forest, cache, rows, extra):
    """Gives leaves `rows` the pages for `extra[i]` more tokens each, or raises `OutOfPages` having done nothing.

    A leaf that has no page yet goes on in its parent's last page, if nobody does so already.
    """
    page_size = forest.page_size
    rows, extra = rows[extra > 0], extra[extra > 0]
    claims, slots = _claims(forest, rows)
    have = forest.pages.count[rows] + claims
    need = np.maximum(-(-(forest.end_slot(rows) + slots + extra) // page_size) - have, 0)
    pages = alloc(forest.pool, cache, int(need.sum()))
    claiming = rows[claims]
    if claiming.size:
        parents = forest.parent[claiming]
        shared = forest.pages.last(parents)
        forest.pool.retain(shared)
        forest.pages.extend(claiming, np.ones(claiming.size, np.int64), shared)
        forest.first_slot[claiming] = slots[claims]
        forest.tail_taken[parents] = True
    if pages.size:
        forest.pages.extend(rows, need, pages)


def alloc(pool, cache, n):
    """`n` pages of the pool; evicts from the cache what is missing, if that will do."""
    short = n - pool.num_free
    if short > 0 and cache is not None and pool.num_evictable >= short:
        cache.evict(short)
    return pool.alloc(n)


def check_request(forest, cache, tokens, extra_key, reserve):
    """Raises `OutOfPages` if a request for `tokens` could not have its pages, shared prefix and eviction counted in."""
    pool, page_size = forest.pool, forest.page_size
    cached, slot, evictable = 0, 0, 0
    if cache is not None:
        head = tokens[:-1]
        path, cached, inside = cache.walk(head, extra_key)
        if path and not inside and not forest.tail_taken[path[-1]]:
            slot = int(forest.end_slot(path[-1])) % page_size  # it can go on in the prefix's last page
        evictable = pool.num_evictable - cache.idle_pages(head, extra_key)
    need = -(-(slot + tokens.size - cached + reserve) // page_size) - (slot > 0)
    if need > pool.num_free + evictable:
        raise OutOfPages(need, pool.num_free, evictable)


def _claims(forest, rows):
    # Which rows can start in their parent's last page, bool [n], and at which slot there, int64 [n].
    parents = forest.parent[rows]
    slots = np.where(parents >= 0, forest.end_slot(parents) % forest.page_size, 0)
    claims = (forest.pages.count[rows] == 0) & (slots > 0) & ~forest.tail_taken[parents]
    first = np.zeros(rows.size, bool)
    first[np.unique(np.where(claims, parents, NO_NODE), return_index=True)[1]] = True
    claims &= first  # of siblings, one
    return claims, np.where(claims, slots, 0)
