"""What a strategy is told: the forest, its depth-first layout, and the attention it is for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pallas_kernels.layout import MAX_UNIT
from tree_attention_jax._layout import Layout
from tree_attention_jax.planning.profile import GpuProfile
from tree_attention_jax.topology import TokenTree


@dataclass(frozen=True)
class Problem:
    """One planning task."""

    tree: TokenTree
    layout: Layout
    page_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int  # bytes of a K/V element
    horizon: int
    sliding_window: int | None
    profile: GpuProfile

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def unit(self) -> int:
        """Tokens an entry holds at most. Divides the page size, so no entry crosses a page."""
        return math.gcd(self.page_size, MAX_UNIT)
