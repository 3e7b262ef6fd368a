"""A plan's launches and the reduction, in Mosaic GPU kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels import partial_mosaic, reduce_triton, reduce_xla
from pallas_kernels.options import Options
from pallas_kernels.state import AttentionState


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    per_head: jax.Array | None,
    *,
    shape: lo.WorkShape,
    options: Options,
    simulate: bool,
) -> tuple[jax.Array, jax.Array]:
    """Output and LSE of every row of ``q``. Arguments as in :func:`pallas_kernels.partial_xla.partial_attention`.

    Raises:
        NotImplementedError: as :func:`pallas_kernels.partial_mosaic.partial_attention`.
    """
    interpret = plgpu.InterpretGPUParams() if simulate else None  # type: ignore[attr-defined]
    return run(q, k, v, buffer, per_head, shape=shape, options=options, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("shape", "options", "interpret"))
def run(q, k, v, buffer, per_head, *, shape: lo.WorkShape, options: Options, interpret: Any):
    """:func:`attend` with given parameters of the simulator; None: on a GPU."""
    if q.shape[0] == 0:
        return jnp.zeros((0, shape.num_q_heads, shape.v_head_dim), q.dtype), jnp.zeros((0, shape.num_q_heads))
    outputs = None
    for index in range(len(shape.launches)):
        outputs = partial_mosaic.partial_attention(
            q, k, v, buffer, per_head, outputs, index=index, shape=shape, options=options, interpret=interpret
        )
    assert outputs is not None
    state = AttentionState(outputs.out, outputs.lse[..., 0], outputs.partial_out, outputs.partial_lse[..., 0])
    if shape.partial_rows:
        if interpret is None:
            state = reduce_triton.reduce_partials(buffer, state, shape=shape)
        else:
            state = reduce_xla.reduce_partials(buffer, state, shape=shape)
    return state.out, state.lse
