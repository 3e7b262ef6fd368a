"""Rows of integers of any length in one array: how nodes keep their tokens and their pages.

Appending is amortised O(1) a value, and gathering many rows (a snapshot's page table) is a single NumPy index
instead of a Python loop over nodes.
"""

import numpy as np


class Ragged:
    """int32 rows in one growing buffer. `count[row]` is the length of a row; rows start empty.

    A view that `ragged[row]` returns is valid until the next change.
    """

    def __init__(self, num_rows=0):
        self.count = np.zeros(num_rows, np.int64)
        self._start = np.zeros(num_rows, np.int64)
        self._room = np.zeros(num_rows, np.int64)
        self._data = np.zeros(256, np.int32)
        self._end = 0

    def grow(self, num_rows):
        """Makes room for `num_rows` rows."""
        extra = num_rows - self.count.size
        self.count, self._start, self._room = (
            np.concatenate([x, np.zeros(extra, np.int64)]) for x in (self.count, self._start, self._room)
        )

    def __getitem__(self, row):
        start = self._start[row]
        return self._data[start : start + self.count[row]]

    def at(self, rows, i):
        """Value `i[n]` of `rows[n]`, for each n."""
        return self._data[self._start[rows] + i]

    def first(self, rows):
        """The first value of each of `rows`, none of them empty."""
        return self.at(rows, 0)

    def last(self, rows):
        """The last value of each of `rows`, none of them empty."""
        return self.at(rows, self.count[rows] - 1)

    def extend(self, rows, counts, values):
        """Appends `counts[i]` of `values`, in order, to `rows[i]`; the rows differ."""
        self._make_room(rows, counts)
        self._data[spans(self._start[rows] + self.count[rows], counts)] = values
        self.count[rows] += counts

    def push(self, row, values):
        """Appends `values` to one row."""
        n, count = len(values), self.count[row]
        if count + n > self._room[row]:
            self._make_room(np.array([row]), np.array([n]))
        start = self._start[row] + count
        self._data[start : start + n] = values
        self.count[row] = count + n

    def truncate(self, row, n):
        """Keeps the first `n` values of a row."""
        self.count[row] = n

    def drop_front(self, row, n):
        """Drops the first `n` values of a row."""
        self._start[row] += n
        self._room[row] -= n
        self.count[row] -= n

    def clear(self, rows):
        self.count[rows] = self._room[rows] = 0

    def take_over(self, row, other):
        """Row `row` becomes row `other`, which becomes empty; nothing is copied."""
        for x in (self._start, self._room, self.count):
            x[row] = x[other]
        self.clear(other)

    def gather(self, rows, counts, skip=0):
        """`counts[i]` values of each of `rows`, from value `skip[i]` on, one after the other."""
        return self._data[spans(self._start[rows] + skip, counts)]

    def _make_room(self, rows, extra):
        short = self.count[rows] + extra > self._room[rows]
        if not short.any():
            return
        room = np.maximum(2 * (self.count[rows] + extra), 4)
        if self._end + room[short].sum() > self._data.size:
            self._compact(int(room.sum()))
            short = extra > 0  # compaction took all spare room away
        rows, room = rows[short], room[short]
        counts, ends = self.count[rows], self._end + np.cumsum(room)
        self._data[spans(ends - room, counts)] = self._data[spans(self._start[rows], counts)]
        self._start[rows], self._room[rows] = ends - room, room
        self._end = int(ends[-1])

    def _compact(self, room):
        # Two thirds of the new buffer are free, so the next compaction is that many appends away.
        counts = self.count
        used = int(counts.sum())
        data = np.zeros(max(256, 3 * (used + room)), np.int32)
        data[:used] = self._data[spans(self._start, counts)]
        self._start = np.cumsum(counts) - counts
        self._room = counts.copy()
        self._data, self._end = data, used


def spans(starts, counts):
    """The integers starts[i] .. starts[i] + counts[i] - 1, one span after the other, int64."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) + np.repeat(starts - (ends - counts), counts)
