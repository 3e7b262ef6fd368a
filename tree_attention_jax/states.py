"""Merging two attention results over disjoint sets of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["merge_states"]


def merge_states(o_a: jax.Array, lse_a: jax.Array, o_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over A and B together, from attention over A and over B (the cascade identity).

    Args:
        o_a, o_b: [..., H, D] outputs.
        lse_a, lse_b: [..., H] log-sum-exp of the scaled logits, natural log. ``-inf``: no token seen.

    Returns:
        ``(o, lse)``, o in o_a's dtype, lse float32. Two empty states give ``(0, -inf)``, never NaN.

    Raises:
        ValueError: shapes that do not fit, naming both.
        TypeError: an argument that is not of a floating-point type.
    """
    for name, value, other, wanted in (
        ("o_b", o_b, "o_a", o_a),
        ("lse_b", lse_b, "lse_a", lse_a),
    ):
        if jnp.shape(value) != jnp.shape(wanted):
            raise ValueError(f"{name} has shape {jnp.shape(value)} but {other} has shape {jnp.shape(wanted)}")
    if jnp.shape(o_a)[:-1] != jnp.shape(lse_a):
        raise ValueError(f"lse_a has shape {jnp.shape(lse_a)}: it must be o_a's {jnp.shape(o_a)} without the last axis")
    for name, value in (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise TypeError(f"{name} has dtype {jnp.result_type(value)}: it must be a floating-point type")
    lse_a = jnp.asarray(lse_a, jnp.float32)
    lse_b = jnp.asarray(lse_b, jnp.float32)
    peak = jnp.maximum(lse_a, lse_b)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    weight_a, weight_b = jnp.exp(lse_a - base), jnp.exp(lse_b - base)
    total = weight_a + weight_b
    some = jnp.where(total == 0, 1.0, total)

    def part(o: jax.Array, weight: jax.Array) -> jax.Array:
        # An empty operand may hold anything: 0 * NaN must not get through.
        return jnp.where(weight[..., None] > 0, jnp.asarray(o, jnp.float32), 0.0) * (weight / some)[..., None]

    out = part(o_a, weight_a) + part(o_b, weight_b)
    lse = jnp.where(total == 0, -jnp.inf, base + jnp.log(some))
    return out.astype(jnp.result_type(o_a)), lse
