"""A prefix cache over token ids: the radix tree of SGLang, to the token.

Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024 (RadixAttention). Different
here: edges split in the middle of a page, because a node is (page, first slot, length) and nodes may share a page;
so the hit is as long as the common prefix whatever the page size, and no K/V moves.

Only tokens whose K/V is in the pages are ever inserted: reserve pages with `pool.alloc`, run the prefill, then
`insert`. A prefill that is abandoned half way frees its pages and leaves nothing that could match.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tree_attention_jax.cache._checks import as_count, as_ints, as_tokens
from tree_attention_jax.cache.forest import Forest
from tree_attention_jax.cache.node_table import NO_NODE


class Match(NamedTuple):
    """The longest cached prefix: `length` tokens, ending exactly at `node` (-1 where nothing matched)."""

    node: int
    length: int


class CachedRun(NamedTuple):
    """Where a node's tokens lie: `length` slots of `pages` (int32), from `first_slot` of the first one on."""

    parent: int
    tokens: np.ndarray
    pages: np.ndarray
    first_slot: int
    length: int


@dataclass
class CacheStatistics:
    """Counts since the cache was made."""

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    inserted_tokens: int = 0
    evicted_tokens: int = 0
    evicted_pages: int = 0
    evictions: int = 0  # nodes that lost tokens

    @property
    def hit_rate(self):
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


