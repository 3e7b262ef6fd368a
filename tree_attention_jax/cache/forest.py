"""Nodes that own runs of tokens in a `PagePool`: the storage under the prefix cache and the live trees.

A node owns `tokens` whose K and V lie in consecutive slots of its pages, from `first_slot` of the first one on.
Two nodes may own different slots of one page, and then each holds a reference to it; so splitting a node in the
middle of a page, or letting a child go on in its parent's last page, moves no K/V.

Who needs a node is counted locally: `locks` on the node itself and `pinned_children` below it. A node with either
is *pinned*, and so are its ancestors. A node that loses its last pin is removed at once, unless the prefix cache
keeps it (`kept`): then its pages become evictable and it waits in `idle` for eviction.
"""

from collections import OrderedDict

import numpy as np

from tree_attention_jax.cache.node_table import NO_NODE, NodeTable
from tree_attention_jax.cache.ragged import Ragged

_INTEGERS = "parent", "first_slot", "filled", "locks", "pinned_children", "num_children", "child_xor", "request"
_FLAGS = "kept", "is_leaf", "is_draft", "has_draft", "tail_taken"


class Forest:
    """Columns of nodes by row, their tokens and pages, and the operations that keep references and pins right.

    Nothing here checks its arguments: `RadixCache` and `SequenceTree` do, before they change anything.
    """

    parent: np.ndarray
    first_slot: np.ndarray
    filled: np.ndarray  # of the node's tokens, how many have K/V in the pages
    locks: np.ndarray
    pinned_children: np.ndarray
    num_children: np.ndarray
    child_xor: np.ndarray  # of the children's rows: the child itself where there is one only
    request: np.ndarray
    kept: np.ndarray  # by the prefix cache
    is_leaf: np.ndarray  # a live sequence ends here and may grow
    is_draft: np.ndarray
    has_draft: np.ndarray
    tail_taken: np.ndarray  # a child owns the slots after the node's last token

    def __init__(self, pool, page_size):
        self.pool, self.page_size = pool, page_size
        self.table = NodeTable()
        for name in _INTEGERS + _FLAGS:
            setattr(self, name, np.zeros(0, bool if name in _FLAGS else np.int64))
        self.tokens, self.pages = Ragged(), Ragged()
        # Unpinned nodes, least recently used first and every node after all its descendants: so the first is
        # always a leaf, and eviction needs no search.
        self.idle: OrderedDict[int, None] = OrderedDict()

    def take(self, n, before=None):
        """`n` rows that hang nowhere yet, last in the order or (one row) right before row `before`."""
        capacity = self.table.needs_room(n)
        if capacity is not None:
            self._grow(capacity)
        return self.table.take(n, before)

    def hang(self, rows, parents, **columns):
        """Makes taken `rows` nodes under rows `parents` (NO_NODE for roots), without tokens, pages and pins."""
        for name in _INTEGERS + _FLAGS:
            getattr(self, name)[rows] = columns.get(name, 0)
        self.parent[rows] = parents
        below = self.parent[rows] >= 0
        rows, parents = rows[below], self.parent[rows][below]
        np.add.at(self.num_children, parents, 1)
        np.bitwise_xor.at(self.child_xor, parents, rows)

    def new_node(self, parent, **columns):
        """One more node under row `parent`."""
        rows = self.take(1)
        self.hang(rows, parent, **columns)
        return int(rows[0])

    def end_slot(self, rows):
        """Slots from the start of the first page to the end of the last token."""
        return self.first_slot[rows] + self.tokens.count[rows]

    def is_pinned(self, rows):
        return (self.locks[rows] > 0) | (self.pinned_children[rows] > 0)

    def hold(self, row):
        """Adds a lock; protects the node and its ancestors as far as they were not."""
        was = self.is_pinned(row)
        self.locks[row] += 1
        if not was:
            self._now_pinned(row)

    def release(self, rows):
        """Drops a lock of each of `rows` (different ones).

        What nothing pins any more is removed, or made evictable where kept. Returns the rows that lost a child to
        that and live on.
        """
        self.locks[rows] -= 1
        rows, bereft = rows[~self.is_pinned(rows)], []
        while rows.size:
            parents = self.parent[rows]
            kept = self.kept[rows]
            for row in rows[kept].tolist():
                self.pool.mark_evictable(self.pages[row])
                self.idle[row] = None
            self.remove(rows[~kept])
            parents = parents[parents >= 0]
            np.subtract.at(self.pinned_children, parents, 1)
            parents = np.unique(parents)
            bereft.append(parents)
            rows = parents[~self.is_pinned(parents)]
        if not bereft:
            return rows
        above = np.unique(np.concatenate(bereft))
        return above[self.table.alive[above] & self.is_pinned(above)]

    def keep(self, row):
        """The node outlives its last pin from now on."""
        self.kept[row] = True
        if not self.is_pinned(row):
            self.pool.mark_evictable(self.pages[row])
            self.idle[int(row)] = None

    def touch(self, path):
        """Marks a root-to-node path as just used."""
        for row in reversed(path):
            if row in self.idle:
                self.idle.move_to_end(row)

    def remove(self, rows, idle=False):
        """Removes unpinned nodes without children, all `idle` or none, and drops their pages: how many got free."""
        parents = self.parent[rows]
        below = parents >= 0
        kids, parents = rows[below], parents[below]
        self.tail_taken[parents[self.continues(kids, parents)]] = False
        np.subtract.at(self.num_children, parents, 1)
        np.bitwise_xor.at(self.child_xor, parents, kids)
        freed = self.pool.free(self.pages.gather(rows, self.pages.count[rows]), evictable=idle)
        self.tokens.clear(rows)
        self.pages.clear(rows)
        self.table.give(rows)
        return freed

    def continues(self, rows, parents):
        """Whether nodes start in the slot right after their parents' last token, inside the same page."""
        slots = self.end_slot(parents) % self.page_size
        may = (slots > 0) & (self.first_slot[rows] == slots) & (self.pages.count[rows] > 0)
        may[may] = self.pages.first(rows[may]) == self.tail_pages(parents[may])
        return may

    def tail_pages(self, rows):
        """The page that holds the slot after the last token, where that is not the first of a page."""
        return self.pages.at(rows, self.end_slot(rows) // self.page_size)

    def split(self, row, k):
        """Cuts a node after its first `k` tokens; moves no K/V. The rest keeps the row. Returns the upper row."""
        parent = self.parent[row]
        columns = {name: getattr(self, name)[row] for name in ("first_slot", "request", "kept")}
        upper = self.take(1, before=row)
        self.hang(upper, NO_NODE, **columns)
        upper = int(upper[0])
        pinned, page_size = self.is_pinned(row), self.page_size
        cut = int(self.first_slot[row]) + k
        pages = self.pages[row]
        if cut % page_size:
            shared = pages[cut // page_size : cut // page_size + 1]
            self.pool.retain(shared)
            if not pinned:
                self.pool.mark_evictable(shared)
        self.pages.push(upper, pages[: -(-cut // page_size)].copy())
        self.tokens.push(upper, self.tokens[row][:k].copy())
        self.pages.drop_front(row, cut // page_size)
        self.tokens.drop_front(row, k)
        self.first_slot[row] = cut % page_size
        self.filled[upper] = min(self.filled[row], k)
        self.filled[row] -= self.filled[upper]
        self._link(upper, parent, instead_of=row)
        self._link(row, upper)
        self.pinned_children[upper] = pinned
        self.tail_taken[upper] = cut % page_size != 0
        if not pinned:
            self.idle[upper] = None
        return upper

    def join_only_child(self, row):
        """Makes one node of `row` and its only child where the child's slots go on from its own, else does nothing.

        The child keeps its row, so that handles to a leaf stay valid. Only for nodes that the cache does not keep.
        """
        if self.num_children[row] != 1 or self.locks[row] or self.kept[row] or self.is_leaf[row]:
            return
        child = int(self.child_xor[row])
        pages = self.pages[child].copy()
        if self.continues(np.array([child]), np.array([row]))[0]:
            self.pool.free(pages[:1])
            pages = pages[1:]
        elif pages.size and (self.end_slot(row) % self.page_size or self.first_slot[child]):
            return  # the child lies elsewhere, as where a sibling went on in the parent's last page
        tokens = self.tokens[child].copy()
        for store, values in (self.pages, pages), (self.tokens, tokens):
            store.push(row, values)
            store.take_over(child, row)
        self.first_slot[child] = self.first_slot[row]
        self.filled[child] += self.filled[row]
        self._link(child, self.parent[row], instead_of=row)
        self.table.give(np.array([row]))

    def move_under(self, row, parent):
        """Hangs a pinned node, with everything below it, under another node."""
        old = self.parent[row]
        if not self.is_pinned(parent):
            self._now_pinned(parent)
        self._link(row, parent)
        self.pinned_children[parent] += 1
        if self.table.comes_before(row, parent):
            self._reorder_by_depth()
        if old >= 0:
            self.num_children[old] -= 1
            self.child_xor[old] ^= row
            self.pinned_children[old] -= 1
            self.locks[old] += 1
            self.release(np.array([old]))

    def drop_front(self, row, k):
        """Gives up the first `k` tokens of a node that is not idle, and the pages that only they used."""
        cut = int(self.first_slot[row]) + k
        self.pool.free(self.pages[row][: cut // self.page_size])
        self.pages.drop_front(row, cut // self.page_size)
        self.tokens.drop_front(row, k)
        self.first_slot[row] = cut % self.page_size
        self.filled[row] -= k

    def drop_pages_after(self, row, num_pages, evictable=False):
        """Keeps a node's first `num_pages` pages. Returns how many pages became free."""
        freed = self.pool.free(self.pages[row][num_pages:], evictable)
        self.pages.truncate(row, num_pages)
        return freed

    def path(self, row):
        """Rows from the root to `row`."""
        rows = []
        while row >= 0:
            rows.append(int(row))
            row = self.parent[row]
        return rows[::-1]

    def children(self, row):
        rows = self.table.order()
        return rows[self.parent[rows] == row]

    def depth(self):
        """Ancestors of each row in use, int64 by row (anything elsewhere)."""
        depth = np.zeros(self.table.capacity, np.int64)
        rows = self.table.order()
        above = self.parent[rows]
        while (above >= 0).any():  # one NumPy pass a level
            depth[rows] += above >= 0
            above = np.where(above >= 0, self.parent[above], NO_NODE)
        return depth

    def _grow(self, capacity):
        extra = capacity - self.table.capacity
        for name in _INTEGERS + _FLAGS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(extra, column.dtype)]))
        self.tokens.grow(capacity)
        self.pages.grow(capacity)
        self.table.grow(capacity)

    def _now_pinned(self, row):
        # `row` just got its first pin: protect its pages, and pin the ancestors that had none.
        while True:
            if row in self.idle:
                self.pool.mark_protected(self.pages[row])
                del self.idle[row]
            parent = self.parent[row]
            if parent < 0:
                return
            was = self.is_pinned(parent)
            self.pinned_children[parent] += 1
            if was:
                return
            row = int(parent)

    def _link(self, row, parent, instead_of=None):
        # Hangs a node without touching pins; `instead_of` is the child of `parent` whose place is taken.
        self.parent[row] = parent
        if parent >= 0:
            self.child_xor[parent] ^= row if instead_of is None else row ^ instead_of
            self.num_children[parent] += instead_of is None

    def _reorder_by_depth(self):
        rows = self.table.order().copy()
        self.table.reorder(rows[np.argsort(self.depth()[rows], kind="stable")])
