"""A plan's launches and the reduction, in Mosaic GPU kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching

from pallas_kernels import layout as lo
from pallas_kernels import partial_mosaic, reduce_mosaic
from pallas_kernels.options import Options


@functools.partial(jax.jit, static_argnames=("shape", "options"))
def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    per_head: jax.Array | None,
    *,
    shape: lo.WorkShape,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Output and LSE of every row of ``q``. Arguments as in :func:`pallas_kernels.partial_xla.partial_attention`.

    Under ``vmap`` the calls run one after another: Mosaic kernels with scratch have no rule of their own.

    Raises:
        NotImplementedError: as :func:`pallas_kernels.partial_mosaic.check`.
    """

    @custom_batching.sequential_vmap
    def call(q, k, v, buffer, *per_head):
        return launch_all(q, k, v, buffer, *(per_head or (None,)), shape=shape, options=options)

    return call(q, k, v, buffer, *(() if per_head is None else (per_head,)))


def launch_all(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    per_head: jax.Array | None,
    *,
    shape: lo.WorkShape,
    options: Options,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """:func:`attend`, or with ``interpret`` (``InterpretGPUParams``) in the simulator.

    Never simulate under ``jit``: the simulator wants a CPU thread a warpgroup, and a program around it takes one away,
    so that where there are few they wait for each other for ever.
    """
    if q.shape[0] == 0:
        return jnp.zeros((0, shape.num_q_heads, shape.v_head_dim), q.dtype), jnp.zeros((0, shape.num_q_heads))
    outputs = None
    for index in range(len(shape.launches)):
        outputs = partial_mosaic.partial_attention(
            q, k, v, buffer, per_head, outputs, index=index, shape=shape, options=options, interpret=interpret
        )
    assert outputs is not None
    if shape.partial_rows:
        outputs = reduce_mosaic.reduce_partials(buffer, outputs, shape=shape, interpret=interpret)
    return outputs.out, outputs.lse[..., 0]
