"""The tail: an item that outlasts all others leaves the GPU idle, so it is split, at the price of more partials.

Flash-Decoding splits by a fixed count and FastTree by thresholds on the number of programs. Here each candidate length
is priced: work over all SMs, the longest item's latency, and the partials that the pieces write.
"""

from __future__ import annotations

import numpy as np

from tree_attention_jax.planning.cost import Shape, launch_time
from tree_attention_jax.planning.problem import Problem

MIN_TOKENS = 64


def best_limit(
    problem: Problem,
    shape: Shape,
    tokens: np.ndarray,
    rows: np.ndarray,
    count: np.ndarray,
    memory: float,
    masked: bool,
    reduced: bool,
) -> tuple[int, float, bool]:
    """How long the items of one launch may be.

    Args:
        problem: gives heads and rates.
        shape: of the launch.
        tokens, rows: of each block; ``count`` says how many such blocks there are.
        memory: time to read the launch's K/V once.
        masked: whether the items compare intervals.
        reduced: the rows have other partials, so that a split makes no final result partial.

    Returns:
        Tokens an item may have at most (0: do not split), the modelled time of the launch and of the partials that
        splitting adds, and whether it splits.
    """
    longest = float(tokens.max(initial=0))
    if longest <= 0:
        return 0, 0.0, False
    steps = float((np.ceil(tokens / shape.tile.block_kv) * count).sum())
    partial_us = 8.0 * problem.num_q_heads * problem.v_head_dim / problem.profile.partial_bytes_per_us
    block = shape.tile.block_kv

    def time(length: float) -> float:
        pieces = np.ceil(tokens / length)
        most = np.ceil(min(longest, length) / block)
        now = launch_time(problem.profile, shape, steps, float((pieces * count).sum()), most, memory, masked)
        written = (pieces - reduced) * (pieces > 1) * rows * count
        return now + float(written.sum()) * partial_us

    best, best_length = time(longest), 0
    if np.ceil(longest / block) * shape.latency_us <= 0.2 * best:
        return best_length, best, False
    reduction = 0.0 if reduced else problem.profile.launch_us
    length = max(MIN_TOKENS, block)
    while length < longest:
        now = time(length) + reduction
        if now < best:
            best, best_length = now, length
        length *= 2
    return best_length, best, best_length > 0
