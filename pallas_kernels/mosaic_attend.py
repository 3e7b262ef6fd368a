"""A computing warpgroup of the Mosaic GPU kernel: 64 rows against the steps that the loading warpgroup brings.

The softmax runs online in base 2, as in :mod:`pallas_kernels.partial_triton`. A step whose slots all hold tokens needs
no mask. In any other the logits of empty slots become -inf, and their values are zeroed (:mod:`.mosaic_clean`).

Masked entries are seen by some rows only, mostly by those of one subtree. So a warpgroup goes through them in parts:
one that none of its rows sees is left out, and one that all of them see takes no mask. Two warpgroups then do different
parts of a step at the same time, while both read what their rows share from the same memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels import mosaic_turns
from pallas_kernels.logits import base2_logits, inside_window
from pallas_kernels.mosaic_clean import clean
from pallas_kernels.mosaic_geometry import WARPGROUP_ROWS, Geometry
from pallas_kernels.mosaic_load import Shared, bring_rows
from pallas_kernels.mosaic_products import Products
from pallas_kernels.mosaic_rows import take_rows
from pallas_kernels.mosaic_store import Outputs, pad, store
from pallas_kernels.mosaic_tokens import (
    Entries,
    all_filled,
    may_be_seen,
    next_all_filled,
    positions,
    read_entries,
    seen_by,
    seen_by_all,
    seen_by_some,
    step_slots,
    tokens_at,
)
from pallas_kernels.mosaic_work import Scalar, Work, div, for_each_work, rem
from pallas_kernels.options import LOG2E, Options

ROWS = plgpu.Layout.WGMMA.reduce(1)


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
    common: Any = {"folded": folded, "factor": factor, "geo": geo, "options": options, "products": products}

    def one(turn: Scalar, work: Work, step: Scalar) -> Scalar:
        row_of = bring_rows(buffer_ref, shared, turn, work, shape, geo)
        _take_queries(shared, warpgroup, geo)
        rows = _rows(buffer_ref, per_head_ref, work, warpgroup, masked_too, shape, geo, options)
        carry = (
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, shape.v_head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), ROWS),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), ROWS),
        )
        step, *carry = _plain_steps(shared, warpgroup, work, step, rows, carry, **common)
        if masked_too:
            step, *carry = _masked_steps(shared, warpgroup, work, step, rows, carry, **common)
        out, peak, total = carry
        some = jnp.where(total == 0, 1.0, total)
        lse2 = jnp.where(total == 0, -jnp.inf, peak * factor + jnp.log2(some))
        out = out * _spread(1.0 / some, out)
        store(out, lse2, outputs, shared, work, warpgroup, row_of, geo)
        return step

    for_each_work(buffer_ref, program, index=index, grid=grid, shape=shape, geo=geo, body=one)
    if index == 0:
        pad(buffer_ref, outputs, shared, program, warpgroup, grid=grid, shape=shape, geo=geo)
    plgpu.wait_smem_to_gmem(0)


def _plain_steps(shared, warpgroup, work, step, rows, carry, *, geo, **common):
    """The steps that every row sees. Two warpgroups take turns: see :func:`_meet`."""

    def attend(i: Scalar, carry: Any) -> Any:
        begin, count = work.entries(False)
        listed = begin + i * geo.entries * lo.PLAIN_SIZE, count - i * geo.entries
        step, full, *softmax = carry
        take: Any = functools.partial(_step, shared, warpgroup, step, listed, rows, geo=geo, **common)
        if geo.looks_ahead:
            taken = lax.cond(full, functools.partial(take, True), functools.partial(take, False), *softmax)
        else:
            taken = take(False, *softmax)
        return (step + 1, *taken)

    _meet(shared, geo, warpgroup == 1)
    # Nothing is known of an item's first step.
    step, _, *carry = lax.fori_loop(0, work.blocks(False, geo), attend, (step, jnp.bool_(False), *carry))
    _meet(shared, geo, warpgroup == 0)
    return step, *carry


def _masked_steps(shared, warpgroup, work, step, rows, carry, *, geo, **common):
    """The steps that some rows see. Warpgroups take no turns, as they leave out different parts."""
    first_row = warpgroup * WARPGROUP_ROWS
    first_query, end_query = div(first_row, geo.heads), div(first_row + WARPGROUP_ROWS + geo.heads - 1, geo.heads)
    span = work.row + first_query, work.row + jnp.minimum(end_query, work.queries)

    def attend(i: Scalar, carry: Any) -> Any:
        begin, count = work.entries(True)
        listed = begin + i * geo.entries * lo.MASKED_SIZE, count - i * geo.entries
        step, *softmax = carry
        return step + 1, *_masked_step(shared, warpgroup, step, listed, rows, span, softmax, geo=geo, **common)

    return lax.fori_loop(0, work.blocks(True, geo), attend, (step, *carry))


def _take_queries(shared: Shared, warpgroup: Scalar, geo: Geometry) -> None:
    """Move this warpgroup's query rows to where, and into the order in which, the matrix units read them."""
    plgpu.barrier_wait(shared.raw_full)
    if geo.queries_staged:  # the last pass's outputs leave from the same memory
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    take_rows(shared.raw.at[warpgroup], shared.queries.at[warpgroup], geo)
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


