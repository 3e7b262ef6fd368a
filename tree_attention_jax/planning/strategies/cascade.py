"""``cascade``: one pass a level of the tree.

FlashInfer's multi-level cascade (Ye et al., "Cascade Inference", 2024; ``MultiLevelCascadeAttentionWrapper``). A level
is one batched prefill over shared K/V: each of its nodes is a request, whose queries are all queries below the node. So
a level has one row tile for all of its nodes, by their average number of rows, and where a level has too few programs
its K/V is cut into chunks, by a binary search for the shortest chunk that still fits two programs an SM.

Weakness: levels are the unit of everything. Every level costs a launch and a partial a query, however short its nodes
are; one tile serves short and long nodes alike; and a level's tail is never filled by another level's items. Joining
two levels is not possible.

Here the levels' states are merged once, at the end, where FlashInfer merges each level into the running output and
rounds it to the output's type. A plan has at most eight launches, so deeper levels share the last one.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.layout import MAX_LAUNCHES, TileClass
from tree_attention_jax._arrays import ceil_div
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._common import make_tiling, profile_tile, seen_nodes
from tree_attention_jax.planning.tiling import Tiling

PROGRAMS_PER_SM = 2
MIN_CHUNK_TOKENS = 128
WIDEST_STEP = 64  # tokens; longer ones leave an SM room for a single program


def cascade(problem: Problem) -> Tiling:
    tree, layout = problem.tree, problem.layout
    node = seen_nodes(problem)
    rows = (layout.row_end - layout.row_begin)[node]
    pages = ceil_div(tree.kv_len[node], problem.page_size)
    launch = np.minimum(layout.depth[node], MAX_LAUNCHES - 1)
    tiles: list[TileClass] = []
    max_tokens = np.zeros(len(node), np.int32)
    for level in range(int(launch.max(initial=0)) + 1):
        mine = launch == level
        tile = _row_tile(problem, rows[mine])
        tiles.append(tile)
        row_tiles = ceil_div(rows[mine], tile.queries_per_tile(problem.heads.group))
        max_tokens[mine] = _pages_a_chunk(problem, row_tiles, pages[mine]) * problem.page_size
    tiling = make_tiling(
        problem,
        row_begin=layout.row_begin[node],
        row_end=layout.row_end[node],
        run_indptr=np.arange(len(node) + 1, dtype=np.int32),
        node=node,
        begin=np.zeros(len(node), np.int32),
        end=tree.kv_len[node],
        kind=launch,
        tiles=tuple(tiles),
    )
    tiling.max_tokens[:] = max_tokens
    return tiling


def _row_tile(problem: Problem, rows: np.ndarray) -> TileClass:
    """FlashInfer's choice by the average of matrix rows, up to 16, up to 64, or more; with the widest step."""
    average = float(rows.mean()) * problem.heads.group if len(rows) else 0.0
    rows_a_tile = 16 if average <= 16 else 64 if average <= 64 else 128
    return profile_tile(problem, rows_a_tile, WIDEST_STEP)


def _pages_a_chunk(problem: Problem, row_tiles: np.ndarray, pages: np.ndarray) -> int:
    """Pages of the shortest chunk with which the level's programs still run at once."""
    room = PROGRAMS_PER_SM * problem.profile.num_sms // problem.heads.num_kv_heads
    low = max(MIN_CHUNK_TOKENS // problem.page_size, 1)
    high = int(pages.max(initial=1))
    while low < high:
        middle = (low + high) // 2
        if int((row_tiles * ceil_div(pages, middle)).sum()) > room:
            low = middle + 1
        else:
            high = middle
    return low
