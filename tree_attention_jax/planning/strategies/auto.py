"""``auto``: the tiling with the least modelled time, by dynamic programming over the tree.

Cut every root-to-leaf path into *segments*. A segment is a top node and its descendants down to some level; its rows
are cut into tiles, and each tile walks the segment's tokens that any of its rows sees: a masked block. That one family
holds all of the published tilings:

- every node its own segment: DeFT-Node;
- one segment a tree, a tile one query high: Flash-Decoding;
- a tile no higher than a child's rows: the child has pulled its ancestors' tokens (FastTree's merge, PAT's pack), and
  they are read again for its sibling;
- a tile as high as the segment: a whole subtree as one masked block (DeFT-Flatten).

A row writes one partial a segment, none if a single segment holds its path; so joining levels trades masked or repeated
work for partials that are never written. ``f(v)``, the least time for everything below ``v``'s ancestors, is the
minimum over the segment's depth and tile of that segment's time plus ``f`` of the nodes just below it: bottom-up, a
level at a time, all nodes of a level at once.

The time of a segment is the larger of its matrix work (steps of a tile, as measured for each shape) and its bytes, plus
the partials. The tail over the SMs is seen to afterwards, by splitting items that would outlast the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels.layout import TileClass
from tree_attention_jax._arrays import ceil_div, exclusive_cumsum, ragged_ranges
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.profile import TileCost
from tree_attention_jax.planning.strategies._common import make_tiling
from tree_attention_jax.planning.strategies._tail import split_lengths
from tree_attention_jax.planning.tiles import entry_unit, fitted
from tree_attention_jax.planning.tiling import Tiling

# Levels a segment may span, unless it reaches the leaves. Deeper joins never paid in the trees we measured.
MAX_SPAN = 10
# Trees with fewer rows than this are bound by latency: what one more launch costs decides, so subsets of the tile shapes
# are planned one by one. Larger trees take all shapes.
SMALL_ROWS = 512


def auto(problem: Problem) -> Tiling:
    levels = _Levels.of(problem)
    if levels.num_nodes == 0:
        return _empty(problem)
    unit = entry_unit(problem)
    shapes = _shapes(problem, unit)
    best: tuple[float, _Choice] | None = None
    for subset in _subsets(shapes, problem):
        choice = _solve(problem, levels, subset)
        used = len(np.unique(choice.kind[choice.is_top]))
        time = choice.time + used * problem.profile.launch_us
        if best is None or time < best[0]:
            best = (time, choice)
    assert best is not None
    return _emit(problem, levels, best[1])


@dataclass(frozen=True)
class _Shape:
    """A tile shape with its costs scaled to this problem's head dim."""

    tile: TileClass
    item_us: float
    step_us: float
    latency_us: float
    queries: int  # per tile


def _shapes(problem: Problem, unit: int) -> list[_Shape]:
    scale = (problem.head_dim + problem.v_head_dim) / 256

    def shape(cost: TileCost) -> _Shape:
        tile = fitted(problem, cost, unit)
        steps = cost.block_kv / tile.block_kv
        return _Shape(
            tile,
            cost.item_us * scale,
            cost.step_us * scale / steps,
            cost.latency_us,
            tile.queries_per_tile(problem.group),
        )

    shapes = [shape(cost) for cost in problem.profile.tiles]
    fits = [s for s in shapes if s.tile.rows >= min(problem.group, 64)]
    return fits or shapes[-1:]


def _subsets(shapes: list[_Shape], problem: Problem) -> list[list[_Shape]]:
    if problem.layout.num_rows >= SMALL_ROWS:
        return [shapes]
    pairs = [[a, b] for i, a in enumerate(shapes) for b in shapes[i + 1 :]]
    return [[s] for s in shapes] + pairs


@dataclass(frozen=True)
class _Levels:
    """The nodes that have rows, by level and depth-first within a level, so children of neighbours are neighbours."""

    node: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    begin: np.ndarray  # [levels + 1]
    child_begin: np.ndarray  # [num_nodes + 1] first child; children of i are child_begin[i] .. child_begin[i + 1] - 1

    @property
    def num_nodes(self) -> int:
        return len(self.node)

    @staticmethod
    def of(problem: Problem) -> _Levels:
        tree, layout = problem.tree, problem.layout
        rows = layout.row_end - layout.row_begin
        # In a stable sort by depth the depth-first order survives within each level. Nodes without rows have no
        # descendants with rows, so leaving them out leaves a forest.
        order = layout.order
        seen = rows[order] > 0
        if not seen.all():
            order = order[seen]
        depth = layout.depth[order]
        by_level = np.argsort(depth, kind="stable")
        node = order[by_level]
        counts = np.bincount(depth)
        begin = exclusive_cumsum(counts)
        children = np.zeros(tree.num_nodes + 1, np.int32)
        children[:-1] = np.bincount(tree.parent[node[begin[1] :]], minlength=tree.num_nodes) if len(node) else 0
        first_child = (begin[1] if len(begin) > 1 else 0) + exclusive_cumsum(children[node])
        return _Levels(node, rows[node], tree.kv_len[node], begin, first_child)


