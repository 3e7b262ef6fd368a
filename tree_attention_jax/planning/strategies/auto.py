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

bottom-up, a level at a time, all nodes of a level at once. A virtual node above the roots lets trees be joined too. All
that is left out where a bound shows that one segment for the whole tree is the best (:mod:`._one_segment`).

The time of a segment comes from its matrix work, measured for each tile shape, and its bytes (:mod:`tree_attention_jax.
planning.cost`); the tail over the SMs, launches and the reduction are priced for whole candidates. What a segment's
tiles walk is an estimate so far, as it depends on where their borders fall: the best few candidates are cut into tiles
and priced again, and the cheapest wins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tree_attention_jax._arrays import all_of, any_of, ragged_places, starts_of
from tree_attention_jax.planning.cost import ShapeTable, shapes_for
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.reduction import reduction_of
from tree_attention_jax.planning.strategies._common import make_tiling
from tree_attention_jax.planning.strategies._launches import (
    ALL_GAIN,
    Blocks,
    Launches,
    blocks_of,
    launch_keys,
    price,
    spread,
    starts,
)
from tree_attention_jax.planning.strategies._levels import Levels, Tiles
from tree_attention_jax.planning.strategies._one_segment import one_segment
from tree_attention_jax.planning.strategies._regular import programme
from tree_attention_jax.planning.strategies._segments import (
    NodeTokens,
    SegmentTable,
    masked_tokens,
    one_sided,
)
from tree_attention_jax.planning.tiling import Tiling

# Candidates that are cut into tiles: none whose estimate is so many times the best one, and of so many rows at most so
# many of them. The more tiles there are, the better is an average.
NO_HOPE = 1.2
FINALISTS = ((512, 5), (20_000, 4))
# Joined segments are long: the short steps that nodes of 16 tokens want gain nothing, but would be one more program.
SHORTEST_STEP = 32
# The model misses launches by about so much. In small trees the usual narrow shape wins if it is as near as that to the
# best: else a growing tree would meet all shapes that are good for it in turn, each of them a program to compile. With
# a single KV head it meets few of them anyway.
NEARLY, SMALL_US = 0.08, 50.0
# In larger ones all shapes are alike, but several side by side have to be faster than the best single one by so much.
SEVERAL = 0.04
# What times of candidates are multiplied with where they are compared: of small trees, and of larger ones.
USUAL, UNUSUAL = (1.0, 1 + NEARLY), (1 + NEARLY, 1 + NEARLY)
MIXED = ((1 + NEARLY) * (1 + SEVERAL), (1 + NEARLY) * (1 + SEVERAL))
# Token slots that a program or two walk in microseconds, of whatever kind its entries are. The first steps of a growing
# tree have no more: of one kind they need one program.
FEW_SLOTS = 1024
# The programme takes the SMs to be busy. A few rows of a single KV head leave most of them idle, and more segments,
# each a partial, would be more programs: so such trees have more candidates, for which partials cost so much less.
FEW_ROWS, CHEAP = 256, 0.15
# Of so few nodes, all that the programme may be asked for takes about as long as a part of it.
FEW_NODES = 128
# ... and of so many, one shape at a time needs less memory.
MANY_NODES = 4096
# What halves of tiles see is the roughest of the estimates. Where one half works on more than this share of a launch
# alone, the best tiling without such tiles is looked for, too, and taken if it is not slower by more than so much of
# that share.
LOPSIDED, ROUGH = 0.05, 0.25
# Levels a segment may span. Deeper joins never paid in the trees we measured.
MAX_SPAN = 10


def auto(problem: Problem) -> Tiling:
    tiling, us, alone = _auto(problem)
    if alone > LOPSIDED and not all(tile.mosaic for tile in problem.profile.tiles):
        other, other_us, _ = _auto(replace(problem, mosaic=False))
        if other_us < us * (1 + ROUGH * alone):
            return other
    return tiling


def _auto(problem: Problem) -> tuple[Tiling, float, float]:
    """The tiling; its time, and the largest share of a launch's tokens that one half of a tile works on alone."""
    if problem.layout.num_rows == 0:
        none = np.zeros(0, np.int32)
        return make_tiling(problem, none, none, np.zeros(1, np.int32), none, none, none), 0.0, 0.0
    shapes, levels = shapes_for(problem, SHORTEST_STEP), Levels.of(problem, MAX_SPAN)
    table, candidates = _candidates(problem, shapes, levels)
    return _emit(problem, table, shapes, _finalists(problem, table, shapes, candidates))


