"""Storage types: the oracle gets the same rounded inputs, so what is tested is the arithmetic."""

import jax.numpy as jnp
import numpy as np
import pytest
from forests import IMPLEMENTATIONS, Heads, attend, check_against_oracle, lay_out, plan_for, poisoned_inputs

import tree_attention_jax as ta

HEADS = Heads(6, 2, 64)
PAGE_SIZE = 16


def forest() -> ta.TokenTree:
    return lay_out(ta.TokenTree([-1, 0, 0, 1], [63, 60, 20, 7], [0, 13, 20, 1]), PAGE_SIZE, sharing=True)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dtype(implementation: str, dtype):
    check_against_oracle(forest(), PAGE_SIZE, HEADS, implementation=implementation, dtype=dtype)


@pytest.mark.parametrize(
    ("kv_dtype", "k_scale", "v_scale"),
    [
        (jnp.float8_e4m3fn, None, None),
        (jnp.float8_e5m2, 1.5, np.array([0.5, 2.0])),
        (np.int8, np.array([0.01, 0.02]), 0.015),
        (jnp.bfloat16, None, None),
    ],
    ids=["fp8-e4m3", "fp8-e5m2-scaled", "int8-scaled", "bf16"],
)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["q-fp32", "q-bf16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_quantised_cache(implementation: str, dtype, kv_dtype, k_scale, v_scale):
    check_against_oracle(
        forest(),
        PAGE_SIZE,
        HEADS,
        implementation=implementation,
        dtype=dtype,
        kv_dtype=kv_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_are_kept_in_float32(implementation: str):
    """4,000 equal keys in bf16: a bf16 sum of weights would stop growing at 256."""
    tree = ta.TokenTree([-1], [4000], [1])
    plan = ta.plan_tree(tree, 16, 1, 1, 64, dtype="bfloat16", strategy="per_node")
    k = jnp.zeros((250, 16, 1, 64), jnp.bfloat16)
    v = jnp.ones((250, 16, 1, 64), jnp.bfloat16)
    q = jnp.ones((1, 1, 64), jnp.bfloat16)
    out, lse = attend(q, k, v, plan, implementation)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1)
    np.testing.assert_allclose(lse, np.log(4000), rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_repeats_bit_for_bit(implementation: str):
    tree = lay_out(ta.TokenTree.from_levels([1, 3, 5], [530, 60, 3]), PAGE_SIZE)
    rng = np.random.default_rng(0)
    pages = int(tree.page_table(PAGE_SIZE)[1].max()) + 1
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((5, 6, 64), (pages, PAGE_SIZE, 2, 64), (pages, PAGE_SIZE, 2, 64))
    )
    plan = ta.plan_tree(tree, PAGE_SIZE, 6, 2, 64)
    first, *others = (attend(q, k, v, plan, implementation) for _ in range(3))
    for other in others:
        np.testing.assert_array_equal(first[0], other[0])
        np.testing.assert_array_equal(first[1], other[1])


@pytest.mark.parametrize("k_scale", [0.0123, np.array([0.0123, 0.77])], ids=["scalar", "per-head"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_k_scale_is_not_rounded_into_q(implementation: str, k_scale):
    """A query that sees one token: its LSE is the logit, and 16-bit q times an odd scale would be off by 2^-9."""
    tree = ta.TokenTree([-1, -1], [1, 1], [1, 1])
    inputs = poisoned_inputs(tree, PAGE_SIZE, HEADS, jnp.bfloat16, np.int8)
    plan = plan_for(tree, PAGE_SIZE, HEADS)
    _, lse = attend(*inputs.on_device(), plan, implementation, k_scale=k_scale)
    _, want = ta.reference.dense_tree_attention(
        inputs.q, inputs.k_pages, inputs.v_pages, tree, PAGE_SIZE, k_scale=k_scale, return_lse=True
    )
    np.testing.assert_allclose(lse, want, rtol=1e-5, atol=1e-5)
