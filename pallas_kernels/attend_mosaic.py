"""A plan's launches and the reduction, in Mosaic GPU kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching, lax

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

    Raises:
        NotImplementedError: as :func:`pallas_kernels.partial_mosaic.check`.
    """
    call = functools.partial(launch_all, shape=shape, options=options)
    return one_after_another(call, q, k, v, buffer, per_head)


def one_after_another(launch: Callable[..., Any], *arguments: jax.Array | None) -> Any:
    """``launch(*arguments)``, a call at a time under ``vmap``: Mosaic kernels with scratch have no rule for it."""
    given = [i for i, x in enumerate(arguments) if x is not None]

    @custom_batching.sequential_vmap
    def call(*arrays):
        all_of_them: list[Any] = [None] * len(arguments)
        for i, array in zip(given, arrays):
            all_of_them[i] = array
        return launch(*all_of_them)

    return call(*(arguments[i] for i in given))


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
    if len(shape.launches) > 1:
        q, k, v, per_head = keep_apart((q, k, v, per_head))
    buffer = keep_apart(buffer)
    outputs = None
    for index in range(len(shape.launches)):
        outputs = partial_mosaic.partial_attention(
            q, k, v, buffer, per_head, outputs, index=index, shape=shape, options=options, interpret=interpret
        )
    assert outputs is not None
    if shape.partial_rows:
        outputs = reduce_mosaic.reduce_partials(buffer, outputs, shape=shape, interpret=interpret)
    out, lse = keep_apart((outputs.out, outputs.lse))
    return out, lse[..., 0]  # not behind the barrier, so that no one cuts it who does not need it


def keep_apart(arrays: Any) -> Any:
    """Keep XLA from fusing slices, before or after, into a call that continues what others have written.

    XLA's dynamic slice fusion (on since jax 0.11) draws slices that a Mosaic call reads, and updates of slices that
    take its results, into one operation with it, as loops over layers or over a batch have them. That operation
    forgets which results are aliased to which operands: what earlier launches have written would be lost.
    """
    return lax.optimization_barrier(arrays)
