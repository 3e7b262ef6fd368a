"""The Mosaic kernels on a Hopper GPU, alone and beside Triton's, against the oracle: what they can of test_gpu.py."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import (
    Case,
    Heads,
    Inputs,
    assert_matches_oracle,
    attend,
    check_against_oracle,
    halves_in_turns,
    lay_out,
    plan_for,
    poisoned_inputs,
)
from test_gpu import CASES, OPTIONS, ragged

import tree_attention_jax as ta
from tree_attention_jax import TokenTree

pytestmark = pytest.mark.gpu

BF16, FP16 = jnp.bfloat16, jnp.float16
check = functools.partial(check_against_oracle, implementation="pallas_mosaic")


@pytest.mark.parametrize("strategy", ["per_node", "flatten", "auto"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_strategies(case: Case, strategy: str):
    check(case.tree(), case.page_size, case.heads, dtype=BF16, padding=case.padding, plan={"strategy": strategy})


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (Heads(8, 2, 256), BF16),
        (Heads(8, 2, 64), FP16),
        (Heads(4, 4, 128), BF16),
        (Heads(24, 2, 128), BF16),
        (Heads(9, 3, 64), BF16),
        (Heads(128, 1, 128), BF16),
        (Heads(8, 2, 128, 64), BF16),
    ],
    ids=str,
)
def test_head_shapes(heads: Heads, dtype):
    check(lay_out(ragged(), 16, sharing=True), 16, heads, dtype=dtype)


@pytest.mark.parametrize("page_size", [8, 16, 64, 256])
def test_page_sizes(page_size: int):
    check(lay_out(ragged(), page_size, sharing=True), page_size, Heads(8, 2, 64), dtype=BF16)


@pytest.mark.parametrize("page_size", [1, 4])
def test_small_pages_side_by_side(page_size: int):
    """Which are planned as pages of 16, in a pool of whole ones."""
    tree = TokenTree.from_levels([1, 3, 12, 156], [70, 130, 33, 19])
    pages = -(-int(tree.page_offsets(page_size)[-1]) * page_size // 16) * 16 // page_size
    check(tree, page_size, Heads(8, 2, 128), dtype=BF16, pages=pages, plan={"gpu": "NVIDIA H200"})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict):
    check(lay_out(ragged(), 16, sharing=True), 16, Heads(6, 2, 64), dtype=BF16, **options)


def test_entries_of_one_token():
    check(
        TokenTree.from_levels([1, 8, 64], [100, 3, 2]), 16, Heads(8, 2, 128), dtype=BF16, plan={"strategy": "per_node"}
    )


def test_repeats_bit_for_bit():
    tree = lay_out(TokenTree.from_levels([1, 7, 63], [4001, 130, 33]), 16)
    heads = Heads(32, 8, 128)
    inputs = poisoned_inputs(tree, 16, heads, BF16).on_device()
    plan = plan_for(tree, 16, heads)
    first = attend(*inputs, plan, "pallas_mosaic")
    for _ in range(20):
        for have, want in zip(attend(*inputs, plan, "pallas_mosaic"), first):
            np.testing.assert_array_equal(np.asarray(have, np.float32), np.asarray(want, np.float32))


def stacked_inputs(tree: TokenTree, heads: Heads) -> tuple[list[Inputs], list[jax.Array]]:
    """Three sets of inputs, and the same as arrays with one more axis."""
    inputs = [poisoned_inputs(tree, 16, heads, BF16, seed=i) for i in range(3)]
    return inputs, [jnp.stack(x) for x in zip(*(one.on_device() for one in inputs))]


def check_vmap(tree: TokenTree, heads: Heads, strategy: str, implementation: str) -> None:
    inputs, stacked = stacked_inputs(tree, heads)
    plan = plan_for(tree, 16, heads, strategy=strategy)

    def attend_one(q, k, v):
        return ta.tree_attention(q, k, v, plan, implementation=implementation, return_lse=True)

    out, lse = jax.jit(jax.vmap(attend_one))(*stacked)
    for i, one in enumerate(inputs):
        assert_matches_oracle(out[i], lse[i], tree, 16, one)


@pytest.mark.parametrize("strategy", ["auto", "per_node"])
def test_vmap_over_an_outer_axis(strategy: str):
    check_vmap(lay_out(ragged(), 16), Heads(8, 2, 64), strategy, "pallas_mosaic")


@pytest.mark.parametrize("implementation", ["pallas_mosaic", "pallas_mixed"])
def test_layers_in_a_loop(implementation: str):
    """Slices of stacked caches go in, and the results into a stack."""
    tree, heads = TokenTree.from_levels([1, 40], [1000, 33]), Heads(32, 8, 128)
    inputs, stacked = stacked_inputs(tree, heads)
    plan = plan_for(tree, 16, heads, strategy="per_node")
    assert len(plan.shape.launches) > 1

    def layer(carry, qkv):
        return carry, ta.tree_attention(*qkv, plan, implementation=implementation, return_lse=True)

    _, (out, lse) = jax.jit(lambda x: jax.lax.scan(layer, None, x))(tuple(stacked))
    for i, one in enumerate(inputs):
        assert_matches_oracle(out[i], lse[i], tree, 16, one)


@pytest.mark.parametrize("implementation", ["pallas_mosaic", "pallas_mixed"])
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [
        (Heads(32, 8, 128), 16),
        (Heads(32, 32, 128), 16),
        (Heads(16, 1, 128), 16),
        (Heads(8, 2, 64), 8),
        (Heads(9, 3, 128), 64),
    ],
    ids=str,
)
def test_halves_in_turns(heads: Heads, page_size: int, implementation: str):
    """Two warpgroups with masks, each of which leaves out what only the other's rows see."""
    tree = lay_out(TokenTree.from_levels([1, 3, 12, 156], [70, 130, 33, 19]), page_size, sharing=page_size == 16)
    inputs = poisoned_inputs(tree, page_size, heads, BF16, padding=3)
    plan = halves_in_turns(tree, page_size, heads)
    assert all(launch.tile.mosaic and launch.tile.masked for launch in plan.shape.launches)
    out, lse = attend(*inputs.on_device(), plan, implementation)
    assert_matches_oracle(out, lse, tree, page_size, inputs)


