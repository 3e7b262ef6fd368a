"""Zeros in the slots of V that hold no token, before the matrix units multiply them with weights of 0: 0 * NaN is NaN.

Masked parts often have such slots, as subtrees are short. There the loading warpgroup cleans, while the parts that it
has asked for next are on their way: the computing ones would spend a third of a part's time on it. A plain step has
some where a node ends. The computing warpgroups clean it, so that launches without masks load as simply as they can.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_geometry import Geometry
from pallas_kernels.mosaic_tokens import pick
from pallas_kernels.mosaic_work import Scalar

# V as it is cleaned: lines of 128 bytes. A tile of 8 tokens by 64 columns is 8 lines, a token's columns in one of them.
# A swizzle moves columns within their line, which does not matter to zeros.
LINE_WORDS = 32
LINE_COLUMNS = 64
TILE_TOKENS = 8


def lines_like(geo: Geometry, v_head_dim: int) -> Any:
    """The values' memory as words, [stages, lines, LINE_WORDS]."""
    return plgpu.SMEM((geo.stages, geo.block * v_head_dim // LINE_COLUMNS, LINE_WORDS), jnp.int32)


def unfilled(filled: Sequence[Scalar], geo: Geometry) -> Scalar:
    """Whether any entry of a part has a slot without a token."""
    return functools.reduce(jnp.minimum, filled) < geo.unit


def clean(
    shared: Any, stage: Scalar, first_slot: Any, begin: Sequence[Scalar], filled: Sequence[Scalar], geo: Geometry
) -> None:
    """Zero what holds no token among the slots of a stage that some entries were copied to, from ``first_slot`` on.

    Of an entry's ``unit`` slots, the ``filled`` ones from ``begin`` on hold its tokens.
    """

    def entry(e: Scalar, carry: None) -> None:
        here, count = pick(begin, e), pick(filled, e)
        zero = functools.partial(_zero_others, shared, stage, first_slot + e * geo.unit, here, count, geo)
        pl.when(count < geo.unit)(zero)

    lax.fori_loop(0, len(begin), entry, None)
    plgpu.commit_smem()


def _zero_others(shared: Any, stage: Scalar, slot: Scalar, begin: Scalar, filled: Scalar, geo: Geometry) -> None:
    """Zero the ``unit`` slots from ``slot`` on, but for the ``filled`` ones from ``begin`` on."""
    width = shared.values.shape[-1]
    if geo.simulated:  # which does not know two views of the same memory
        some = shared.values.at[stage, pl.ds(slot, geo.unit)]
        token = lax.broadcasted_iota(jnp.int32, some.shape, 0)
    else:
        count = geo.unit * width // LINE_COLUMNS
        some = shared.lines.at[stage, pl.ds(slot * (width // LINE_COLUMNS), count)]
        layout = plgpu.Layout.WG_STRIDED((count, LINE_WORDS), vec_size=2)
        line = plgpu.broadcasted_iota(jnp.int32, (count, LINE_WORDS), 0, layout=layout)
        tile_lines = TILE_TOKENS * width // LINE_COLUMNS
        token = (line >> (tile_lines.bit_length() - 1)) * TILE_TOKENS + (line & (TILE_TOKENS - 1))
    token = token - begin
    here = some[...]
    some[...] = jnp.where((token >= 0) & (token < filled), here, jnp.zeros_like(here))
