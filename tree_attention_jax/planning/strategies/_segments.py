"""What a segment costs: a node's rows times some levels, cut into tiles of each of the profile's shapes."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from tree_attention_jax.planning.cost import MASKED_SHARE, OVERLAP, ShapeTable
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._levels import Levels

# An inner node's segments: with its own tokens, or right below them.
FROM, BELOW = 0, 1


class Sums(NamedTuple):
    """What the cost of segments depends on; float32.

    Attributes:
        rows: of the top.
        total, extra: tokens of all nodes, and the same weighted by each node's rows - 1.
        own: tokens that every row sees: the top's, or those of its only child if the top's are another segment's.
    """

    rows: np.ndarray
    total: np.ndarray
    extra: np.ndarray
    own: np.ndarray

    def walked(self, queries: np.ndarray, tiles: np.ndarray) -> np.ndarray:
        """Tokens that all tiles of ``queries`` rows walk together.

        A node that s rows see meets about 1 + (s - 1) / queries tiles, and never more than there are.
        """
        met = self.extra / queries
        met += self.total
        return np.minimum(met, self.total * tiles, out=met)

    def tiles(self, queries: np.ndarray) -> np.ndarray:
        return np.ceil(self.rows / queries)


def masked_tokens(own: np.ndarray, tiles: np.ndarray, walked: np.ndarray) -> np.ndarray:
    """About how many of the tokens walked are masked: never the top's own, which every row sees."""
    masked = own * tiles
    np.subtract(walked, masked, out=masked)
    np.maximum(masked, 0.0, out=masked)
    masked *= MASKED_SHARE
    return masked


def one_sided(rows: np.ndarray, queries: Any, tiles: np.ndarray) -> np.ndarray:
    """About which share of what tiles mask one half works on, beyond as much of the other half.

    As if each row saw as much, and no other row of the other half did: then the busier half is the one with more rows.
    """
    half, full = queries / 2.0, tiles - 1.0
    others = full * half
    full *= queries
    busier = np.minimum(rows - full, half)
    busier += others
    busier *= 2.0 / rows
    busier -= 1.0
    return busier


class NodeTokens(NamedTuple):
    """Token slots that are walked of each node: float32 [N], in level order."""

    tokens: np.ndarray  # with the idle ones of entries
    rows: np.ndarray
    extra: np.ndarray  # tokens * (rows - 1)
    sums: np.ndarray  # float64 [N + 1]: prefix sums of the tokens

    @staticmethod
    def of(levels: Levels, unit: int) -> NodeTokens:
        slots = -levels.tokens  # idle ones, of each node's last entry
        slots &= unit - 1
        slots *= levels.tokens >= slots  # short runs will get entries of one token (:func:`.entries._chunks`)
        slots += levels.tokens
        tokens, rows = slots.astype(np.float32), levels.rows.astype(np.float32)
        extra = rows - 1.0
        extra *= tokens
        sums = np.zeros(len(tokens) + 1)
        sums[1:] = tokens
        return NodeTokens(tokens, rows, extra, np.add.accumulate(sums, out=sums))


