"""What partials cost: launches write them, and the reduction reads and merges them.

A few megabytes of them stay in the L2, where they cost little; what is beyond comes from device memory. The reduction
merges so many partials of a query at a time (``WorkShape.reduce_block``): each further round waits for its loads.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from tree_attention_jax._arrays import largest
from tree_attention_jax.planning.problem import Heads, Problem
from tree_attention_jax.planning.profile import GpuProfile

# Partials merged at a time: of a long split context there are many. With more than a few on average, or of few queries,
# many at a time are faster; else up to twice as slow.
FEW_PARTIALS, MANY_PARTIALS = 4, 16
FEW_ON_AVERAGE = 8
FEW_QUERIES = 64


class Reduction(NamedTuple):
    """Costs for one forest; microseconds, and partials are rows of all query heads.

    Attributes:
        num_rows: queries.
        fixed_us: of a reduction of however many partials.
        write_us, read_us: of a partial.
        far_us: what reading one takes longer, beyond the first ``near`` of them.
        round_us: of each round of loads after the first.
    """

    num_rows: int
    fixed_us: float
    write_us: float
    read_us: float
    far_us: float
    near: float
    round_us: float

    @property
    def partial_us(self) -> float:
        """What a partial costs at least."""
        return self.write_us + self.read_us

    def time(self, partials: np.ndarray) -> np.ndarray:
        """To write so many partials and to merge them, float64; 0 for none."""
        us = partials * self.partial_us
        us += self.fixed_us
        us *= partials > 0
        most, few = largest(partials), self.num_rows > FEW_QUERIES
        if most > self.near:
            us += np.maximum(partials - self.near, 0) * self.far_us
        merged: Any = self.num_rows * (FEW_PARTIALS if few else MANY_PARTIALS)  # in a round
        if most > merged:
            if few:
                merged = np.where(partials > FEW_ON_AVERAGE * self.num_rows, self.num_rows * MANY_PARTIALS, merged)
            us += np.maximum(np.ceil(partials / merged) - 1, 0) * self.round_us
        return us

    def time_of(self, partials: float) -> float:
        """The same of a number, some of them."""
        merged = self.num_rows * (FEW_PARTIALS if self.num_rows > FEW_QUERIES else MANY_PARTIALS)
        if partials > FEW_ON_AVERAGE * self.num_rows:
            merged = self.num_rows * MANY_PARTIALS
        us = partials * self.partial_us + self.fixed_us
        us += max(partials - self.near, 0) * self.far_us
        return us + max(math.ceil(partials / merged) - 1, 0) * self.round_us


def reduction_of(problem: Problem) -> Reduction:
    return _reduction(problem.profile, problem.heads, problem.layout.num_rows)


@functools.lru_cache(maxsize=256)
def _reduction(profile: GpuProfile, heads: Heads, num_rows: int) -> Reduction:
    cost, partial_bytes = profile.reduction, heads.partial_bytes / 2
    return Reduction(
        num_rows=max(num_rows, 1),
        fixed_us=cost.launch_us + num_rows * heads.num_q_heads * cost.row_us,
        write_us=partial_bytes / cost.write_bytes_per_us,
        read_us=partial_bytes / cost.read_bytes_per_us,
        far_us=partial_bytes / cost.far_bytes_per_us - partial_bytes / cost.read_bytes_per_us,
        near=cost.near_bytes / partial_bytes,
        round_us=cost.round_us,
    )


def reduce_block(num_rows: int, num_partials: int, with_partials: int) -> int:
    """Partials that the reduction merges at a time; ``with_partials``: how many queries have any."""
    if num_rows <= FEW_QUERIES:
        return MANY_PARTIALS
    return MANY_PARTIALS if num_partials > FEW_ON_AVERAGE * with_partials else FEW_PARTIALS
