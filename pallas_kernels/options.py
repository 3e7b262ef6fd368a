"""What a call may change about the logits: the arguments every backend takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Options:
    """Static options of one attention call.

    Attributes:
        scale: factor of q.k.
        logits_soft_cap: ``cap * tanh(logit / cap)``; None: off.
        sliding_window: a query at position s sees t with ``s - sliding_window < t <= s``; None: all.
        alibi: add ``slope * (t - s)``; the slopes are an array argument.
        scaled_keys: multiply q.k by a factor a query head, an array argument: the scales of quantised keys. Scaling q
            instead would round it once more.
    """

    scale: float
    logits_soft_cap: float | None = None
    sliding_window: int | None = None
    alibi: bool = False
    scaled_keys: bool = False

    @property
    def uses_positions(self) -> bool:
        return self.sliding_window is not None or self.alibi

    @property
    def uses_heads(self) -> bool:
        """Whether there is the array argument: float32 [2, Hq], slopes and key factors."""
        return self.alibi or self.scaled_keys
