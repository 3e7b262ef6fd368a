"""``per_node``: one rectangle a node, its tokens times all rows below it.

DeFT-Node (Yao et al., ICLR 2025). K/V traffic is minimal: each token is read by one item a row tile. Its weakness is
what the paper's later variants address: a long node is one long item, many short nodes are many partials.
"""

from __future__ import annotations

import numpy as np

from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._common import make_tiling, seen_nodes
from tree_attention_jax.planning.tiling import Tiling


def per_node(problem: Problem, max_tokens: int = 0) -> Tiling:
    """``max_tokens``: split items longer than this (0: never)."""
    layout = problem.layout
    node = seen_nodes(problem)
    return make_tiling(
        problem,
        row_begin=layout.row_begin[node],
        row_end=layout.row_end[node],
        run_indptr=np.arange(len(node) + 1, dtype=np.int32),
        node=node,
        begin=np.zeros(len(node), np.int32),
        end=problem.tree.kv_len[node],
        max_tokens=max_tokens,
    )
