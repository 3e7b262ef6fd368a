"""How short items must be for every SM to have work."""

from __future__ import annotations

import numpy as np

from tree_attention_jax.planning.problem import Problem

MIN_CHUNK = 128
PROGRAMS_PER_SM = 4


def split_limit(problem: Problem, rows: np.ndarray, tokens: np.ndarray) -> int:
    """Tokens an item may have, so that the blocks make about ``PROGRAMS_PER_SM`` programs an SM.

    Args:
        problem: gives SM count and heads.
        rows: queries of each block, of which 64 matrix rows make a tile.
        tokens: tokens of each block.
    """
    tiles = -(-rows.astype(np.int64) * problem.heads.group // 64)
    work = int((tiles * tokens).sum()) * problem.heads.num_kv_heads
    wanted = problem.profile.num_sms * PROGRAMS_PER_SM
    chunk = max(work // wanted, MIN_CHUNK)
    return 1 << int(chunk - 1).bit_length()
