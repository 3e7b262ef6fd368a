"""What a decoding step cost: K/V bytes read, bytes that sharing saved, time to plan and time on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree_attention_jax.topology import TokenTree

__all__ = ["StepStatistics", "kv_tokens"]


@dataclass(frozen=True)
class StepStatistics:
    """One call of the model, or one block of them without the host in between.

    Attributes:
        steps: calls of the model.
        queries: tokens that went through it, over all steps.
        kv_bytes_read: K/V of all layers that the queries see, each byte once a step.
        kv_bytes_saved: what separate sequences would have read on top of that.
        plan_seconds: host time for the snapshot and the plan.
        device_seconds: from the dispatch, or from the end of the step before if that came later, until the result
            was there.
    """

    steps: int
    queries: int
    kv_bytes_read: int
    kv_bytes_saved: int
    plan_seconds: float
    device_seconds: float

    def __add__(self, other: StepStatistics) -> StepStatistics:
        return StepStatistics(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @classmethod
    def total(cls, steps: list[StepStatistics]) -> StepStatistics:
        """The sum over steps."""
        return sum(steps, cls(0, 0, 0, 0, 0.0, 0.0))


def kv_tokens(tree: TokenTree) -> tuple[int, int]:
    """(tokens that the queries of a forest see, each once; the same if every node with queries read its own path)."""
    layout = tree.layout
    seen = layout.row_end > layout.row_begin
    path = layout.position.astype(np.int64) + tree.kv_len
    return int(tree.kv_len[seen].sum(dtype=np.int64)), int(path[tree.q_len > 0].sum())
