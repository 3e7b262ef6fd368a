"""From q.k to base-2 logits: the arithmetic that every backend shares, written for any shape that broadcasts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.options import LOG2E, Options


def base2_logits(
    dot: jax.Array,
    options: Options,
    query_position: jax.Array | None = None,
    token_position: jax.Array | None = None,
    slope: jax.Array | None = None,
) -> jax.Array:
    """Scaled, capped and biased logits times log2(e), so that ``exp2`` of them is the softmax numerator.

    The cap comes before the bias, as in FlashAttention.
    """
    if options.logits_soft_cap is None:
        logits = dot * (options.scale * LOG2E)
    else:
        cap = options.logits_soft_cap
        logits = jnp.tanh(dot * (options.scale / cap)) * (cap * LOG2E)
    if options.alibi:
        assert slope is not None
        assert query_position is not None
        assert token_position is not None
        distance = (token_position - query_position).astype(jnp.float32)
        logits = logits + slope * LOG2E * distance
    return logits


def inside_window(options: Options, query_position: jax.Array, token_position: jax.Array) -> jax.Array:
    """Whether a token is young enough for a query. That it is not too young is what the plan's intervals say."""
    assert options.sliding_window is not None
    return query_position - token_position < options.sliding_window
