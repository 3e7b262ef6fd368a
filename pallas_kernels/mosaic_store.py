"""What a computing warpgroup of the Mosaic GPU kernel writes: rows through shared memory, a query's heads at a time.

Bulk copies move at least 16 bytes and do not scatter, so an LSE is written :data:`LSE_COPIES` times side by side, and
an output leaves in pieces of :data:`CHUNK` columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_geometry import CHUNK, LSE_COPIES, WARPGROUP_ROWS, Geometry
from pallas_kernels.mosaic_load import Shared, for_each_box
from pallas_kernels.mosaic_work import Scalar, Work, div
from pallas_kernels.options import LOG2E


class Outputs(NamedTuple):
    """:class:`pallas_kernels.state.AttentionState`, but an LSE is LSE_COPIES equal numbers: [..., Hq, LSE_COPIES]."""

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

    def write(final: bool) -> None:
        staged = shared.out16 if final else shared.out32
        target, lse_target = (outputs.out, outputs.lse) if final else (outputs.partial_out, outputs.partial_lse)
        lse = lse2 / LOG2E if final else lse2
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        shared.lse[warpgroup] = lax.broadcast_in_dim(lse, (WARPGROUP_ROWS, LSE_COPIES), [0])
        for column in range(0, out.shape[1], CHUNK):
            if column:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[warpgroup] = out[:, column : column + CHUNK].astype(staged.dtype)
            plgpu.commit_smem()

            def leave(place, head, rows, column=column):
                here = (place, pl.ds(head, geo.box))
                plgpu.copy_smem_to_gmem(staged.at[warpgroup, rows], target.at[(*here, pl.ds(column, CHUNK))])
                if column == 0:
                    plgpu.copy_smem_to_gmem(shared.lse.at[warpgroup, rows], lse_target.at[here])

            for_each_box(buffer_ref, work, warpgroup, shape=shape, geo=geo, final=final, there=leave)

    @pl.when(work.partial < 0)
    def _():
        write(True)

    @pl.when(work.partial >= 0)
    def _():
        write(False)


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
        nothing = jnp.zeros((WARPGROUP_ROWS, CHUNK), jnp.float32)
        shared.out16[0] = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA).astype(shared.out16.dtype)
        never = jnp.full((WARPGROUP_ROWS, LSE_COPIES), -jnp.inf, jnp.float32)
        shared.lse[0] = plgpu.layout_cast(never, plgpu.Layout.WGMMA)
        plgpu.commit_smem()

        def one(i: Scalar, carry: None) -> None:
            query = first + program + i * grid
            for head in range(0, shape.num_q_heads, geo.box):
                here = (query, pl.ds(head, geo.box))
                for column in range(0, shape.v_head_dim, CHUNK):
                    plgpu.copy_smem_to_gmem(
                        shared.out16.at[0, pl.ds(0, geo.box)], outputs.out.at[(*here, pl.ds(column, CHUNK))]
                    )
                plgpu.copy_smem_to_gmem(shared.lse.at[0, pl.ds(0, geo.box)], outputs.lse.at[here])

        lax.fori_loop(0, div(share + grid - 1, grid), one, None)