def _step(shared, warpgroup, step, listed, rows, full, *softmax, folded, factor, geo, options, products):
    """One step that every row sees: whether the next one is known to be full, and the softmax that goes on.

    ``full``: this one is known to be. If it is not, it looks, and the code for both cases is there.
    """
    stage = rem(step, geo.stages)
    slots = [stage * geo.parts + part for part in range(geo.parts)]
    for slot in slots:
        plgpu.barrier_wait(shared.keys_full.at[slot])
    first, left = listed
    next_full = next_all_filled(shared.meta, slots[0], first, left, geo) if geo.looks_ahead else jnp.bool_(False)
    entries: Any = None
    if not full or options.uses_positions:
        entries = read_entries(shared.meta, slots[0], first, left, geo.entries, False, geo)
    if not full:
        full = all_filled(entries, geo)
    queries = shared.queries.at[warpgroup]
    logits, _ = products.scores(queries, shared.keys.at[stage], functools.partial(_meet, shared, geo))
    for slot in slots:
        plgpu.barrier_arrive(shared.keys_free.at[slot])

    logits = _masked(logits, rows, entries, full, False, folded, geo, options)
    weight, out, peak, total = _go_on(logits, softmax, factor)
    # In this order, as in JAX's own attention kernel.
    out, total, peak, weight = lax.optimization_barrier((out, total, peak, weight.astype(shared.values.dtype)))
    for slot in slots:
        plgpu.barrier_wait(shared.values_full.at[slot])
    _meet(shared, geo)

    if full is not True:
        for part, slot in enumerate(slots):
            of_part = entries.part(part, geo)
            empty = jnp.logical_not(all_filled(of_part, geo))
            pl.when(empty)(functools.partial(_clean, shared, warpgroup, stage, slot, part, of_part, geo))
    out = products.accumulate(out, weight, shared.values.at[stage])
    for slot in slots:
        plgpu.barrier_arrive(shared.values_free.at[slot])
    return next_full, out, peak, total


def _masked_step(
    shared, warpgroup, step, listed, rows, span, softmax, *, folded, factor, geo, options, products
) -> Any:
    """One step that some rows see, part after part; ``span``: this warpgroup's rows."""
    stage = rem(step, geo.stages)
    queries = shared.queries.at[warpgroup]

    def read(slot: Scalar, first: Scalar, left: Scalar) -> Entries:
        return read_entries(shared.meta, slot, first, left, geo.part_entries, True, geo)

    def attend(part: Scalar, softmax: Any) -> Any:
        slot = stage * geo.parts + part
        begin = pl.ds(pl.multiple_of(part * geo.part, geo.part), geo.part)
        first, left = listed[0] + part * geo.part_entries * lo.MASKED_SIZE, listed[1] - part * geo.part_entries
        plgpu.barrier_wait(shared.keys_full.at[slot])
        if geo.halves:
            some = may_be_seen(shared.meta, slot, first, left, warpgroup, geo)
        else:
            some = seen_by_some(read(slot, first, left), *span)

        def look(*softmax: jax.Array) -> Any:
            keys = shared.keys.at[stage, begin]
            if options.uses_positions:
                entries = read(slot, first, left)
                logits, _ = products.scores(queries, keys, lambda: None)
                logits = _masked(logits, rows, entries, False, True, folded, geo, options)
            else:  # who sees what is worked out while the product is
                logits, seen = products.scores(queries, keys, lambda: _seen(rows, read(slot, first, left), span, geo))
                logits = _with_key_factor(logits, rows, options)
                logits = _where_seen(_as_they_are(logits, folded, options), seen)
            weight, *goes_on = _go_on(logits, softmax, factor)
            return weight.astype(shared.values.dtype), *goes_on

        def look_away(*softmax: jax.Array) -> Any:
            products.none()
            nothing = jnp.zeros((WARPGROUP_ROWS, geo.part), shared.values.dtype)
            return plgpu.layout_cast(nothing, plgpu.Layout.WGMMA), *softmax

        weight, out, peak, total = lax.cond(some, look, look_away, *softmax)
        plgpu.barrier_arrive(shared.keys_free.at[slot])
        plgpu.barrier_wait(shared.values_full.at[slot])

        def add(out: jax.Array) -> jax.Array:
            return products.accumulate(out, weight, shared.values.at[stage, begin])

        out = lax.cond(some, add, lambda out: out, out)
        plgpu.barrier_arrive(shared.values_free.at[slot])
        return out, peak, total

    return lax.fori_loop(0, geo.parts, attend, tuple(softmax))


