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
from pallas_kernels.mosaic_geometry import SMALLEST_COPY, WARPGROUP_ROWS
from pallas_kernels.options import Options
from pallas_kernels.state import AttentionState


def wide_launches(q: jax.Array, k: jax.Array, v: jax.Array, shape: lo.WorkShape) -> tuple[int, ...]:
    """The launches that Mosaic runs: those whose tiles were made for it, and what else fills two of its warpgroups and
    needs no masks. Not those with shorter entries than its copies. None where it cannot at all."""
    try:
        partial_mosaic.check(q, k, v, shape)
    except NotImplementedError:
        return ()

    def suits(tile: lo.TileClass) -> bool:
        units = (tile.unit, tile.masked_unit) if tile.masked else (tile.unit,)
        wide = tile.mosaic or (tile.rows > WARPGROUP_ROWS and not tile.masked)
        return wide and min(units) >= SMALLEST_COPY

    wide = (index for index, launch in enumerate(shape.launches) if suits(launch.tile))
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
    # Mosaic goes first, and the form of its LSEs is the state's.
    state = AttentionState(*keep_apart(outputs))
    simulated = interpret is not None
    for index in range(len(shape.launches)):
        if index not in wide:
            state = partial_triton.partial_attention(
                q, k, v, buffer, per_head, state, index=index, shape=shape, options=options, interpret=simulated
            )
    if shape.partial_rows:
        state = reduce_triton.reduce_partials(buffer, state, shape=shape, interpret=simulated)
    out, lse = keep_apart((state.out, state.lse))
    return out, lse[..., 0]  # not behind the barrier, so that no one cuts it who does not need it