@dataclass(frozen=True)
class _Choice:
    """The best segmentation: which nodes are tops, how many levels their segments span, and in which shape."""

    time: float
    is_top: np.ndarray
    span: np.ndarray
    kind: np.ndarray
    shapes: list[_Shape]


def _solve(problem: Problem, levels: _Levels, shapes: list[_Shape]) -> _Choice:
    profile, num_nodes = problem.profile, levels.num_nodes
    depth = len(levels.begin) - 1
    spans = min(depth, MAX_SPAN)
    low, high = _descendants(levels, spans)
    cost, kind = _segment_times(problem, levels, shapes, low, high)
    partial = levels.rows * (8.0 * problem.num_q_heads * problem.v_head_dim / profile.partial_bytes_per_us)

    # after[i] = sum of f over nodes i, i + 1, ...: the sum over any stretch of a level is a difference.
    after = np.zeros(num_nodes + 1)
    f, span = np.empty(num_nodes), np.empty(num_nodes, np.int32)
    for level in reversed(range(depth)):
        here = slice(levels.begin[level], levels.begin[level + 1])
        reach = min(spans, depth - level)
        below = after[low[1 : reach + 1, here]] - after[high[1 : reach + 1, here]]
        total = cost[:reach, here] + below
        if level:
            total += partial[here]
        else:  # a root's segment that leaves nothing below it writes final results
            total += np.where(low[1 : reach + 1, here] < high[1 : reach + 1, here], partial[here], 0.0)
        best = total.argmin(axis=0)
        span[here] = best
        f[here] = total[best, np.arange(total.shape[1])]
        # A suffix sum; the level below continues it.
        after[here] = np.cumsum(f[here][::-1])[::-1] + after[levels.begin[level + 1]]
    is_top = _tops(levels, span, low, high)
    return _Choice(float(f[: levels.begin[1]].sum()), is_top, span, kind[span, np.arange(num_nodes)], shapes)


def _descendants(levels: _Levels, spans: int) -> tuple[np.ndarray, np.ndarray]:
    """[spans + 1, N]: descendants of node i exactly k levels down are ``low[k, i] .. high[k, i] - 1``."""
    low = np.empty((spans + 1, levels.num_nodes), np.int32)
    high = np.empty_like(low)
    low[0] = np.arange(levels.num_nodes, dtype=np.int32)
    high[0] = low[0] + 1
    for k in range(spans):
        levels.child_begin.take(low[k], out=low[k + 1])
        levels.child_begin.take(high[k], out=high[k + 1])
    return low, high


