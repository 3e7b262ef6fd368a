"""Rows for the nodes of a forest: allocation, handles, and a parents-first order kept up to date.

A *row* is where a node sits in the arrays and is used again after the node is gone. A *handle* is what callers
hold: it carries the row's generation, so a handle kept too long is an error, never somebody else's node.
"""

import numpy as np

NO_NODE = -1
_ROW_BITS = 32


class NodeTable:
    """Allocates rows and keeps them in an order in which every parent comes before its children.

    A new node goes to the end of the order and a removed one leaves a hole, so both are O(1); only a split,
    which puts a node before an existing one, shifts the rest (one memmove).
    """

    def __init__(self):
        self.capacity = 0
        self.alive = np.zeros(0, bool)
        self.generation = np.zeros(0, np.int64)
        self._free = []
        self._order = np.zeros(16, np.int64)  # rows, NO_NODE for a hole
        self._order_end = 0
        self._place = np.zeros(0, np.int64)  # where in the order a row is
        self.num_alive = 0

    def needs_room(self, n):
        """The capacity to grow to before `take(n)`, or None."""
        short = n - len(self._free)
        return None if short <= 0 else max(16, 2 * self.capacity, self.capacity + short)

    def grow(self, capacity):
        extra = capacity - self.capacity
        self.alive = np.concatenate([self.alive, np.zeros(extra, bool)])
        self.generation = np.concatenate([self.generation, np.zeros(extra, np.int64)])
        self._place = np.concatenate([self._place, np.zeros(extra, np.int64)])
        self._free.extend(range(capacity - 1, self.capacity - 1, -1))
        self.capacity = capacity

    def take(self, n, before=None):
        """`n` free rows, int64 [n], last in the order (or, one row only, right before row `before`)."""
        rows = np.array(self._free[: -n - 1 : -1], np.int64)
        del self._free[len(self._free) - n :]
        self.alive[rows] = True
        self.num_alive += n
        if before is None:
            self._place_last(rows)
        else:
            self._place_before(rows[0], before)
        return rows

    def give(self, rows):
        """Frees rows; handles to them go stale."""
        self.alive[rows] = False
        self.generation[rows] += 1
        self.num_alive -= rows.size
        self._order[self._place[rows]] = NO_NODE
        self._free.extend(rows.tolist())

    def order(self):
        """All rows in use, parents first, int64 [num_alive]."""
        if self.num_alive < self._order_end:
            self._close_holes()
        return self._order[: self._order_end]

    def reorder(self, rows):
        """Sets the whole order, to a permutation of what it was."""
        self._order[: rows.size] = rows
        self._order_end = rows.size
        self._place[rows] = np.arange(rows.size)

    def comes_before(self, row, other):
        return bool(self._place[row] < self._place[other])

    def handles(self, rows):
        """Handles of rows, int64; NO_NODE stays NO_NODE."""
        rows = np.asarray(rows, np.int64)
        return np.where(rows < 0, rows, self.generation[rows] << _ROW_BITS | rows)

    def handle(self, row):
        return int(self.generation[row]) << _ROW_BITS | int(row) if row >= 0 else NO_NODE

    def rows(self, handles):
        """Rows of handles, NO_NODE for what is not a node (any more)."""
        rows = handles & ((1 << _ROW_BITS) - 1)
        known = (handles >= 0) & (rows < self.capacity)
        rows = np.where(known, rows, 0)
        if self.capacity == 0:
            return rows + NO_NODE
        known &= self.alive[rows] & (self.generation[rows] == handles >> _ROW_BITS)
        return np.where(known, rows, NO_NODE)

    def _place_last(self, rows):
        end = self._order_end + rows.size
        if end > self._order.size:
            self._close_holes()
            end = self._order_end + rows.size
            if 2 * end > self._order.size:
                self._order = np.concatenate([self._order, np.zeros(2 * end, np.int64)])
        self._order[self._order_end : end] = rows
        self._place[rows] = np.arange(self._order_end, end)
        self._order_end = end

    def _place_before(self, row, before):
        self._place_last(np.array([row]))
        at, end = self._place[before], self._order_end
        self._order[at + 1 : end] = self._order[at : end - 1]
        self._order[at] = row
        moved = self._order[at:end]
        used = moved >= 0
        self._place[moved[used]] = np.arange(at, end)[used]

    def _close_holes(self):
        self.reorder(self._order[: self._order_end][self._order[: self._order_end] >= 0].copy())
