"""jit, vmap, donation, plan reuse, and the choice of an implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import (
    IMPLEMENTATIONS,
    Heads,
    assert_matches_oracle,
    lay_out,
    plan_for,
    poisoned_inputs,
    quick_compiler_options,
)

import tree_attention_jax as ta
from tree_attention_jax import backends

HEADS = Heads(4, 2)
PAGE_SIZE = 16


def forest(seed: int = 0) -> ta.TokenTree:
    return lay_out(ta.TokenTree([-1, 0, 0], [63, 33, 5], [0, 3, 1]), PAGE_SIZE, seed)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_an_outer_axis(implementation: str):
    """Three layers, or three heads' worth of caches, with one plan."""
    tree, batch = forest(), 3
    plan = plan_for(tree, PAGE_SIZE, HEADS)
    inputs = [poisoned_inputs(tree, PAGE_SIZE, HEADS, seed=i) for i in range(batch)]
    stacked = [jnp.stack(x) for x in zip(*(one.on_device() for one in inputs))]

    def attend(q, k, v):
        return ta.tree_attention(q, k, v, plan, implementation=implementation, return_lse=True)

    out, lse = jax.jit(jax.vmap(attend), compiler_options=quick_compiler_options())(*stacked)
    for i, one in enumerate(inputs):
        assert_matches_oracle(out[i], lse[i], tree, PAGE_SIZE, one)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (1, 2, 2)], ids=str)
def test_vmap_over_some_arguments(axes: tuple):
    tree, batch = forest(), 2
    plan = plan_for(tree, PAGE_SIZE, HEADS)
    inputs = [poisoned_inputs(tree, PAGE_SIZE, HEADS, seed=i) for i in range(batch)]
    q, k, v = (
        one[0] if axis is None else jnp.stack(one, axis)
        for axis, one in zip(axes, zip(*(i.on_device() for i in inputs)))
    )

    def attend(q, k, v):
        return ta.tree_attention(q, k, v, plan, return_lse=True)

    out, lse = jax.jit(jax.vmap(attend, in_axes=axes), compiler_options=quick_compiler_options())(q, k, v)
    for i in range(batch):
        picked = [inputs[0 if axis is None else i] for axis in axes]
        mixed = type(picked[0])(picked[0].q, picked[1].k_pages, picked[2].v_pages)
        assert_matches_oracle(out[i], lse[i], tree, PAGE_SIZE, mixed)


def test_one_plan_for_all_layers_is_one_program():
    """Another plan of the same shape, another layer's pages: no new trace."""
    traces = 0

    @jax.jit
    def attend(q, k, v, plan):
        nonlocal traces
        traces += 1
        return ta.tree_attention(q, k, v, plan, return_lse=True)

    for seed in range(3):
        tree = forest(seed)
        inputs = poisoned_inputs(tree, PAGE_SIZE, HEADS, seed=seed, pages=12)
        out, lse = attend(*inputs.on_device(), plan_for(tree, PAGE_SIZE, HEADS))
        assert_matches_oracle(out, lse, tree, PAGE_SIZE, inputs)
    assert traces == 1


def test_donated_pages_through_a_step_of_two_layers():
    """append and attend in one jit: the pages are written in place."""
    tree = forest()
    plan = plan_for(tree, PAGE_SIZE, HEADS)
    inputs = [poisoned_inputs(tree, PAGE_SIZE, HEADS, seed=i) for i in range(2)]
    new = np.random.default_rng(0).normal(size=(2, tree.num_queries, 2, 64)).astype(np.float32)

    def step(layers, q, new, plan):
        outs, kept = [], []
        for k, v in layers:
            k, v = ta.append_kv(k, v, new[0], new[1], plan)
            outs.append(ta.tree_attention(q, k, v, plan, return_lse=True))
            kept.append((k, v))
        return kept, outs

    layers = [(jnp.array(i.k_pages, copy=True), jnp.array(i.v_pages, copy=True)) for i in inputs]
    addresses = [x.unsafe_buffer_pointer() for layer in layers for x in layer]
    run = jax.jit(step, donate_argnums=0, compiler_options=quick_compiler_options())
    kept, outs = run(layers, inputs[0].q, jnp.asarray(new), plan)
    assert [x.unsafe_buffer_pointer() for layer in kept for x in layer] == addresses
    for (k, v), (out, lse) in zip(kept, outs):
        after = type(inputs[0])(inputs[0].q, np.asarray(k), np.asarray(v))
        assert_matches_oracle(out, lse, tree, PAGE_SIZE, after)


