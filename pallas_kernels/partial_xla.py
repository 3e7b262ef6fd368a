"""Partial attention in plain XLA: right everywhere, and what the Pallas kernels must equal.

Items are taken a chunk at a time and their tokens a tile at a time, so memory is linear in rows and never holds a
[queries, tokens] matrix. Items of a launch come longest first: a chunk's items have much the same length.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import layout as lo
from pallas_kernels.logits import base2_logits, inside_window
from pallas_kernels.options import LOG2E, Options
from pallas_kernels.state import AttentionState

CHUNK = 16


def partial_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    per_head: jax.Array | None,
    state: AttentionState,
    *,
    index: int,
    shape: lo.WorkShape,
    options: Options,
) -> AttentionState:
    """Run the items of launch ``index``.

    Args:
        q: [Q, Hq, D].
        k: [num_slots, Hkv, D]; ``v``: [num_slots, Hkv, Dv].
        buffer: int32 [shape.buffer_size], see :mod:`pallas_kernels.layout`.
        per_head: float32 [2, Hq] slopes and key factors, with ``options.uses_heads``.
        state: what earlier launches wrote.
    """
    launch = shape.launches[index]
    num_items = buffer[index]
    run = functools.partial(_run_chunk, q, k, v, buffer, per_head, launch=launch, shape=shape, options=options)

    def chunk(c, state):
        items = c * CHUNK + jnp.arange(CHUNK)
        return run(items, items < num_items, state)

    return lax.fori_loop(0, (num_items + CHUNK - 1) // CHUNK, chunk, state)


def _run_chunk(q, k, v, buffer, per_head, items, exists, state, *, launch, shape, options) -> AttentionState:
    """``CHUNK`` items side by side: c item, n query of the item, h KV head, g head of its group, t token."""
    tile = launch.tile
    at = launch.items_at + jnp.where(exists, items, 0) * lo.ITEM_SIZE
    record = buffer[at[:, None] + jnp.arange(lo.ITEM_SIZE)]
    num_rows = jnp.where(exists, record[:, lo.NUM_ROWS], 0)

    n = jnp.arange(tile.queries_per_tile(shape.group))
    row = record[:, lo.ROW, None] + n
    query = buffer[shape.rows_at + jnp.minimum(row, shape.row_capacity - 1)]
    live = (n < num_rows[:, None]) & (query < q.shape[0])
    query = jnp.where(live, query, 0)
    tile_q = q[query].reshape(*query.shape, shape.num_kv_heads, shape.group, shape.head_dim).astype(jnp.float32)
    position = buffer[shape.positions_at + query]
    slope = key_factor = None
    if per_head is not None:
        slope, key_factor = per_head.reshape(2, shape.num_kv_heads, 1, shape.group, 1)

    def step(masked: bool, i, carry):
        out, peak, total = carry
        t = i * tile.block_kv + jnp.arange(tile.block_kv)
        slot, seen, token_position = _tokens(buffer, record, t, tile.entry_tokens(masked), row, masked)
        keys = jnp.where((seen.any(1))[:, :, None, None], k[slot].astype(jnp.float32), 0)
        values = jnp.where((seen.any(1))[:, :, None, None], v[slot].astype(jnp.float32), 0)
        dot = jnp.einsum("cnhgd,cthd->chngt", tile_q, keys, precision=lax.Precision.HIGHEST)
        if options.scaled_keys:
            assert key_factor is not None
            dot = dot * key_factor
        query_position = position[:, None, :, None, None]
        token_position = token_position[:, None, None, None, :]
        logits = base2_logits(dot, options, query_position, token_position, slope)
        seen = seen[:, None, :, None, :]
        if options.sliding_window is not None:
            seen = seen & inside_window(options, query_position, token_position)
        logits = jnp.where(seen, logits, -jnp.inf)
        new_peak = jnp.maximum(peak, logits.max(-1))
        base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weight = jnp.exp2(logits - base[..., None])
        shrink = jnp.exp2(peak - base)
        total = total * shrink + weight.sum(-1)
        out = out * shrink[..., None] + jnp.einsum("chngt,cthd->chngd", weight, values, precision=lax.Precision.HIGHEST)
        return out, new_peak, total

    rows = (len(items), shape.num_kv_heads, len(n), shape.group)
    carry = (jnp.zeros((*rows, shape.v_head_dim)), jnp.full(rows, -jnp.inf), jnp.zeros(rows))

    def walk(masked, carry):
        entries = jnp.where(exists, record[:, lo.MASKED_COUNT if masked else lo.PLAIN_COUNT], 0).max()
        steps = (entries * tile.entry_tokens(masked) + tile.block_kv - 1) // tile.block_kv
        return lax.fori_loop(0, steps, functools.partial(step, masked), carry)

    carry = walk(False, carry)
    if tile.masked:
        carry = walk(True, carry)
    out, peak, total = carry
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    lse2 = jnp.where(total == 0, -jnp.inf, peak + jnp.log2(jnp.where(total == 0, 1.0, total)))

    def by_query(x):  # [c, h, n, g, ...] -> [c, n, Hq, ...]
        return jnp.moveaxis(x, 1, 2).reshape(*x.shape[:1], len(n), shape.num_q_heads, *x.shape[4:])

    return _write(state, by_query(out), by_query(lse2), record[:, lo.PARTIAL, None], n, query, live)


def _tokens(buffer, record, t, unit, row, masked):
    """Cache slot [c, t], who sees it [c, n, t], and absolute position [c, t] of the item's tokens ``t``."""
    size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
    begin = record[:, lo.MASKED_BEGIN if masked else lo.PLAIN_BEGIN, None]
    entry = t // unit
    listed = entry < record[:, lo.MASKED_COUNT if masked else lo.PLAIN_COUNT, None]
    at = jnp.where(listed, begin + entry * size, 0)
    x = t % unit
    word = jnp.where(listed, buffer[at + lo.WORD], 0)
    filled = x < (word & lo.COUNT_MASK)
    slot = jnp.where(filled, (word >> lo.SLOT_SHIFT) + x, 0)
    position = buffer[at + lo.POSITION] + x
    seen = jnp.broadcast_to(filled[:, None, :], (*row.shape, len(t)))
    if masked:
        low = buffer[at + lo.LOW]
        low = jnp.where(low < 0, ~low + x, low)
        high = buffer[at + lo.HIGH]
        seen = seen & (low[:, None, :] <= row[:, :, None]) & (row[:, :, None] < high[:, None, :])
    return slot, seen, position


def _write(state: AttentionState, out, lse2, partial, n, query, live) -> AttentionState:
    nowhere = jnp.iinfo(jnp.int32).max
    final = live & (partial < 0)
    target = jnp.where(final, query, nowhere)
    place = jnp.where(live & (partial >= 0), partial + n, nowhere)
    return AttentionState(
        out=state.out.at[target].set(out.astype(state.out.dtype), mode="drop"),
        lse=state.lse.at[target].set(lse2 / LOG2E, mode="drop"),
        partial_out=state.partial_out.at[place].set(out, mode="drop"),
        partial_lse=state.partial_lse.at[place].set(lse2, mode="drop"),
    )
