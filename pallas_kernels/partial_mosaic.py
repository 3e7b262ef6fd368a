"""Partial attention as a Pallas kernel (Mosaic GPU backend), for Hopper.

One program takes one pass of an item and one KV head after another. A warpgroup loads (:mod:`.mosaic_load`) while one
or two others compute, 64 rows each (:mod:`.mosaic_attend`). :mod:`pallas_kernels.partial_xla` is the version this must
equal.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_attend import consume
from pallas_kernels.mosaic_clean import lines_like
from pallas_kernels.mosaic_geometry import (
    COPY_BYTES,
    META_WORDS,
    SMALLEST_COPY,
    STAGED_BYTES,
    WARPGROUP_ROWS,
    Geometry,
    geometry,
)
from pallas_kernels.mosaic_load import Shared, Staged, barriers, produce
from pallas_kernels.mosaic_products import PLAIN, WGMMA
from pallas_kernels.mosaic_rows import swizzled
from pallas_kernels.mosaic_store import Outputs
from pallas_kernels.options import Options

# Registers a thread where two warpgroups compute, without masks and with: they take what the loading one leaves of
# 3 x 168. One that computes alone has enough without.
LOAD_REGISTERS = 56, 72
COMPUTE_REGISTERS = 224, 216
SIMULATED_PROGRAMS = 2
# Of a whole H100 or H200, where the device does not say.
HOPPER_SMS = 132


def partial_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    per_head: jax.Array | None,
    state: Outputs | None,
    *,
    index: int,
    shape: lo.WorkShape,
    options: Options,
    interpret: Any = None,
) -> Outputs:
    """Run the items of launch ``index``. Arguments as in :func:`pallas_kernels.partial_xla.partial_attention`.

    ``state`` None (the first launch): outputs start uninitialised; every row a reader looks at gets written.
    ``interpret``: parameters of the simulator (``InterpretGPUParams``); None: a GPU.

    Raises:
        NotImplementedError: as :func:`check`.
    """
    launch = shape.launches[index]
    check(q, k, v, shape)
    geo = geometry(shape, launch.tile, simulated=interpret is not None)
    grid = min(launch.grid, _programs() if interpret is None else SIMULATED_PROGRAMS)
    mesh = plgpu.Mesh(grid=(grid,), grid_names=("program",), num_threads=geo.consumers + 1, thread_name="warpgroup")
    # tanh.approx would cost more precision than a capped logit can lose.
    parameters = plgpu.CompilerParams(
        approx_math=options.logits_soft_cap is None, lowering_semantics=plgpu.LoweringSemantics.Lane
    )
    outputs = Outputs(
        jax.ShapeDtypeStruct((q.shape[0], shape.num_q_heads, shape.v_head_dim), q.dtype),
        jax.ShapeDtypeStruct((q.shape[0], shape.num_q_heads, geo.lse_copies), jnp.float32),
        jax.ShapeDtypeStruct((max(shape.partial_rows, 1), shape.num_q_heads, shape.v_head_dim), jnp.float32),
        jax.ShapeDtypeStruct((max(shape.partial_rows, 1), shape.num_q_heads, geo.lse_copies), jnp.float32),
    )
    kernel = functools.partial(
        _kernel,
        index=index,
        grid=grid,
        shape=shape,
        geo=geo,
        options=options,
        products=WGMMA if interpret is None else PLAIN,
        dtype=q.dtype,
    )
    operands = [q, k, v, buffer] + ([per_head] if options.uses_heads else [])
    run = functools.partial(
        pl.kernel,
        kernel,
        mesh=mesh,
        compiler_params=parameters,
        interpret=False if interpret is None else interpret,
        name=f"tree_mosaic_{launch.tile.name()}",
    )
    if state is None:
        return Outputs(*run(out_type=tuple(outputs))(*operands))
    refs = [jax.new_ref(x) for x in state]
    run()(*operands, *refs)
    return Outputs(*(jax.freeze(ref) for ref in refs))


def _programs() -> int:
    """Programs that run at once: one an SM, because each takes most of its shared memory."""
    return getattr(jax.devices()[0], "core_count", None) or HOPPER_SMS


def check(q: jax.Array, k: jax.Array, v: jax.Array, shape: lo.WorkShape) -> None:
    """Whether the kernel can do this.

    Raises:
        NotImplementedError: a type, head dim or pool that it cannot do.
    """
    # The matrix units take two operands of one 16-bit type from shared memory, as the copies bring them.
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(
            f"q, K and V have dtypes {q.dtype}, {k.dtype} and {v.dtype}: the Mosaic kernel takes bfloat16 or float16, "
            f"the same for all three"
        )
    at_once = max([SMALLEST_COPY, *(launch.tile.unit for launch in shape.launches)])  # masked entries are no longer
    if k.shape[0] % at_once:
        raise NotImplementedError(
            f"a pool of {k.shape[0]} slots: the Mosaic kernel copies {at_once} slots at once for this plan, so it "
            f"needs a multiple of that, which page sizes of 8 and more give"
        )
    for launch in shape.launches:
        geometry(shape, launch.tile)


def _kernel(q_ref, k_ref, v_ref, buffer_ref, *refs, index, grid, shape, geo, options, products, dtype):
    per_head_ref = refs[0] if options.uses_heads else None
    outputs = Outputs(*refs[-4:])
    masked = shape.launches[index].tile.masked

    def run(rows, raw, queries_and_staged, lse, keys, values, *others):
        queries, staged = _views(queries_and_staged, geo)
        values, lines = (values, None) if geo.simulated else values
        shared = Shared(rows, raw, queries, staged, lse, keys, values, lines, *others)
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        common = {"index": index, "grid": grid, "shape": shape, "geo": geo}

        @pl.when(warpgroup < geo.consumers)
        def _():
            if geo.consumers > 1:
                plgpu.set_max_registers(COMPUTE_REGISTERS[masked], action="increase")
            consume(
                buffer_ref,
                per_head_ref,
                outputs,
                shared,
                program,
                warpgroup,
                **common,
                options=options,
                products=products,
            )

        @pl.when(warpgroup == geo.consumers)
        def _():
            if geo.consumers > 1:
                plgpu.set_max_registers(LOAD_REGISTERS[masked], action="decrease")
            produce(q_ref, k_ref, v_ref, buffer_ref, shared, program, **common)

    pl.run_scoped(run, *_scratch(shape, geo, dtype), *barriers(geo), collective_axes="warpgroup")


def _scratch(shape: lo.WorkShape, geo: Geometry, dtype: Any) -> list[Any]:
    """The arrays of :class:`Shared`. What the matrix units read is tiled and swizzled as they expect it."""
    values = swizzled((geo.stages, geo.block, shape.v_head_dim), dtype)
    return [
        plgpu.SMEM((2, max(geo.row_words, COPY_BYTES // 4)), jnp.int32),
        _boxes(geo, shape.head_dim, dtype),
        _queries_and_staged(shape, geo, dtype),
        _boxes(geo, geo.lse_copies, jnp.float32),
        swizzled((geo.stages, geo.block, shape.head_dim), dtype),
        values if geo.simulated else plgpu.RefUnion(values, lines_like(geo, shape.v_head_dim)),
        plgpu.SMEM((geo.slots, META_WORDS), jnp.int32),
    ]


def _boxes(geo: Geometry, width: int, dtype: Any) -> Any:
    return plgpu.SMEM((geo.consumers, geo.boxes, geo.box, width), dtype)


def _queries_and_staged(shape: lo.WorkShape, geo: Geometry, dtype: Any) -> Any:
    """The queries, and what :class:`Staged` has: :func:`_views` tells them apart."""
    queries = swizzled((geo.consumers, WARPGROUP_ROWS, shape.head_dim), dtype)

    def views(dtype: Any) -> tuple[Any, Any]:
        width = min(STAGED_BYTES // jnp.dtype(dtype).itemsize, shape.v_head_dim)
        return _boxes(geo, width, dtype), swizzled((geo.consumers, WARPGROUP_ROWS, width), dtype)

    partial, final = views(jnp.float32), views(dtype)
    if geo.simulated:
        return [queries, partial[0], final[0]]
    if geo.queries_staged:
        return plgpu.RefUnion(*partial, final[0], queries)
    if geo.staged_apart:
        return [queries, plgpu.RefUnion(*partial), plgpu.RefUnion(*final)]
    return [queries, plgpu.RefUnion(*partial, *final)]


def _views(refs: Any, geo: Geometry) -> tuple[Any, Staged]:
    """Queries and :class:`Staged` from the references to :func:`_queries_and_staged`."""
    if geo.simulated:
        queries, partial, final = refs
        return queries, Staged((partial, None), (final, None))
    if geo.queries_staged:
        *partial, final, queries = refs
        return queries, Staged(tuple(partial), (final, queries))
    if geo.staged_apart:
        queries, partial, final = refs
        return queries, Staged(partial, final)
    queries, (*partial, boxes, by_way_of) = refs
    return queries, Staged(tuple(partial), (boxes, by_way_of))