# ---------------------------------------------------------------------- implementations


def test_the_default_works_here():
    tree = forest()
    inputs = poisoned_inputs(tree, PAGE_SIZE, HEADS)
    plan = plan_for(tree, PAGE_SIZE, HEADS)
    assert_matches_oracle(*ta.tree_attention(*inputs.on_device(), plan, return_lse=True), tree, PAGE_SIZE, inputs)


@pytest.mark.parametrize("name", ["pallas_mosaic", "jax_triton"])
def test_a_sequence_falls_through_to_one_that_can(name: str):
    tree = forest()
    inputs = poisoned_inputs(tree, PAGE_SIZE, HEADS)
    plan = plan_for(tree, PAGE_SIZE, HEADS)
    out, lse = ta.tree_attention(*inputs.on_device(), plan, implementation=[name, "xla"], return_lse=True)
    assert_matches_oracle(out, lse, tree, PAGE_SIZE, inputs)
    new = np.zeros((2, tree.num_queries, 2, 64), np.float32)
    k, _ = ta.append_kv(*inputs.on_device()[1:], *map(jnp.asarray, new), plan, implementation=(name, "xla"))
    assert (np.asarray(k).reshape(-1, 2, 64)[np.asarray(plan.slots[: tree.num_queries])] == 0).all()


@pytest.mark.parametrize("name", ["pallas_mosaic", "jax_triton"])
def test_one_that_cannot_says_what_would_work(name: str):
    tree = forest()
    inputs = poisoned_inputs(tree, PAGE_SIZE, HEADS)
    plan = plan_for(tree, PAGE_SIZE, HEADS)
    with pytest.raises(NotImplementedError, match=f"{name}: .*'pallas_triton'.*'xla' anywhere"):
        ta.tree_attention(*inputs.on_device(), plan, implementation=name)
    with pytest.raises(NotImplementedError, match=f"{name}: "):
        ta.append_kv(*inputs.on_device()[1:], np.zeros((4, 2, 64)), np.zeros((4, 2, 64)), plan, implementation=[name])


def test_all_that_cannot_are_listed():
    tree = forest()
    inputs = poisoned_inputs(tree, PAGE_SIZE, HEADS)
    with pytest.raises(NotImplementedError, match=r"pallas_mosaic: .*; jax_triton: "):
        ta.tree_attention(
            *inputs.on_device(), plan_for(tree, PAGE_SIZE, HEADS), implementation=["pallas_mosaic", "jax_triton"]
        )


def test_only_not_implemented_falls_through():
    def wrong(attend):
        raise ValueError("a bug must not be hidden")

    with pytest.raises(ValueError, match="must not be hidden"):
        backends.run_first(("pallas_triton", "xla"), wrong)


def test_pallas_refuses_what_its_offsets_cannot_reach():
    """A one-byte pool of 2^31 elements, whose offsets Pallas would compute in 32 bits. Only shapes matter here."""
    tree = ta.TokenTree([-1], [20])
    plan = plan_for(tree, PAGE_SIZE, HEADS)
    pages = jax.ShapeDtypeStruct((2**31 // (16 * 2 * 64), 16, 2, 64), jnp.int8)
    q = jax.ShapeDtypeStruct((1, 4, 64), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"one-byte pool of 2147483648 elements.*'xla'"):
        jax.eval_shape(
            lambda q, k, v: ta.tree_attention(q, k, v, plan, implementation="pallas_triton"), q, pages, pages
        )
    out = jax.eval_shape(
        lambda q, k, v: ta.tree_attention(q, k, v, plan, implementation=["pallas_triton", "xla"]), q, pages, pages
    )
    assert out.shape == (1, 4, 64)
