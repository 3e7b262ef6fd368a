"""What the launches of one call hand on to each other."""

from __future__ import annotations

from typing import NamedTuple

import jax


class AttentionState(NamedTuple):
    """Outputs in the making. Every launch writes its own rows of them and passes the rest through.

    Attributes:
        out: [Q, Hq, Dv] in q's dtype.
        lse: float32 [Q, Hq], natural log.
        partial_out: float32 [partial_rows, Hq, Dv], normalised over the item's tokens.
        partial_lse: float32 [partial_rows, Hq], **base 2**, as the kernels compute it.

    Where Mosaic's kernels take part, an LSE is several equal numbers, [..., Hq, copies], of which Triton's kernels read
    and write the first: see :mod:`pallas_kernels.mosaic_store`.
    """

    out: jax.Array
    lse: jax.Array
    partial_out: jax.Array
    partial_lse: jax.Array


def lse_at(lse: jax.Array, place: tuple) -> tuple:
    """The index of an LSE in either form."""
    return place if lse.ndim == 2 else (*place, 0)
