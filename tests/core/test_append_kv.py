"""append_kv: every new token at its slot, nothing else touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import IMPLEMENTATIONS, Heads, lay_out, num_pages, plan_for

import tree_attention_jax as ta

HEADS = Heads(4, 2, 24, 40)


def forest(page_size: int) -> ta.TokenTree:
    tree = ta.TokenTree([-1, 0, 0, -1, 3], [33, 7, 20, 5, 0], [3, 0, 20, 1, 0])
    return lay_out(tree, page_size, sharing=True)


def pools(tree: ta.TokenTree, page_size: int, dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    pages = num_pages(tree, page_size)
    return tuple(
        rng.integers(-50, 50, (pages, page_size, HEADS.kv, width)).astype(dtype)
        for width in (HEADS.dim, HEADS.value_dim)
    )


def new_tokens(rows: int, dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return tuple(rng.integers(60, 99, (rows, HEADS.kv, width)).astype(dtype) for width in (HEADS.dim, HEADS.value_dim))


def new_slots(tree: ta.TokenTree, page_size: int) -> np.ndarray:
    slots = np.split(tree.token_slots(page_size), np.cumsum(tree.kv_len)[:-1])
    return np.concatenate([own[len(own) - q :] for own, q in zip(slots, tree.q_len)])


def written(pool: np.ndarray, new: np.ndarray, slots: np.ndarray) -> np.ndarray:
    flat = pool.reshape(-1, *pool.shape[2:]).copy()
    flat[slots] = new
    return flat.reshape(pool.shape)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8], ids=["fp32", "bf16", "int8"])
@pytest.mark.parametrize("page_size", [1, 10, 16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_writes_the_new_tokens_and_nothing_else(implementation: str, page_size: int, dtype):
    tree = forest(page_size)
    plan = plan_for(tree, page_size, HEADS)
    old, new = pools(tree, page_size, dtype), new_tokens(tree.num_queries, dtype)
    have = ta.append_kv(*map(jnp.asarray, old + new), plan, implementation=implementation)
    slots = new_slots(tree, page_size)
    np.testing.assert_array_equal(plan.slots[: len(slots)], slots)
    for pool, pool_new, result in zip(old, new, have):
        assert result.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(result, written(pool, pool_new, slots))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_padding_are_dropped(implementation: str):
    tree = forest(16)
    plan = plan_for(tree, 16, HEADS)
    old, new = pools(tree, 16), new_tokens(plan.query_capacity)
    have = ta.append_kv(*map(jnp.asarray, old + new), plan, implementation=implementation)
    slots = new_slots(tree, 16)
    for pool, pool_new, result in zip(old, new, have):
        np.testing.assert_array_equal(result, written(pool, pool_new[: len(slots)], slots))


def test_nothing_to_append():
    tree = ta.TokenTree([-1], [20], [0])
    old = pools(tree, 16)
    for pool, result in zip(old, ta.append_kv(*map(jnp.asarray, old + new_tokens(0)), plan_for(tree, 16, HEADS))):
        np.testing.assert_array_equal(result, pool)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rounds_to_the_type_of_the_cache(implementation: str):
    tree = forest(16)
    old = pools(tree, 16, jnp.bfloat16)
    rng = np.random.default_rng(2)
    new = tuple(rng.normal(size=x.shape).astype(np.float32) for x in new_tokens(tree.num_queries))
    have = ta.append_kv(*map(jnp.asarray, old + new), plan_for(tree, 16, HEADS), implementation=implementation)
    for pool, pool_new, result in zip(old, new, have):
        np.testing.assert_array_equal(result, written(pool, pool_new.astype(jnp.bfloat16), new_slots(tree, 16)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_donated_pages_are_written_in_place(implementation: str):
    """Two layers under one jit: every cache keeps its buffer."""
    tree = forest(16)
    plan = plan_for(tree, 16, HEADS)
    old, new = pools(tree, 16), new_tokens(tree.num_queries)

    def step(layers, k_new, v_new, plan):
        return [ta.append_kv(k, v, k_new, v_new, plan, implementation=implementation) for k, v in layers]

    # Plain jnp.asarray may alias NumPy's memory, which cannot be donated.
    layers = [tuple(jnp.array(pool, copy=True) for pool in old) for _ in range(2)]
    addresses = [pool.unsafe_buffer_pointer() for layer in layers for pool in layer]
    result = jax.jit(step, donate_argnums=0)(layers, *map(jnp.asarray, new), plan)
    assert all(pool.is_deleted() for layer in layers for pool in layer)
    assert [pool.unsafe_buffer_pointer() for layer in result for pool in layer] == addresses
    for layer in result:
        for pool, pool_new, have in zip(old, new, layer):
            np.testing.assert_array_equal(have, written(pool, pool_new, new_slots(tree, 16)))


def test_append_then_attend_sees_the_new_tokens():
    tree = forest(16)
    plan = plan_for(tree, 16, HEADS)
    k, v = ta.append_kv(*map(jnp.asarray, pools(tree, 16) + new_tokens(tree.num_queries)), plan)
    q = np.random.default_rng(3).normal(size=(tree.num_queries, HEADS.q, HEADS.dim)).astype(np.float32) / 100
    out = ta.tree_attention(jnp.asarray(q), k, v, plan)
    want = ta.reference.dense_tree_attention(q, k, v, tree, 16)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-3)
