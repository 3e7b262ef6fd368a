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
    """

    out: jax.Array
    lse: jax.Array
    partial_out: jax.Array
    partial_lse: jax.Array
