"""``per_query``: every query walks its whole path by itself.

Flash-Decoding (Dao et al., 2023), FlashInfer's batch decode and TGI's paged FlashDecoding do this. Without sharing it
is optimal. With sharing, a prefix is read once for each query below it: the traffic this package exists to avoid.
Long paths are split over programs, as Flash-Decoding does.
"""

from __future__ import annotations

import numpy as np

from tree_attention_jax._arrays import exclusive_cumsum
from tree_attention_jax.planning.parallel import split_limit
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._common import make_tiling
from tree_attention_jax.planning.tiling import Tiling


def per_query(problem: Problem) -> Tiling:
    tree, layout = problem.tree, problem.layout
    row, node = _paths(tree.parent, layout.query_node[layout.row_query])
    order = np.argsort(row, kind="stable")
    row, node = row[order], node[order]
    num_rows = layout.num_rows
    rows = np.arange(num_rows, dtype=np.int32)
    tokens = np.bincount(row, weights=tree.kv_len[node], minlength=num_rows).astype(np.int64)
    return make_tiling(
        problem,
        row_begin=rows,
        row_end=rows + 1,
        run_indptr=exclusive_cumsum(np.bincount(row, minlength=num_rows)),
        node=node,
        begin=np.zeros(len(node), np.int32),
        end=tree.kv_len[node],
        max_tokens=split_limit(problem, np.ones(num_rows, np.int32), tokens),
    )


def _paths(parent: np.ndarray, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every (row, node on its path) pair, by climbing all rows at once, a level at a time."""
    row = np.arange(len(node), dtype=np.int32)
    rows, nodes = [row], [node]
    while True:
        node = parent[node]
        alive = node >= 0
        if not alive.any():
            return np.concatenate(rows), np.concatenate(nodes)
        row, node = row[alive], node[alive]
        rows.append(row)
        nodes.append(node)
