"""What a computing warpgroup of the Mosaic GPU kernel writes: rows through shared memory, a query's heads at a time.

Bulk copies do not scatter and move at least 16 bytes, so an LSE is written several times side by side. Wide outputs
leave in pieces of some columns. Nothing waits for the last copies but the next pass that needs their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_geometry import WARPGROUP_ROWS, Geometry
from pallas_kernels.mosaic_load import Shared, for_each_box
from pallas_kernels.mosaic_rows import put_rows
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
    outputs: Outputs,
    shared: Shared,
    work: Work,
    warpgroup: Scalar,
    row_of: Callable[[Scalar], Scalar],
    geo: Geometry,
) -> None:
    """Write a pass's rows, float32 [64, Dv] and base-2 LSE [64], as final outputs or as partials.

    ``row_of``: of :func:`.bring_rows`.
    """

    def write(final: bool) -> None:
        staged, swizzled = shared.staged.final if final else shared.staged.partial
        target, lse_target = (outputs.out, outputs.lse) if final else (outputs.partial_out, outputs.partial_lse)
        _stage_lse(shared, warpgroup, lse2 / LOG2E if final else lse2, geo)
        width = staged.shape[-1]
        for column in range(0, out.shape[1], width):
            if column:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            by_way_of = swizzled if swizzled is None else swizzled.at[warpgroup]
            put_rows(staged.at[warpgroup], by_way_of, out[:, column : column + width].astype(staged.dtype), geo)
            plgpu.commit_smem()

            def leave(here: Any, boxes: Any, column: int = column) -> None:
                columns = (*here, pl.ds(column, width))
                plgpu.copy_smem_to_gmem(staged.at[warpgroup, boxes], target.at[columns])
                if not column:
                    plgpu.copy_smem_to_gmem(shared.lse.at[warpgroup, boxes], lse_target.at[here])

            for_each_box(work, warpgroup, row_of if final else None, geo=geo, there=leave)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(work.partial < 0)
    def _():
        write(True)

    @pl.when(work.partial >= 0)
    def _():
        write(False)


def _stage_lse(shared: Shared, warpgroup: Scalar, lse: jax.Array, geo: Geometry) -> None:
    copies = lax.broadcast_in_dim(lse, (WARPGROUP_ROWS, geo.lse_copies), [0])
    put_rows(shared.lse.at[warpgroup], None, copies, geo)


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
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        never = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        _stage_lse(shared, warpgroup, never, geo)
        staged, _ = shared.staged.final
        nothing = jnp.zeros((WARPGROUP_ROWS, staged.shape[-1]), staged.dtype)
        put_rows(staged.at[0], None, plgpu.layout_cast(nothing, plgpu.Layout.WGMMA), geo)
        plgpu.commit_smem()

        def query(i: Scalar, carry: None) -> None:
            for head in range(0, shape.num_q_heads, geo.box):
                here = (first + program + i * grid, pl.ds(head, geo.box))
                plgpu.copy_smem_to_gmem(shared.lse.at[0, 0], outputs.lse.at[here])
                for column in range(0, shape.v_head_dim, staged.shape[-1]):
                    columns = (*here, pl.ds(column, staged.shape[-1]))
                    plgpu.copy_smem_to_gmem(staged.at[0, 0], outputs.out.at[columns])

        lax.fori_loop(0, div(share + grid - 1, grid), query, None)
