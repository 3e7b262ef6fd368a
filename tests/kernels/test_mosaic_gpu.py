"""The Mosaic kernel on a Hopper GPU, against the oracle: the cases of the Triton kernel that it can do."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Case, Heads, assert_matches_oracle, attend, check_against_oracle, lay_out, plan_for, poisoned_inputs
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


def test_vmap_over_an_outer_axis():
    tree, heads = lay_out(ragged(), 16), Heads(8, 2, 64)
    inputs = [poisoned_inputs(tree, 16, heads, BF16, seed=i) for i in range(3)]
    stacked = [jnp.stack(x) for x in zip(*(one.on_device() for one in inputs))]
    plan = plan_for(tree, 16, heads)

    def attend_one(q, k, v):
        return ta.tree_attention(q, k, v, plan, implementation="pallas_mosaic", return_lse=True)

    out, lse = jax.jit(jax.vmap(attend_one))(*stacked)
    for i, one in enumerate(inputs):
        assert_matches_oracle(out[i], lse[i], tree, 16, one)
