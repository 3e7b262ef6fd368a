"""The tail: an item that outlasts all others leaves the GPU idle, so it is split, at the price of more partials.

Flash-Decoding splits by a fixed count and FastTree by thresholds on the number of programs. Here each candidate length
is priced: work over all SMs, the longest item's latency, and the partials that the pieces write.
"""

from __future__ import annotations

import numpy as np

from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._shapes import Shape

MIN_TOKENS = 64
# How much of the shorter of (throughput, latency) shows beside the longer. Fitted on the 45 cells.
OVERLAP = 0.35


def best_limit(
    problem: Problem, shape: Shape, tokens: np.ndarray, rows: np.ndarray, count: np.ndarray, memory: float
) -> tuple[int, float, bool]:
    """How long the items of one launch may be.

    Args:
        problem: gives heads and rates.
        shape: of the launch.
        tokens, rows: of each block; ``count`` says how many such blocks there are.
        memory: time to read the launch's K/V once.

    Returns:
        Tokens an item may have at most (0: do not split), the modelled time of the launch, and whether it splits.
    """
    longest = float(tokens.max())
    steps = np.ceil(tokens / shape.tile.block_kv)
    walk = float((steps * count).sum()) * shape.step_us
    partial_us = 8.0 * problem.num_q_heads * problem.v_head_dim / problem.profile.partial_bytes_per_us

    def time(length: float) -> float:
        pieces = np.ceil(tokens / length)
        work = max((walk + float((pieces * count).sum()) * shape.item_us) * shape.programs, memory)
        latency = np.ceil(min(longest, length) / shape.tile.block_kv) * shape.latency_us
        split = float(((pieces - 1) * rows * count).sum())
        # The first split of a row also means that there must be a reduction.
        extra = split * partial_us + (problem.profile.launch_us if split else 0.0)
        return max(work, latency) + OVERLAP * min(work, latency) + extra

    if longest <= 0:
        return 0, 0.0, False
    best, best_length = time(longest), 0
    if np.ceil(longest / shape.tile.block_kv) * shape.latency_us > 0.2 * best:
        length = max(MIN_TOKENS, shape.tile.block_kv)
        while length < longest:
            now = time(length)
            if now < best:
                best, best_length = now, length
            length *= 2
    return best_length, best, best_length > 0
