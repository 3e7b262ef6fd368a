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

from tree_attention_jax._arrays import exclusive_cumsum, ragged_places, ragged_ranges
from tree_attention_jax.planning.cost import ShapeTable, shapes_for
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._common import make_tiling
from tree_attention_jax.planning.strategies._launches import Blocks, price
from tree_attention_jax.planning.strategies._levels import Levels
from tree_attention_jax.planning.strategies._segmentation import Segments, cheapest
from tree_attention_jax.planning.strategies._segments import SegmentSums, Sums, segment_times
from tree_attention_jax.planning.tiling import Tiling

# Tiles of a segment may see more tokens than their average: if so many times as many, split limits are priced again.
LONGER_THAN_THOUGHT = 1.1
# Joined segments are long: the short steps that nodes of 16 tokens want gain nothing, but would be one more program.
SHORTEST_STEP = 32
# Plain items run apart from masked ones where that gains so many times as much as their launch costs: if it gained
# little, a growing tree would meet both kinds of plan all the time.
SPLIT = 2.0
# Levels a segment may span. Deeper joins never paid in the trees we measured.
MAX_SPAN = 10


def auto(problem: Problem) -> Tiling:
    if problem.layout.num_rows == 0:
        none = np.zeros(0, np.int32)
        return make_tiling(problem, none, none, np.zeros(1, np.int32), none, none, none)
    levels = Levels.of(problem, MAX_SPAN)
    shapes = shapes_for(problem, SHORTEST_STEP)
    return _emit(problem, levels, _cheapest(problem, shapes, _candidates(problem, levels, shapes)), shapes)


@dataclass(frozen=True)
class _Candidate:
    """A segmentation with the shape of each segment."""

    segments: Segments
    sums: Sums
    shape: np.ndarray


@dataclass(frozen=True)
class _Plan:
    """The winner, with what was decided of it; [M] as in :class:`Segments`."""

    segments: Segments
    tiles: np.ndarray
    launch: np.ndarray  # shape * 2 + masked
    memory: np.ndarray  # by launch, as the next three: time to read its K/V once
    share: np.ndarray  # of its steps that are masked
    longest: np.ndarray  # tokens of a tile, by the estimate
    limit: np.ndarray  # tokens an item may have at most
    has_partials: bool


def _candidates(problem: Problem, levels: Levels, shapes: ShapeTable) -> list[_Candidate]:
    """The optimum of the programme, the optimum with each of its shapes alone, and one segment for everything."""
    sums = SegmentSums.of(levels, problem.unit)
    alone = np.zeros(sums.inner.total.shape, bool)
    alone[0, 0] = True
    inner, leaf = segment_times(problem, shapes, sums.inner, alone), segment_times(problem, shapes, sums.leaf, True)
    partial = levels.rows * (problem.heads.partial_bytes / problem.profile.partial_bytes_per_us)

    best = cheapest(levels, inner.min(axis=0), leaf.min(axis=0), partial)
    picked = sums.pick(levels, best)
    shape = segment_times(problem, shapes, picked, best.alone()).argmin(axis=0)
    found = [_Candidate(best, picked, shape)]
    used = np.flatnonzero(np.bincount(shape))
    for index in used if len(used) > 1 else ():
        segments = cheapest(levels, inner[index], leaf[index], partial)
        found.append(_Candidate(segments, sums.pick(levels, segments), np.full(len(segments.top), index)))
    if levels.depth <= levels.spans:
        whole = Segments.whole_forest(levels)
        picked = sums.pick(levels, whole)
        found += [_Candidate(whole, picked, np.full(1, index)) for index in range(len(shapes.tiles))]
    return found


