"""The paged K/V cache as plain arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tree_attention_jax.models.configs import LlamaConfig

Pages = tuple[jax.Array, ...]


def allocate_pages(config: LlamaConfig, num_pages: int, page_size: int, dtype: DTypeLike) -> tuple[Pages, Pages]:
    """(k_pages, v_pages), each one array a layer, [num_pages, page_size, num_kv_heads, head_dim] of `dtype`.

    Every array has a buffer of its own, so that a jitted step can take all of them as donated arguments.
    """
    if num_pages < 1 or page_size < 1:
        raise ValueError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
    shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
    k_pages, v_pages = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
    return k_pages, v_pages


def kv_bytes_per_token(config: LlamaConfig, dtype: DTypeLike) -> int:
    """Bytes that one cached token takes over all layers, K and V together."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
