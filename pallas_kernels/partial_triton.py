"""Partial attention as a Pallas kernel (Triton backend).

One program takes one item and one KV head: its queries' heads are packed into the rows of a matrix tile, so each
K/V element is read once for the whole group (GQA packing), and the softmax runs online in base 2 (FlashAttention-2).
Plain entries come first and need no mask but the end of an entry; masked entries compare the row with the entry's
interval. :mod:`pallas_kernels.partial_xla` is the version this must equal.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.logits import base2_logits, inside_window
from pallas_kernels.options import LOG2E, Options
from pallas_kernels.state import AttentionState

NOBODY = 2**31 - 1  # as `low` of a token's interval: no row sees it


def partial_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    slopes: jax.Array | None,
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
    head_tiles = pl.cdiv(shape.group, launch.tile.heads_per_tile(shape.group))
    outputs = AttentionState(
        jax.ShapeDtypeStruct((q.shape[0], shape.num_q_heads, shape.v_head_dim), q.dtype),
        jax.ShapeDtypeStruct((q.shape[0], shape.num_q_heads), jnp.float32),
        jax.ShapeDtypeStruct((max(shape.partial_rows, 1), shape.num_q_heads, shape.v_head_dim), jnp.float32),
        jax.ShapeDtypeStruct((max(shape.partial_rows, 1), shape.num_q_heads), jnp.float32),
    )
    operands = [q, k, v, buffer] + ([slopes] if options.alibi else [])
    aliases = {} if state is None else {len(operands) + i: i for i in range(len(outputs))}
    kernel = functools.partial(_kernel, index=index, shape=shape, options=options)
    return pl.pallas_call(
        kernel,
        grid=(launch.grid, shape.num_kv_heads * head_tiles),
        out_shape=outputs,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=launch.tile.warps, num_stages=launch.tile.stages),
        interpret=interpret,
        name=f"tree_partial_{launch.tile.name()}",
    )(*operands, *(state or ()))


def _kernel(q_ref, k_ref, v_ref, buffer_ref, *refs, index, shape, options):
    launch = shape.launches[index]
    slopes_ref = refs[0] if options.alibi else None
    outputs = AttentionState(*refs[-4:])
    run = functools.partial(
        _run_item, q_ref, k_ref, v_ref, buffer_ref, slopes_ref, outputs, launch=launch, shape=shape, options=options
    )
    # Program ids are read here because the interpreter does not know them inside a loop or a branch.
    program, head_program = pl.program_id(0), pl.program_id(1)
    num_items = buffer_ref[index]
    if launch.grid == launch.capacity:
        pl.when(program < num_items)(lambda: run(program, head_program))
        return

    def loop(i, carry):
        run(program + i * launch.grid, head_program)
        return carry

    lax.fori_loop(0, (num_items - program + launch.grid - 1) // launch.grid, loop, 0)


def _run_item(q_ref, k_ref, v_ref, buffer_ref, slopes_ref, outputs, item, head_program, *, launch, shape, options):
    tile = launch.tile
    heads = tile.heads_per_tile(shape.group)
    head_tiles = pl.cdiv(shape.group, heads)
    kv_head = head_program // head_tiles
    record = launch.items_at + item * lo.ITEM_SIZE
    first_row = buffer_ref[record + lo.ROW]
    num_rows = buffer_ref[record + lo.NUM_ROWS]

    # Tile row r is head r % heads of query r // heads.
    r = jnp.arange(tile.rows)
    n = r // heads
    head_in_group = r % heads + (head_program % head_tiles) * heads
    head = kv_head * shape.group + head_in_group
    live = (n < num_rows) & (n < tile.queries_per_tile(shape.group)) & (head_in_group < shape.group)
    row = first_row + n
    query = plgpu.load(buffer_ref.at[shape.rows_at + row], mask=live, other=0)
    live &= query < q_ref.shape[0]
    # Idle rows point past the end: the mask keeps the GPU away, and the interpreter (which writes old values back where
    # the mask is off) drops them instead of racing with a live row.
    query = jnp.where(live, query, q_ref.shape[0])
    head = jnp.where(live, head, 0)
    q_tile = _load_rows(q_ref, (query[:, None], head[:, None]), live)
    position = slope = None
    if options.uses_positions:
        position = plgpu.load(buffer_ref.at[shape.positions_at + query], mask=live, other=0)[:, None]
    if options.alibi:
        slope = plgpu.load(slopes_ref.at[head], mask=live, other=0.0)[:, None]

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
        if not folded:
            logits = base2_logits(logits, options, position, token_position, slope)
        if masked:
            seen = (low[None, :] <= row[:, None]) & (row[:, None] < high[None, :])
        else:
            seen = jnp.broadcast_to(filled[None, :], logits.shape)
        if options.sliding_window is not None:
            seen &= inside_window(options, position, token_position)
        logits = jnp.where(seen, logits, -jnp.inf)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        # A row that has seen nothing yet has peak -inf; measuring from 0 keeps -inf - -inf out of exp2.
        base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak * factor)
        weight = jnp.exp2(logits * factor - base[:, None])
        shrink = jnp.exp2(peak * factor - base)
        values = _load_rows(v_ref, (slot[:, None], kv_head), filled).astype(q_tile.dtype)
        out = out * shrink[:, None] + _dot(weight.astype(values.dtype), values)
        return out, new_peak, total * shrink + weight.sum(axis=1)

    def walk(masked, carry):
        entries = buffer_ref[record + (lo.MASKED_BEGIN if masked else lo.PLAIN_BEGIN)]
        num_entries = buffer_ref[record + (lo.MASKED_COUNT if masked else lo.PLAIN_COUNT)]
        steps = (num_entries * tile.unit + tile.block_kv - 1) // tile.block_kv
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
    _store(outputs, buffer_ref[record + lo.PARTIAL], out, lse2, n, query, head, live)


def _load_entries(buffer_ref, entries, num_entries, first, tile, masked, options):
    """Of tokens ``first .. first + block_kv - 1``: slot, whether there is one, position, and row interval."""
    size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
    t = first + jnp.arange(tile.block_kv)
    entry = t // tile.unit
    x = t % tile.unit
    listed = entry < num_entries
    at = entries + entry * size
    count = plgpu.load(buffer_ref.at[at + lo.COUNT], mask=listed, other=0)
    filled = x < (count & lo.COUNT_MASK)
    slot = plgpu.load(buffer_ref.at[at + lo.SLOT], mask=listed, other=0) + x
    slot = jnp.where(filled, slot, 0)
    position = low = high = None
    if options.uses_positions:
        position = (plgpu.load(buffer_ref.at[at + lo.POSITION], mask=listed, other=0) + x)[None, :]
    if masked:
        low = plgpu.load(buffer_ref.at[at + lo.LOW], mask=listed, other=0)
        low = jnp.where(filled, low + jnp.where(count >= lo.CAUSAL, x, 0), NOBODY)
        high = plgpu.load(buffer_ref.at[at + lo.HIGH], mask=listed, other=0)
    return slot, filled, position, low, high


def _load_rows(ref, index, mask):
    """``ref[*index, :]`` as [rows, width rounded up to a power of two], 0 where masked or beyond the width."""
    width = ref.shape[-1]
    column = jnp.arange(pl.next_power_of_2(width))[None, :]
    mask = jnp.broadcast_to(mask[:, None], (mask.shape[0], column.shape[1]))
    if column.shape[1] != width:
        mask &= column < width
    return plgpu.load(ref.at[(*index, column)], mask=mask, other=0)


def _dot(a, b):
    """Matrix product accumulated in float32; float32 operands keep full precision (no TF32)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def _store(outputs: AttentionState, partial, out, lse2, n, query, head, live):
    width = outputs.out.shape[-1]
    column = jnp.arange(out.shape[1])[None, :]
    final = live & (partial < 0)
    shared = live & (partial >= 0)
    query = jnp.where(final, query, outputs.out.shape[0])
    place = jnp.where(shared, partial + n, outputs.partial_out.shape[0])

    def mask2d(mask):
        mask = jnp.broadcast_to(mask[:, None], out.shape)
        return mask & (column < width) if out.shape[1] != width else mask

    where = (query[:, None], head[:, None], column)
    plgpu.store(outputs.out.at[where], out.astype(outputs.out.dtype), mask=mask2d(final))
    plgpu.store(outputs.lse.at[(query, head)], lse2 / LOG2E, mask=final)
    plgpu.store(outputs.partial_out.at[(place[:, None], head[:, None], column)], out, mask=mask2d(shared))
    plgpu.store(outputs.partial_lse.at[(place, head)], lse2, mask=shared)
