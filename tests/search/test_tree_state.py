from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_attention_jax.search import tree_state
from tree_attention_jax.search.tree_state import TreeState

CAPACITY, LEAVES, DEPTH = 24, 4, 8
append, fork = jax.jit(tree_state.append), jax.jit(tree_state.fork)
on_paths = jax.jit(tree_state.on_paths)
path_pages = jax.jit(tree_state.path_pages, static_argnums=2)
path_tokens = jax.jit(tree_state.path_tokens, static_argnums=2)
NO_LEAVES, EVERY_LEAF = np.full(LEAVES, -1, np.int32), np.ones(LEAVES, bool)
SLOTS = np.random.default_rng(0).permutation(100)[:CAPACITY].astype(np.int32)


class Twin:
    """The same tree on the host: leaves are linked nodes, and what no leaf reaches is gone."""

    def __init__(self):
        self.leaves = [None] * LEAVES  # (token, parent) chains, compared by identity

    def nodes(self):
        found = {}
        for leaf in self.leaves:
            while leaf is not None:
                found[id(leaf)] = leaf
                leaf = leaf[1]
        return found

    def append(self, tokens, active):
        room = CAPACITY - len(self.nodes())
        for i, token in enumerate(tokens):
            if active[i]:
                if room > 0:
                    self.leaves[i] = (token, self.leaves[i])
                room -= 1
        return room < 0

    def fork(self, parents):
        self.leaves = [self.leaves[p] for p in parents]

    def paths(self):
        out = []
        for leaf in self.leaves:
            path = []
            while leaf is not None:
                path.append(leaf[0])
                leaf = leaf[1]
            out.append(path[::-1])
        return out


row = st.lists(st.integers(0, LEAVES - 1), min_size=LEAVES, max_size=LEAVES)
steps = st.lists(st.tuples(st.sampled_from(["append", "append", "fork"]), row, st.integers(0, 15)), max_size=25)


@settings(max_examples=40, deadline=None)
@given(steps)
def test_equals_its_host_twin(steps):
    state, leaves, twin = TreeState.create(slots=SLOTS), NO_LEAVES, Twin()
    overflow = False
    for name, values, bits in steps:
        if name == "append":
            active = np.array([bits >> i & 1 for i in range(LEAVES)], bool)
            overflow |= twin.append(values, active)
            state, leaves = append(state, leaves, np.array(values, np.int32), active)
        else:
            twin.fork(values)
            state, leaves = fork(state, leaves, np.array(values, np.int32))
        check(state, leaves, twin, overflow)


def check(state, leaves, twin, overflow):
    tokens, lengths = map(np.asarray, path_tokens(state, leaves, DEPTH))
    slots, _ = map(np.asarray, path_pages(state, leaves, DEPTH))
    for i, path in enumerate(twin.paths()):
        shown = path[-DEPTH:]
        assert lengths[i] == len(shown)
        assert tokens[i].tolist() == shown + [0] * (DEPTH - len(shown))
    live = twin.nodes()
    assert int(state.num_free) == CAPACITY - len(live)
    assert bool(state.overflow) == overflow
    used = np.asarray(state.parent) != tree_state.FREE
    assert used.sum() == len(live)
    free = np.asarray(state.free)[: int(state.num_free)]
    assert sorted(free.tolist()) == np.flatnonzero(~used).tolist()
    distinct = {int(s) for i in range(LEAVES) for s in slots[i, : int(lengths[i])]}
    assert distinct <= set(SLOTS[used].tolist())
    parents = np.asarray(state.parent)
    children = np.bincount(parents[used & (parents >= 0)], minlength=CAPACITY)
    pointers = np.bincount(np.asarray(leaves)[np.asarray(leaves) >= 0], minlength=CAPACITY)
    assert np.array_equal(np.asarray(state.refs)[used], (children + pointers)[used])


