"""Zeros in the slots of V that hold no token, before the matrix units multiply them with weights of 0: 0 * NaN is NaN.

The loading warpgroup writes them, while the part that it has just asked for is on its way. The computing ones have no
time to: they would spend a third of a part's time on it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_geometry import Geometry
from pallas_kernels.mosaic_work import Scalar

# V as it is cleaned: lines of 128 bytes. A tile of 8 tokens by 64 columns is 8 lines, a token's columns in one of them.
# A swizzle moves columns within their line, which does not matter to zeros.
LINE_WORDS = 32
LINE_COLUMNS = 64
TILE_TOKENS = 8


def lines_like(geo: Geometry, v_head_dim: int) -> Any:
    """The values' memory as words, [stages, lines, LINE_WORDS]."""
    return plgpu.SMEM((geo.stages, geo.block * v_head_dim // LINE_COLUMNS, LINE_WORDS), jnp.int32)


def unfilled(words: tuple[Scalar, ...], geo: Geometry) -> Scalar:
    """Whether any entry of a part has a slot without a token."""
    least = words[0] & lo.COUNT_MASK
    for word in words[1:]:
        least = jnp.minimum(least, word & lo.COUNT_MASK)
    return least < geo.unit


def clean(values: Any, lines: Any, first_slot: Scalar, words: tuple[Scalar, ...], geo: Geometry) -> None:
    """Zero what holds no token among the slots that these entries were copied to, from ``first_slot`` of a stage on.

    ``values``: [block, Dv]; ``lines``: the same memory as words, None in the simulator.
    """
    for e, word in enumerate(words):
        begin, filled = (word >> lo.COUNT_BITS) & (geo.unit - 1), word & lo.COUNT_MASK
        zero = functools.partial(_zero_others, values, lines, first_slot + e * geo.unit, begin, filled, geo)
        pl.when(filled < geo.unit)(zero)
    plgpu.commit_smem()


def _zero_others(values, lines, slot: Scalar, begin: Scalar, filled: Scalar, geo: Geometry) -> None:
    """Zero the ``unit`` slots from ``slot`` on, but for the ``filled`` ones from ``begin`` on."""
    width = values.shape[-1]
    if lines is None:
        some = values.at[pl.ds(slot, geo.unit)]
        token = lax.broadcasted_iota(jnp.int32, some.shape, 0)
    else:
        count = geo.unit * width // LINE_COLUMNS
        some = lines.at[pl.ds(slot * (width // LINE_COLUMNS), count)]
        layout = plgpu.Layout.WG_STRIDED((count, LINE_WORDS), vec_size=2)
        line = plgpu.broadcasted_iota(jnp.int32, (count, LINE_WORDS), 0, layout=layout)
        tile_lines = TILE_TOKENS * width // LINE_COLUMNS
        token = (line >> (tile_lines.bit_length() - 1)) * TILE_TOKENS + (line & (TILE_TOKENS - 1))
    token = token - begin
    here = some[...]
    some[...] = jnp.where((token >= 0) & (token < filled), here, jnp.zeros_like(here))
