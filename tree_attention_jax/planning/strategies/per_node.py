"""``per_node``: one rectangle a node, its tokens times all rows below it.

DeFT-Node (Yao et al., ICLR 2025). K/V traffic is minimal: each token is read by one item a row tile. Its weakness is
what the paper's later variants address: a long node is one long item, many short nodes are many partials.
"""

from __future__ import annotations

import numpy as np

from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiles import choose, drop_unused, standard_tiles
from tree_attention_jax.planning.tiling import Tiling


def per_node(problem: Problem, max_tokens: int = 0) -> Tiling:
    tree, layout = problem.tree, problem.layout
    node = np.flatnonzero((tree.kv_len > 0) & (layout.row_end > layout.row_begin)).astype(np.int32)
    tokens = tree.kv_len[node]
    rows = (layout.row_end - layout.row_begin)[node]
    tiles = standard_tiles(problem.unit, problem.group)
    kind, tiles = drop_unused(choose(rows, tokens, tiles, problem.group), tiles)
    return Tiling(
        row_begin=layout.row_begin[node],
        row_end=layout.row_end[node],
        run_indptr=np.arange(len(node) + 1, dtype=np.int32),
        node=node,
        begin=np.zeros(len(node), np.int32),
        end=tokens,
        tile=kind,
        max_tokens=np.full(len(node), max_tokens, np.int32),
        tiles=tiles,
    )
