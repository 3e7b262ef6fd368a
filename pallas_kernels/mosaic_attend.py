"""A computing warpgroup of the Mosaic GPU kernel: 64 rows against the steps that the loading warpgroup brings.

The softmax runs online in base 2, as in :mod:`pallas_kernels.partial_triton`. A step whose slots all hold tokens needs
no mask. In any other the logits of empty slots become -inf and their values 0, because 0 * NaN is NaN and a free slot
may hold anything.
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
from pallas_kernels.logits import base2_logits, inside_window
from pallas_kernels.mosaic_geometry import WARPGROUP_ROWS, Geometry
from pallas_kernels.mosaic_load import Shared
from pallas_kernels.mosaic_products import Products
from pallas_kernels.mosaic_store import Outputs, pad, store
from pallas_kernels.mosaic_tokens import (
    Entries,
    all_filled,
    positions,
    read_entries,
    seen_by,
    step_slots,
    tokens_at,
)
from pallas_kernels.mosaic_work import Scalar, Work, div, for_each_work, rem
from pallas_kernels.options import LOG2E, Options

ROWS = plgpu.Layout.WGMMA.reduce(1)
# Columns of V that are cleaned at a time: more would not fit in registers beside the accumulator.
CLEAN_COLUMNS = 64


class Rows(NamedTuple):
    """What a logit depends on beside the dot product, a number a row; None where no option needs it."""

    row: Any
    position: Any
    slope: Any
    key_factor: Any


def consume(
    buffer_ref: Any,
    per_head_ref: Any,
    outputs: Outputs,
    shared: Shared,
    program: Scalar,
    warpgroup: Scalar,
    *,
    index: int,
    grid: int,
    shape: lo.WorkShape,
    geo: Geometry,
    options: Options,
    products: Products,
) -> None:
    """Attend with rows ``64 * warpgroup ..`` of every pass of this program, and write what comes out."""
    masked_too = shape.launches[index].tile.masked
    # The scale moves into exp2's argument, one fused multiply-add, unless something non-linear comes between.
    folded = options.logits_soft_cap is None and not options.alibi and options.scale > 0
    factor = options.scale * LOG2E if folded else 1.0

    def one(turn: Scalar, work: Work, step: Scalar) -> Scalar:
        del turn
        _take_queries(shared, warpgroup, geo)
        rows = _rows(buffer_ref, per_head_ref, work, warpgroup, masked_too, shape, geo, options)
        carry = (
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, shape.v_head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), ROWS),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), ROWS),
        )
        _meet(shared, geo, warpgroup == 1)
        for masked in (False, True) if masked_too else (False,):

            def attend(i: Scalar, carry: Any, masked: bool = masked) -> Any:
                left = work.entries(masked)[1] - i * geo.entries
                step, *softmax = carry
                softmax = _step(
                    shared, warpgroup, step, left, rows, tuple(softmax), masked, folded, factor, geo, options, products
                )
                return (step + 1, *softmax)

            step, *carry = lax.fori_loop(0, work.blocks(masked, geo), attend, (step, *carry))
        _meet(shared, geo, warpgroup == 0)
        out, peak, total = carry
        some = jnp.where(total == 0, 1.0, total)
        lse2 = jnp.where(total == 0, -jnp.inf, peak * factor + jnp.log2(some))
        out = out / lax.broadcast_in_dim(some, out.shape, [0])
        store(out, lse2, buffer_ref, outputs, shared, work, warpgroup, shape=shape, geo=geo)
        return step

    if index == 0:
        pad(buffer_ref, outputs, shared, program, warpgroup, grid=grid, shape=shape, geo=geo)
    for_each_work(buffer_ref, program, index=index, grid=grid, shape=shape, geo=geo, body=one)
    plgpu.wait_smem_to_gmem(0)


def _take_queries(shared: Shared, warpgroup: Scalar, geo: Geometry) -> None:
    """Move this warpgroup's query rows to where, and into the order in which, the matrix units read them."""
    plgpu.barrier_wait(shared.raw_full)
    load: Any = plgpu.load  # whose signature is another in older versions
    rows = load(shared.raw.at[warpgroup], optimized=False)
    shared.queries[warpgroup] = plgpu.layout_cast(rows, plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.raw_free)


def _rows(buffer_ref, per_head_ref, work, warpgroup, masked_too, shape, geo, options) -> Rows:
    row = warpgroup * WARPGROUP_ROWS + plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROWS)
    n, head = div(row, geo.heads), rem(row, geo.heads)
    position = slope = key_factor = None

    def spread(count, number, read, dtype):
        """``read(number)`` a row, a scalar after another: there is no gather into registers."""
        # In this order for the reason given at `pick`.
        zeros = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), dtype), ROWS)
        return lax.fori_loop(0, count, lambda i, x: jnp.where(number != i, x, read(i)), zeros)

    def query_position(i):
        return buffer_ref[shape.positions_at + buffer_ref[shape.rows_at + work.row + i]]

    first_head = work.kv_head * geo.group + work.head
    heads = jnp.minimum(geo.group - work.head, geo.heads)
    if options.uses_positions:
        position = spread(work.queries, n, query_position, jnp.int32)
    if options.alibi:
        slope = spread(heads, head, lambda i: per_head_ref[0, first_head + i], jnp.float32)
    if options.scaled_keys:
        key_factor = spread(heads, head, lambda i: per_head_ref[1, first_head + i], jnp.float32)
    return Rows(work.row + n if masked_too else None, position, slope, key_factor)


