"""From the live nodes of a forest to the arrays of one step.

Nodes are kept parents first and their tokens and pages in ragged rows, so all of this is a handful of NumPy calls
whatever the number of tokens.
"""

import numpy as np


def live_rows(forest):
    """Rows of the nodes that a leaf (or somebody's lock) needs, parents first."""
    rows = forest.table.order()
    return rows[forest.is_pinned(rows)]


def token_tree(forest, horizon, max_q_len):
    """The live nodes as a `TokenTree`, leaves with the pages of `horizon` more tokens."""
    from tree_attention_jax.topology import TokenTree

    rows, q_len = _queries(forest, max_q_len)
    kv_len = forest.filled[rows] + q_len
    place = np.zeros(forest.table.capacity + 1, np.int64)
    place[rows] = np.arange(rows.size)
    place[-1] = -1  # where a root's parent, NO_NODE, looks
    room = kv_len + np.where(forest.is_leaf[rows], horizon, 0)
    pages = np.where(room > 0, -(-(forest.first_slot[rows] + room) // forest.page_size), 0)
    indptr = np.concatenate([[0], np.cumsum(pages)])
    return TokenTree(
        place[forest.parent[rows]],
        kv_len,
        q_len,
        indptr,
        forest.pages.gather(rows, pages),
        np.where(pages > 0, forest.first_slot[rows], 0),
    )


def pending_tokens(forest, max_q_len):
    rows, q_len = _queries(forest, max_q_len)
    return forest.tokens.gather(rows, q_len, skip=forest.filled[rows])


def commit(forest, max_q_len):
    rows, q_len = _queries(forest, max_q_len)
    forest.filled[rows] += q_len


def query_rows(forest, nodes, max_q_len):
    rows, q_len = _queries(forest, max_q_len)
    last = np.full(forest.table.capacity + 1, -1, np.int64)
    last[rows] = np.where(q_len > 0, np.cumsum(q_len) - 1, -1)
    return last[nodes]


def _queries(forest, max_q_len):
    # (live rows, how many pending tokens of each are this step's queries)
    rows = live_rows(forest)
    q_len = forest.tokens.count[rows] - forest.filled[rows]
    if max_q_len is None:
        return rows, q_len
    waits = np.zeros(forest.table.capacity + 1, bool)
    waits[rows] = q_len > max_q_len
    above = waits[forest.parent[rows]]
    while (more := above & ~waits[rows]).any():  # one pass a level of nodes whose ancestors are not through
        waits[rows[more]] = True
        above = waits[forest.parent[rows]]
    return rows, np.where(above, 0, np.minimum(q_len, max_q_len))
