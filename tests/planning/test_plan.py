"""TreePlan as a pytree, its buckets, and every planning argument that is refused."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Heads, lay_out, plan_for

import tree_attention_jax as ta
from tree_attention_jax import Buckets, TokenTree

HEADS = Heads(4, 2)
TREE = TokenTree.from_levels([1, 3], [63, 5])


# ---------------------------------------------------------------------- pytree


def test_one_array_and_a_small_static_part():
    plan = plan_for(TREE, 16, HEADS)
    leaves, structure = jax.tree.flatten(plan)
    assert len(leaves) == 1
    assert leaves[0].dtype == jnp.int32
    assert leaves[0].shape == (plan.shape.buffer_size,)
    assert isinstance(hash(structure), int)
    assert len(pickle.dumps(plan.shape)) < 2000


def test_equal_shapes_have_equal_static_parts():
    one, other = (plan_for(lay_out(TREE, 16, seed), 16, HEADS) for seed in (0, 1))
    assert not np.array_equal(one.buffer, other.buffer)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert hash(jax.tree.structure(one)) == hash(jax.tree.structure(other))


@pytest.mark.parametrize(
    "changed",
    [
        {"heads": Heads(8, 2)},
        {"heads": Heads(4, 4)},
        {"heads": Heads(4, 2, 128)},
        {"heads": Heads(4, 2, 64, 80)},
        {"page_size": 32},
        {"sliding_window": 8},
        {"buckets": Buckets(queries=500)},
    ],
    ids=lambda c: next(iter(c)),
)
def test_what_needs_another_program_differs_in_the_static_part(changed: dict):
    arguments = {"page_size": 16, "heads": HEADS}
    base, other = plan_for(TREE, **arguments), plan_for(TREE, **(arguments | changed))
    assert jax.tree.structure(base) != jax.tree.structure(other)


def test_survives_jit_and_tree_map():
    tree = TREE.with_pages(16, reserve=4)
    plan = plan_for(tree, 16, HEADS, horizon=2, sliding_window=9)
    for copy in (jax.jit(lambda p: p)(plan), jax.tree.map(lambda x: x, plan)):
        assert (copy.shape, copy.horizon, copy.sliding_window) == (plan.shape, 2, 9)
        copy.check(tree)


def test_positions_and_slots_in_query_order():
    tree = TokenTree([-1, 0, 0], [6, 3, 2], [0, 3, 1], [0, 2, 3, 4], [9, 4, 7, 2])
    plan = plan_for(tree, 4, HEADS)
    assert plan.positions[:4].tolist() == [6, 7, 8, 7]
    assert plan.slots[:4].tolist() == [28, 29, 30, 9]
    assert (plan.positions[4:] == 0).all()
    assert (plan.slots[4:] == -1).all()


# ---------------------------------------------------------------------- buckets


def test_buckets_of_a_plan_pin_its_program():
    large = plan_for(TokenTree.from_levels([1, 40], [63, 5]), 16, HEADS)
    small = plan_for(TREE, 16, HEADS, buckets=large.buckets)
    assert small.query_capacity == large.query_capacity
    assert small.shape.buffer_size == large.shape.buffer_size
    small.check(TREE)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ({"queries": 2}, "buckets.queries is 2: this plan needs 3"),
        ({"items": 1}, "buckets.items is 1: this plan needs"),
        ({"partials": 1}, "buckets.partials is 1: this plan needs"),
        ({"buffer": 40}, "buckets.buffer is 40: this plan needs"),
        ({"queries": -1}, "buckets.queries is -1"),
        ({"items": 2.5}, "buckets.items is 2.5"),
    ],
)
def test_impossible_bucket(buckets: dict, message: str):
    with pytest.raises(ValueError, match=message):
        plan_for(TREE, 16, HEADS, buckets=Buckets(**buckets), strategy="per_node")


# ---------------------------------------------------------------------- refused arguments

REFUSED = {
    "tree": ({"tree": [[-1], [5]]}, TypeError, "tree is a list"),
    "unknown strategy": ({"strategy": "flash"}, ValueError, "strategy is 'flash': .*'auto'.*'per_node'"),
    "no pages": ({"page_size": 0}, ValueError, "page_size is 0"),
    "fractional page": ({"page_size": 16.0}, TypeError, "page_size is 16.0"),
    "no query heads": ({"num_q_heads": 0}, ValueError, "num_q_heads is 0"),
    "no KV heads": ({"num_kv_heads": 0}, ValueError, "num_kv_heads is 0"),
    "heads do not divide": ({"num_q_heads": 7}, ValueError, "num_q_heads is 7: .* num_kv_heads, which is 2"),
    "fewer query heads": ({"num_q_heads": 1}, ValueError, "num_q_heads is 1: .* num_kv_heads, which is 2"),
    "no width": ({"head_dim": 0}, ValueError, "head_dim is 0"),
    "no value width": ({"v_head_dim": 0}, ValueError, "v_head_dim is 0"),
    "width a word": ({"head_dim": "64"}, TypeError, "head_dim is '64'"),
    "negative horizon": ({"horizon": -1}, ValueError, "horizon is -1"),
    "horizon a bool": ({"horizon": True}, TypeError, "horizon is True"),
    "window of nothing": ({"sliding_window": 0}, ValueError, "sliding_window is 0"),
    "fractional window": ({"sliding_window": 4.0}, TypeError, "sliding_window is 4.0"),
    "dtype": ({"dtype": "bfloat17"}, TypeError, "bfloat17"),
    "chunk": ({"strategy": "node_chunk", "chunk": 0}, ValueError, "chunk is 0"),
    "unknown option": ({"strategy": "per_node", "chunks": 4}, TypeError, "chunks"),
}


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(changed: dict, error: type, message: str):
    arguments = {"tree": TREE, "page_size": 16, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    with pytest.raises(error, match=message):
        ta.plan_tree(**(arguments | changed))


def test_tiles_times_rows_of_a_tree_exceed_32_bits():
    """They are places in the levels of a tree: 5,625 tiles of ten levels of 45,000 rows."""
    leaves, chain = 45_000, 9
    parent = np.concatenate([np.arange(-1, chain - 1), np.full(leaves, chain - 1)])
    tree = ta.TokenTree(parent, np.ones(len(parent), np.int32))
    plan = ta.plan_tree(tree, 16, num_q_heads=16, num_kv_heads=1, gpu="NVIDIA H200")
    plan.check(tree)
