"""Random operations against the brute-force twin, with all invariants after each; and a long run of them."""

import contextlib
import random
import time
from collections import defaultdict

import numpy as np
import pytest
from forest_invariants import check_forest
from freezing import freeze
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_tree import SimulatedTree

from tree_attention_jax.cache import OutOfPages

# Thousands of random operations in plain Python: once is enough.
pytestmark = pytest.mark.slow

has_leaf = precondition(lambda self: self.sim.twin)
has_draft = precondition(lambda self: self.sim.drafts)
few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)


class TreeMachine(RuleBasedStateMachine):
    """A pool small enough to run out, tokens few enough to share prefixes all the time."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]), cached=st.booleans(), capacity=st.integers(6, 24))
    def start(self, page_size, cached, capacity):
        self.sim = SimulatedTree(capacity, page_size, cached, max_leaves=8)

    def attempt(self, call):
        """Runs `call`; where the tree refuses, nothing may have changed."""
        before = freeze(self.sim.tree, self.sim.twin)
        try:
            return call()
        except (OutOfPages, ValueError) as refusal:
            error = refusal
        assert freeze(self.sim.tree, self.sim.twin) == before
        if isinstance(error, OutOfPages):
            assert error.needed > error.free + (error.evictable if self.sim.cache else 0)
        else:
            assert "leaves asked for" in str(error) or "draft" in str(error)

    def leaf(self, data, draft=None):
        leaves = sorted(x for x in self.sim.twin if draft is None or (x in self.sim.drafts) == draft)
        return data.draw(st.sampled_from(leaves)) if leaves else None

    @rule(tokens=few_tokens, key=st.sampled_from([None, "b"]), reserve=st.integers(0, 5))
    def add_request(self, tokens, key, reserve):
        self.attempt(lambda: self.sim.add_request(tokens, extra_key=key, reserve=reserve))

    @has_leaf
    @rule(data=st.data(), t=st.integers(0, 5))
    def append_to_some(self, data, t):
        leaves = sorted(data.draw(st.sets(st.sampled_from(sorted(self.sim.twin)))))
        tokens = np.array(data.draw(st.lists(st.integers(0, 2), min_size=5, max_size=5)))[:t]
        self.attempt(lambda: self.sim.append(leaves, np.tile(tokens, (len(leaves), 1))))

    @has_leaf
    @rule(data=st.data(), k=st.integers(1, 4))
    def fork(self, data, k):
        leaf = self.leaf(data)
        self.attempt(lambda: self.sim.fork(leaf, k))

    @has_leaf
    @rule(data=st.data(), parents=st.lists(st.integers(0, 9), max_size=8))
    def branch(self, data, parents):
        leaves = sorted(data.draw(st.sets(st.sampled_from(sorted(self.sim.twin)), min_size=1)))
        self.attempt(lambda: self.sim.branch(leaves, [p % len(leaves) for p in parents]))

    @has_leaf
    @rule(data=st.data(), finish=st.booleans())
    def end(self, data, finish):
        self.sim.drop(self.leaf(data), finish)

    @has_leaf
    @rule(data=st.data())
    def publish(self, data):
        leaf = self.leaf(data, draft=False)
        if leaf is not None:
            self.sim.tree.publish(leaf)

    @has_leaf
    @rule(data=st.data(), n=st.integers(0, 9))
    def reserve(self, data, n):
        leaf = self.leaf(data)
        self.attempt(lambda: self.sim.tree.reserve(leaf, n))

    @has_leaf
    @rule(data=st.data(), tokens=few_tokens)
    def draft(self, data, tokens):
        leaf = self.leaf(data, draft=False)
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(tokens))]
        if leaf is not None:
            self.attempt(lambda: self.sim.draft(leaf, parents, tokens))

    @has_draft
    @rule(data=st.data())
    def accept(self, data):
        leaf = data.draw(st.sampled_from(sorted(self.sim.drafts)))
        self.sim.step()
        path, at = [], leaf
        while below := [n for n, (above, _) in self.sim.drafts[leaf].items() if above == at]:
            at = data.draw(st.sampled_from([None, *below]))
            if at is None:
                break
            path.append(at)
        self.sim.accept(leaf, path)

    @rule(horizon=st.sampled_from([0, 0, 3]), chunk=st.sampled_from([None, None, 1, 2]))
    def step(self, horizon, chunk):
        self.attempt(lambda: self.sim.step(horizon, chunk))

    @precondition(lambda self: self.sim.cache is not None)
    @rule(n=st.integers(1, 6))
    def evict(self, n):
        evictable = self.sim.pool.num_evictable
        assert self.sim.cache.evict(n) >= min(n, evictable)

    @invariant()
    def consistent(self):
        self.sim.check()
        check_forest(self.sim.tree._forest, self.sim.cache)

    def teardown(self):
        for leaf in list((getattr(self, "sim", None) and self.sim.twin) or ()):
            self.sim.drop(leaf, finish=False)
        if hasattr(self, "sim"):
            if self.sim.cache is not None:
                self.sim.cache.evict(self.sim.pool.capacity)
            assert self.sim.pool.num_free == self.sim.pool.capacity, "pages leaked"
            assert self.sim.tree._forest.table.num_alive == 0, "nodes leaked"


TreeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTreeMachine = TreeMachine.TestCase


@pytest.mark.parametrize("cached", [False, True], ids=["alone", "cached"])
def test_soak(cached):
    """20,000 operations in all: no leak, invariants hold, and at the end they take as long as at the start."""
    rng = random.Random(1)
    sim = SimulatedTree(600, 4, cached, max_leaves=40)
    took = defaultdict(list)
    for i in range(10_000):
        name, call = random_operation(sim, rng)
        began = time.thread_time()  # what this thread computed, whatever else the machine does
        with contextlib.suppress(OutOfPages):
            call()
        took[name].append(time.thread_time() - began)
        if i % 400 == 0:
            sim.check()
            check_forest(sim.tree._forest, sim.cache)
    for name, times in took.items():
        early, late = np.median(times[len(times) // 10 : len(times) // 3]), np.median(times[-len(times) // 3 :])
        assert late < 3 * early + 5e-5, f"{name} took {early * 1e6:.0f} us early on, {late * 1e6:.0f} us late"
    for leaf in list(sim.twin):
        sim.drop(leaf, finish=True)
    if cached:
        sim.cache.evict(600)
    assert sim.pool.num_free == 600
    assert sim.tree._forest.table.num_alive == 0
    assert sim.tree._forest.table.capacity < 2000


def random_operation(sim, rng):
    def tokens(n):
        return [rng.randrange(3) for _ in range(n)]

    leaves = list(sim.twin)
    if not leaves:
        return "add_request", lambda: sim.add_request(tokens(9))
    leaf, size = rng.choice(leaves), len(leaves)
    drafted = leaf in sim.drafts
    if drafted:
        nodes = list(sim.drafts[leaf])
        chain = nodes[: rng.randrange(len(nodes) + 1)]

        def verify():
            sim.step()
            sim.accept(leaf, chain)

        return "accept", verify
    choice = rng.random()
    if choice < 0.15 and size < 16:
        return "add_request", lambda: sim.add_request(tokens(rng.randrange(1, 30)))
    if choice < 0.27 and size < 20:
        return "fork", lambda: sim.fork(leaf, rng.randrange(1, 5))
    free = [x for x in leaves if x not in sim.drafts]
    if choice < 0.30:
        return "branch", lambda: sim.branch(free, [rng.randrange(len(free)) for _ in free])
    if choice < 0.35 or size > 16 or len(sim.twin[leaf]) > 80:
        return "prune", lambda: sim.drop(leaf, finish=False)
    if choice < 0.42:
        return "finish", lambda: sim.drop(leaf, finish=True)
    if choice < 0.46:
        return "publish", lambda: sim.tree.publish(leaf)
    if choice < 0.52:
        return "draft", lambda: sim.draft(leaf, list(range(-1, 4)), tokens(5))
    if choice < 0.60:
        return "step", sim.step
    return "append", lambda: sim.append(free, [tokens(1) for _ in free])
