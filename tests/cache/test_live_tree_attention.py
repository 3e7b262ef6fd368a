"""Live trees through the whole op: what every leaf attends to is its own path, wherever its K/V came to lie."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated_tree import SimulatedTree, path_hashes

import tree_attention_jax as ta
from tree_attention_jax.cache import move_slots

HEADS = dict(num_q_heads=2, num_kv_heads=1, head_dim=16)
PAGE_SIZE, PAGES = 4, 64
# One program for all steps.
BUCKETS = ta.Buckets(queries=16, items=64, partials=64, buffer=4096)
append_kv, tree_attention = jax.jit(ta.append_kv), jax.jit(partial(ta.tree_attention, implementation="xla"))
advance = jax.jit(ta.TreePlan.advance)


@pytest.fixture(autouse=True)
def compile_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def kv_of(hashes):
    """K and V, float32 [n, 1, 16] each, of tokens with these paths."""
    rows = [np.random.default_rng(abs(int(h))).normal(size=(2, 1, HEADS["head_dim"])) for h in hashes]
    kv = np.array(rows, np.float32).reshape(-1, 2, 1, HEADS["head_dim"])
    return kv[:, 0], kv[:, 1]


def dense(q, tokens):
    """Attention of q [2, 16] over all of a path, in float64."""
    k, v = (x[:, 0].astype(np.float64) for x in kv_of(path_hashes(tokens)))
    logits = q.astype(np.float64) @ k.T / np.sqrt(q.shape[1])
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def plan_of(snapshot, horizon=0):
    kwargs = dict(page_size=PAGE_SIZE, dtype="float32", horizon=horizon, buckets=BUCKETS)
    return ta.plan_tree(snapshot, **kwargs, **HEADS)


class AttendingTree(SimulatedTree):
    """Next to each simulated slot, real K/V on the device; slots that nobody wrote hold NaN."""

    def __init__(self, cached):
        super().__init__(PAGES, PAGE_SIZE, cached)
        shape = PAGES, PAGE_SIZE, HEADS["num_kv_heads"], HEADS["head_dim"]
        self.k, self.v = jnp.full(shape, jnp.nan), jnp.full(shape, jnp.nan)
        self.rng = np.random.default_rng(0)

    def attend(self, paths, max_q_len=None):
        """One step. paths: {leaf or draft node: its tokens}. Checks their last queries; returns how many there are."""
        rows = self.tree.query_rows(list(paths), max_q_len)
        snapshot = self.step(max_q_len=max_q_len)
        plan = plan_of(snapshot)
        slots = snapshot.token_slots(PAGE_SIZE)
        ends = np.cumsum(snapshot.kv_len)
        new = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, snapshot.q_len)]).astype(int)
        q, out = self.attention(plan, self.kv[slots[new]])
        for row, tokens in zip(rows, paths.values()):
            if row >= 0:
                np.testing.assert_allclose(out[row], dense(q[row], tokens), rtol=2e-5, atol=2e-5)
        return int((rows >= 0).sum())

    def attention(self, plan, hashes):
        padding = [(0, plan.query_capacity - len(hashes)), (0, 0), (0, 0)]
        k_new, v_new = (np.pad(x, padding) for x in kv_of(hashes))
        self.k, self.v = append_kv(self.k, self.v, k_new, v_new, plan)
        q = self.rng.normal(size=(plan.query_capacity, 2, HEADS["head_dim"])).astype(np.float32)
        return q, np.asarray(tree_attention(q, self.k, self.v, plan))


@pytest.mark.parametrize("cached", [False, True], ids=["alone", "cached"])
def test_chunked_prefill_branches_and_a_draft(cached):
    sim = AttendingTree(cached)
    prompt = list(range(11))
    a = sim.add_request(prompt)
    for end in 4, 8, 11:
        assert sim.attend({a: prompt[:end]}, max_q_len=4) == 1
    sim.tree.publish(a)
    b = sim.add_request([*prompt[:6], 50, 51])
    leaves = [*sim.fork(a, 3), b]
    sim.append(leaves[:3], [20, 21, 22])
    assert sim.tree.pending_tokens().size == (5 if cached else 11)
    assert sim.attend(sim.twin) == 4
    leaves = sim.tree.branch(leaves, [2, 0, 2, 3]).tolist()
    sim.twin = {leaf: sim.tree.tokens(leaf).tolist() for leaf in leaves}
    sim.append(leaves, [30, 31, 32, 33])
    nodes = sim.draft(leaves[0], [-1, -1, 0, 1, 1, 4], [40, 41, 42, 43, 44, 45])
    paths = {node: sim.draft_tokens(leaves[0], node) for node in nodes}
    assert sim.attend({**sim.twin, **paths}) == 10
    moves = sim.tree.accept([nodes[1], nodes[4]])
    sim.kv[moves.dst] = sim.kv[moves.src]
    sim.k, sim.v = move_slots(sim.k, sim.v, *moves.pad(4))
    sim.drafts, sim.twin[leaves[0]] = {}, sim.twin[leaves[0]] + [41, 44]
    sim.append(leaves, [60, 61, 62, 63])
    assert sim.attend(sim.twin) == 4
    sim.check()


def test_steps_on_the_device_between_two_snapshots():
    """Three tokens a leaf by `plan.advance()`, then the host learns of them."""
    sim = AttendingTree(cached=False)
    leaves = sim.fork(sim.add_request([1, 2, 3, 4, 5]), 3)
    sim.attend({})
    new = np.arange(12).reshape(3, 4)
    sim.append(leaves, new[:, :1])
    snapshot = sim.tree.snapshot(horizon=3)
    plan = plan_of(snapshot, horizon=3)
    order = np.argsort(sim.tree.query_rows(leaves))
    for i in range(4):
        paths = [[*range(1, 6), *new[leaf, : i + 1]] for leaf in order]
        q, out = sim.attention(plan, [path_hashes(path)[-1] for path in paths])
        for row, path in enumerate(paths):
            np.testing.assert_allclose(out[row], dense(q[row], path), rtol=2e-5, atol=2e-5)
        plan = advance(plan)
    sim.append(leaves, new[:, 1:])
    sim.step()
    sim.append(leaves, [7, 8, 9])
    assert sim.attend(sim.twin) == 3