def test_paths_share_the_slots_of_what_they_share():
    @jax.jit
    def two_branches():
        state, leaves = tree_state.append(TreeState.create(8), jnp.array([-1]), jnp.array([5]))
        state, leaves = tree_state.fork(state, leaves, jnp.array([0, 0]))
        state, leaves = tree_state.append(state, leaves, jnp.array([6, 7]))
        pages, length = tree_state.path_pages(state, leaves, 3), tree_state.path_length(state, jnp.array([-1, 0, 2]))
        return pages, length, tree_state.fork(state, leaves, jnp.array([1]))[0]

    (slots, lengths), length, state = two_branches()
    assert np.asarray(slots).tolist() == [[0, 1, 0], [0, 2, 0]]
    assert np.asarray(lengths).tolist() == [2, 2]
    assert np.asarray(length).tolist() == [0, 1, 2]
    assert int(state.num_free) == 6, "the other branch is free again, the shared token is not"


def test_the_whole_loop_runs_under_jit():
    """Random beam steps in one scan end where the same steps one by one do."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 9, (6, LEAVES)).astype(np.int32)
    parents = rng.integers(0, LEAVES, (6, LEAVES)).astype(np.int32)

    @jax.jit
    def loop(state, leaves):
        def step(carry, x):
            state, leaves = tree_state.append(*carry, x[0])
            return tree_state.fork(state, leaves, x[1]), None

        return jax.lax.scan(step, (state, leaves), (tokens, parents))[0]

    start = TreeState.create(slots=SLOTS), NO_LEAVES
    state, leaves = loop(*start)
    expected = start
    for t, p in zip(tokens, parents):
        expected = fork(*append(*expected, t, EVERY_LEAF), p)
    jax.tree.map(np.testing.assert_array_equal, (state, leaves), expected)


def test_nothing_in_a_step_ends_by_data():
    """Loops that do make a GPU wait for the host."""
    state = TreeState.create(slots=SLOTS)
    for step in (
        lambda state: tree_state.append(state, NO_LEAVES, NO_LEAVES),
        lambda state: tree_state.fork(state, NO_LEAVES, np.zeros(LEAVES, np.int32)),
        lambda state: tree_state.path_pages(state, NO_LEAVES, DEPTH),
        lambda state: tree_state.on_paths(state, NO_LEAVES),
    ):
        assert "while[" not in str(jax.make_jaxpr(step)(state))


def test_nodes_on_paths():
    rng = np.random.default_rng(2)
    for _ in range(20):
        parent = np.array([int(rng.integers(-1, max(1, i))) if i else -1 for i in range(CAPACITY)], np.int32)
        parent[rng.random(CAPACITY) < 0.2] = tree_state.FREE
        nodes = rng.integers(-1, CAPACITY, 3).astype(np.int32)
        wanted = np.zeros(CAPACITY, bool)
        for node in nodes.tolist():
            while node >= 0:
                wanted[node] = True
                node = int(parent[node])
        state = replace(TreeState.create(CAPACITY), parent=jnp.asarray(parent))
        assert np.asarray(on_paths(state, nodes)).tolist() == wanted.tolist()
    line = replace(TreeState.create(CAPACITY), parent=jnp.arange(-1, CAPACITY - 1, dtype=jnp.int32))
    assert np.asarray(on_paths(line, np.array([CAPACITY - 1]))).all()


def test_a_batch_of_trees_by_vmap():
    @jax.jit
    @jax.vmap
    def step(tokens, parents):
        state, leaves = tree_state.append(TreeState.create(8), jnp.full(3, -1, jnp.int32), tokens)
        state, leaves = tree_state.fork(state, leaves, parents)
        return state, tree_state.path_tokens(state, leaves, 1)[0]

    states, tokens = step(np.array([[1, 2, 3], [4, 5, 6]]), np.array([[0, 0, 1], [2, 2, 2]]))
    assert np.asarray(tokens)[..., 0].tolist() == [[1, 1, 2], [6, 6, 6]]
    assert np.asarray(states.num_free).tolist() == [6, 7]


def test_misuse():
    with pytest.raises(ValueError, match="give capacity, or slots"):
        TreeState.create()
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        TreeState.create(0)
    with pytest.raises(ValueError, match="not empty"):
        TreeState.create(slots=np.zeros(0, int))