def _cheapest(problem: Problem, shapes: ShapeTable, candidates: list[_Candidate]) -> _Plan:
    """The candidate with the least time as a whole: launches with their tails, partials and the reduction."""
    num_shapes = len(shapes.tiles)
    counts = [len(candidate.shape) for candidate in candidates]
    owner = np.repeat(np.arange(len(candidates)), counts)
    shape = np.concatenate([candidate.shape for candidate in candidates])
    below = np.concatenate([candidate.segments.below for candidate in candidates])
    span = np.concatenate([candidate.segments.span for candidate in candidates])
    sums = Sums.concatenate([candidate.sums for candidate in candidates])
    queries = shapes.queries[shape]
    rows, tiles = np.minimum(sums.rows, queries), sums.tiles(queries)
    walked = sums.walked(queries, tiles)
    can_mask = (below + span > 0) & (rows > 1)  # a single row sees all that its tile walks
    key = _launch_keys(problem, shapes, owner * num_shapes + shape, can_mask, walked)
    order = np.argsort(key, kind="stable")
    sorted_key = key[order]
    first = _starts(sorted_key)
    whose, launch = np.divmod(sorted_key[first], 2 * num_shapes)
    blocks = Blocks(first, tiles[order], (walked / tiles)[order], rows[order])
    memory = np.add.reduceat(sums.total[order], first) * (problem.heads.token_bytes / problem.profile.bytes_per_us)
    written = np.bincount(owner, weights=sums.rows)
    has_partials = written > problem.layout.num_rows  # some row has several segments
    masked = np.where(can_mask, sums.masked(tiles, walked), 0)[order]
    share = np.add.reduceat(masked, first) / np.maximum(np.add.reduceat(walked[order], first), 1)
    pricing = price(problem, shapes.take(launch // 2), blocks, memory, launch % 2 == 1, share, has_partials[whose])
    total = np.bincount(whose, weights=pricing.time)
    partial_us = problem.heads.partial_bytes / problem.profile.partial_bytes_per_us
    total += np.where(has_partials, problem.profile.launch_us + written * partial_us, 0)
    best = int(total.argmin())
    mine = slice(sum(counts[:best]), sum(counts[: best + 1]))
    ours = whose == best

    def by_launch(values: np.ndarray) -> np.ndarray:
        out = np.zeros(2 * num_shapes, values.dtype)
        out[launch[ours]] = values[ours]
        return out

    return _Plan(
        candidates[best].segments,
        tiles[mine].astype(np.int32),
        key[mine] % (2 * num_shapes),
        by_launch(memory),
        by_launch(share),
        by_launch(np.maximum.reduceat(blocks.tokens, first)),
        by_launch(pricing.limit),
        bool(has_partials[best]),
    )


def _launch_keys(
    problem: Problem, shapes: ShapeTable, key: np.ndarray, can_mask: np.ndarray, walked: np.ndarray
) -> np.ndarray:
    """``key`` * 2 + can_mask: masked and plain items run as launches of their own, as a mask costs registers and time.

    Unless that is not much more than the launch of the plain ones would cost.
    """
    shape = key % len(shapes.tiles)
    costs_us = (shapes.programs * (shapes.mixed_token_us - shapes.token_us))[shape] * walked
    has_masked = np.bincount(key, weights=can_mask) > 0
    cheap = np.bincount(key, weights=np.where(can_mask, 0, costs_us)) < SPLIT * problem.profile.launch_us
    return key * 2 + (can_mask | (has_masked & cheap)[key])


def _emit(problem: Problem, levels: Levels, plan: _Plan, shapes: ShapeTable) -> Tiling:
    """One block a row tile of each segment; now that the tiles are known, each launch's split limit is set."""
    step = shapes.queries.astype(np.int32)[plan.launch // 2]
    owner, nth = ragged_places(plan.tiles)
    launch = plan.launch[owner]
    by_launch = np.argsort(launch, kind="stable")
    owner, nth, launch = owner[by_launch], nth[by_launch], launch[by_launch]
    top = plan.segments.top[owner]
    row0 = levels.row_begin[top] + nth * step[owner]
    row1 = np.minimum(row0 + step[owner], levels.row_end[top])
    level, below, span = levels.level[top], plan.segments.below[owner], plan.segments.span[owner]
    pairs, low, high = levels.nodes_of_tiles(row0, row1, level + below, level + span)
    run_indptr = exclusive_cumsum(high - low)[pairs]
    node = levels.node[ragged_ranges(low, high)[1]]
    length = problem.tree.kv_len[node]
    first = _starts(launch)
    tokens = np.diff(exclusive_cumsum(length)[run_indptr])
    tiling = make_tiling(
        problem,
        row_begin=row0,
        row_end=row1,
        run_indptr=run_indptr,
        node=node,
        begin=np.zeros(len(node), np.int32),
        end=length,
        kind=launch,
        tiles=tuple(tile for tile in shapes.tiles for _ in range(2)),
    )
    blocks = Blocks(first, np.ones(len(launch)), tokens.astype(np.float64), (row1 - row0).astype(np.float64))
    which = launch[first]
    limit = plan.limit[which]
    if (np.maximum.reduceat(blocks.tokens, first) > LONGER_THAN_THOUGHT * plan.longest[which]).any():
        reduced = np.full(len(first), plan.has_partials)
        limit = price(
            problem, shapes.take(which // 2), blocks, plan.memory[which], which % 2 == 1, plan.share[which], reduced
        ).limit
    tiling.max_tokens[:] = limit[blocks.launch()]
    return tiling


def _starts(values: np.ndarray) -> np.ndarray:
    """Where each run of equal values begins."""
    new = np.empty(len(values), bool)
    new[:1] = True
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return np.flatnonzero(new)
