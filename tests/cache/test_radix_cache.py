from collections import Counter

import numpy as np
import pytest
from forest_invariants import check_forest
from freezing import freeze
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tree_attention_jax.cache import Match, OutOfPages, PagePool, RadixCache


def filled(cache, tokens, start=0, **kwargs):
    """What a caller does: reserve, prefill, insert, drop its own references."""
    pages = cache.pool.alloc(-(-(len(tokens) - start) // cache.page_size))
    match = cache.insert(tokens, pages, start=start, **kwargs)
    cache.pool.free(pages)
    return match


def new_cache(capacity=32, page_size=4):
    pool = PagePool(capacity)
    return pool, RadixCache(pool, page_size)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_match_is_the_longest_common_prefix_inside_a_page_too(page_size):
    pool, cache = new_cache(32, page_size)
    filled(cache, np.arange(10))
    slots = cache.slots(cache.match_prefix(np.arange(10)).node)
    match = cache.match_prefix([0, 1, 2, 3, 4, 5, 99])
    assert match.length == 6
    assert cache.slots(match.node).tolist() == slots[:6].tolist(), "the split moved K/V"
    whole = cache.match_prefix(np.arange(12))
    assert whole.length == 10
    assert cache.slots(whole.node).tolist() == slots.tolist()
    assert cache.run(whole.node).parent == match.node
    assert pool.num_protected == 0
    check_forest(cache.forest, cache)


def test_nothing_matches_in_another_namespace():
    _, cache = new_cache()
    filled(cache, [1, 2, 3], extra_key="lora-a")
    assert cache.match_prefix([1, 2, 3], extra_key="lora-a").length == 3
    assert cache.match_prefix([1, 2, 3], extra_key="lora-b") == Match(-1, 0)
    assert cache.match_prefix([1, 2, 3]) == Match(-1, 0)


def test_insert_says_what_was_cached_and_keeps_no_duplicates():
    pool, cache = new_cache()
    filled(cache, [1, 2, 3, 4, 5])
    used = pool.capacity - pool.num_free
    assert filled(cache, [1, 2, 3, 4, 5]).length == 5
    assert pool.capacity - pool.num_free == used
    assert filled(cache, [1, 2, 3, 9, 9, 9]).length == 3
    assert cache.match_prefix([1, 2, 3, 9, 9, 9]).length == 6
    check_forest(cache.forest, cache)


def test_insert_after_a_locked_match_takes_pages_for_the_rest_only():
    pool, cache = new_cache()
    filled(cache, np.arange(6))
    match = cache.match_prefix(np.arange(20))
    cache.lock(match.node)
    assert filled(cache, np.arange(20), start=match.length).length == 6
    cache.unlock(match.node)
    assert cache.match_prefix(np.arange(20)).length == 20
    assert pool.capacity - pool.num_free == 2 + 4


def test_a_prefill_that_is_abandoned_leaves_nothing_to_match():
    pool, cache = new_cache()
    pages = pool.alloc(3)  # reserved; the prefill stops after 5 of 12 tokens
    cache.insert(np.arange(5), pages)
    pool.free(pages)
    assert cache.match_prefix(np.arange(12)).length == 5
    assert pool.capacity - pool.num_free == 2, "the page of the unfilled tokens is free again"


def test_eviction_is_least_recently_used_first_and_takes_no_more_than_needed():
    pool, cache = new_cache(12)
    for first in (10, 20, 30):
        filled(cache, np.arange(first, first + 8))
    cache.match_prefix(np.arange(10, 18))
    assert cache.evict(3) == 3
    assert [cache.match_prefix(np.arange(f, f + 8)).length for f in (10, 20, 30)] == [8, 0, 4]
    assert cache.evict(100) == 3
    assert pool.num_free == 12
    assert cache.statistics.evicted_pages == 6
    assert cache.statistics.evicted_tokens == 24
    check_forest(cache.forest, cache)


def test_locked_prefixes_stay():
    _pool, cache = new_cache(8)
    filled(cache, np.arange(8))
    match = cache.match_prefix(np.arange(6))
    cache.lock(match.node)
    assert cache.evict(8) == 0, "the rest of the split page holds no page of its own"
    assert cache.match_prefix(np.arange(8)).length == 8, "so there is no point in evicting it"
    cache.unlock(match.node)
    assert cache.evict(8) == 2


def test_a_lock_survives_a_split_of_its_node():
    _, cache = new_cache()
    node = filled(cache, np.arange(8)).node
    cache.lock(node)
    cache.match_prefix(np.arange(5))
    assert cache.evict(8) == 0
    assert len(cache.slots(node)) == 8
    cache.unlock(node)
    assert cache.evict(8) == 2


def test_statistics():
    _, cache = new_cache()
    filled(cache, np.arange(8))
    cache.match_prefix(np.arange(4))
    cache.match_prefix(np.arange(100, 104))
    assert (cache.statistics.queries, cache.statistics.query_tokens, cache.statistics.hit_tokens) == (2, 8, 4)
    assert cache.statistics.hit_rate == 0.5
    assert cache.statistics.inserted_tokens == 8


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.unlock(c.test_node), ValueError, "is not locked"),
        (lambda c: c.lock(10**6), ValueError, "node 1000000 is not in the cache"),
        (lambda c: c.lock(-2), ValueError, "node must be at least -1"),
        (lambda c: c.match_prefix([1, -1]), ValueError, r"tokens\[1\] is -1, not a token id"),
        (lambda c: c.match_prefix([1, 50]), ValueError, r"tokens\[1\] is 50, not a token id \(0..49\)"),
        (lambda c: c.match_prefix([0.5]), TypeError, "tokens must be integers"),
        (lambda c: c.insert([7, 8], []), ValueError, "0 pages of 4 slots, 2 slots needed"),
        (lambda c: c.insert([7, 8], [0], first_slot=4), ValueError, "first_slot is 4"),
        (lambda c: c.insert([7, 8], [0], first_slot=3), ValueError, "5 slots needed"),
        (lambda c: c.insert([1, 2, 3, 9], [0], start=3), ValueError, "start is 3, but only 2"),
        (lambda c: c.insert([7, 8], [0], start=3), ValueError, "start is 3, but there are 2 tokens"),
        (lambda c: c.insert(np.arange(8), [0, 0]), ValueError, "names a page twice"),
        (lambda c: c.insert([1, 2, 9], [15]), ValueError, "retain of page 15, which is free"),
        (lambda c: c.insert([7, 8], [99]), ValueError, r"pages\[0\] is 99"),
        (lambda c: c.evict(-1), ValueError, "n must be at least 0"),
    ],
)
def test_misuse_changes_nothing(call, error, message):
    pool = PagePool(16)
    cache = RadixCache(pool, 4, vocab_size=50)
    cache.test_node = filled(cache, [1, 2]).node
    before = freeze(cache)
    with pytest.raises(error, match=message):
        call(cache)
    assert freeze(cache) == before