def test_halves_in_turns_with_options():
    tree, heads = lay_out(TokenTree.from_levels([1, 3, 12, 156], [70, 130, 33, 19]), 16), Heads(8, 2, 64)
    options = {**OPTIONS["all"], "alibi_slopes": 2.0 ** -np.arange(1, 9), "attention_sinks": np.linspace(-3, 3, 8)}
    inputs = poisoned_inputs(tree, 16, heads, BF16)
    out, lse = attend(*inputs.on_device(), halves_in_turns(tree, 16, heads), "pallas_mosaic", **options)
    assert_matches_oracle(out, lse, tree, 16, inputs, **options)


@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(32, 32, 128), Heads(16, 1, 128)], ids=str)
def test_by_default(heads: Heads):
    """What the planner picks for a Hopper GPU has Mosaic's tiles, and runs where nothing else is asked for."""
    tree = TokenTree.from_levels([1, 4, 16, 512], [500, 130, 33, 21])
    plan = plan_for(tree, 16, heads)
    assert any(launch.tile.mosaic for launch in plan.shape.launches)
    inputs = poisoned_inputs(tree, 16, heads, BF16)
    out, lse = attend(*inputs.on_device(), plan, None)
    assert_matches_oracle(out, lse, tree, 16, inputs)


# ---------------------------------------------------------------------- wide tiles only, beside Triton's


def wide_and_narrow() -> TokenTree:
    """Nodes that fill wide tiles, above leaves that do not."""
    return lay_out(TokenTree.from_levels([1, 4, 64], [1000, 130, 17]), 16, sharing=True)


@pytest.mark.parametrize("strategy", ["per_node", "node_chunk"])
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(32, 32, 128), Heads(16, 1, 128), Heads(8, 2, 64)], ids=str)
def test_mixed(heads: Heads, strategy: str):
    tree = wide_and_narrow()
    plan = plan_for(tree, 16, heads, strategy=strategy)
    rows = [launch.tile.rows for launch in plan.shape.launches]
    assert min(rows) < 64 <= max(rows)
    padding = min(9, plan.query_capacity - tree.num_queries)
    check(tree, 16, heads, implementation="pallas_mixed", dtype=BF16, padding=padding, plan={"strategy": strategy})


def test_mixed_options():
    options = {**OPTIONS["all"], "alibi_slopes": 2.0 ** -np.arange(1, 9), "attention_sinks": np.linspace(-3, 3, 8)}
    plan = {"strategy": "per_node"}
    check(wide_and_narrow(), 16, Heads(8, 2, 64), implementation="pallas_mixed", dtype=FP16, plan=plan, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mixed_strategies(case: Case):
    check(case.tree(), case.page_size, case.heads, implementation="pallas_mixed", dtype=BF16, padding=case.padding)


def test_mixed_is_triton_for_float32():
    check(wide_and_narrow(), 16, Heads(8, 2, 64), implementation="pallas_mixed", dtype=jnp.float32)


def test_mixed_under_vmap():
    check_vmap(wide_and_narrow(), Heads(8, 2, 64), "per_node", "pallas_mixed")