class _Candidates(NamedTuple):
    """Segmentations, one after the other: [M] segments of all."""

    owner: np.ndarray  # the candidate that a segment is of
    segments: np.ndarray  # places in the table
    shape: np.ndarray
    twin: int  # a segmentation that is the same as the first one; 0: none
    shown: bool  # the first one is the best, as a bound shows
    mixed: bool  # the first one has several shapes; no other one has


class _Finalists(NamedTuple):
    """A few candidates, one after the other, each by launch: [M] segments and [L] launches of all."""

    segments: np.ndarray  # [M] places in the table
    tiles: np.ndarray  # [M] of each segment
    place: np.ndarray  # [M] its launch
    first: np.ndarray  # [L] each launch's first segment
    whose: np.ndarray  # [L] the candidate that a launch is of
    launch: np.ndarray  # [L] shape * 2 + masked
    memory: np.ndarray  # [L] time to read its K/V once
    partials: np.ndarray | None  # [L] that its candidate writes if nothing is split; None: none does
    ranks: list[int]  # the candidates, best estimate first
    reduction: np.ndarray  # of all candidates: what it costs to write these partials and to merge them
    handicaps: list[tuple[float, float]]  # of all candidates
    gains: bool  # the (first) launch of the best one gains by splitting items


def _candidates(problem: Problem, shapes: ShapeTable, levels: Levels) -> tuple[SegmentTable, _Candidates]:
    """The optimum of the programme, the optimum with each of its shapes alone, and one segment for everything; for few
    rows also the optimum where partials are cheap."""
    nodes = NodeTokens.of(levels, problem.unit)
    few = problem.heads.num_kv_heads == 1 and problem.layout.num_rows <= FEW_ROWS
    prices = [1.0, CHEAP] if few else [1.0]
    whole, small = one_segment(problem, shapes, levels, nodes, prices[-1]), levels.num_nodes <= FEW_NODES
    if whole is not None:
        table, time, place = whole
        best = where_cheap = np.array([place])
    else:
        table, time, optima_of = programme(problem, shapes, levels, nodes)
        lists = np.minimum.reduce(time)[None]
        if small:
            lists = np.concatenate([lists, time])
        optima = optima_of(lists, prices)
        best, where_cheap = optima[0], optima[len(lists) * (len(prices) - 1)]
    shape = time.take(best, axis=1).argmin(axis=0)
    used = sorted(set(shape.tolist()))
    alone = [(0, index) for index in used] if len(used) > 1 else []  # (price, shape)
    if few:
        cheap_shape = time.take(where_cheap, axis=1).argmin(axis=0)
        alone += [(1, index) for index in sorted(set(cheap_shape.tolist()))]
    found = [best]
    if whole is not None:
        found += [best] * len(alone)
    elif small:
        found += [optima[len(lists) * price + 1 + index] for price, index in alone]
    else:
        batches = [[pair for pair in alone if pair[0] == price] for price in range(len(prices))]
        if levels.num_nodes > MANY_NODES:
            batches = [[pair] for pair in alone]
        for batch in filter(None, batches):
            of_shapes = time.take([index for _, index in batch], axis=0)
            found += optima_of(of_shapes, [prices[batch[0][0]]])
    shape_of, twin = [index for _, index in alone], 0
    if levels.depth <= levels.spans:
        if len(best) == 1 and levels.depth > 2:
            twin = len(found) + int(shape[0])
        shape_of += range(len(shapes.tiles))
        found += [np.array([table.all_in_one()])] * len(shapes.tiles)
    counts = [len(places) for places in found]
    owner, of_others = np.arange(len(counts)), np.array(shape_of, np.intp)
    if len(counts) < sum(counts):
        owner, of_others = owner.repeat(counts), of_others.repeat(counts[1:])
    first, others = np.concatenate(found), np.concatenate([shape, of_others])
    return table, _Candidates(owner, first, others, twin, whole is not None, len(used) > 1)


