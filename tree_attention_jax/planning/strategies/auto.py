"""``auto``: the tiling with the least modelled time, by dynamic programming over the tree.

Cut every root-to-leaf path into *segments*. A segment is a node's rows times some consecutive levels below (and with)
it; the rows are cut into tiles, and each tile walks the segment's tokens that any of its rows sees: a masked block.
That one family holds all of the published tilings:

- every node a segment of its own: DeFT-Node;
- one segment a tree, a tile one query high: Flash-Decoding;
- a tile no higher than a child's rows: the child has pulled its ancestors' tokens (FastTree's merge, PAT's pack), and
  they are read again for its sibling;
- a tile as high as the segment: a whole subtree as one masked block (DeFT-Flatten);
- the levels below a node without the node: siblings joined, so that short leaves fill a tile together.

A row writes one partial a segment, none if a single segment holds its path: joining levels trades masked or repeated
work for partials that are never written. With ``f(v)`` the least time for v and all below it, and ``h(v)`` the same
without v's own tokens::

    f(v) = min over k >= 0 of  time(v's rows, levels 0..k) + partials + sum of h over v's descendants k levels down
    h(v) = min( sum of f over v's children,
                min over k >= 1 of  time(v's rows, levels 1..k) + partials + sum of h over the descendants k down )

bottom-up, a level at a time, all nodes of a level at once. A virtual node above the roots lets trees be joined too. The
time of a segment comes from its matrix work, measured for each tile shape, and its bytes (:mod:`tree_attention_jax.
planning.cost`); the tail over the SMs, launches and the reduction are priced for whole candidates, of which the
cheapest wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree_attention_jax._arrays import ceil_div, exclusive_cumsum, ragged_ranges
from tree_attention_jax.planning.cost import OVERLAP, Shape, shapes_for
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._common import make_tiling
from tree_attention_jax.planning.strategies._levels import Levels, nodes_of_tiles
from tree_attention_jax.planning.strategies._tail import best_limit
from tree_attention_jax.planning.tiling import Tiling

# Levels a segment may span. Deeper joins never paid in the trees we measured.
MAX_SPAN = 10


def auto(problem: Problem) -> Tiling:
    if problem.layout.num_rows == 0:
        none = np.zeros(0, np.int32)
        return make_tiling(problem, none, none, np.zeros(1, np.int32), none, none, none)
    levels = Levels.of(problem, MAX_SPAN)
    shapes = shapes_for(problem)
    costs = _Costs.of(problem, levels, shapes)
    best = min(_candidates(levels, costs, shapes), key=lambda segments: segments.time(problem, shapes))
    return _emit(problem, levels, best, shapes)


@dataclass(frozen=True)
class _Costs:
    """Times of all segments, [shape, with or without the top's tokens, span, node]; and their walked tokens."""

    time: np.ndarray
    walked: np.ndarray
    memory: np.ndarray  # [2, span, node]
    partial: np.ndarray  # [node] time to write a partial for every row, and to read it again

    @staticmethod
    def of(problem: Problem, levels: Levels, shapes: list[Shape]) -> _Costs:
        unit = shapes[0].tile.unit
        tokens = (ceil_div(levels.tokens, unit) * unit).astype(np.float32)
        total = levels.sum_down(tokens)
        extra = levels.sum_down(tokens * (levels.rows - 1).astype(np.float32))
        total = np.stack([total, total - total[0]])
        extra = np.stack([extra, extra - extra[0]])
        width = (problem.head_dim + problem.v_head_dim) * problem.itemsize * problem.num_kv_heads
        memory = total * np.float32(width / problem.profile.bytes_per_us)
        walked = np.empty((len(shapes), *total.shape), np.float32)
        time = np.empty_like(walked)
        for index, shape in enumerate(shapes):
            tiles = ceil_div(levels.rows, shape.queries).astype(np.float32)
            # A node that s rows see meets about 1 + (s - 1) / q tiles of q rows, and never more than there are.
            np.minimum(total + extra / np.float32(shape.queries), total * tiles, out=walked[index])
            np.copyto(walked[index], total, where=tiles == 1)
            work = walked[index] * np.float32(shape.masked_token_us)
            work[0, 0] = walked[index, 0, 0] * np.float32(shape.token_us)  # one node alone needs no mask
            work += tiles * np.float32(shape.item_us + 0.5 * shape.step_us)
            work *= np.float32(shape.programs)
            np.add(np.maximum(work, memory), np.float32(OVERLAP) * np.minimum(work, memory), out=time[index])
            reread = walked[index] * np.float32(width / problem.profile.l2_bytes_per_us)
            np.maximum(time[index], reread, out=time[index])
        partial_bytes = 8.0 * problem.num_q_heads * problem.v_head_dim
        partial = levels.rows * np.float32(partial_bytes / problem.profile.partial_bytes_per_us)
        return _Costs(time, walked, memory, partial)


@dataclass(frozen=True)
class _Segments:
    """A segmentation: tops, whether their own tokens belong to it, how many levels, and the shape."""

    top: np.ndarray
    below: np.ndarray  # 1: without the top's own tokens
    span: np.ndarray
    shape: np.ndarray
    tiles: np.ndarray
    tokens: np.ndarray  # about how many a tile walks
    rows: np.ndarray
    memory: np.ndarray
    has_partials: bool

    @staticmethod
    def of(levels: Levels, costs: _Costs, shapes: list[Shape], top, below, span, shape) -> _Segments:
        queries = np.array([s.queries for s in shapes])
        rows = levels.rows[top]
        tiles = ceil_div(rows, queries[shape])
        return _Segments(
            top=top,
            below=below,
            span=span,
            shape=shape,
            tiles=tiles,
            tokens=costs.walked[shape, below, span, top] / tiles,
            rows=np.minimum(rows, queries[shape]),
            memory=costs.memory[below, span, top],
            has_partials=bool(len(top) > 1 and rows.sum() > levels.rows[0]),
        )

    def launch(self) -> np.ndarray:
        """Masked and plain items of a shape run as launches of their own: a mask costs registers."""
        joined = (self.span > 0) | (self.below > 0)
        return self.shape * 2 + (joined & (self.rows > 1))  # a single row sees all that its tile walks

    def time(self, problem: Problem, shapes: list[Shape]) -> float:
        """Modelled time of the whole call."""
        total, partials = 0.0, float(self.has_partials)
        launch = self.launch()
        for which in np.unique(launch):
            mine = launch == which
            memory = float(self.memory[mine].sum())
            _, time, splits = best_limit(
                problem,
                shapes[which // 2],
                self.tokens[mine],
                self.rows[mine],
                self.tiles[mine],
                memory,
                bool(which % 2),
                self.has_partials,
            )
            total += time
            partials += splits
        if partials:
            written = float((self.rows * self.tiles).sum()) if self.has_partials else 0.0
            moved = 8.0 * problem.num_q_heads * problem.v_head_dim * written
            total += problem.profile.launch_us + moved / problem.profile.partial_bytes_per_us
        return total


def _candidates(levels: Levels, costs: _Costs, shapes: list[Shape]):
    """Segmentations worth pricing as a whole: the optimum, the same with fewer launches, and one segment for all."""
    every = list(range(len(shapes)))
    best = _solve(levels, costs, shapes, every)
    yield best
    used = np.unique(best.shape).tolist()
    if len(used) > 1:
        for index in used:
            yield _solve(levels, costs, shapes, [index])
    if levels.depth <= levels.spans:  # a segment can reach from the virtual root to the deepest leaf
        for index in every:
            zero = np.zeros(1, np.int32)
            yield _Segments.of(levels, costs, shapes, zero, zero + 1, zero + levels.depth - 1, zero + index)


def _solve(levels: Levels, costs: _Costs, shapes: list[Shape], allowed: list[int]) -> _Segments:
    """The dynamic programme over the given shapes."""
    num_nodes, low, high = levels.num_nodes, levels.low, levels.high
    if len(allowed) == 1:
        time, shape = costs.time[allowed[0]], None
    else:
        shape = costs.time[allowed].argmin(axis=0)
        time = costs.time[allowed].min(axis=0)
    # Sums over nodes i, i + 1, ... of the levels done so far: a stretch of a level is a difference of two.
    f_after, h_after = np.zeros(num_nodes + 1, np.float32), np.zeros(num_nodes + 1, np.float32)
    f_span, h_span = np.zeros(num_nodes, np.int32), np.zeros(num_nodes, np.int32)
    for level in reversed(range(levels.depth)):
        first, last = levels.begin[level], levels.begin[level + 1]
        here = slice(first, last)
        reach = min(levels.spans, levels.depth - level)
        beneath = h_after[low[1:reach, here]] - h_after[high[1:reach, here]]
        partial = costs.partial[here]
        options = np.empty((reach, last - first), np.float32)
        options[0] = f_after[low[1, here]] - f_after[high[1, here]]
        options[1:] = time[1, 1:reach, here] + beneath
        if level:
            options[1:] += partial
        else:  # joined trees that leave nothing below them write final results
            options[1:] += np.where(low[2 : reach + 1, here] < high[2 : reach + 1, here], partial, 0)
        h_span[here] = choice = options.argmin(axis=0)
        h = options[choice, np.arange(last - first)]
        h_after[here] = h[::-1].cumsum()[::-1] + h_after[last]
        if level == 0:
            break
        options[0] = time[0, 0, here] + h
        options[1:] = time[0, 1:reach, here] + beneath
        if level > 1:
            options += partial
        else:  # a root's segment that leaves nothing below it writes final results
            options += np.where(low[1 : reach + 1, here] < high[1 : reach + 1, here], partial, 0)
        f_span[here] = choice = options.argmin(axis=0)
        f = options[choice, np.arange(last - first)]
        f_after[here] = f[::-1].cumsum()[::-1] + f_after[last]
    top, below, span = _trace(levels, f_span, h_span)
    chosen = np.full(len(top), allowed[0]) if shape is None else np.array(allowed)[shape[below, span, top]]
    return _Segments.of(levels, costs, shapes, top, below, span, chosen)


def _trace(levels: Levels, f_span: np.ndarray, h_span: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Follow the choices from the virtual root: (top, below, span) of every segment."""
    start = np.zeros((2, levels.num_nodes + 1), np.int32)  # differences of: begins f here, begins h here
    start[1, 0], start[1, 1] = 1, -1
    running = np.zeros(2, np.int32)
    found = []
    for level in range(levels.depth):
        first, last = levels.begin[level], levels.begin[level + 1]
        flags = start[:, first:last].cumsum(axis=1) + running[:, None]
        running = flags[:, -1].copy()
        f_node = np.flatnonzero(flags[0]) + first
        h_flag = flags[1]
        if len(f_node):
            span = f_span[f_node]
            found.append((f_node, np.zeros_like(f_node), span))
            h_flag[f_node[span == 0] - first] += 1
            _mark(start[1], levels, f_node[span > 0], span[span > 0])
        h_node = np.flatnonzero(h_flag) + first
        if len(h_node):
            span = h_span[h_node]
            apart, joined = h_node[span == 0], h_node[span > 0]
            _mark(start[0], levels, apart, np.ones_like(apart))
            if len(joined):
                found.append((joined, np.ones_like(joined), span[span > 0]))
                _mark(start[1], levels, joined, span[span > 0])
    return tuple(np.concatenate(part) for part in zip(*found))  # type: ignore[return-value]


def _mark(change: np.ndarray, levels: Levels, node: np.ndarray, down: np.ndarray) -> None:
    if len(node):
        change += np.bincount(levels.low[down, node], minlength=len(change)).astype(np.int32)
        change -= np.bincount(levels.high[down, node], minlength=len(change)).astype(np.int32)


def _emit(problem: Problem, levels: Levels, segments: _Segments, shapes: list[Shape]) -> Tiling:
    """One block a row tile of each segment."""
    step = np.array([s.queries for s in shapes], np.int32)[segments.shape]
    owner, nth = ragged_ranges(np.zeros_like(segments.tiles), segments.tiles)
    row0 = levels.row_begin[segments.top][owner] + nth * step[owner]
    row1 = np.minimum(row0 + step[owner], levels.row_end[segments.top][owner])
    first_level = levels.level[segments.top] + segments.below
    last_level = levels.level[segments.top] + segments.span
    tile, node = nodes_of_tiles(problem, row0, row1, (first_level - 1)[owner], (last_level - 1)[owner])
    length = problem.tree.kv_len[node]
    tokens = np.bincount(tile, weights=length, minlength=len(row0))
    launch = segments.launch()[owner]
    limit = np.zeros(len(row0), np.int32)
    for which in np.unique(launch):
        mine = launch == which
        memory = float(segments.memory[segments.launch() == which].sum())
        limit[mine], _, _ = best_limit(
            problem,
            shapes[which // 2],
            tokens[mine],
            (row1 - row0)[mine],
            np.ones(int(mine.sum())),
            memory,
            bool(which % 2),
            segments.has_partials,
        )
    tiling = make_tiling(
        problem,
        row_begin=row0,
        row_end=row1,
        run_indptr=exclusive_cumsum(np.bincount(tile, minlength=len(row0))),
        node=node,
        begin=np.zeros(len(node), np.int32),
        end=length,
        kind=launch,
        tiles=tuple(shape.tile for shape in shapes for _ in range(2)),
    )
    tiling.max_tokens[:] = limit
    return tiling
