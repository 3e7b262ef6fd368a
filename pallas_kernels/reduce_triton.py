"""Tree reduction as a Pallas kernel (Triton backend): one program merges the partials of one query and some heads.

The partials come in a fixed order, a block at a time, and are merged in float32 registers, so the result repeats bit
for bit, unlike the atomics of DeFT's reduction. A block of partials is loaded at once, because a long context split
over many items is otherwise a chain of dependent loads. :mod:`pallas_kernels.reduce_xla` is what it must equal.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.options import LOG2E
from pallas_kernels.state import AttentionState, lse_at

# Rows (heads x partials) of the block that a program holds.
BLOCK_ROWS = 16
MAX_HEADS = 4


def reduce_partials(
    buffer: jax.Array, state: AttentionState, *, shape: lo.WorkShape, interpret: bool = False
) -> AttentionState:
    """Write ``out`` and ``lse`` of every query that has partials; the others already hold their final value."""
    heads = min(MAX_HEADS, BLOCK_ROWS // shape.reduce_block, pl.next_power_of_2(shape.num_q_heads))
    outputs = (
        jax.ShapeDtypeStruct(state.out.shape, state.out.dtype),
        jax.ShapeDtypeStruct(state.lse.shape, state.lse.dtype),
    )
    out, lse = pl.pallas_call(
        functools.partial(_kernel, heads=heads, shape=shape),
        grid=(state.out.shape[0], pl.cdiv(shape.num_q_heads, heads)),
        out_shape=outputs,
        input_output_aliases={3: 0, 4: 1},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=2),
        interpret=interpret,
        name="tree_reduce",
    )(buffer, state.partial_out, state.partial_lse, state.out, state.lse)
    return state._replace(out=out, lse=lse)


def _kernel(buffer_ref, partial_out_ref, partial_lse_ref, _out, _lse, out_ref, lse_ref, *, heads, shape):
    query = pl.program_id(0)
    begin = buffer_ref[shape.reduce_at + query]
    count = buffer_ref[shape.reduce_at + query + 1] - begin
    width = shape.v_head_dim
    block = shape.reduce_block
    head = pl.program_id(1) * heads + jnp.arange(heads)
    exists = head < shape.num_q_heads
    # Idle lanes point past the end, for the reason given in partial_triton.
    head = jnp.where(exists, head, shape.num_q_heads)
    column = jnp.arange(pl.next_power_of_2(width))
    inside = column < width

    def merge(i, carry):
        out, peak, total = carry
        nth = i * block + jnp.arange(block)
        listed = nth < count
        place = plgpu.load(buffer_ref.at[begin + nth], mask=listed, other=0)
        wanted = exists[:, None] & listed[None, :]
        at = lse_at(partial_lse_ref, (place[None, :], head[:, None]))
        lse = plgpu.load(partial_lse_ref.at[at], mask=wanted, other=-jnp.inf)
        part = plgpu.load(
            partial_out_ref.at[(place[None, :, None], head[:, None, None], column[None, None, :])],
            mask=wanted[:, :, None] & inside[None, None, :],
            other=0.0,
        )
        new_peak = jnp.maximum(peak, lse.max(axis=1))
        base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        shrink, weight = jnp.exp2(peak - base), jnp.exp2(lse - base[:, None])
        out = out * shrink[:, None] + (part * weight[:, :, None]).sum(axis=1)
        return out, new_peak, total * shrink + weight.sum(axis=1)

    @pl.when(count > 0)
    def _():
        carry = (
            jnp.zeros((heads, column.shape[0]), jnp.float32),
            jnp.full((heads,), -jnp.inf, jnp.float32),
            jnp.zeros((heads,), jnp.float32),
        )
        out, peak, total = lax.fori_loop(0, lax.div(count + block - 1, block), merge, carry)
        some = jnp.where(total == 0, 1.0, total)
        out = (out / some[:, None]).astype(out_ref.dtype)
        lse = jnp.where(total == 0, -jnp.inf, (peak + jnp.log2(some)) / LOG2E)
        mask = exists[:, None] & inside[None, :]
        plgpu.store(out_ref.at[(query, head[:, None], column[None, :])], out, mask=mask)
        plgpu.store(lse_ref.at[lse_at(lse_ref, (query, head))], lse, mask=exists)
