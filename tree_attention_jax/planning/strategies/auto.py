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
planning.cost`); the tail over the SMs, launches and the reduction are priced for whole candidates. What a segment's
tiles walk is an estimate so far, as it depends on where their borders fall: the best few candidates are cut into tiles
and priced again, and the cheapest wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree_attention_jax._arrays import exclusive_cumsum, ragged_places, ragged_runs
from tree_attention_jax.planning.cost import ShapeTable, shapes_for
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._common import make_tiling
from tree_attention_jax.planning.strategies._launches import Blocks, price, spread, starts
from tree_attention_jax.planning.strategies._levels import Levels
from tree_attention_jax.planning.strategies._segmentation import cheapest
from tree_attention_jax.planning.strategies._segments import SegmentTable, masked_tokens, segment_times
from tree_attention_jax.planning.tiling import Tiling

# Candidates that are cut into tiles: so many at most, and none whose estimate is so many times the best one.
FINALISTS, NO_HOPE = 3, 1.15
# Of so many rows, whose tiles are many enough for an average, only the best.
MANY_ROWS = 20_000
# Joined segments are long: the short steps that nodes of 16 tokens want gain nothing, but would be one more program.
SHORTEST_STEP = 32
# Plain items run apart from masked ones where that gains so many times as much as their launch costs: if it gained
# little, a growing tree would meet both kinds of plan all the time.
SPLIT = 2.0
# The model misses launches by about so much. In small trees the usual narrow shape wins if it is as near as that to the
# best: else a growing tree would meet all shapes that are good for it in turn, each of them a program to compile. With
# a single KV head it meets few of them anyway.
NEARLY, SMALL_US = 0.08, 50.0
# Token slots that a program or two walk in microseconds, of whatever kind its entries are. The first steps of a growing
# tree have no more: of one kind they need one program.
FEW_SLOTS = 1024
# Levels a segment may span. Deeper joins never paid in the trees we measured.
MAX_SPAN = 10


def auto(problem: Problem) -> Tiling:
    if problem.layout.num_rows == 0:
        none = np.zeros(0, np.int32)
        return make_tiling(problem, none, none, np.zeros(1, np.int32), none, none, none)
    table = SegmentTable.of(Levels.of(problem, MAX_SPAN), problem.unit)
    shapes = shapes_for(problem, SHORTEST_STEP)
    return _emit(problem, table, shapes, _finalists(problem, table, shapes, _candidates(problem, table, shapes)))


@dataclass(frozen=True)
class _Candidates:
    """Segmentations, one after the other: [M] segments of all."""

    first: np.ndarray  # each one's first segment
    segments: np.ndarray  # places in the table
    shape: np.ndarray
    twin: int  # a segmentation that is the same as the first one; 0: none


@dataclass(frozen=True)
class _Finalists:
    """A few candidates, one after the other, each by launch: [M] segments and [L] launches of all."""

    segments: np.ndarray  # [M] places in the table
    tiles: np.ndarray  # [M] of each segment
    first: np.ndarray  # [L] each launch's first segment
    whose: np.ndarray  # [L] the candidate that a launch is of
    launch: np.ndarray  # [L] shape * 2 + masked
    memory: np.ndarray  # [L] time to read its K/V once
    ranks: list[int]  # the candidates, best estimate first
    reduction: np.ndarray  # of all candidates: time of the partials that they write, and of the launch that merges them
    usual: np.ndarray  # of all candidates: they have no other shape than the usual one


def _candidates(problem: Problem, table: SegmentTable, shapes: ShapeTable) -> _Candidates:
    """The optimum of the programme, the optimum with each of its shapes alone, and one segment for everything."""
    levels = table.levels
    time = segment_times(problem, shapes, table)
    partial = levels.rows * (problem.heads.partial_bytes / problem.profile.partial_bytes_per_us)

    best = cheapest(table, np.minimum.reduce(time), partial)
    shape = time.take(best, axis=1).argmin(axis=0)
    found, shape_of, counts = [best], [shape], [len(best)]
    used = np.bincount(shape).nonzero()[0]
    for index in used if len(used) > 1 else ():
        found.append(cheapest(table, time[index], partial))
        counts.append(len(found[-1]))
        shape_of.append(np.full(counts[-1], index))
    twin = 0
    if levels.depth <= levels.spans:
        every = np.arange(len(shapes.tiles))
        if len(best) == 1 and levels.depth > 2:
            twin = len(counts) + int(shape[0])
        found.append(np.full(len(every), table.all_in_one()))
        counts += [1] * len(every)
        shape_of.append(every)
    return _Candidates(exclusive_cumsum(np.array(counts))[:-1], np.concatenate(found), np.concatenate(shape_of), twin)


def _finalists(problem: Problem, table: SegmentTable, shapes: ShapeTable, candidates: _Candidates) -> _Finalists:
    """Those with the least time as a whole, by the estimate: launches with their tails, partials and the reduction."""
    num_kinds, profile = 2 * len(shapes.tiles), problem.profile
    segments, shape = candidates.segments, candidates.shape
    owner = spread(candidates.first, len(segments))
    sums = table.pick(segments)
    queries = shapes.queries.take(shape)
    rows, tiles = np.minimum(sums.rows, queries), sums.tiles(queries)
    walked = sums.walked(queries, tiles)
    can_mask = rows > 1  # a single row sees all that its tile walks
    can_mask &= segments >= table.num_alone
    masked = masked_tokens(sums.own, tiles, walked)
    masked *= can_mask
    key = _launch_keys(problem, shapes, owner * num_kinds + 2 * shape, can_mask, shape, walked)
    if len(key) > len(candidates.first):  # else each launch has one segment, and they are in order
        order = np.argsort(key, kind="stable")
        segments, tiles, walked, rows, masked, key, total = (
            column.take(order) for column in (segments, tiles, walked, rows, masked, key, sums.total)
        )
    else:
        total = sums.total
    first = starts(key)
    of_launch = key.take(first)
    whose = of_launch // num_kinds
    launch = of_launch - whose * num_kinds
    place = spread(first, len(key))
    blocks = Blocks(first, place, tiles, walked / tiles, rows)
    memory = np.add.reduceat(total, first) * (problem.heads.token_bytes / profile.bytes_per_us)
    written = np.bincount(owner, sums.rows)
    has_partials = written > problem.layout.num_rows  # some row has several segments
    share = np.add.reduceat(masked, first) / np.maximum(np.add.reduceat(walked, first), 1)
    costs = shapes.launches(launch, share)
    pricing = price(problem, costs, blocks, memory, has_partials.take(whose))
    reduction = profile.launch_us + written * (problem.heads.partial_bytes / profile.partial_bytes_per_us)
    reduction *= has_partials
    time = np.bincount(whose, pricing.time) + reduction
    usual = ~np.logical_or.reduceat(shape != shapes.usual, candidates.first)
    usual &= problem.heads.num_kv_heads > 1
    time *= _factor(usual, time)

    best = time.argsort(kind="stable")[: FINALISTS if problem.layout.num_rows < MANY_ROWS else 1]
    ranks = best[time.take(best) <= NO_HOPE * time[best[0]]]
    stays = np.zeros(len(time), bool)
    stays[ranks] = True
    if candidates.twin and stays[0]:
        stays[candidates.twin] = False
    ours = stays.take(whose)
    mine, ours = ours.take(place).nonzero()[0], ours.nonzero()[0]
    return _Finalists(
        segments=segments.take(mine),
        tiles=tiles.take(mine).astype(np.intp),
        first=mine.searchsorted(first.take(ours)),
        whose=whose.take(ours),
        launch=launch.take(ours),
        memory=memory.take(ours),
        ranks=[which for which in ranks.tolist() if stays[which]],
        reduction=reduction,
        usual=usual,
    )


def _factor(usual: np.ndarray, time: np.ndarray) -> np.ndarray:
    """What the time of candidates is multiplied by before they are compared: see ``NEARLY``."""
    return 1 + NEARLY * (~usual | (time > SMALL_US))


def _is_tiny(problem: Problem) -> bool:
    slots = problem.tree.num_nodes * problem.unit  # beside those of the tokens
    return slots <= FEW_SLOTS and slots + int(problem.tree.kv_len.sum()) <= FEW_SLOTS


def _launch_keys(
    problem: Problem, shapes: ShapeTable, key: np.ndarray, can_mask: np.ndarray, shape: np.ndarray, walked: np.ndarray
) -> np.ndarray:
    """``key`` + can_mask: masked and plain items run as launches of their own, as a mask costs registers and time.

    Unless that is not much more than the launch of the plain ones would cost.
    """
    has_masked = np.bincount(key, can_mask) > 0
    costs_us = shapes.mask_us.take(shape) * walked
    costs_us *= ~can_mask
    cheap = np.bincount(key, costs_us) < SPLIT * problem.profile.launch_us
    return key + (can_mask | (has_masked & cheap).take(key))


def _emit(problem: Problem, table: SegmentTable, shapes: ShapeTable, plans: _Finalists) -> Tiling:
    """One block a row tile of each segment; now that the tiles are known, they are priced, and split limits are set.

    All finalists are cut and priced together: there is less to compute than there are NumPy calls to make.
    """
    levels = table.levels
    kind = plans.launch // 2
    offset = exclusive_cumsum(plans.tiles)
    first = offset.take(plans.first)  # each launch's first tile
    owner, nth = ragged_places(plans.tiles)
    top = table.top.take(plans.segments)
    of_tile = spread(first, len(owner))
    step = shapes.int_queries.take(kind).take(of_tile)
    row0 = levels.row_begin.take(top).take(owner) + nth * step
    row1 = np.minimum(row0 + step, levels.row_end.take(top).take(owner))
    begins_below, span = table.below(plans.segments).astype(np.int32), table.span.take(plans.segments)
    seen = levels.nodes_of_tiles(row0, row1, top.take(owner), begins_below.take(owner), span.take(owner))
    # Tokens of each tile, and those of them that not all of its rows see.
    before = np.zeros((2, len(seen.low) + 1))
    before[0, 1:] = table.token_sums.take(seen.high) - table.token_sums.take(seen.low)
    np.multiply(before[0, 1:], seen.partly, out=before[1, 1:])
    np.add.accumulate(before, axis=1, out=before)
    upto = before.take(seen.indptr, axis=1)
    tokens, masked = upto[:, 1:] - upto[:, :-1]
    blocks = Blocks(first, of_tile, np.ones(len(row0)), tokens, (row1 - row0).astype(np.float64))
    share = np.add.reduceat(masked, first) / np.maximum(np.add.reduceat(tokens, first), 1)
    reduced = plans.reduction.take(plans.whose) > 0
    pricing = price(problem, shapes.launches(plans.launch, share), blocks, plans.memory, reduced)
    time = np.bincount(plans.whose, pricing.time, len(plans.reduction)) + plans.reduction
    time *= _factor(plans.usual, time)

    winner = min(plans.ranks, key=time.tolist().__getitem__)
    launches = (plans.whose == winner).nonzero()[0]
    begin, end = first[launches[0]], first[launches[-1] + 1] if launches[-1] + 1 < len(first) else len(row0)
    which = of_tile[begin:end]
    indptr = seen.indptr[begin : end + 1]
    low, counts = (x[indptr[0] : indptr[-1]] for x in (seen.low, seen.high - seen.low))
    node = levels.node.take(ragged_runs(low, counts))
    return Tiling(
        row_begin=row0[begin:end],
        row_end=row1[begin:end],
        run_indptr=exclusive_cumsum(counts).take(indptr - indptr[0]),
        node=node,
        begin=np.zeros(len(node), np.int32),
        end=problem.tree.kv_len.take(node),
        tile=(which - launches[0]).astype(np.int32),
        max_tokens=pricing.limit.take(which),
        tiles=tuple(shapes.tiles[index] for index in kind.take(launches).tolist()),
        uniform=_is_tiny(problem),
    )