def _finalists(problem: Problem, table: SegmentTable, shapes: ShapeTable, candidates: _Candidates) -> _Finalists:
    """Those with the least time as a whole, by the estimate: launches with their tails, partials and the reduction."""
    profile, num_rows = problem.profile, problem.layout.num_rows
    owner, segments, shape = candidates.owner, candidates.segments, candidates.shape
    sums = table.pick(segments)
    queries = shapes.queries.take(shape)
    rows, tiles = np.minimum(sums.rows, queries), sums.tiles(queries)
    walked = sums.walked(queries, tiles)
    can_mask = rows > 1.0  # a single row sees all that its tile walks
    can_mask &= segments >= table.num_alone
    masked = masked_tokens(sums.own, tiles, walked)
    masked *= can_mask
    alone = masked * shapes.two_halves.take(shape)  # of one half of a tile
    if any_of(alone):
        alone *= one_sided(sums.rows, queries, tiles)
    total, launch, other = sums.total, 2 * shape, shape != shapes.usual
    single = int(owner[-1]) + 1 == len(owner)  # each candidate is a single segment, which is its launch
    if single:
        first = place = whose = owner
        launch += can_mask
        reduction: np.ndarray = np.zeros(len(owner))
        in_all = np.maximum(walked, 1.0)
    else:
        written = np.bincount(owner, sums.rows)
        written *= written > num_rows  # some row has several segments
        reduction = reduction_of(problem).time(written)
        other = np.bincount(owner, other) > 0
        num_kinds = 2 * len(shapes.tiles)
        key = launch_keys(problem, shapes, owner * num_kinds + launch, can_mask, shape, walked)
        if not all_of(key[1:] >= key[:-1]):
            order = key.argsort(kind="stable")
            segments, tiles, walked, rows, masked, alone, key, total = [
                column.take(order) for column in (segments, tiles, walked, rows, masked, alone, key, total)
            ]
        first = starts(key)
        whose, launch = np.divmod(key.take(first), num_kinds)
        place, total = spread(first, len(key)), np.add.reduceat(total, first)
        masked, alone = np.add.reduceat(masked, first), np.add.reduceat(alone, first)
        in_all = np.maximum(np.add.reduceat(walked, first), 1.0)
    blocks = Blocks(first, place, tiles, walked / tiles, rows)
    memory = total * (problem.heads.token_bytes / profile.bytes_per_us)
    memory *= shapes.launch_memory.take(launch)
    partials = None if single else written.take(whose)
    launches = Launches(launch, masked / in_all, alone / in_all, memory, partials)
    # Where no bound shows what is best the root is long: then some launch gains by a split nearly always.
    hopeless, gains = NO_HOPE * (1 + NEARLY) if single else np.inf, not candidates.shown
    times, limits = price(problem, shapes, launches, blocks, hopeless, gains)
    handicaps = [UNUSUAL] * len(reduction)
    if problem.heads.num_kv_heads > 1:
        handicaps = [UNUSUAL if is_other else USUAL for is_other in other.tolist()]
        if candidates.mixed:
            handicaps[0] = MIXED
    time = _comparable((times if single else np.bincount(whose, times)) + reduction, handicaps)

    most = max([count for rows_at_most, count in FINALISTS if num_rows <= rows_at_most], default=1)
    best = sorted(range(len(time)), key=time.__getitem__)[:most]
    ranks = [which for which in best if time[which] <= NO_HOPE * time[best[0]]]
    if candidates.twin in ranks and 0 in ranks and candidates.twin:
        ranks.remove(candidates.twin)
    if single:
        mine = ours = np.array(sorted(ranks))
        first = place = np.arange(len(ranks))
    else:
        stays = np.zeros(len(time), bool)
        for which in ranks:  # faster than an index of so few
            stays[which] = True
        stays = stays.take(whose)
        mine, ours = stays.take(place).nonzero()[0], stays.nonzero()[0]
        first = mine.searchsorted(first.take(ours))
        place = spread(first, len(mine))
    return _Finalists(
        segments=segments.take(mine),
        tiles=tiles.take(mine).astype(np.intp),
        place=place,
        first=first,
        whose=whose.take(ours),
        launch=launch.take(ours),
        memory=memory.take(ours),
        partials=None if partials is None else partials.take(ours),
        ranks=ranks,
        reduction=reduction,
        handicaps=handicaps,
        gains=bool(limits[whose.searchsorted(ranks[0])] > 0),
    )


def _comparable(time: np.ndarray, handicaps: list[tuple[float, float]]) -> list[float]:
    """Times of candidates as they are compared."""
    return [us * handicap[us > SMALL_US] for us, handicap in zip(time.tolist(), handicaps)]


def _is_tiny(problem: Problem) -> bool:
    slots = problem.tree.num_nodes * problem.unit  # beside those of the tokens
    return slots <= FEW_SLOTS and slots + int(np.add.reduce(problem.tree.kv_len)) <= FEW_SLOTS


