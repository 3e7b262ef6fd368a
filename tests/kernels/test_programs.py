"""Which program does which work: the interpreter runs loops over many items, a GPU one program each."""

import jax
import pytest
from forests import Heads, assert_matches_oracle, attend, lay_out, plan_for, poisoned_inputs

import tree_attention_jax as ta
from pallas_kernels import partial_triton


def test_one_program_an_item_equals_the_oracle(monkeypatch: pytest.MonkeyPatch):
    tree, heads = lay_out(ta.TokenTree.from_levels([1, 3, 6], [40, 5, 3]), 16), Heads(4, 2, 32)
    plan = plan_for(tree, 16, heads, strategy="per_node", buckets=ta.Buckets(items=16))
    grids = [launch.grid for launch in plan.shape.launches]
    monkeypatch.setattr(partial_triton, "INTERPRETED_PROGRAMS", max(grids))
    jax.clear_caches()  # a program of the default number may be there already
    inputs = poisoned_inputs(tree, 16, heads)
    out, lse = attend(*inputs.on_device(), plan, "pallas_triton")
    assert_matches_oracle(out, lse, tree, 16, inputs)
