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
from pallas_kernels.mosaic_zero import LINE_BYTES, LINE_COLUMNS, WORD_BITS, zero_tokens

LINE_WORDS = LINE_BYTES // 4


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
    width = shared.values.shape[-1]
    if geo.simulated:  # which does not know two views of the same memory
        some = shared.values.at[stage, pl.ds(first_slot, len(begin) * geo.unit)]
        slot = lax.broadcasted_iota(jnp.int32, some.shape, 0)
        entry = slot // geo.unit
        token = slot % geo.unit - pick(begin, entry)
        here = some[...]
        some[...] = jnp.where((token >= 0) & (token < pick(filled, entry)), here, jnp.zeros_like(here))
    else:
        tokens = len(begin) * geo.unit
        holds = [jnp.int32(0)] * (tokens // WORD_BITS)
        for e, (first, count) in enumerate(zip(begin, filled)):
            word, bit = divmod(e * geo.unit, WORD_BITS)
            holds[word] |= ((1 << count) - 1) << (first + bit)
        lines = shared.lines.at[stage, pl.ds(first_slot * width // LINE_COLUMNS, tokens * width // LINE_COLUMNS)]
        zero_tokens(lines, width, holds)
    plgpu.commit_smem()
