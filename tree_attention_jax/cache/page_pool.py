"""A fixed pool of K/V pages, shared by reference counts.

The pool hands out page *ids*; the K and V they name live in device arrays that it never touches. Sharing a
page, as a fork or a radix split does, is one more reference and copies nothing.

A reference is either *firm* (somebody reads or writes the page) or *evictable* (a cache keeps it in case it is
needed again). A page whose references are all evictable can be had back on demand, so at any time

    num_free + num_evictable + num_protected == capacity

and `OutOfPages` can tell whether eviction would have helped.
"""

import numpy as np

from tree_attention_jax.cache._checks import as_count, as_ints, check_range


class OutOfPages(RuntimeError):
    """The pool has too few free pages. `needed`, `free` and `evictable` are numbers of pages."""

    def __init__(self, needed, free, evictable):
        self.needed, self.free, self.evictable = needed, free, evictable
        super().__init__(f"{needed} pages needed, {free} free and {evictable} evictable")

    def __reduce__(self):
        return type(self), (self.needed, self.free, self.evictable)


class PagePool:
    """Page ids 0..capacity-1 with reference counts; every operation is O(1) a page and all or nothing.

    Calls take one page id or a sequence of them; an id that occurs twice in a call counts twice.
    """

    def __init__(self, capacity):
        """`capacity`: number of pages, at least 1."""
        self.capacity = as_count("capacity", capacity, minimum=1)
        # A stack whose top is its end; page 0 comes out first.
        self._stack = np.arange(self.capacity, dtype=np.int32)[::-1].copy()
        self._num_free = self.capacity
        self._refs = np.zeros(self.capacity, np.int64)
        self._loose = np.zeros(self.capacity, np.int64)  # how many of the references are evictable
        self._num_evictable = 0

    @property
    def num_free(self):
        return self._num_free

    @property
    def num_evictable(self):
        return self._num_evictable

    @property
    def num_protected(self):
        return self.capacity - self._num_free - self._num_evictable

    def refcount(self, pages):
        """References to each of `pages`, int64 [n]; 0 for a free page."""
        return self._refs[self._ids(pages)]

    def is_evictable(self, pages):
        """For each of `pages`: only evictable references hold it, bool [n]."""
        pages = self._ids(pages)
        return (self._refs[pages] > 0) & (self._refs[pages] == self._loose[pages])

    def alloc(self, n=1):
        """Takes `n` free pages, with one firm reference each: int32 [n].

        Raises `OutOfPages`, having taken nothing, if fewer are free. The pool never evicts by itself.
        """
        n = as_count("n", n)
        if n > self._num_free:
            raise OutOfPages(n, self._num_free, self._num_evictable)
        pages = self._stack[self._num_free - n : self._num_free][::-1].copy()
        self._num_free -= n
        self._refs[pages] = 1
        return pages

    def retain(self, pages):
        """Adds a firm reference to each of `pages`; ValueError if one of them is free."""
        pages, counts = self._counted(pages)
        self._refuse(pages, self._refs[pages] == 0, "retain of page {}, which is free")
        before = self._evictable_among(pages)
        self._refs[pages] += counts
        self._num_evictable += self._evictable_among(pages) - before

    def free(self, pages, evictable=False):
        """Drops a reference to each of `pages`, a firm one or an evictable one; unreferenced pages are free again.

        Returns how many pages became free. ValueError if a page has no such reference left (a double free).
        """
        pages, counts = self._counted(pages)
        refs, loose = self._refs[pages], self._loose[pages]
        kind = "evictable" if evictable else "firm"
        held = loose if evictable else refs - loose
        self._refuse(pages, held < counts, f"free of page {{}}, which has no {kind} reference left (double free?)")
        before = self._evictable_among(pages)
        self._refs[pages] -= counts
        if evictable:
            self._loose[pages] -= counts
        gone = pages[refs == counts]
        self._stack[self._num_free : self._num_free + gone.size] = gone[::-1]
        self._num_free += gone.size
        self._num_evictable += self._evictable_among(pages) - before
        return int(gone.size)

    def mark_evictable(self, pages):
        """Turns one firm reference to each of `pages` into an evictable one."""
        pages, counts = self._counted(pages)
        firm = self._refs[pages] - self._loose[pages]
        self._refuse(pages, firm < counts, "page {} has no firm reference to mark evictable")
        self._shift(pages, counts)

    def mark_protected(self, pages):
        """Turns one evictable reference to each of `pages` into a firm one."""
        pages, counts = self._counted(pages)
        self._refuse(pages, self._loose[pages] < counts, "page {} has no evictable reference to protect")
        self._shift(pages, -counts)

    def check(self):
        """Recounts everything from the reference counts; AssertionError if a total or the free list is off."""
        free = np.sort(self._stack[: self._num_free])
        assert np.array_equal(free, np.flatnonzero(self._refs == 0)), "free list and reference counts disagree"
        assert (np.clip(self._loose, 0, self._refs) == self._loose).all(), "evictable references off"
        evictable = np.count_nonzero((self._refs > 0) & (self._refs == self._loose))
        assert evictable == self._num_evictable, f"{evictable} evictable pages, counted {self._num_evictable}"
        assert self.num_free + self.num_evictable + self.num_protected == self.capacity

    def __repr__(self):
        return (
            f"PagePool(capacity={self.capacity}, free={self.num_free}, evictable={self.num_evictable}, "
            f"protected={self.num_protected})"
        )

    def _ids(self, pages):
        pages = as_ints("pages", pages)
        check_range("pages", pages, 0, self.capacity, "page of this pool")
        return pages

    def _counted(self, pages):
        pages = self._ids(pages)
        if pages.size < 2:
            return pages, np.ones(pages.size, np.int64)
        return np.unique(pages, return_counts=True)

    def _refuse(self, pages, bad, message):
        if bad.any():
            raise ValueError(message.format(pages[np.argmax(bad)]))

    def _evictable_among(self, pages):
        refs = self._refs[pages]
        return int(np.count_nonzero((refs > 0) & (refs == self._loose[pages])))

    def _shift(self, pages, counts):
        before = self._evictable_among(pages)
        self._loose[pages] += counts
        self._num_evictable += self._evictable_among(pages) - before
