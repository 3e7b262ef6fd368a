"""The decoder in one scan is the decoder."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tree_attention_jax as ta
from tree_attention_jax.models import Llama, allocate_pages
from tree_attention_jax.models.rolled import RolledLlama


@pytest.fixture
def model(tiny_config):
    model = Llama(replace(tiny_config, num_layers=4), dtype="float32", rngs=nnx.Rngs(0))
    for i, layer in enumerate(model.layers):  # layers that are told apart, and move the logits
        layer.qkv_proj.kernel[...] *= 20 + i
    return model


def test_one_scan_computes_what_the_layers_do(model):
    config, tokens = model.config, jnp.arange(10) % 7
    tree = ta.TokenTree([-1, 0, 0], [5, 2, 3], [5, 2, 3])
    heads = dict(num_q_heads=config.num_q_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    plan = ta.plan_tree(tree, page_size=4, dtype="float32", **heads)
    rows = jnp.array([9, 6])
    wanted = model(tokens, *allocate_pages(config, 4, 4, "float32"), plan, logit_rows=rows)

    @jax.jit
    def rolled(model, k_pages, v_pages):
        return RolledLlama.of(model)(tokens, k_pages, v_pages, plan, logit_rows=rows)

    found = rolled(model, *allocate_pages(config, 4, 4, "float32"))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(jnp.abs(other).max()))
    assert len(found[1]) == 4
    assert float(jnp.abs(found[1][3]).max()) > 0


def test_loops_on_a_cpu_hold_deep_models_in_one_scan(model, monkeypatch):
    rolled = model.for_loops()
    assert isinstance(rolled, RolledLlama)
    assert rolled.config is model.config
    assert rolled.dtype == model.dtype
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert model.for_loops() is model
    monkeypatch.undo()
    model.config = replace(model.config, num_layers=2)
    assert model.for_loops() is model
