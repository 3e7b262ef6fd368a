"""Append to the cache as a Pallas kernel (Triton backend): it writes in place and touches nothing else.

The cache is aliased with the result, so under donation no page is copied. :mod:`pallas_kernels.append_xla` is the
version this must equal.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def append(
    k_cache: jax.Array, v_cache: jax.Array, k_new: jax.Array, v_new: jax.Array, slots: jax.Array, *, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """``cache[slots[i]] = new[i]`` for K and V, for every slot that is not negative.

    Args:
        k_cache: [num_slots, Hkv, D]; ``v_cache``: [num_slots, Hkv, Dv].
        k_new: [Q, Hkv, D]; ``v_new``: [Q, Hkv, Dv].
        slots: int32 [Q], distinct where not negative.
    """
    if slots.shape[0] == 0:
        return k_cache, v_cache
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_cache, v_cache)]
    k_cache, v_cache = pl.pallas_call(
        _kernel,
        grid=(slots.shape[0], k_cache.shape[1]),
        out_shape=like,
        input_output_aliases={3: 0, 4: 1},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="tree_append",
    )(slots, k_new, v_new, k_cache, v_cache)
    return k_cache, v_cache


def _kernel(slots_ref, k_new_ref, v_new_ref, _k, _v, k_ref, v_ref):
    query, head = pl.program_id(0), pl.program_id(1)
    slot = slots_ref[query]

    @pl.when(slot >= 0)
    def _():
        for new_ref, cache_ref in ((k_new_ref, k_ref), (v_new_ref, v_ref)):
            width = new_ref.shape[-1]
            column = jnp.arange(pl.next_power_of_2(width))
            mask = column < width
            row = plgpu.load(new_ref.at[query, head, column], mask=mask, other=jnp.zeros((), new_ref.dtype))
            plgpu.store(cache_ref.at[slot, head, column], row.astype(cache_ref.dtype), mask=mask)