def _go_on(logits: jax.Array, softmax: Any, factor: float) -> tuple[jax.Array, ...]:
    """Weights of a step's tokens; and output so far, peak and total, measured from the new peak."""
    out, peak, total = softmax
    new_peak = jnp.maximum(peak, logits.max(axis=1))
    # A row that has seen nothing yet has peak -inf; measuring from 0 keeps -inf - -inf out of exp2.
    base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak * factor)
    weight = jnp.exp2(logits * factor - _spread(base, logits))
    shrink = jnp.exp2(peak * factor - base)
    return weight, out * _spread(shrink, out), new_peak, total * shrink + weight.sum(axis=1)


def _meet(shared: Shared, geo: Geometry, really: Any = True) -> None:
    """Wait for the other consumer, if there is one.

    Both meet twice a step: when the scores have been issued, and when the softmax is done. The second one meets once
    more before its first step, and the first one after its last: so one computes a softmax while the other has the
    matrix units, as in FlashAttention-3.
    """
    if geo.consumers > 1:
        meet = functools.partial(_meet_simulated, shared) if geo.simulated else mosaic_turns.meet
        meet() if really is True else pl.when(really)(meet)


def _meet_simulated(shared: Shared) -> None:
    plgpu.barrier_arrive(shared.turn)
    plgpu.barrier_wait(shared.turn)


def _spread(rows: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(rows, like.shape, [0])


def _masked(logits, rows: Rows, entries: Entries, full, masked, folded, geo, options: Options) -> jax.Array:
    """Logits in the form that the softmax reads, -inf where a row does not see a token.

    ``full``: all slots hold a token that all rows see, but for the options.
    """
    logits = _with_key_factor(logits, rows, options)

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

    if options.uses_positions:
        return one_by_one(logits)

    as_they_are = functools.partial(_as_they_are, folded=folded, options=options)
    return as_they_are(logits) if full is True else lax.cond(full, as_they_are, one_by_one, logits)


def _with_key_factor(logits: jax.Array, rows: Rows, options: Options) -> jax.Array:
    return logits * _spread(rows.key_factor, logits) if options.scaled_keys else logits


def _as_they_are(logits: jax.Array, folded: bool, options: Options) -> jax.Array:
    """In the form that the softmax reads, where no option needs positions."""
    return logits if folded else base2_logits(logits, options)


def _seen(rows: Rows, entries: Entries, span: tuple[Scalar, Scalar], geo: Geometry) -> jax.Array:
    """int32 [64, part], all bits set where a row sees a token."""
    shape = WARPGROUP_ROWS, geo.part
    everything = plgpu.layout_cast(jnp.full(shape, -1, jnp.int32), plgpu.Layout.WGMMA)

    def one_by_one() -> jax.Array:
        tokens = tokens_at(step_slots(shape, 1), entries, geo)
        row = lax.broadcast_in_dim(rows.row, shape, [0])
        return jnp.where(seen_by(row, tokens, entries), everything, 0)

    all_of_it = seen_by_all(entries, *span) & all_filled(entries, geo)
    return lax.cond(all_of_it, lambda: everything, one_by_one)


def _where_seen(logits: jax.Array, seen: jax.Array) -> jax.Array:
    """-inf elsewhere, in one operation of bits: a comparison would be one more."""
    bits = lax.bitcast_convert_type(logits, jnp.int32)
    nothing = int(np.float32(-np.inf).view(np.int32))
    return lax.bitcast_convert_type((bits & seen) | (~seen & nothing), jnp.float32)


def _clean(
    shared: Shared, warpgroup: Scalar, stage: Scalar, slot: Scalar, part: int, entries: Entries, geo: Geometry
) -> None:
    """Zero what holds no token in a part of V. The first warpgroup does it, and a second one waits for it."""

    @pl.when(warpgroup == 0)
    def _():
        clean(shared, stage, part * geo.part, entries.begin, entries.filled, geo)
        if geo.consumers > 1:
            plgpu.barrier_arrive(shared.clean.at[slot])

    if geo.consumers > 1:

        @pl.when(warpgroup > 0)
        def _():
            plgpu.barrier_wait(shared.clean.at[slot])
