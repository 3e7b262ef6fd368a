"""A plan's launches in two kinds of kernels: wide tiles in Mosaic GPU's, all others and the reduction in Triton's.

Wide tiles are bound by the matrix units, of which Mosaic uses more; narrow ones by bytes and by what a program costs to
begin and end, where Triton's small programs do better. Both kinds write their own rows of one state, so launches may
run in any order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from pallas_kernels import layout as lo
from pallas_kernels import partial_mosaic, partial_triton, reduce_triton
from pallas_kernels.attend_mosaic import keep_apart, one_after_another
from pallas_kernels.mosaic_geometry import WARPGROUP_ROWS
from pallas_kernels.options import Options
from pallas_kernels.state import AttentionState


def wide_launches(q: jax.Array, k: jax.Array, v: jax.Array, shape: lo.WorkShape) -> tuple[int, ...]:
    """The launches that Mosaic runs: those that fill its warpgroups and need no masks. None where it cannot at all."""
    try:
        partial_mosaic.check(q, k, v, shape)
    except NotImplementedError:
        return ()
    tiles = [launch.tile for launch in shape.launches]
    wide = (index for index, tile in enumerate(tiles) if tile.rows >= WARPGROUP_ROWS and not tile.masked)
    return tuple(wide) if q.shape[0] else ()


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
    """As :func:`pallas_kernels.attend_mosaic.attend`, for plans with :func:`wide_launches`."""
    call = functools.partial(launch_all, shape=shape, options=options)
    return one_after_another(call, q, k, v, buffer, per_head)


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
    """:func:`attend`, or with ``interpret`` in the simulator, as :func:`pallas_kernels.attend_mosaic.launch_all`."""
    wide = wide_launches(q, k, v, shape)
    q, k, v, buffer, per_head = keep_apart((q, k, v, buffer, per_head))
    outputs = None
    for index in wide:
        outputs = partial_mosaic.partial_attention(
            q, k, v, buffer, per_head, outputs, index=index, shape=shape, options=options, interpret=interpret
        )
    assert outputs is not None
    # Mosaic goes first, because its LSEs are several equal numbers: so they are cut once.
    state = keep_apart(
        AttentionState(outputs.out, outputs.lse[..., 0], outputs.partial_out, outputs.partial_lse[..., 0])
    )
    simulated = interpret is not None
    for index in range(len(shape.launches)):
        if index not in wide:
            state = partial_triton.partial_attention(
                q, k, v, buffer, per_head, state, index=index, shape=shape, options=options, interpret=simulated
            )
    if shape.partial_rows:
        state = reduce_triton.reduce_partials(buffer, state, shape=shape, interpret=simulated)
    return keep_apart((state.out, state.lse))
