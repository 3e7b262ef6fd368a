"""Partial attention as a Pallas kernel (Triton backend).

One program takes one item and one KV head: its queries' heads are packed into the rows of a matrix tile, so each
K/V element is read once for the whole group (GQA packing), and the softmax runs online in base 2 (FlashAttention-2).
Plain entries come first and need no mask but the end of an entry; masked entries compare the row with the entry's
interval. :mod:`pallas_kernels.partial_xla` is the version this must equal.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.logits import base2_logits, inside_window
from pallas_kernels.options import LOG2E, Options
from pallas_kernels.state import AttentionState, lse_at

INTERPRETED_PROGRAMS = 4
NOBODY = 2**31 - 1  # as `low` of a token's interval: no row sees it


class _Item(NamedTuple):
    """An item record. ``entries``: where the plain ones begin, and the masked ones; ``counts``: how many they are."""

    row: jax.Array
    num_rows: jax.Array
    entries: tuple[jax.Array, jax.Array]
    counts: tuple[jax.Array, jax.Array]
    partial: jax.Array


def partial_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    per_head: jax.Array | None,
    state: AttentionState | None,
    *,
    index: int,
    shape: lo.WorkShape,
    options: Options,
    interpret: bool = False,
) -> AttentionState:
    """Run the items of launch ``index``. Arguments as in :func:`pallas_kernels.partial_xla.partial_attention`.

    ``state`` None (the first launch): outputs start uninitialised; every row a reader looks at gets written.
    """
    launch = shape.launches[index]
    outputs: Any = (
        jax.ShapeDtypeStruct((q.shape[0], shape.num_q_heads, shape.v_head_dim), q.dtype),
        jax.ShapeDtypeStruct((q.shape[0], shape.num_q_heads), jnp.float32),
        jax.ShapeDtypeStruct((max(shape.partial_rows, 1), shape.num_q_heads, shape.v_head_dim), jnp.float32),
        jax.ShapeDtypeStruct((max(shape.partial_rows, 1), shape.num_q_heads), jnp.float32),
    )
    operands = [q, k, v, buffer] + ([per_head] if options.uses_heads else [])
    aliases = {}
    if state is not None:
        outputs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state)
        aliases = {len(operands) + i: i for i in range(len(outputs))}
    exp2 = jnp.exp2 if interpret else _exp2  # the interpreter knows no assembly
    # The interpreter runs program after program, so few programs with many items each are faster there.
    grid = min(launch.grid, INTERPRETED_PROGRAMS) if interpret else launch.grid
    kernel = functools.partial(_kernel, grid=grid, index=index, shape=shape, options=options, exp2=exp2)
    results = pl.pallas_call(
        kernel,
        grid=(grid,),
        out_shape=outputs,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=launch.tile.warps, num_stages=launch.tile.stages),
        interpret=interpret,
        name=f"tree_partial_{launch.tile.name()}",
    )(*operands, *(state or ()))
    return AttentionState(*results)


def _kernel(q_ref, k_ref, v_ref, buffer_ref, *refs, grid, index, shape, options, exp2):
    launch = shape.launches[index]
    per_head_ref = refs[0] if options.uses_heads else None
    outputs = AttentionState(*refs[-4:])
    run = functools.partial(
        _run_item,
        q_ref,
        k_ref,
        v_ref,
        buffer_ref,
        per_head_ref,
        outputs,
        launch=launch,
        shape=shape,
        options=options,
        exp2=exp2,
    )
    program = pl.program_id(0)  # read here: the interpreter does not know it inside a loop
    heads = shape.num_kv_heads * shape.head_tiles(launch.tile)
    # Where each program has one item, it is read while the number of items, which says whether there is any, is on its
    # way: memory is waited for once, not twice.
    item = _read_item(buffer_ref, launch, lax.div(program, heads)) if grid >= launch.capacity * heads else None
    if index == 0:
        _pad(buffer_ref, outputs, program, grid, rows=launch.tile.rows, shape=shape)
    total = buffer_ref[index] * heads

    if item is not None:
        # Items come longest first, and the GPU gives the next one to whichever SM has room. A loop over several items
        # would keep what it needs to begin and end them in registers all the while: 40 a thread, which narrow tiles
        # lack for their accumulator and the others for a program more on the SM.
        @pl.when(program < total)
        def _():
            run(item, lax.rem(program, heads))
    else:

        def turn(i, carry):
            work = program + i * grid
            run(_read_item(buffer_ref, launch, lax.div(work, heads)), lax.rem(work, heads))
            return carry

        lax.fori_loop(0, lax.div(jnp.maximum(total - program, 0) + grid - 1, grid), turn, 0)


def _pad(buffer_ref, outputs, program, grid, *, rows, shape):
    """0 and -inf for the rows of ``q`` that are no query: usually none, else a share for each program."""
    width = pl.next_power_of_2(shape.v_head_dim)
    first = buffer_ref[lo.NUM_QUERIES] * shape.num_q_heads
    end = outputs.out.shape[0] * shape.num_q_heads
    shares = lax.div(jnp.maximum(end - first, 0) + rows - 1, rows)

    def share(i, carry):
        flat = first + (program + i * grid) * rows + jnp.arange(rows)
        query, head = _divmod(flat, shape.num_q_heads)
        zeros, nothing = jnp.zeros((rows, width), jnp.float32), jnp.full((rows,), -jnp.inf, jnp.float32)
        _store(outputs.out, outputs.lse, query, head, flat < end, zeros, nothing)
        return carry

    lax.fori_loop(0, lax.div(jnp.maximum(shares - program, 0) + grid - 1, grid), share, 0)


def _read_item(buffer_ref, launch, number) -> _Item:
    record = launch.items_at + number * lo.ITEM_SIZE
    return _Item(
        row=buffer_ref[record + lo.ROW],
        num_rows=buffer_ref[record + lo.NUM_ROWS],
        entries=(buffer_ref[record + lo.PLAIN_BEGIN], buffer_ref[record + lo.MASKED_BEGIN]),
        counts=(buffer_ref[record + lo.PLAIN_COUNT], buffer_ref[record + lo.MASKED_COUNT]),
        partial=buffer_ref[record + lo.PARTIAL],
    )


def _run_item(
    q_ref, k_ref, v_ref, buffer_ref, per_head_ref, outputs, item, head_program, *, launch, shape, options, exp2
):
    tile = launch.tile
    heads = tile.heads_per_tile(shape.group)
    kv_head, head_tile = _divmod(head_program, shape.head_tiles(tile))

    # Tile row r is head r % heads of query r // heads.
    n, head = _divmod(jnp.arange(tile.rows), heads)
    head += head_tile * heads
    live = n < jnp.minimum(item.num_rows, tile.queries_per_tile(shape.group))
    if shape.group % heads:
        live &= head < shape.group
    head += kv_head * shape.group
    row = item.row + n

    def load_query():
        query = plgpu.load(buffer_ref.at[shape.rows_at + row], mask=live, other=0)
        return query, live & (query < q_ref.shape[0])

    query, queried = load_query()
    q_tile = _load_rows(q_ref, (query[:, None], head[:, None]), queried)
    position = slope = None
    if options.uses_positions:
        position = plgpu.load(buffer_ref.at[shape.positions_at + query], mask=queried, other=0)[:, None]
    if options.alibi:
        slope = plgpu.load(per_head_ref.at[(jnp.zeros_like(head), head)], mask=queried, other=0.0)[:, None]
    if options.scaled_keys:
        key_factor = plgpu.load(per_head_ref.at[(jnp.ones_like(head), head)], mask=queried, other=0.0)[:, None]

    # The scale moves into exp2's argument, one fused multiply-add, unless something non-linear comes between.
    folded = options.logits_soft_cap is None and not options.alibi and options.scale > 0
    factor = options.scale * LOG2E if folded else 1.0

    def step(masked, entries, num_entries, i, carry):
        out, peak, total = carry
        slot, filled, token_position, low, high = _load_entries(
            buffer_ref, entries, num_entries, i * tile.block_kv, tile, masked, options
        )
        keys = _load_rows(k_ref, (slot[:, None], kv_head), filled).astype(q_tile.dtype)
        logits = _dot(q_tile, keys.T)
        if options.scaled_keys:
            logits = logits * key_factor
        if not folded:
            logits = base2_logits(logits, options, position, token_position, slope)
        if masked:
            seen = (low[None, :] <= row[:, None]) & (row[:, None] < high[None, :])
        else:
            seen = jnp.broadcast_to(filled[None, :], logits.shape)
        if options.sliding_window is not None:
            assert position is not None
            assert token_position is not None
            seen &= inside_window(options, position, token_position)
        logits = jnp.where(seen, logits, -jnp.inf)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        base = new_peak * factor
        if masked or options.sliding_window is not None:
            # A row that has seen nothing yet has peak -inf; measuring from 0 keeps -inf - -inf out of exp2.
            base = jnp.where(new_peak == -jnp.inf, 0.0, base)
        weight = exp2(logits * factor - base[:, None])
        shrink = exp2(peak * factor - base)
        values = _load_rows(v_ref, (slot[:, None], kv_head), filled).astype(q_tile.dtype)
        out = out * shrink[:, None] + _dot(weight.astype(values.dtype), values)
        return out, new_peak, total * shrink + weight.sum(axis=1)

    def walk(masked, carry):
        entries, num_entries = item.entries[masked], item.counts[masked]
        steps = lax.div(num_entries * tile.entry_tokens(masked) + tile.block_kv - 1, tile.block_kv)
        return lax.fori_loop(0, steps, functools.partial(step, masked, entries, num_entries), carry)

    carry = (
        jnp.zeros((tile.rows, pl.next_power_of_2(shape.v_head_dim)), jnp.float32),
        jnp.full((tile.rows,), -jnp.inf, jnp.float32),
        jnp.zeros((tile.rows,), jnp.float32),
    )
    carry = walk(False, carry)
    if tile.masked:
        carry = walk(True, carry)
    out, peak, total = carry
    some = jnp.where(total == 0, 1.0, total)
    out = out / some[:, None]
    lse2 = jnp.where(total == 0, -jnp.inf, peak * factor + jnp.log2(some))
    partial = item.partial

    # Idle rows point past the end: the mask keeps the GPU away, and the interpreter (which writes old values back where
    # the mask is off) drops them instead of racing with a live row.
    @pl.when(partial < 0)
    def _():
        # Loaded again rather than kept: sixteen more live registers a thread make the wide tile spill.
        query, queried = load_query()
        place = jnp.where(queried, query, outputs.out.shape[0])
        _store(outputs.out, outputs.lse, place, head, queried, out, lse2 / LOG2E)

    @pl.when(partial >= 0)
    def _():
        place = jnp.where(live, partial + n, outputs.partial_out.shape[0])
        _store(outputs.partial_out, outputs.partial_lse, place, head, live, out, lse2)


def _load_entries(buffer_ref, entries, num_entries, first, tile, masked, options):
    """Of tokens ``first .. first + block_kv - 1``: slot, whether there is one, position, and row interval."""
    size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
    entry, x = _divmod(first + jnp.arange(tile.block_kv), tile.entry_tokens(masked))
    listed = entry < num_entries
    at = entries + entry * size
    word = plgpu.load(buffer_ref.at[at + lo.WORD], mask=listed, other=0)
    filled = x < (word & lo.COUNT_MASK)
    slot = (word >> lo.SLOT_SHIFT) + x
    position = low = high = None
    if options.uses_positions:
        position = (plgpu.load(buffer_ref.at[at + lo.POSITION], mask=listed, other=0) + x)[None, :]
    if masked:
        low = plgpu.load(buffer_ref.at[at + lo.LOW], mask=listed, other=0)
        low = jnp.where(filled, jnp.where(low < 0, ~low + x, low), NOBODY)
        high = plgpu.load(buffer_ref.at[at + lo.HIGH], mask=listed, other=0)
    return slot, filled, position, low, high


def _load_rows(ref, index, mask):
    """``ref[*index, :]`` as [rows, width rounded up to a power of two], 0 where masked or beyond the width."""
    width = ref.shape[-1]
    column = jnp.arange(pl.next_power_of_2(width))[None, :]
    mask = jnp.broadcast_to(mask[:, None], (mask.shape[0], column.shape[1]))
    if column.shape[1] != width:
        mask &= column < width
    return plgpu.load(ref.at[(*index, column)], mask=mask, other=jnp.zeros((), ref.dtype))


def _exp2(x):
    """2 ** x by the GPU's own instruction; libdevice's rescales denormals, which costs 5 to 30% of a kernel."""
    (y,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def _divmod(x, n: int):
    """Quotient and remainder of non-negative integers. Python's rounding costs instructions that shifts do not."""
    if n & (n - 1) == 0:
        return x >> (n.bit_length() - 1), x & (n - 1)
    return lax.div(x, n), lax.rem(x, n)


def _dot(a, b):
    """Matrix product accumulated in float32; float32 operands keep full precision (no TF32)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def _store(out_ref, lse_ref, place, head, mask, out, lse):
    width = out_ref.shape[-1]
    column = jnp.arange(out.shape[1])[None, :]
    plgpu.store(lse_ref.at[lse_at(lse_ref, (place, head))], lse, mask=mask)
    mask = jnp.broadcast_to(mask[:, None], out.shape)
    if out.shape[1] != width:
        mask &= column < width
    plgpu.store(out_ref.at[(place[:, None], head[:, None], column)], out.astype(out_ref.dtype), mask=mask)