def _step(shared, warpgroup, step, left, rows, carry, masked, folded, factor, geo, options, products):
    out, peak, total = carry
    stage = rem(step, geo.stages)
    plgpu.barrier_wait(shared.keys_full.at[stage])
    entries = read_entries(shared.meta, stage, left, masked, geo)
    full = all_filled(entries, geo)
    meet = functools.partial(_meet, shared, geo)
    logits = products.scores(shared.queries.at[warpgroup], shared.keys.at[stage], meet)
    plgpu.barrier_arrive(shared.keys_free.at[stage])

    if options.scaled_keys:
        logits = logits * _spread(rows.key_factor, logits)
    logits = _masked(logits, rows, entries, full, masked, folded, geo, options)
    new_peak = jnp.maximum(peak, logits.max(axis=1))
    # A row that has seen nothing yet has peak -inf; measuring from 0 keeps -inf - -inf out of exp2.
    base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak * factor)
    weight = jnp.exp2(logits * factor - _spread(base, logits))
    shrink = jnp.exp2(peak * factor - base)
    total = total * shrink + weight.sum(axis=1)
    out = out * _spread(shrink, out)

    plgpu.barrier_wait(shared.values_full.at[stage])
    meet()

    @pl.when(jnp.logical_not(full))
    def _():
        _clean(shared, warpgroup, stage, entries, geo)

    out = products.accumulate(out, weight.astype(shared.values.dtype), shared.values.at[stage])
    plgpu.barrier_arrive(shared.values_free.at[stage])
    return out, new_peak, total


def _meet(shared: Shared, geo: Geometry, really: Any = True) -> None:
    """Wait for the other consumer, if there is one.

    Both meet twice a step: when the scores have been issued, and when the softmax is done. The second one meets once
    more before its first step, and the first one after its last: so one computes a softmax while the other has the
    matrix units, as in FlashAttention-3.
    """
    if geo.consumers == 1:
        return

    def meet() -> None:
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.turn)

    meet() if really is True else pl.when(really)(meet)


def _spread(rows: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(rows, like.shape, [0])


def _masked(logits, rows: Rows, entries: Entries, full, masked, folded, geo, options: Options) -> jax.Array:
    """Logits in the form that the softmax reads, -inf where a row does not see a token."""

    def one_by_one(logits: jax.Array) -> jax.Array:
        tokens = tokens_at(step_slots(logits.shape, 1), entries, geo)
        seen = seen_by(_spread(rows.row, logits), tokens, entries) if masked else tokens.filled
        query_position: Any = None
        token_position: Any = None
        slope = None
        if options.uses_positions:
            query_position = _spread(rows.position, logits)
            token_position = positions(tokens, entries)
        if options.alibi:
            slope = _spread(rows.slope, logits)
        if not folded:
            logits = base2_logits(logits, options, query_position, token_position, slope)
        if options.sliding_window is not None:
            seen = seen & inside_window(options, query_position, token_position)
        return jnp.where(seen, logits, -jnp.inf)

    if masked or options.uses_positions:
        return one_by_one(logits)

    def as_they_are(logits: jax.Array) -> jax.Array:
        return logits if folded else base2_logits(logits, options)

    return lax.cond(full, as_they_are, one_by_one, logits)


def _clean(shared: Shared, warpgroup: Scalar, stage: Scalar, entries: Entries, geo: Geometry) -> None:
    """Zero the slots of V that hold no token. The first warpgroup does it, and a second one waits for it."""

    @pl.when(warpgroup == 0)
    def _():
        for block in range(0, geo.block, WARPGROUP_ROWS):
            for column in range(0, shared.values.shape[-1], CLEAN_COLUMNS):
                part = shared.values.at[stage, pl.ds(block, WARPGROUP_ROWS), pl.ds(column, CLEAN_COLUMNS)]
                values = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
                filled = tokens_at(block + step_slots(values.shape, 0), entries, geo).filled
                part[...] = jnp.where(filled, values, jnp.zeros_like(values))
        plgpu.commit_smem()
        if geo.consumers > 1:
            plgpu.barrier_arrive(shared.clean.at[stage])

    if geo.consumers > 1:

        @pl.when(warpgroup > 0)
        def _():
            plgpu.barrier_wait(shared.clean.at[stage])
