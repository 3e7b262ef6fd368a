"""Draft trees for speculative verification, inside a `SequenceTree`.

Draft tokens take the slots right after their leaf's last token, whatever the shape of the tree: the leaf's pages
are extended over all of them first, and each draft node holds a reference of its own to its page. So the accepted
tokens end up in pages that the leaf already has, and accepting can't run out of pages.
"""

import numpy as np

from tree_attention_jax.cache._checks import check_range
from tree_attention_jax.cache.moves import Moves


def check(parents, tokens):
    """ValueError unless `parents` and `tokens` describe a tree of at least one node."""
    if parents.size != tokens.size or not tokens.size:
        raise ValueError(f"parents has {parents.size} entries and tokens {tokens.size}; both need one a node")
    check_range("parents", parents, -1, tokens.size, "draft node, or -1 for the leaf")
    if (late := parents >= np.arange(parents.size)).any():
        at = int(np.argmax(late))
        raise ValueError(f"parents[{at}] is {parents[at]}, but a parent comes before its children")


def split_path(forest, rows):
    """(leaf row, draft rows) of a path to accept, whose leaf may be left out; ValueError if it is none."""
    if not rows.size:
        raise ValueError("path is empty: it starts with the leaf, or with the first accepted node")
    if forest.is_draft[rows[0]]:
        rows = np.concatenate([[forest.parent[rows[0]]], rows])
    leaf, nodes = int(rows[0]), rows[1:]
    if not forest.has_draft[leaf]:
        raise ValueError(f"path starts at {forest.table.handle(leaf)}, which is no leaf with a draft")
    wrong = (forest.parent[nodes] != rows[:-1]) | ~forest.is_draft[nodes]
    if wrong.any():
        node = forest.table.handle(nodes[np.argmax(wrong)])
        raise ValueError(f"path: {node} is no draft node under the one before it")
    if (forest.filled[rows] < forest.tokens.count[rows]).any():
        raise ValueError("path has tokens without K/V: run the model and commit() before accept()")
    return leaf, nodes


def add(forest, leaf, parents, tokens):
    """Adds the draft nodes under row `leaf`, whose pages reach over them; returns their rows."""
    page_size, n = forest.page_size, tokens.size
    slots = int(forest.end_slot(leaf)) + np.arange(n)
    pages = forest.pages[leaf][slots // page_size].copy()
    rows = forest.take(n)
    under = np.where(parents >= 0, rows[parents], leaf)
    forest.hang(rows, under, request=forest.request[leaf], is_draft=True, locks=1)
    np.add.at(forest.pinned_children, under, 1)
    forest.first_slot[rows] = slots % page_size
    one = np.ones(n, np.int64)
    forest.pool.retain(pages)
    forest.pages.extend(rows, one, pages)
    forest.tokens.extend(rows, one, tokens)
    forest.has_draft[leaf] = True
    return rows


def accept(forest, leaf, path):
    """Makes the tokens of draft rows `path` the leaf's own, drops the whole draft, and returns the `Moves`."""
    page_size = forest.page_size
    at = int(forest.end_slot(leaf)) + np.arange(path.size)
    dst = _slots(forest.pages[leaf][at // page_size], at % page_size, page_size)
    src = _slots(forest.pages.last(path), forest.first_slot[path], page_size)
    tokens = forest.tokens.gather(path, np.ones(path.size, np.int64))
    discard(forest, leaf)
    forest.tokens.push(leaf, tokens)
    forest.filled[leaf] += path.size
    forest.drop_pages_after(leaf, -(-int(forest.end_slot(leaf)) // page_size))
    moved = src != dst
    return Moves(src[moved].astype(np.int32), dst[moved].astype(np.int32))


def discard(forest, leaf):
    """Drops the leaf's draft, if it has one."""
    if not forest.has_draft[leaf]:
        return
    draft = _below(forest, leaf)
    forest.has_draft[leaf] = False
    forest.release(draft)
    forest.tail_taken[leaf] = False


def _below(forest, leaf):
    # A draft's rows come after the leaf in the order, and parents before children.
    order = forest.table.order()
    inside = np.zeros(forest.table.capacity, bool)
    inside[leaf] = True
    rows = order[forest.is_draft[order]]
    while True:
        more = rows[inside[forest.parent[rows]] & ~inside[rows]]
        if not more.size:
            return rows[inside[rows]]
        inside[more] = True


def _slots(pages, first, page_size):
    return pages.astype(np.int64) * page_size + first