def _emit(problem: Problem, table: SegmentTable, shapes: ShapeTable, plans: _Finalists) -> tuple[Tiling, float, float]:
    """One block a row tile of each segment; now that the tiles are known, they are priced, and split limits are set.

    All finalists are cut and priced together: there is less to compute than there are NumPy calls to make.
    """
    levels, segments, num_launches = table.levels, plans.segments, len(plans.first)
    kind, top = plans.launch >> 1, table.top.take(segments)
    owner, nth = ragged_places(plans.tiles)
    of_tile = owner if len(segments) == num_launches else plans.place.take(owner)
    first = starts(of_tile)  # each launch's first tile
    step = shapes.int_queries.take(kind).take(plans.place)
    row0 = nth * step.take(owner)
    row0 += levels.row_begin.take(top).take(owner)
    row1 = row0 + step.take(owner)
    np.minimum(row1, levels.row_end.take(top).take(owner), out=row1)
    tiles, num_tiles = Tiles(row0, row1, owner), len(row0)
    halved = shapes.launches_of_halves.take(plans.launch).take(of_tile).nonzero()[0]
    if len(halved):  # the middles of these are looked at along with the tiles
        tiles = _with_middles(tiles, halved, step // 2)
    seen = levels.nodes_of_tiles(tiles, top, table.below(segments), table.span.take(segments))
    # Tokens of each tile, and those of them that not all of its rows see. All numbers are whole, so no sum is rounded.
    sums = np.empty((3, len(seen.low)))
    table.token_sums.take(seen.high, out=sums[0], mode="clip")  # they are in range; without a mode it is slow
    table.token_sums.take(seen.low, out=sums[1], mode="clip")
    np.subtract(sums[0], sums[1], out=sums[2])
    sums[2] *= seen.partly
    before_high, before_low, masked = np.add.reduceat(sums, seen.indptr[:-1], axis=1)
    tokens, masked = (before_high - before_low)[:num_tiles], masked[:num_tiles]
    alone = np.zeros(num_tiles)  # of one half of a tile, beyond those of the other
    if len(halved):
        of_both, high, low, of_some = tokens - masked, before_high[:num_tiles], before_low[:num_tiles], masked
        if len(halved) < num_tiles:
            of_both, high, low, of_some = (column.take(halved) for column in (of_both, high, low, of_some))
        # The first half sees all up to the middle, the second one all from there on.
        busier = before_high[num_tiles:] - low
        np.maximum(busier, high - before_low[num_tiles:], out=busier)
        busier -= of_both
        busier *= 2.0
        busier -= of_some
        np.maximum(busier, 0.0, out=busier)
        if len(halved) < num_tiles:
            alone[halved] = busier
        else:
            alone = busier
    in_all = np.maximum(np.add.reduceat(tokens, first), 1.0)
    masked, alone = np.add.reduceat(masked, first), np.add.reduceat(alone, first)
    blocks = blocks_of(first, of_tile, tokens, (row1 - row0).astype(np.float64))
    alone /= in_all
    launches = Launches(plans.launch, masked / in_all, alone, plans.memory, plans.partials)
    gains = plans.gains and num_launches > ALL_GAIN
    times, limits = price(problem, shapes, launches, blocks, gains=gains)
    time = np.bincount(plans.whose, times, len(plans.reduction)) + plans.reduction

    winner, low, high = plans.ranks[0], 0, num_launches
    if len(plans.ranks) > 1:
        comparable = _comparable(time.take(plans.ranks), [plans.handicaps[rank] for rank in plans.ranks])
        winner, whose = plans.ranks[comparable.index(min(comparable))], plans.whose.tolist()
        low = whose.index(winner)
        high = low + whose.count(winner)
    begin, end = first[low], first[high] if high < len(first) else len(row0)
    which = of_tile[begin:end]
    indptr = seen.indptr[begin : end + 1]
    runs = slice(indptr[0], indptr[-1])
    counts = seen.high[runs] - seen.low[runs]
    upto = starts_of(counts)
    place = np.arange(upto[-1])
    place += (seen.low[runs] - upto[:-1]).repeat(counts)
    node = levels.node.take(place)
    tiling = Tiling(
        row_begin=row0[begin:end],
        row_end=row1[begin:end],
        run_indptr=upto.take(indptr - indptr[0]),
        node=node,
        begin=np.zeros(len(node), np.int32),
        end=problem.tree.kv_len.take(node),
        tile=(which - low).astype(np.int32),
        max_tokens=limits.take(which),
        tiles=tuple([shapes.tiles[index] for index in kind[low:high].tolist()]),
        uniform=_is_tiny(problem),
        cut=True,
    )
    return tiling, float(time[winner]), float(np.maximum.reduce(alone[low:high]))


def _with_middles(tiles: Tiles, which: np.ndarray, half: np.ndarray) -> Tiles:
    """The tiles; then for some of them an empty one between their first ``half`` rows (of each segment's tiles) and the
    others.

    Where there are no others, it lies at the end.
    """
    row0, row1, owner = begin, end, whose = tiles
    if len(which) < len(row0):
        begin, end, whose = row0.take(which), row1.take(which), owner.take(which)
    middle = half.take(whose)
    middle += begin
    np.minimum(middle, end, out=middle)
    return Tiles(np.concatenate([row0, middle]), np.concatenate([row1, middle]), np.concatenate([owner, whose]))
