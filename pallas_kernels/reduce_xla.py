"""Merge each query's partials by their log-sum-exp, in plain XLA: what the Pallas reduction must equal."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import layout as lo
from pallas_kernels.options import LOG2E
from pallas_kernels.state import AttentionState


def reduce_partials(buffer: Array, state: AttentionState, *, shape: lo.WorkShape) -> AttentionState:
    """Write ``out`` and ``lse`` of every query that has partials; the others already hold their final value."""
    num_queries = state.out.shape[0]
    begin = buffer[shape.reduce_at + jnp.arange(num_queries)]
    end = buffer[shape.reduce_at + 1 + jnp.arange(num_queries)]

    def merge(i, carry):
        out, peak, total = carry
        listed = begin + i < end
        place = buffer[jnp.where(listed, begin + i, 0)]
        lse = jnp.where(listed[:, None], state.partial_lse[place], -jnp.inf)
        new_peak = jnp.maximum(peak, lse)
        base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        shrink, weight = jnp.exp2(peak - base), jnp.exp2(lse - base)
        part = jnp.where((lse > -jnp.inf)[..., None], state.partial_out[place], 0.0)
        return out * shrink[..., None] + part * weight[..., None], new_peak, total * shrink + weight

    rows = state.lse.shape
    carry = (jnp.zeros(state.out.shape, jnp.float32), jnp.full(rows, -jnp.inf), jnp.zeros(rows))
    out, peak, total = lax.fori_loop(0, (end - begin).max(), merge, carry)
    some = jnp.where(total == 0, 1.0, total)
    has_partials = (end > begin)[:, None]
    return state._replace(
        out=jnp.where(has_partials[..., None], (out / some[..., None]).astype(state.out.dtype), state.out),
        lse=jnp.where(has_partials, jnp.where(total == 0, -jnp.inf, (peak + jnp.log2(some)) / LOG2E), state.lse),
    )