def _segment_times(problem: Problem, levels: _Levels, shapes: list[_Shape], low, high) -> tuple[np.ndarray, np.ndarray]:
    """[spans, N] time of the segment from node i down k levels, in its best shape, and which shape that is."""
    spans = len(low) - 1
    unit = shapes[0].tile.unit
    tokens = (ceil_div(levels.tokens, unit) * unit).astype(np.float64)
    in_level = np.concatenate(([0.0], np.cumsum(tokens)))
    weighted = np.concatenate(([0.0], np.cumsum(tokens * (levels.rows - 1))))
    # Tokens of the segment, and of the segment weighted by the rows that see them.
    total = np.cumsum(in_level[high[:spans]] - in_level[low[:spans]], axis=0)
    extra = np.cumsum(weighted[high[:spans]] - weighted[low[:spans]], axis=0)
    width = (problem.head_dim + problem.v_head_dim) * problem.itemsize * problem.num_kv_heads
    memory = total * (width / problem.profile.bytes_per_us)
    best = np.full(total.shape, np.inf)
    kind = np.zeros(total.shape, np.int32)
    for index, shape in enumerate(shapes):
        programs = problem.num_kv_heads * max(1, -(-problem.group // shape.tile.rows)) / problem.profile.num_sms
        tiles = ceil_div(levels.rows, shape.queries)
        # A node seen by s rows meets about 1 + (s - 1) / q tiles of q rows, and never more tiles than there are.
        walked = np.where(tiles == 1, total, np.minimum(total + extra / shape.queries, total * tiles))
        per_step = shape.step_us / shape.tile.block_kv
        fixed = tiles * (shape.item_us + 0.5 * shape.step_us)
        time = np.maximum((walked * per_step + fixed) * programs, memory)
        better = time < best
        np.copyto(best, time, where=better)
        kind[better] = index
    return best, kind


def _tops(levels: _Levels, span: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Roots, and the nodes just below each top's segment."""
    change = np.zeros(levels.num_nodes + 1, np.int32)
    is_top = np.zeros(levels.num_nodes, bool)
    change[0] += 1
    change[levels.begin[1]] -= 1
    running = 0
    for level in range(len(levels.begin) - 1):
        here = slice(levels.begin[level], levels.begin[level + 1])
        flag = np.cumsum(change[here]) + running
        running = int(flag[-1])
        is_top[here] = flag > 0
        tops = np.flatnonzero(is_top[here]) + levels.begin[level]
        np.add.at(change, low[span[tops] + 1, tops], 1)
        np.add.at(change, high[span[tops] + 1, tops], -1)
    return is_top


def _emit(problem: Problem, levels: _Levels, choice: _Choice) -> Tiling:
    """One block a row tile of each top's segment."""
    layout = problem.layout
    top = np.flatnonzero(choice.is_top)
    shapes = choice.shapes
    kind = choice.kind[top]
    step = np.array([s.queries for s in shapes], np.int32)[kind]
    node = levels.node[top]
    owner, nth = ragged_ranges(np.zeros(len(top), np.int32), ceil_div(levels.rows[top], step))
    row0 = layout.row_begin[node][owner] + nth * step[owner]
    row1 = np.minimum(row0 + step[owner], layout.row_end[node][owner])
    first_level = layout.depth[node][owner]
    last_level = first_level + choice.span[top][owner]
    tile, run_node = _nodes_of_tiles(problem, row0, row1, first_level, last_level)
    run_indptr = exclusive_cumsum(np.bincount(tile, minlength=len(row0)))
    length = problem.tree.kv_len[run_node]
    tokens = np.bincount(tile, weights=length, minlength=len(row0)).astype(np.int64)
    limits = split_lengths(
        problem,
        tokens,
        row1 - row0,
        kind[owner],
        [(s.tile, s.item_us, s.step_us, s.latency_us) for s in shapes],
    )
    tiling = make_tiling(
        problem,
        row_begin=row0,
        row_end=row1,
        run_indptr=run_indptr,
        node=run_node,
        begin=np.zeros(len(run_node), np.int32),
        end=length,
        kind=kind[owner],
        tiles=tuple(s.tile for s in shapes),
    )
    tiling.max_tokens[:] = limits
    return tiling


def _nodes_of_tiles(problem: Problem, row0, row1, first_level, last_level) -> tuple[np.ndarray, np.ndarray]:
    """(tile, node) pairs, sorted by tile: nodes between the two levels that any row of the tile sees."""
    layout, parent = problem.layout, problem.tree.parent
    order = layout.order
    begin = layout.row_begin[order]  # ascending: depth-first order
    # Nodes that begin inside the tile stand together in depth-first order ...
    tile, rank = ragged_ranges(np.searchsorted(begin, row0, "left"), np.searchsorted(begin, row1, "left"))
    node = order[rank]
    depth = layout.depth[node]
    inside = (depth >= first_level[tile]) & (depth <= last_level[tile])
    parts = [(tile[inside], node[inside])]
    # ... and those that began before it are ancestors of its first row.
    tile = np.flatnonzero(row0 > 0).astype(np.int32)
    node = problem.tree.query_nodes()[layout.row_query[row0[tile]]]
    while len(tile):
        depth = layout.depth[node]
        wanted = (depth <= last_level[tile]) & (layout.row_begin[node] < row0[tile]) & (depth >= first_level[tile])
        if wanted.any():
            parts.append((tile[wanted], node[wanted]))
        node = parent[node]
        alive = (depth > first_level[tile]) & (node >= 0)
        tile, node = tile[alive], node[alive]
    if len(parts) == 1:
        return parts[0]
    tile = np.concatenate([p[0] for p in parts])
    node = np.concatenate([p[1] for p in parts])
    by_tile = np.argsort(tile, kind="stable")
    return tile[by_tile], node[by_tile]


def _empty(problem: Problem) -> Tiling:
    none = np.zeros(0, np.int32)
    return make_tiling(problem, none, none, np.zeros(1, np.int32), none, none, none)
