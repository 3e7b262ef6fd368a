"""Scatter new K and V into the cache, in plain XLA: what the Pallas append must equal."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def append(cache: Array, new: Array, slots: Array) -> Array:
    """``cache[slots[i]] = new[i]`` for every slot that is not negative.

    Args:
        cache: [num_slots, Hkv, D].
        new: [Q, Hkv, D].
        slots: int32 [Q], distinct where not negative.
    """
    target = jnp.where(slots < 0, cache.shape[0], slots)
    return cache.at[target].set(new.astype(cache.dtype), mode="drop", unique_indices=True)
