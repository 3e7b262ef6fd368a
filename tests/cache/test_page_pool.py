import pickle

import numpy as np
import pytest
from freezing import freeze
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tree_attention_jax.cache import OutOfPages, PagePool


def test_pages_come_out_in_order_and_come_back():
    pool = PagePool(4)
    assert pool.alloc(3).tolist() == [0, 1, 2]
    assert pool.free([1]) == 1
    assert pool.alloc(2).tolist() == [1, 3]
    assert (pool.num_free, pool.num_evictable, pool.num_protected) == (0, 0, 4)


def test_running_out_says_what_is_there_and_takes_nothing():
    pool = PagePool(4)
    pool.mark_evictable(pool.alloc(3))
    before = freeze(pool)
    with pytest.raises(OutOfPages, match="2 pages needed, 1 free and 3 evictable") as error:
        pool.alloc(2)
    assert (error.value.needed, error.value.free, error.value.evictable) == (2, 1, 3)
    assert freeze(pool) == before
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_a_shared_page_is_free_after_its_last_reference():
    pool = PagePool(2)
    page = pool.alloc()
    pool.retain(page)
    assert pool.free(page) == 0
    assert pool.free(page) == 1


def test_a_page_is_evictable_when_all_its_references_are():
    pool = PagePool(2)
    page = pool.alloc()
    pool.retain(page)
    pool.mark_evictable(page)
    assert pool.num_evictable == 0
    pool.free(page)
    assert pool.num_evictable == 1
    pool.mark_protected(page)
    assert pool.num_evictable == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: p.free([0, 1, 1]), ValueError, "free of page 1, which has no firm reference left"),
        (lambda p: p.free(3), ValueError, "free of page 3"),
        (lambda p: p.free(2), ValueError, "free of page 2"),  # all its references belong to a cache
        (lambda p: p.free(0, evictable=True), ValueError, "page 0, which has no evictable reference"),
        (lambda p: p.retain([0, 3]), ValueError, "retain of page 3, which is free"),
        (lambda p: p.retain([0, 9]), ValueError, r"pages\[1\] is 9, not a page of this pool \(0..3\)"),
        (lambda p: p.free([-1]), ValueError, r"pages\[0\] is -1"),
        (lambda p: p.free([0.0]), TypeError, "pages must be integers"),
        (lambda p: p.free([[0]]), ValueError, "one dimension"),
        (lambda p: p.alloc(-1), ValueError, "n must be at least 0, got -1"),
        (lambda p: p.alloc(1.0), TypeError, "n must be an integer"),
        (lambda p: p.mark_evictable([0, 0]), ValueError, "page 0 has no firm reference"),
        (lambda p: p.mark_protected(0), ValueError, "page 0 has no evictable reference"),
    ],
)
def test_misuse_changes_nothing(call, error, message):
    pool = PagePool(4)
    pool.alloc(3)
    pool.mark_evictable(2)
    before = freeze(pool)
    with pytest.raises(error, match=message):
        call(pool)
    assert freeze(pool) == before


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_pool_has_at_least_one_page(capacity):
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        PagePool(capacity)


class PoolMachine(RuleBasedStateMachine):
    """Against a dict: page -> [firm references, evictable references]."""

    def __init__(self):
        super().__init__()
        self.pool, self.model = PagePool(6), {}

    def some(self, data, which):
        return data.draw(st.lists(st.sampled_from(sorted(which)), min_size=1, max_size=4))

    def change(self, pages, firm, loose, call):
        after = {page: list(counts) for page, counts in self.model.items()}
        for page in pages:
            after[page][0] += firm
            after[page][1] += loose
        if min(min(counts) for counts in after.values()) < 0:
            with pytest.raises(ValueError):
                call(pages)
            return
        call(pages)
        self.model = {page: counts for page, counts in after.items() if sum(counts)}

    @rule(n=st.integers(0, 7))
    def alloc(self, n):
        if n > 6 - len(self.model):
            with pytest.raises(OutOfPages):
                self.pool.alloc(n)
            return
        for page in self.pool.alloc(n).tolist():
            assert page not in self.model
            self.model[page] = [1, 0]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def retain(self, data):
        self.change(self.some(data, self.model), 1, 0, self.pool.retain)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        self.change(self.some(data, self.model), -1, 0, self.pool.free)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free_evictable(self, data):
        self.change(self.some(data, self.model), 0, -1, lambda pages: self.pool.free(pages, evictable=True))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def mark_evictable(self, data):
        self.change(self.some(data, self.model), -1, 1, self.pool.mark_evictable)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def mark_protected(self, data):
        self.change(self.some(data, self.model), 1, -1, self.pool.mark_protected)

    @invariant()
    def same_as_the_model(self):
        self.pool.check()
        counts = [sum(self.model.get(page, (0, 0))) for page in range(6)]
        assert self.pool.refcount(np.arange(6)).tolist() == counts
        assert self.pool.num_free == counts.count(0)
        assert self.pool.num_evictable == sum(firm == 0 for firm, _ in self.model.values())


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