class RadixCache:
    """Longest-prefix matching over cached token sequences, with locks, LRU eviction and namespaces.

    Nodes are named by integer handles; a handle keeps naming the *end* of its node when a later call splits it.
    Every method raises before it changes anything.
    """

    def __init__(self, pool, page_size, vocab_size=None):
        """
        pool: the `PagePool` that the pages come from; the cache holds references of its own to them.
        page_size: token slots in a page, at least 1.
        vocab_size: token ids are below it (None: any int32).
        """
        self.pool = pool
        self.page_size = as_count("page_size", page_size, minimum=1)
        self.vocab_size = vocab_size
        self.statistics = CacheStatistics()
        self.forest = Forest(pool, self.page_size)
        self.has_sequences = False  # a SequenceTree lives in this forest
        self._index = {}  # (row, or a namespace's root key; first token) -> the child's row
        self._root_keys = {}  # root row -> its namespace's root key
        self._external_locks = {}  # row -> locks taken by `lock`

    def match_prefix(self, tokens, extra_key=None):
        """Finds the longest cached prefix of `tokens` [n] and marks it as just used.

        An edge that matches in part is split there. Lock the node before anything else may evict.
        extra_key: namespace, any hashable; prefixes match within one namespace only (a LoRA adapter's name, say).
        """
        tokens = as_tokens("tokens", tokens, self.vocab_size)
        path, length = self.match_rows(tokens, extra_key)
        self.statistics.queries += 1
        self.statistics.query_tokens += tokens.size
        self.statistics.hit_tokens += length
        return Match(self.forest.table.handle(path[-1]) if path else NO_NODE, length)

    def insert(self, tokens, pages, start=0, first_slot=0, extra_key=None):
        """Caches `tokens` [n]; their K/V must be in the pages already.

        pages: page ids whose slots hold the K/V of tokens[start:], from slot `first_slot` of the first one on.
        start: how many tokens to leave out at the front, because they are cached (a match, kept locked meanwhile).

        Returns the `Match` of what had been cached before, at the node where all of `tokens` end now. The cache
        adds references of its own for what is new; the caller's stay the caller's to free, duplicates included.
        ValueError if fewer than `start` tokens are cached or `pages` are too few or free.
        """
        tokens = as_tokens("tokens", tokens, self.vocab_size)
        pages = as_ints("pages", pages)
        start, first_slot = as_count("start", start), as_count("first_slot", first_slot)
        self._check_insert(tokens, pages, start, first_slot)
        _, cached, _ = self.walk(tokens, extra_key)
        if cached < start:
            raise ValueError(f"start is {start}, but only {cached} of these tokens are cached")
        first, last = first_slot + cached - start, first_slot + tokens.size - start
        pages = pages[first // self.page_size : -(-last // self.page_size)] if cached < tokens.size else pages[:0]
        self.pool.retain(pages)  # the last thing that can fail
        path, _ = self.match_rows(tokens, extra_key)
        if cached < tokens.size:
            path.append(self._add_child(path, extra_key, tokens[cached:], pages, first % self.page_size))
            self.forest.touch(path)
        return Match(self.forest.table.handle(path[-1]) if path else NO_NODE, cached)

    def lock(self, node):
        """Protects a node and its ancestors from eviction, once more. Node -1, the empty prefix, needs no lock."""
        if node == NO_NODE:
            return
        row = self._row(node)
        self._external_locks[row] = self._external_locks.get(row, 0) + 1
        self.forest.hold(row)

    def unlock(self, node):
        """Undoes one `lock` of this node; ValueError if there is none left."""
        if node == NO_NODE:
            return
        row = self._row(node)
        count = self._external_locks.get(row, 0)
        if count == 0:
            raise ValueError(f"node {node} is not locked")
        self._external_locks[row] = count - 1
        if count == 1:
            del self._external_locks[row]
        self.forest.release(np.array([row]))

    def evict(self, n):
        """Frees at least `n` pages, or all that can be; returns how many.

        Least recently used first, leaf by leaf, and of the last leaf only as much of its end as is needed.
        """
        n = as_count("n", n)
        freed = 0
        while freed < n and self.forest.idle and self.pool.num_evictable:
            freed += self._evict_from(next(iter(self.forest.idle)), n - freed)
        return freed

    def run(self, node):
        """Where a node's own tokens lie, as a `CachedRun` of copies."""
        row, forest = self._row(node), self.forest
        return CachedRun(
            forest.table.handle(forest.parent[row]),
            forest.tokens[row].copy(),
            forest.pages[row].copy(),
            int(forest.first_slot[row]),
            int(forest.tokens.count[row]),
        )

    def slots(self, node):
        """Slots (page * page_size + slot in page) of all tokens from the root to `node`, int64 [length]."""
        if node == NO_NODE:
            return np.zeros(0, np.int64)
        parts = []
        for row in self.forest.path(self._row(node)):
            at = self.forest.first_slot[row] + np.arange(self.forest.tokens.count[row])
            pages = self.forest.pages[row].astype(np.int64)
            parts.append(pages[at // self.page_size] * self.page_size + at % self.page_size)
        return np.concatenate(parts)

    @property
    def num_cached_tokens(self):
        rows = self.forest.table.order()
        return int(self.forest.tokens.count[rows[self.forest.kept[rows]]].sum())

    def __repr__(self):
        return f"RadixCache(page_size={self.page_size}, cached_tokens={self.num_cached_tokens}, pool={self.pool})"

    # What follows works on rows of the forest; `SequenceTree` uses it too.

    def walk(self, tokens, extra_key):
        """(root-to-leaf rows, matched tokens, how many of the last row if not all of it); changes nothing."""
        path, length, parent = [], 0, (extra_key,)
        while length < tokens.size:
            row = self._index.get((parent, int(tokens[length])))
            if row is None:
                break
            path.append(row)
            run = self.forest.tokens[row]
            same = common_prefix(run, tokens[length:])
            length += same
            if same < run.size:
                return path, length, same
            parent = row
        return path, length, 0

    def match_rows(self, tokens, extra_key):
        """(root-to-leaf rows, length) of the longest cached prefix, split at its end and touched."""
        path, length, inside = self.walk(tokens, extra_key)
        if inside:
            path[-1] = self.split(path[-1], inside)
        self.forest.touch(path)
        return path, length

    def idle_pages(self, tokens, extra_key):
        """How many pages would stop being evictable if the longest cached prefix of `tokens` were locked."""
        path, _, inside = self.walk(tokens, extra_key)
        forest, parts = self.forest, []
        for row in path:
            if row in forest.idle:
                end = forest.first_slot[row] + (inside if inside and row == path[-1] else forest.tokens.count[row])
                parts.append(forest.pages[row][: -(-int(end) // self.page_size)])
        if not parts:
            return 0
        return int(np.count_nonzero(self.pool.is_evictable(np.unique(np.concatenate(parts)))))

    def split(self, row, k):
        """Cuts a cached node after `k` tokens; returns the upper row, the lower part keeps its own."""
        forest = self.forest
        parent = self._parent_key(row)
        upper = forest.split(row, k)
        if row in self._root_keys:
            self._root_keys[upper] = self._root_keys.pop(row)
        self._index[parent, int(forest.tokens[upper][0])] = upper
        self._index[upper, int(forest.tokens[row][0])] = row
        return upper

    def find_child(self, parent, token, extra_key):
        """The cached child of a row (or, under NO_NODE, root of a namespace) that starts with `token`, or None."""
        return self._index.get((parent if parent >= 0 else (extra_key,), int(token)))

    def adopt(self, row, extra_key):
        """Makes a filled node of the forest, whose parent is cached or who has none, matchable and kept."""
        if self.forest.parent[row] < 0:
            self._root_keys[row] = (extra_key,)
        self._index[self._parent_key(row), int(self.forest.tokens[row][0])] = row
        self.forest.keep(row)
        self.statistics.inserted_tokens += int(self.forest.tokens.count[row])

    def _parent_key(self, row):
        parent = int(self.forest.parent[row])
        return parent if parent >= 0 else self._root_keys[row]

    def _add_child(self, path, extra_key, tokens, pages, first_slot):
        forest, parent = self.forest, path[-1] if path else NO_NODE
        # The caller may go on writing in its last page, so nobody else may start there.
        row = forest.new_node(parent, first_slot=first_slot, tail_taken=True)
        forest.tokens.push(row, tokens)
        forest.pages.push(row, pages)
        forest.filled[row] = tokens.size
        if parent >= 0:
            forest.tail_taken[parent] |= forest.continues(np.array([row]), np.array([parent]))[0]
        self.adopt(row, extra_key)
        return row

    def _evict_from(self, row, n):
        forest, page_size = self.forest, self.page_size
        pages, before = forest.pages[row], int(forest.tokens.count[row])
        alone = np.cumsum(self.pool.refcount(pages)[::-1] == 1)  # freed by dropping the last 1, 2, ... pages
        keep = pages.size - 1 - int(np.searchsorted(alone, n)) if alone.size and alone[-1] > n else 0
        left = keep * page_size - int(forest.first_slot[row])
        if left > 0:
            freed = forest.drop_pages_after(row, keep, evictable=True)
            forest.tokens.truncate(row, left)
            forest.filled[row] = left
            forest.tail_taken[row] = False
        else:
            self._forget(row)
            left, freed = 0, forest.remove(np.array([row]), idle=True)
        self.statistics.evictions += 1
        self.statistics.evicted_pages += freed
        self.statistics.evicted_tokens += before - left
        return freed

    def _forget(self, row):
        del self._index[self._parent_key(row), int(self.forest.tokens[row][0])]
        self._root_keys.pop(row, None)
        del self.forest.idle[row]

    def _row(self, node):
        node = as_count("node", node, minimum=NO_NODE)
        row = int(self.forest.table.rows(np.array([node]))[0])
        if row < 0 or not self.forest.kept[row]:
            raise ValueError(f"node {node} is not in the cache (evicted?)")
        return row

    def _check_insert(self, tokens, pages, start, first_slot):
        if start > tokens.size:
            raise ValueError(f"start is {start}, but there are {tokens.size} tokens")
        if first_slot >= self.page_size:
            raise ValueError(f"first_slot is {first_slot}, but a page has {self.page_size} slots")
        slots = first_slot + tokens.size - start if start < tokens.size else 0
        if pages.size * self.page_size < slots:
            raise ValueError(f"pages has {pages.size} pages of {self.page_size} slots, {slots} slots needed")
        if np.unique(pages).size < pages.size:
            raise ValueError("pages names a page twice")


def common_prefix(a, b):
    """Length of the longest common prefix of two arrays."""
    n = min(a.size, b.size)
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n
