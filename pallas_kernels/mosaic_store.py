"""What a computing warpgroup of the Mosaic GPU kernel writes: rows through shared memory, a query's heads at a time.

Bulk copies do not scatter and move at least 16 bytes, so an LSE is written several times side by side. They
begin at multiples of 128 bytes, so an output leaves in pieces of so many columns.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_geometry import WARPGROUP_ROWS, Geometry
from pallas_kernels.mosaic_load import Shared, for_each_box
from pallas_kernels.mosaic_work import Scalar, Work, div
from pallas_kernels.options import LOG2E


class Outputs(NamedTuple):
    """:class:`pallas_kernels.state.AttentionState`, but an LSE is some equal numbers: [..., Hq, lse_copies]."""

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any


def store(
    out: jax.Array,
    lse2: jax.Array,
    buffer_ref: Any,
    outputs: Outputs,
    shared: Shared,
    work: Work,
    warpgroup: Scalar,
    *,
    shape: lo.WorkShape,
    geo: Geometry,
) -> None:
    """Write a pass's rows, float32 [64, Dv] and base-2 LSE [64], as final outputs or as partials."""

    walk = functools.partial(for_each_box, buffer_ref, work, warpgroup, shape=shape, geo=geo)

    def write(final: bool) -> None:
        staged = shared.staged.out if final else shared.staged.partial
        target, lse_target = (outputs.out, outputs.lse) if final else (outputs.partial_out, outputs.partial_lse)
        _stage_lse(shared, warpgroup, lse2 / LOG2E if final else lse2, geo)
        staged_lse = shared.staged.lse
        walk(
            final=final,
            there=lambda here, rows: plgpu.copy_smem_to_gmem(staged_lse.at[warpgroup, rows], lse_target.at[here]),
        )
        for column in range(0, out.shape[1], staged.shape[-1]):
            columns = pl.ds(column, staged.shape[-1])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            put(staged.at[warpgroup], out[:, column : column + staged.shape[-1]].astype(staged.dtype))
            plgpu.commit_smem()
            walk(
                final=final,
                there=lambda here, rows, columns=columns: plgpu.copy_smem_to_gmem(
                    staged.at[warpgroup, rows], target.at[(*here, columns)]
                ),
            )

    @pl.when(work.partial < 0)
    def _():
        write(True)

    @pl.when(work.partial >= 0)
    def _():
        write(False)


def put(ref: Any, value: jax.Array) -> None:
    """``ref[...] = value``, with bank conflicts: rows that a copy takes as they lie leave no room to avoid them."""
    store_to: Any = getattr(plgpu, "store", None)
    if store_to is None:  # before jax 0.12 a plain store does not ask
        ref[...] = value
    else:
        store_to(ref, value, optimized=False)


def _stage_lse(shared: Shared, warpgroup: Scalar, lse: jax.Array, geo: Geometry) -> None:
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    copies = lax.broadcast_in_dim(lse, (WARPGROUP_ROWS, geo.lse_copies), [0])
    put(shared.staged.lse.at[warpgroup, pl.ds(0, WARPGROUP_ROWS)], copies)
    plgpu.commit_smem()


def pad(
    buffer_ref: Any,
    outputs: Outputs,
    shared: Shared,
    program: Scalar,
    warpgroup: Scalar,
    *,
    grid: int,
    shape: lo.WorkShape,
    geo: Geometry,
) -> None:
    """0 and -inf for the rows of ``q`` that are no query: usually none, else a share for each program."""
    first, end = buffer_ref[lo.NUM_QUERIES], outputs.out.shape[0]
    share = jnp.maximum(end - first - program, 0)

    @pl.when((share > 0) & (warpgroup == 0))
    def _():
        queries = div(share + grid - 1, grid)
        never = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        _stage_lse(shared, warpgroup, never, geo)
        rows = pl.ds(0, geo.box)

        def lse(i: Scalar, carry: None) -> None:
            for head in range(0, shape.num_q_heads, geo.box):
                here = (first + program + i * grid, pl.ds(head, geo.box))
                plgpu.copy_smem_to_gmem(shared.staged.lse.at[warpgroup, rows], outputs.lse.at[here])

        lax.fori_loop(0, queries, lse, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = shared.staged.out
        nothing = jnp.zeros((WARPGROUP_ROWS, staged.shape[-1]), staged.dtype)
        put(staged.at[0], plgpu.layout_cast(nothing, plgpu.Layout.WGMMA))
        plgpu.commit_smem()

        def out(i: Scalar, carry: None) -> None:
            for head in range(0, shape.num_q_heads, geo.box):
                for column in range(0, shape.v_head_dim, staged.shape[-1]):
                    here = (first + program + i * grid, pl.ds(head, geo.box), pl.ds(column, staged.shape[-1]))
                    plgpu.copy_smem_to_gmem(staged.at[0, rows], outputs.out.at[here])

        lax.fori_loop(0, queries, out, None)
