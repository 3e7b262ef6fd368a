"""The tail: an item that outlasts all others leaves the GPU idle, so it is split, at the price of more partials.

Flash-Decoding splits by a fixed count and FastTree by thresholds on the number of programs. Here each candidate length
is priced: work over all SMs, the longest item's latency, and the partials that the pieces write.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.layout import TileClass
from tree_attention_jax.planning.problem import Problem

MIN_TOKENS = 64


def split_lengths(
    problem: Problem,
    tokens: np.ndarray,
    rows: np.ndarray,
    kind: np.ndarray,
    shapes: list[tuple[TileClass, float, float, float]],
) -> np.ndarray:
    """Per block, the tokens an item may have at most (0: do not split). Blocks of one shape get one limit.

    Args:
        tokens, rows: of each block.
        kind: shape of each block.
        shapes: (tile, item_us, step_us, latency_us) of each shape.
    """
    limit = np.zeros(len(tokens), np.int32)
    for index, shape in enumerate(shapes):
        mine = np.flatnonzero(kind == index)
        if len(mine):
            limit[mine] = _best_limit(problem, tokens[mine], rows[mine], *shape)
    return limit


def _best_limit(problem: Problem, tokens, rows, tile: TileClass, item_us, step_us, latency_us) -> int:
    profile = problem.profile
    heads = problem.num_kv_heads * max(1, -(-problem.group // tile.rows))
    width = (problem.head_dim + problem.v_head_dim) * problem.itemsize * problem.num_kv_heads
    partial_us = 8.0 * problem.num_q_heads * problem.v_head_dim / profile.partial_bytes_per_us
    longest = int(tokens.max())
    memory = float(tokens.sum()) * width / profile.bytes_per_us

    def time(length: int) -> float:
        pieces = -(-tokens // length)
        steps = -(-tokens // tile.block_kv)
        work = float((pieces * item_us + steps * step_us).sum()) * heads / profile.num_sms
        latency = -(-min(longest, length) // tile.block_kv) * latency_us
        extra = float(((pieces - 1) * rows).sum()) * partial_us
        # A row's first split also costs the reduction, which then has to run at all.
        return max(work, memory) + latency + extra

    whole = time(longest)
    best, best_length = whole, 0
    length = max(MIN_TOKENS, tile.block_kv)
    while length < longest:
        now = time(length)
        if now < best:
            best, best_length = now, length
        length *= 2
    return best_length
