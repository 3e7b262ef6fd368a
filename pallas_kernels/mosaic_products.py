"""The two matrix products of attention, apart from the kernel so that a simulator without tensor cores can run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Products(NamedTuple):
    """Both operands in shared memory, except the weights.

    Attributes:
        scores: (queries [64, D], keys [T, D], meanwhile) -> float32 [64, T] and what ``meanwhile()`` returns, which is
            called when the product has been issued.
        accumulate: (out float32 [64, Dv], weights [64, T], values [T, Dv]) -> out + weights values.
        none: called where both are left out.
    """

    scores: Callable[[Any, Any, Callable[[], Any]], tuple[jax.Array, Any]]
    accumulate: Callable[[jax.Array, jax.Array, Any], jax.Array]
    none: Callable[[], None]


def _scores(queries, keys, meanwhile) -> tuple[jax.Array, Any]:
    def multiply(accumulator):
        plgpu.wgmma(accumulator, queries, keys.transpose((1, 0)))
        other = meanwhile()
        return accumulator[...], other

    return pl.run_scoped(multiply, plgpu.ACC((queries.shape[0], keys.shape[0]), jnp.float32))


def _accumulate(out, weights, values) -> jax.Array:
    def multiply(accumulator):
        plgpu.wgmma(accumulator, weights, values)

    return pl.run_state(multiply)(plgpu.ACC.init(out))


WGMMA = Products(_scores, _accumulate, lambda: None)


def _plain_scores(queries, keys, meanwhile) -> tuple[jax.Array, Any]:
    other = meanwhile()
    scores = jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)
    # The matrix units read as the copies write; these reads do not, so a copy may follow only after this.
    plgpu.commit_smem()
    return scores, other


def _plain_accumulate(out, weights, values) -> jax.Array:
    out = out + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
    plgpu.commit_smem()
    return out


# What was read to find out that there is nothing to do may be copied over then, too.
PLAIN = Products(_plain_scores, _plain_accumulate, plgpu.commit_smem)
