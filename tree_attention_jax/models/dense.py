"""The same decoder without pages, trees or kernels: what every other forward is checked against."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from tree_attention_jax.models.llama import CosSin, Llama, LlamaLayer


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, sliding_window: int | None = None) -> jax.Array:
    """softmax(q.K^T / sqrt(D)) V over each query's past: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D].

    Computed in float32, memory [Hq, T, T].
    """
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), k) / math.sqrt(q.shape[-1])
    query, key = jnp.arange(q.shape[0])[:, None], jnp.arange(q.shape[0])[None, :]
    visible = key <= query
    if sliding_window is not None:
        visible &= key > query - sliding_window
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, v).astype(q.dtype)


def dense_forward(model: Llama, token_ids: jax.Array) -> jax.Array:
    """Logits after every token of one sequence: int [T] -> float32 [T, vocab]."""
    x, rope = _enter(model, token_ids)
    for layer in model.layers:
        x = _dense_layer(layer, x, rope, window=model.config.sliding_window)
    return _leave(model, x)


# Outside of a `jax.jit`, an operation at a time compiles a program each.
@jax.jit
def _enter(model: Llama, token_ids: jax.Array) -> tuple[jax.Array, CosSin]:
    return model.embed(token_ids), model.rope(jnp.arange(token_ids.shape[0]))


@jax.jit
def _leave(model: Llama, x: jax.Array) -> jax.Array:
    return model.logits(x)


@partial(jax.jit, static_argnames="window")
def _dense_layer(layer: LlamaLayer, x: jax.Array, rope: CosSin, *, window: int | None) -> jax.Array:
    q, k, v = layer.project_qkv(x, rope)
    return layer.finish(x, causal_attention(q, k, v, window))
