"""Attention over what grew on the device: each query reads the K/V slots of its own path.

A loop's prompt is read by a plan that the host made once, every byte once for all queries. What grew since is known
to the device alone, as lists of slots (`tree_state.path_pages`). Both give an output and its log-sum-exp, and
`merge_states` makes one softmax of them (the cascade identity).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tree_attention_jax.attention import append_kv, tree_attention
from tree_attention_jax.planning.plan import TreePlan
from tree_attention_jax.states import merge_states

__all__ = ["forward_on_paths", "path_attention"]

Pages = tuple[jax.Array, ...]


def path_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
    *,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each query over a list of slots.

    Memory and time grow with Q * T: meant for the few tokens that a search adds to a long prompt.

    Args:
        q: [Q, Hq, D]. k_pool: [num_slots, Hkv, D]; v_pool: [num_slots, Hkv, Dv], Hq a multiple of Hkv.
        slots: int32 [Q, T]; entries from `lengths` on are ignored, but must be slots.
        lengths: int32 [Q], 0 for a query that sees nothing.
        scale: of q.k; None: ``D ** -0.5``.

    Returns:
        (o [Q, Hq, Dv] in q's dtype, lse float32 [Q, Hq], natural log); ``0`` and ``-inf`` where the length is 0.

    Raises:
        ValueError: head counts or list shapes that do not fit, naming both.
    """
    queries, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    if num_q_heads % num_kv_heads:
        raise ValueError(f"q has {num_q_heads} heads but k_pool has {num_kv_heads}: it must be a multiple")
    if slots.shape[:1] != (queries,) or lengths.shape != (queries,):
        raise ValueError(f"slots and lengths have shapes {slots.shape} and {lengths.shape} for {queries} queries")
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    grouped = q.reshape(queries, num_kv_heads, -1, head_dim).astype(jnp.float32)
    logits = jnp.einsum("qhgd,qthd->qhgt", grouped, k_pool[slots].astype(jnp.float32)) * scale
    seen = jnp.arange(slots.shape[1]) < lengths[:, None]
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, initial=-jnp.inf)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(logits - base[..., None])
    total = weights.sum(axis=-1)
    some = jnp.where(total > 0, total, 1.0)
    # Unseen slots may hold anything: 0 * NaN must not get through.
    values = jnp.where(seen[..., None, None], v_pool[slots].astype(jnp.float32), 0.0)
    out = jnp.einsum("qhgt,qthd->qhgd", weights / some[..., None], values)
    lse = jnp.where(total > 0, base + jnp.log(some), -jnp.inf)
    return out.reshape(queries, num_q_heads, -1).astype(q.dtype), lse.reshape(queries, num_q_heads)


def forward_on_paths(
    model: Any,
    k_pages: Sequence[jax.Array],
    v_pages: Sequence[jax.Array],
    plan: TreePlan,
    tokens: jax.Array,
    positions: jax.Array,
    new_slots: jax.Array,
    path_slots: jax.Array,
    path_lengths: jax.Array,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, Pages, Pages]:
    """One call of the model on tokens below a prompt. Call it inside `jax.jit`, with the pages donated to that.

    Args:
        model: a `models.Llama`, or anything with its parts: `config`, `embed`, `rope`, `run_layers`, `logits`.
        plan: of a `Workspace`: query i sees its prompt, and one slot of its own where its K/V is written first.
        tokens: int32 [Q]; positions: int32 [Q], absolute.
        new_slots: int32 [Q], where the tokens' K/V goes to stay; one past the end is dropped.
        path_slots: int32 [Q, T], path_lengths: int32 [Q]: what query i sees between its prompt and itself. K/V that
            this call writes may be among it.

    Returns:
        (logits float32 [Q, V], k_pages, v_pages).

    Raises:
        NotImplementedError: the model has a sliding window, which would need each path token's position.
    """
    if model.config.sliding_window is not None:
        raise NotImplementedError("loops on the device attend without a sliding window: use TreeDecoder's own loops")
    rope = model.rope(positions)

    def step(layer, x, k_layer, v_layer):
        q, k, v = layer.project_qkv(x, rope)
        k_layer, v_layer = append_kv(k_layer, v_layer, k, v, plan, implementation=implementation)
        k_layer, k_pool = _put(k_layer, new_slots, k)
        v_layer, v_pool = _put(v_layer, new_slots, v)
        above, above_lse = tree_attention(q, k_layer, v_layer, plan, implementation=implementation, return_lse=True)
        below, below_lse = path_attention(q, k_pool, v_pool, path_slots, path_lengths)
        attended, _ = merge_states(above, above_lse, below, below_lse)
        return layer.finish(x, attended), k_layer, v_layer

    x, new_k, new_v = model.run_layers(step, model.embed(tokens), k_pages, v_pages)
    return model.logits(x), new_k, new_v


def for_loops(model: Any) -> Any:
    """The model in the form in which a loop should hold it (`models.Llama.for_loops`), if it has one."""
    return model.for_loops() if hasattr(model, "for_loops") else model


def _put(pages: jax.Array, slots: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Writes values to flat slots: (the pages, the same as a pool of slots)."""
    pool = pages.reshape(-1, *pages.shape[2:])
    pool = pool.at[slots].set(values.astype(pool.dtype), mode="drop")
    return pool.reshape(pages.shape), pool