class SegmentTable(NamedTuple):
    """Every segment that ``auto`` may choose, [F]: each leaf by itself, then those from and those below inner nodes.

    Either of the last two lists each pair of a span and an inner node that ends within the tree, by span. Most inner
    nodes lie deep, so these are few of all pairs.
    """

    levels: Levels
    top: np.ndarray  # [F] node, in level order
    span: np.ndarray  # [F] levels below the top
    pairs: np.ndarray  # of the (state, span, inner node) triples that are listed, their places among all of them
    first: np.ndarray  # [spans + 1] where each span begins among those listed
    num_alone: int  # the first so many are one node each, with its own tokens: leaves, and span 0 from each inner node
    first_below: int  # the first segment without its top's own tokens
    sums: Sums
    exact: np.ndarray  # [4, F] the same, but with own tokens that are not rounded up to entries
    token_sums: np.ndarray  # [N + 1] prefix sums of the nodes' tokens, with the idle ones of their entries
    partial_rows: np.ndarray  # [F] rows that write a partial if the programme chooses the segment: none if it is final

    @staticmethod
    def of(levels: Levels, nodes: NodeTokens) -> SegmentTable:
        inner, leaf, spans, bounds = levels.inner, levels.leaf, levels.spans, levels.bounds
        # Inner nodes are in order of their levels: those that have so many levels below them are the first ones.
        counts = levels.inner_begin[levels.depth : levels.depth - spans : -1]
        starts = [0, *itertools.accumulate(counts)]
        span, first = np.arange(spans).repeat(counts), np.array(starts)
        place = np.arange(starts[-1])
        place -= first.take(span)
        listed = inner.take(place)
        top = np.concatenate([leaf, listed, listed])
        num_leaves, below = len(leaf), len(leaf) + len(listed)

        # Sums over each node and what is down to so many levels below it: of tokens, and of the extra ones.
        prefix = np.zeros((levels.num_nodes + 1, 2))
        prefix[:, 0], prefix[1:, 1] = nodes.sums, nodes.extra
        np.add.accumulate(prefix[:, 1], out=prefix[:, 1])
        begin, end = prefix.take(np.concatenate([bounds[k, :, :n] for k, n in enumerate(counts)], axis=1), axis=0)
        end -= begin
        for k in range(1, spans):
            end[starts[k] : starts[k + 1]] += end[starts[k - 1] : starts[k - 1] + counts[k]]
        sums = end.astype(np.float32)
        exact = np.empty((4, len(top)), np.float32)
        exact[0] = nodes.rows.take(top)
        exact[1, :num_leaves], exact[2, :num_leaves] = nodes.tokens.take(leaf), nodes.extra.take(leaf)
        total = exact[1:3].T
        total[num_leaves:below] = sums
        np.subtract(sums, sums.take(place, axis=0), out=total[below:])
        whole = top.copy()  # the node that all rows of the segment see whole; the virtual root stands for none
        whole[below:] = levels.only_child().take(place)
        exact[3] = levels.tokens.take(whole)

        # Segments that reach from a root, or from the virtual root, to the deepest leaf below write final results.
        partial_rows, roots = levels.rows.take(top), levels.inner_begin[2]
        partial_rows[: levels.begin[2] - roots] = 0  # leaves that are roots
        if roots > 2:
            ends = bounds[1 : levels.depth, :, 1:roots]  # of a root, spans that reach beyond its leaves are listed too
            at, root = (ends[:, 0] == ends[:, 1]).nonzero()
            partial_rows[first.take(at) + root + (num_leaves + 1)] = 0
        elif roots == 2 and levels.depth - 2 < spans:  # the only one that is no leaf, and so the deepest
            partial_rows[num_leaves + starts[levels.depth - 2] + 1] = 0
        if levels.depth <= spans:
            partial_rows[-1] = 0
        pairs = span * len(inner)
        pairs += place
        return SegmentTable(
            levels=levels,
            top=top,
            span=np.concatenate([np.zeros(num_leaves, np.intp), span, span]),
            pairs=np.concatenate([pairs, pairs + spans * len(inner)]),
            first=first,
            num_alone=levels.num_nodes,
            first_below=below,
            sums=Sums(rows=exact[0], total=exact[1], extra=exact[2], own=nodes.tokens.take(whole)),
            exact=exact,
            token_sums=nodes.sums,
            partial_rows=partial_rows,
        )

    def below(self, place: np.ndarray) -> np.ndarray:
        """bool: segments without their top's own tokens."""
        return place >= self.first_below

    def all_in_one(self) -> int:
        """Place of the segment that holds everything, if segments may span as many levels."""
        return len(self.top) - 1

    def place(self, state: int, span: Any, inner: Any) -> Any:
        """Of inner nodes' segments in the table, by the node's place among the inner nodes."""
        return len(self.levels.leaf) + state * (len(self.pairs) // 2) + self.first.take(span) + inner

    def by_node(self, cost: np.ndarray) -> np.ndarray:
        """Costs [F, C] of inner nodes' segments as [2, spans, I, C], without end for those that are not listed."""
        levels, count = self.levels, cost.shape[1]
        options = np.empty((2 * levels.spans * len(levels.inner), count))
        options.fill(np.inf)
        options[self.pairs] = cost[len(levels.leaf) :]
        return options.reshape(2, levels.spans, -1, count)

    def pick(self, place: np.ndarray) -> Sums:
        """Sums of chosen segments."""
        return Sums(*self.exact.take(place, axis=1))


def segment_times(problem: Problem, shapes: ShapeTable, table: SegmentTable) -> np.ndarray:
    """float32 [S, F]: time of each segment with each of S shapes, as a part of a launch that fills the GPU."""
    costs, width, sums = shapes.segment_costs, problem.heads.token_bytes, table.sums
    tiles = sums.tiles(costs.queries)
    walked = sums.walked(costs.queries, tiles)
    # One node by itself needs no masks.
    work, alone = np.empty_like(walked), table.num_alone
    np.multiply(walked[:, :alone], costs.plain_us, out=work[:, :alone])
    joined = masked_tokens(sums.own[alone:], tiles[:, alone:], walked[:, alone:])
    np.multiply(walked[:, alone:], costs.token_us, out=work[:, alone:])
    for shape, us in zip(costs.halved.tolist(), costs.one_sided_us.tolist()):
        share = one_sided(sums.rows[alone:], float(costs.queries[shape, 0]), tiles[shape, alone:])
        share *= us
        share *= joined[shape]
        work[shape, alone:] += share
    joined *= costs.masked_us
    work[:, alone:] += joined
    tiles *= costs.tile_us
    work += tiles
    memory = np.empty_like(work)
    memory[:] = sums.total * (width / problem.profile.bytes_per_us)
    memory[:, alone:] *= costs.masked_memory
    time = np.maximum(work, memory)
    np.minimum(work, memory, out=work)
    work *= OVERLAP
    time += work
    walked *= width / problem.profile.l2_bytes_per_us
    return np.maximum(time, walked, out=time)
