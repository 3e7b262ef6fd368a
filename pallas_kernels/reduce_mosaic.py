"""Tree reduction as a Pallas kernel (Mosaic GPU backend): one program merges the partials of 64 rows, heads of queries.

As :mod:`pallas_kernels.reduce_triton`: a fixed order, float32 registers, no atomics, so results repeat bit for bit. The
next partials are copied while the last ones are merged. :mod:`pallas_kernels.reduce_xla` is what it must equal.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_geometry import WARPGROUP_ROWS, lse_copies
from pallas_kernels.mosaic_rows import put
from pallas_kernels.mosaic_store import Outputs
from pallas_kernels.mosaic_work import Scalar, div, rem
from pallas_kernels.options import LOG2E

ROWS = plgpu.Layout.WGMMA.reduce(1)
STAGES = 2


class Scratch(NamedTuple):
    """Shared memory: partials and their LSEs as they come, outputs and LSEs as they leave, and when they have come."""

    part: Any
    part_lse: Any
    out: Any
    lse: Any
    full: Any


class Box(NamedTuple):
    """Heads of one query, side by side: rows ``rows`` of a program. ``begin`` is where its ``partials`` are listed."""

    query: Scalar
    head: Scalar
    begin: Scalar
    partials: Scalar


def reduce_partials(buffer: jax.Array, outputs: Outputs, *, shape: lo.WorkShape, interpret: Any = None) -> Outputs:
    """Write ``out`` and ``lse`` of every query that has partials; the others already hold their final value.

    ``interpret``: parameters of the simulator (``InterpretGPUParams``); None: a GPU.
    """
    dtype = outputs.out.dtype
    box = math.gcd(shape.num_q_heads, WARPGROUP_ROWS)
    rows = outputs.out.shape[0] * shape.num_q_heads
    width = shape.v_head_dim
    scratch = (
        plgpu.SMEM((STAGES, WARPGROUP_ROWS, width), jnp.float32),
        plgpu.SMEM((STAGES, WARPGROUP_ROWS, lse_copies(shape)), jnp.float32),
        plgpu.SMEM((WARPGROUP_ROWS, width), dtype),
        plgpu.SMEM((WARPGROUP_ROWS, lse_copies(shape)), jnp.float32),
    )
    barrier = plgpu.Barrier(num_arrivals=2 * WARPGROUP_ROWS // box, num_barriers=STAGES)

    def kernel(buffer_ref, partial_out_ref, partial_lse_ref, out_ref, lse_ref):
        run = functools.partial(
            _merge, buffer_ref, Outputs(out_ref, lse_ref, partial_out_ref, partial_lse_ref), box=box, shape=shape
        )
        pl.run_scoped(lambda *refs: run(Scratch(*refs)), *scratch, barrier, collective_axes="warpgroup")

    mesh = plgpu.Mesh(
        grid=(-(-rows // WARPGROUP_ROWS),), grid_names=("program",), num_threads=1, thread_name="warpgroup"
    )
    out, lse = jax.new_ref(outputs.out), jax.new_ref(outputs.lse)
    pl.kernel(
        kernel,
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=False if interpret is None else interpret,
        name="tree_mosaic_reduce",
    )(buffer, outputs.partial_out, outputs.partial_lse, out, lse)
    return outputs._replace(out=jax.freeze(out), lse=jax.freeze(lse))


def _merge(buffer_ref, outputs: Outputs, scratch: Scratch, *, box: int, shape: lo.WorkShape) -> None:
    first = lax.axis_index("program") * WARPGROUP_ROWS
    boxes = WARPGROUP_ROWS // box
    last_query = outputs.out.shape[0] - 1

    def nth_box(i: Scalar) -> Box:
        row = first + i * box
        query = div(row, shape.num_q_heads)
        at = shape.reduce_at + jnp.minimum(query, last_query)
        begin = buffer_ref[at]
        count = jnp.where(query > last_query, 0, buffer_ref[at + 1] - begin)
        return Box(query, rem(row, shape.num_q_heads), begin, count)

    # How many partials each row has, and the most that one has.
    box_of_row = div(plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROWS), box)
    zeros = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.int32), ROWS)

    def see(i: Scalar, carry: Any) -> Any:
        counts, most = carry
        count = nth_box(i).partials
        return jnp.where(box_of_row != i, counts, count), jnp.maximum(most, count)  # in the order given at `pick`

    counts, most = lax.fori_loop(0, boxes, see, (zeros, jnp.int32(0)))

    def load(nth: Scalar) -> None:
        stage = rem(nth, STAGES)

        def one(i: Scalar, carry: None) -> None:
            _load_box(buffer_ref, outputs, scratch, stage, nth, i * box, nth_box(i), box)

        lax.fori_loop(0, boxes, one, None)

    def step(nth: Scalar, carry: Any) -> Any:
        @pl.when(nth + 1 < most)
        def _():
            load(nth + 1)

        return _take(scratch, rem(nth, STAGES), nth < counts, carry)

    @pl.when(most > 0)
    def _():
        load(jnp.int32(0))
        carry = (
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, shape.v_head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), ROWS),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), ROWS),
        )
        out, peak, total = lax.fori_loop(0, most, step, carry)
        some = jnp.where(total == 0, 1.0, total)
        lse = jnp.where(total == 0, -jnp.inf, (peak + jnp.log2(some)) / LOG2E)
        put(scratch.out, (out / lax.broadcast_in_dim(some, out.shape, [0])).astype(scratch.out.dtype))
        put(scratch.lse, lax.broadcast_in_dim(lse, scratch.lse.shape, [0]))
        plgpu.commit_smem()

        def leave(i: Scalar, carry: None) -> None:
            target, row = nth_box(i), i * box

            @pl.when(target.partials > 0)
            def _():
                here = (target.query, pl.ds(target.head, box))
                plgpu.copy_smem_to_gmem(scratch.out.at[pl.ds(row, box)], outputs.out.at[here])
                plgpu.copy_smem_to_gmem(scratch.lse.at[pl.ds(row, box)], outputs.lse.at[here])

        lax.fori_loop(0, boxes, leave, None)
        plgpu.wait_smem_to_gmem(0)


def _load_box(buffer_ref, outputs, scratch, stage, nth, row, source: Box, box) -> None:
    """The ``nth`` partial of a box; one that has fewer only arrives, and its rows keep what they held."""
    full, rows = scratch.full.at[stage], pl.ds(row, box)

    @pl.when(nth < source.partials)
    def _():
        here = (buffer_ref[source.begin + nth], pl.ds(source.head, box))
        plgpu.copy_gmem_to_smem(outputs.partial_out.at[here], scratch.part.at[stage, rows], full)
        plgpu.copy_gmem_to_smem(outputs.partial_lse.at[here], scratch.part_lse.at[stage, rows], full)

    @pl.when(nth >= source.partials)
    def _():
        plgpu.barrier_arrive(full)
        plgpu.barrier_arrive(full)


def _take(scratch: Scratch, stage: Scalar, listed: jax.Array, carry: Any) -> Any:
    """Merge a partial into each row that has one (``listed``)."""
    out, peak, total = carry
    load: Any = plgpu.load
    plgpu.barrier_wait(scratch.full.at[stage])
    part = plgpu.layout_cast(load(scratch.part.at[stage], optimized=False), plgpu.Layout.WGMMA)
    lses = plgpu.layout_cast(load(scratch.part_lse.at[stage], optimized=False), plgpu.Layout.WGMMA)
    plgpu.commit_smem()  # the copies of the step after the next follow these reads
    lse = jnp.where(listed, lses.max(axis=1), -jnp.inf)
    new_peak = jnp.maximum(peak, lse)
    base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
    shrink, weight = jnp.exp2(peak - base), jnp.exp2(lse - base)

    def spread(rows: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(rows, part.shape, [0])

    part = jnp.where(spread(weight) > 0, part, 0.0)
    return out * spread(shrink) + part * spread(weight), new_peak, total * shrink + weight
