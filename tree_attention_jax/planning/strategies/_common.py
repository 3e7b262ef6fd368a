"""What most strategies need: pick tiles, and wrap runs into a tiling."""

from __future__ import annotations

import numpy as np

from pallas_kernels.layout import TileClass
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.tiles import choose, drop_unused, fitted, standard_tiles
from tree_attention_jax.planning.tiling import Tiling


def make_tiling(
    problem: Problem,
    row_begin: np.ndarray,
    row_end: np.ndarray,
    run_indptr: np.ndarray,
    node: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    max_tokens: int = 0,
    kind: np.ndarray | None = None,
    tiles: tuple[TileClass, ...] | None = None,
) -> Tiling:
    """A tiling of these blocks; tiles by rows and length unless given."""
    if tiles is None:
        tiles = standard_tiles(problem)
    if kind is None:
        total = np.concatenate(([0], np.cumsum(end - begin)))
        tokens = total[run_indptr[1:]] - total[run_indptr[:-1]]
        kind = choose(row_end - row_begin, tokens, tiles, problem.heads.group)
    kind, tiles = drop_unused(kind, tiles)
    return Tiling(
        row_begin=row_begin,
        row_end=row_end,
        run_indptr=run_indptr,
        node=node,
        begin=begin,
        end=end,
        tile=kind,
        max_tokens=np.full(len(row_begin), max_tokens, np.int32),
        tiles=tiles,
    )


def seen_nodes(problem: Problem) -> np.ndarray:
    """Nodes that have tokens and rows to see them, in node order."""
    layout = problem.layout
    return np.flatnonzero((problem.tree.kv_len > 0) & (layout.row_end > layout.row_begin)).astype(np.int32)


def profile_tile(problem: Problem, rows: int, block_kv: int) -> TileClass:
    """For strategies that publish their tiles: the profile's nearest by rows, then by the length of a step."""
    costs = [cost for cost in problem.profile.tiles if not cost.mosaic]
    cost = min(costs, key=lambda tile: (abs(tile.rows - rows), abs(tile.block_kv - block_kv)))
    return fitted(problem.heads, cost, problem.unit)