def test_a_stale_handle_is_an_error():
    _, cache = new_cache()
    node = filled(cache, [1, 2]).node
    cache.evict(1)
    filled(cache, [3, 4])
    with pytest.raises(ValueError, match="not in the cache"):
        cache.lock(node)


class RadixMachine(RuleBasedStateMachine):
    """Against sets of prefixes: every cached prefix, when it was last used, and who locks it."""

    keys = st.sampled_from([None, "a"])
    runs = st.lists(st.integers(0, 2), min_size=0, max_size=9)

    def __init__(self):
        super().__init__()
        self.page_size = 1

    @rule(page_size=st.integers(1, 4))
    @precondition(lambda self: not hasattr(self, "cache"))
    def start(self, page_size):
        self.pool = PagePool(14)
        self.cache = RadixCache(self.pool, page_size)
        self.used = {}  # (key, tokens so far) -> time of last use
        self.locks = []  # (node, key, tokens)
        self.where = {}  # (key, tokens so far) -> its slot
        self.now = 0

    def use(self, key, tokens):
        self.now += 1
        for n in range(1, len(tokens) + 1):
            if (key, tuple(tokens[:n])) in self.used:
                self.used[key, tuple(tokens[:n])] = self.now

    def locked(self):
        return {(key, tokens[:n]) for _, key, tokens in self.locks for n in range(1, len(tokens) + 1)}

    def cached(self, key, tokens):
        n = 0
        while n < len(tokens) and (key, tuple(tokens[: n + 1])) in self.used:
            n += 1
        return n

    @precondition(lambda self: hasattr(self, "cache"))
    @rule(tokens=runs, key=keys, lock=st.booleans())
    def match(self, tokens, key, lock):
        match = self.cache.match_prefix(tokens, extra_key=key)
        assert match.length == self.cached(key, tokens)
        matched = tuple(tokens[: match.length])
        expected = [self.where[key, matched[: n + 1]] for n in range(match.length)]
        assert self.cache.slots(match.node).tolist() == expected
        self.use(key, matched)
        if lock:
            self.cache.lock(match.node)
            self.locks.append((match.node, key, matched))

    @precondition(lambda self: hasattr(self, "cache"))
    @rule(tokens=runs, key=keys, spare=st.integers(0, 1), first_slot=st.integers(0, 3), abort=st.booleans())
    def prefill(self, tokens, key, spare, first_slot, abort):
        """Reserve, fill and insert, or give up after the reservation."""
        first_slot %= self.cache.page_size
        start = max(0, self.cached(key, tokens) - spare)
        needed = -(-(first_slot + len(tokens) - start) // self.cache.page_size)
        if needed > self.pool.num_free:
            with pytest.raises(OutOfPages):
                self.pool.alloc(needed)
            return
        pages = self.pool.alloc(needed)
        if not abort:
            cached = self.cached(key, tokens)
            assert self.cache.insert(tokens, pages, start, first_slot, extra_key=key).length == cached
            for n in range(cached, len(tokens)):
                at = first_slot + n - start
                slot = int(pages[at // self.cache.page_size]) * self.cache.page_size + at % self.cache.page_size
                self.where[key, tuple(tokens[: n + 1])] = slot
                self.used[key, tuple(tokens[: n + 1])] = 0
            self.use(key, tokens)
        self.pool.free(pages)

    @precondition(lambda self: hasattr(self, "cache") and self.locks)
    @rule(data=st.data())
    def unlock(self, data):
        node, key, tokens = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.cache.unlock(node)
        self.use(key, tokens)
        if node != -1 and node not in [n for n, *_ in self.locks]:
            with pytest.raises(ValueError, match="not locked"):
                self.cache.unlock(node)

    @precondition(lambda self: hasattr(self, "cache"))
    @rule(n=st.integers(0, 8))
    def evict(self, n):
        evictable = self.pool.num_evictable
        freed = self.cache.evict(n)
        assert min(n, evictable) <= freed <= evictable
        left = set()
        for key in (None, "a"):
            left |= {(key, tokens) for k, tokens in self.used if k == key and self.still_cached(key, tokens)}
        gone = set(self.used) - left
        assert not gone & self.locked(), "a locked prefix was evicted"
        free_to_go = left - self.locked()
        if gone and free_to_go:
            assert max(self.used[p] for p in gone) <= min(self.used[p] for p in free_to_go)
        for prefix in gone:
            del self.used[prefix], self.where[prefix]

    def still_cached(self, key, tokens):
        return self.cache.walk(np.array(tokens, np.int32), key)[1] == len(tokens)

    @invariant()
    def consistent(self):
        if hasattr(self, "cache"):
            check_forest(self.cache.forest, self.cache)
            assert self.cache.num_cached_tokens == len(self.used)
            assert max(Counter(self.where.values()).values(), default=1) == 1


RadixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRadixMachine = RadixMachine.TestCase
