"""The Triton kernels on a real GPU, against the oracle. Compiling is most of the time, so configurations are chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import (
    Case,
    Heads,
    assert_matches_oracle,
    attend,
    check_against_oracle,
    lay_out,
    plan_for,
    poisoned_inputs,
)

import tree_attention_jax as ta
from tree_attention_jax import TokenTree
from tree_attention_jax.planning.strategies import STRATEGIES

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = jnp.bfloat16, jnp.float16, jnp.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
check = functools.partial(check_against_oracle, implementation="pallas_triton")


def ragged() -> TokenTree:
    """Inner nodes with queries, a chunk of prefill, leaves that decode, a leaf without queries, an empty one."""
    return TokenTree([-1, 0, 0, 1, 1, 2, -1, 6], [630, 130, 200, 7, 333, 1, 0, 60], [0, 13, 0, 7, 120, 1, 0, 60])


def drafts() -> TokenTree:
    """64 draft tokens under each of 4 prompts."""
    paths = (
        [[i] for i in range(4)]
        + [[i, j] for i in range(4) for j in range(5)]
        + [[i, j, 0] for i in range(4) for j in range(5)]
    )
    return TokenTree.from_paths(
        paths + [[i, j, 0, 0] for i in range(4) for j in range(4)], [630, 60, 1, 333], page_size=16
    )


CASES = [
    Case("decode", lambda: TokenTree.from_levels([1, 5, 63], [1023, 60, 17]), Heads(32, 8, 128)),
    Case("ragged", lambda: lay_out(ragged(), 16, sharing=True), Heads(28, 4, 128)),
    Case("draft", drafts, Heads(12, 4, 64)),
    Case("deep", lambda: TokenTree.from_levels([1, 2, 4, 8, 16, 32], [16] * 6), Heads(16, 1, 128)),
    Case("prefill", lambda: TokenTree([-1, 0], [63, 500], [0, 437]), Heads(6, 2, 64), padding=9),
]

OPTIONS = {
    "soft-cap": {"logits_soft_cap": 1.5},
    "window": {"sliding_window": 150},
    "alibi": {"alibi_slopes": 2.0 ** -np.arange(1, 7)},
    "all": {
        "scale": 0.2,
        "logits_soft_cap": 2.0,
        "sliding_window": 150,
        "alibi_slopes": 2.0 ** -np.arange(1, 7),
        "attention_sinks": np.linspace(-3, 3, 6),
        "k_scale": 1.2,
        "v_scale": np.array([3.0, 0.25]),
    },
}


@pytest.mark.parametrize(
    ("case", "strategy"),
    [*((case, strategy) for case in CASES[:3] for strategy in STRATEGIES), *((case, "auto") for case in CASES[3:])],
    ids=str,
)
def test_strategies(case: Case, strategy: str):
    check(case.tree(), case.page_size, case.heads, dtype=BF16, padding=case.padding, plan={"strategy": strategy})


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_dtypes(case: Case, dtype):
    check(case.tree(), case.page_size, case.heads, dtype=dtype)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (Heads(8, 2, 80), BF16),
        (Heads(4, 4, 96), FP32),
        (Heads(4, 2, 192), FP16),
        (Heads(8, 2, 256), BF16),
        (Heads(4, 2, 256), FP32),
        (Heads(6, 1, 192, 128), BF16),
        (Heads(5, 1, 64, 96), FP16),
        (Heads(9, 3, 64), BF16),
        (Heads(24, 2, 128), BF16),
        (Heads(128, 1, 128), BF16),
        (Heads(96, 1, 64), FP32),
        (Heads(1, 1, 64), FP32),
    ],
    ids=str,
)
def test_head_shapes(heads: Heads, dtype):
    check(lay_out(ragged(), 16, sharing=True), 16, heads, dtype=dtype)


@pytest.mark.parametrize("page_size", [1, 2, 10, 64, 256])
def test_page_sizes(page_size: int):
    check(lay_out(ragged(), page_size, sharing=True), page_size, Heads(8, 2, 64), dtype=BF16)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict):
    check(lay_out(ragged(), 16, sharing=True), 16, Heads(6, 2, 64), dtype=BF16, **options)


def test_window_given_to_the_planner_too():
    check(lay_out(ragged(), 16), 16, Heads(6, 2, 64), dtype=FP32, plan={"sliding_window": 150}, sliding_window=150)


@pytest.mark.parametrize(
    ("kv_dtype", "k_scale", "v_scale"),
    [(jnp.float8_e4m3fn, 1.5, 0.5), (jnp.float8_e5m2, None, None), (np.int8, np.array([0.01, 0.02]), 0.015)],
    ids=["fp8-e4m3", "fp8-e5m2", "int8"],
)
def test_quantised_caches(kv_dtype, k_scale, v_scale):
    tree = lay_out(ragged(), 16, sharing=True)
    check(tree, 16, Heads(6, 2, 128), dtype=BF16, kv_dtype=kv_dtype, k_scale=k_scale, v_scale=v_scale)


def test_repeats_bit_for_bit():
    """Many partials a query, and a GPU that runs them in any order."""
    tree = lay_out(TokenTree.from_levels([1, 7, 63], [4001, 130, 33]), 16)
    heads = Heads(32, 8, 128)
    inputs = poisoned_inputs(tree, 16, heads, BF16).on_device()
    plan = plan_for(tree, 16, heads)
    assert plan.shape.partial_rows
    first = attend(*inputs, plan, "pallas_triton")
    for _ in range(20):
        for have, want in zip(attend(*inputs, plan, "pallas_triton"), first):
            np.testing.assert_array_equal(np.asarray(have, np.float32), np.asarray(want, np.float32))


def test_vmap_over_an_outer_axis():
    tree, heads = lay_out(ragged(), 16), Heads(8, 2, 64)
    inputs = [poisoned_inputs(tree, 16, heads, BF16, seed=i) for i in range(3)]
    stacked = [jnp.stack(x) for x in zip(*(one.on_device() for one in inputs))]
    plan = plan_for(tree, 16, heads)

    def attend(q, k, v):
        return ta.tree_attention(q, k, v, plan, implementation="pallas_triton", return_lse=True)

    out, lse = jax.jit(jax.vmap(attend))(*stacked)
    for i, one in enumerate(inputs):
        assert_matches_oracle(out[i], lse[i], tree, 16, one)


def test_a_step_of_two_layers_in_place():
    """append, then attend, in each of two layers under one jit with donated pages."""
    tree, heads = lay_out(ragged(), 16, sharing=True), Heads(8, 2, 128)
    plan = plan_for(tree, 16, heads)
    inputs = [poisoned_inputs(tree, 16, heads, BF16, seed=i) for i in range(2)]
    new = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, tree.num_queries, 2, 128)), BF16)

    def step(layers, q, new, plan):
        outs, kept = [], []
        for (k, v), (k_new, v_new) in zip(layers, new):
            k, v = ta.append_kv(k, v, k_new, v_new, plan, implementation="pallas_triton")
            outs.append(ta.tree_attention(q, k, v, plan, implementation="pallas_triton", return_lse=True))
            kept.append((k, v))
        return kept, outs

    layers = [one.on_device()[1:] for one in inputs]
    addresses = [x.unsafe_buffer_pointer() for layer in layers for x in layer]
    kept, outs = jax.jit(step, donate_argnums=0)(layers, jnp.asarray(inputs[0].q), new, plan)
    assert [x.unsafe_buffer_pointer() for layer in kept for x in layer] == addresses
    slots = np.asarray(plan.slots)[: tree.num_queries]
    for layer, (k, v), (out, lse) in zip(range(2), kept, outs):
        for pages, old, added in zip((k, v), (inputs[layer].k_pages, inputs[layer].v_pages), np.asarray(new[layer])):
            want = old.reshape(-1, *old.shape[2:]).copy()
            want[slots] = added
            np.testing.assert_array_equal(np.asarray(pages).reshape(want.shape).view(np.uint16), want.view(np.uint16))
        assert_matches_oracle(out, lse, tree, 16, type(inputs[0])(inputs[0].q, np.asarray(k), np.asarray(v)))


def test_decoding_on_the_device():
    """Twenty steps of append, attend and advance in one loop, against xla doing the same."""
    tree, heads, steps = lay_out(TokenTree.from_levels([1, 3, 9], [300, 60, 5]), 4, reserve=20), Heads(8, 2, 64), 20
    plan = plan_for(tree, 4, heads, horizon=steps)
    inputs = poisoned_inputs(tree, 4, heads, FP32)
    rng = np.random.default_rng(0)
    q, k_new, v_new = (
        jnp.asarray(rng.normal(size=(steps, tree.num_queries, count, 64)), jnp.float32)
        for count in (heads.q, heads.kv, heads.kv)
    )

    def decode(k, v, plan, implementation):
        def step(i, carry):
            k, v, plan, outs = carry
            k, v = ta.append_kv(k, v, k_new[i], v_new[i], plan, implementation=implementation)
            out = ta.tree_attention(q[i], k, v, plan, implementation=implementation)
            return k, v, plan.advance(), outs.at[i].set(out)

        return jax.lax.fori_loop(0, steps, step, (k, v, plan, jnp.zeros_like(q)))[-1]

    run = jax.jit(decode, static_argnums=3)
    have, want = (run(*inputs.on_device()[1:], plan, name) for name in ("pallas_triton", "xla"))
    np.testing.assert_allclose(have, want, atol=1e-5)


def test_the_default_is_pallas():
    tree, heads = lay_out(ragged(), 16), Heads(8, 2, 64)
    inputs = poisoned_inputs(tree, 16, heads, BF16)
    plan = plan_for(tree, 16, heads)
    out, lse = ta.tree_attention(*inputs.on_device(), plan, return_lse=True)
    assert_matches_oracle(out, lse, tree, 16, inputs)
    for have, want in zip((out, lse), attend(*inputs.on_device(), plan, "pallas_triton")):
        np.testing.assert_array_equal(np.asarray(have, np.float32), np.asarray(want, np.float32))
