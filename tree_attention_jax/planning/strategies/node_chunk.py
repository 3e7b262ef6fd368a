"""``node_chunk``: one rectangle a node, long nodes cut into chunks so that every SM has work.

DeFT-Node-Chunk (Yao et al., ICLR 2025) cuts at a fixed 128 tokens. Here the chunk follows from the GPU's SM count and
the work at hand, because every cut costs a partial. Short nodes remain what they are: many partials.
"""

from __future__ import annotations

from tree_attention_jax.planning.parallel import split_limit
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies.per_node import per_node
from tree_attention_jax.planning.tiling import Tiling


def node_chunk(problem: Problem, chunk: int | None = None) -> Tiling:
    """``chunk``: tokens a piece; ``None`` computes it, 128 is DeFT's."""
    if chunk is None:
        tree, layout = problem.tree, problem.layout
        chunk = split_limit(problem, layout.row_end - layout.row_begin, tree.kv_len)
    elif chunk < 1:
        raise ValueError(f"chunk is {chunk}: it must be at least 1")
    return per_node(problem, max_tokens=chunk)
