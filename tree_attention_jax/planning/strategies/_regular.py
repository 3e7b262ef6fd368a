"""The dynamic programme of ``auto`` for regular trees, in which all nodes of a level are alike.

The nodes of a level have the same segments to choose from there, at the same costs, so one of them chooses for all: the
programme has as many nodes as the tree has levels, and what lies k levels below a node is so many times one node. All
segments that the nodes of a level have with so many levels below are of one *kind*. What comes out is what
:mod:`._segmentation` finds node by node.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tree_attention_jax._arrays import any_of, starts_of
from tree_attention_jax.planning.cost import ShapeTable
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._levels import Levels
from tree_attention_jax.planning.strategies._segmentation import Optima, costs_of, options_of
from tree_attention_jax.planning.strategies._segments import (
    BELOW,
    FROM,
    NodeTokens,
    SegmentTable,
    Sums,
    segment_times,
)


def programme(
    problem: Problem, shapes: ShapeTable, levels: Levels, nodes: NodeTokens
) -> tuple[SegmentTable, np.ndarray, Callable[[np.ndarray, list[float]], Optima | RegularOptima]]:
    """All segments of a tree, their times, and what finds the best of them by lists of times and prices of partials."""
    regular = RegularTable.of(levels, nodes)
    if regular is not None:
        time = segment_times(problem, shapes, regular.kinds).repeat(regular.counts, axis=1)
        return regular.table, time, functools.partial(RegularOptima, problem, regular)
    table = SegmentTable.of(levels, nodes)
    time = segment_times(problem, shapes, table)
    return table, time, lambda times, prices: Optima(table, options_of(problem, table, times, prices))


class _Kinds(NamedTuple):
    """The kinds of segments in a regular tree of so many levels, [K], in the order of :class:`.SegmentTable`."""

    level: np.ndarray  # of their tops
    span: np.ndarray  # levels below the top
    end: np.ndarray  # the level behind the deepest one
    first_below: int  # the first kind without its tops' own tokens
    alone: np.ndarray  # of each of these, the kind that is its tops alone
    final: list[int]  # those that write final results: from a root, or the virtual root, to all leaves
    places: list[np.ndarray]  # of each level but the last, [2, spans]: the kinds from its nodes, and below them

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(depth: int, spans: int) -> _Kinds:
        leaves = depth - 1
        listed = [(level, span) for span in range(spans) for level in range(leaves) if level + span <= leaves]
        place = {pair: 1 + nth for nth, pair in enumerate(listed)}
        level, span = np.ascontiguousarray(np.array([(leaves, 0), *listed, *listed]).T)
        places = [np.array([place[pair] for pair in listed if pair[0] == nth]) for nth in range(leaves)]
        final = [0] if depth == 2 else [place[pair] for pair in [(1, depth - 2)] if pair in place]
        if depth <= spans:
            final.append(len(level) - 1)
        arrays = level, span, level + span + 1, 1 + level[1 + len(listed) :]
        for array in arrays:
            array.setflags(write=False)
        level, span, end, alone = arrays
        below = [np.stack([of_level, of_level + len(listed)]) for of_level in places]
        return _Kinds(level, span, end, 1 + len(listed), alone, final, below)


class RegularTable(NamedTuple):
    """Every segment that ``auto`` may choose in a regular tree, and the kinds that they are of."""

    table: SegmentTable  # all segments, kind after kind; without what only :mod:`._segmentation` needs
    kinds: SegmentTable  # one segment of each kind
    counts: np.ndarray  # [K] segments of each kind
    first: np.ndarray  # [K + 1] where they begin in the table
    nodes: list[int]  # of each level

    @staticmethod
    def of(levels: Levels, nodes: NodeTokens) -> RegularTable | None:
        """None if the tree is not regular."""
        depth, begin = levels.depth, levels.begin
        if len(levels.leaf) != begin[-1] - begin[-2]:
            return None  # leaves of several levels
        differs = levels.children[1:] != levels.children[:-1]
        differs |= levels.rows[1:] != levels.rows[:-1]
        differs |= levels.tokens[1:] != levels.tokens[:-1]
        for node in begin[1:-1]:
            differs[node - 1] = False
        if any_of(differs):
            return None
        level, span, end, first_below, alone, final, _ = _Kinds.of(depth, levels.spans)
        one = np.array(begin[:-1])  # node of each level
        num_nodes = [after - before for before, after in itertools.pairwise(begin)]
        of_levels = np.array(num_nodes)
        counts = of_levels.take(level)

        # Sums over a node and what is down to so many levels below it: its share of the sums over these levels.
        upto = np.zeros((2, depth + 1))
        upto[0, 1:], upto[1, 1:] = nodes.tokens.take(one), nodes.extra.take(one)
        upto[:, 1:] *= of_levels
        np.add.accumulate(upto, axis=1, out=upto)
        sums = upto.take(end, axis=1)
        sums -= upto.take(level, axis=1)
        sums /= counts
        exact = np.empty((4, len(level)), np.float32)
        rows = levels.rows.take(one).take(level)
        exact[0], exact[1:3] = rows, sums
        exact[1:3, first_below:] -= exact[1:3].take(alone, axis=1)
        # The node that all rows of the segment see whole; the virtual root stands for none.
        children = [nth if num_nodes[nth] == num_nodes[nth - 1] else 0 for nth in range(1, depth)]
        whole = one.take(level)
        top, whole[first_below:] = whole.copy(), one.take(children).take(level[first_below:])
        exact[3] = levels.tokens.take(whole)
        rows[final] = 0
        kinds = SegmentTable(
            levels=levels,
            top=top,
            span=span,
            pairs=span[:0],
            first=span[:0],
            num_alone=depth,
            first_below=first_below,
            sums=Sums(exact[0], exact[1], exact[2], nodes.tokens.take(whole)),
            exact=exact,
            token_sums=nodes.sums,
            partial_rows=rows,
        )
        first = starts_of(counts)
        tops = np.arange(first[-1])
        tops += (top - first[:-1]).repeat(counts)
        table = kinds._replace(
            top=tops,
            span=span.repeat(counts),
            num_alone=levels.num_nodes,
            first_below=int(first[first_below]),
            exact=exact.repeat(counts, axis=1),
        )
        return RegularTable(table, kinds, counts, first, num_nodes)


class RegularOptima:
    """As :class:`.Optima`: the C segmentations with the least costs, as places of their segments in the table."""

    def __init__(self, problem: Problem, regular: RegularTable, times: np.ndarray, prices: list[float]):
        """``times`` [lists, F] and ``prices`` as in :func:`.options_of`."""
        levels, num_nodes = regular.kinds.levels, regular.nodes
        times = times.take(regular.first[:-1], axis=1)
        cost = costs_of(problem, regular.kinds.partial_rows, times, prices)
        self._first, self._count = regular.first, cost.shape[1]
        self._places = _Kinds.of(levels.depth, levels.spans).places
        # Of all nodes of each level, the least cost of all below them; of those below, with their own tokens.
        below_all, from_all = np.zeros((levels.depth, self._count)), cost[0] * num_nodes[-1]
        self._spans: list[list[list[int]]] = []  # of each level: levels below the best segment from it, and below it
        for level in reversed(range(levels.depth - 1)):
            options, nodes = cost.take(self._places[level], axis=0), num_nodes[level]  # [2, spans, C] of each node
            options[:, 1:] += below_all[level + 1 : level + options.shape[1]] / nodes
            np.divide(from_all, nodes, out=options[BELOW, 0])  # all children begin segments of their own
            below_it = np.minimum.reduce(options[BELOW])
            options[FROM, 0] += below_it
            from_all = np.minimum.reduce(options[FROM]) * nodes
            np.multiply(below_it, nodes, out=below_all[level])
            self._spans.insert(0, options.argmin(axis=1).tolist())

    def __getitem__(self, which: int) -> np.ndarray:
        """Follow the best options from the virtual root."""
        chosen: tuple[list[int], list[int]] = ([], [])  # kinds: from nodes, and below them
        level, begins = 0, False  # begins: nodes of this level begin segments
        while level < len(self._spans):
            span, places, (from_it, below_it) = 0, self._places[level], self._spans[level]
            if begins:
                span = from_it[which]
                chosen[FROM].append(places[FROM, span])
            if span == 0:
                span = below_it[which]
                if span > 0:
                    chosen[BELOW].append(places[BELOW, span])
            begins = span == 0
            level += max(span, 1)
        kinds = [*chosen[FROM], *chosen[BELOW], *([0] if begins else [])]
        return np.concatenate([np.arange(self._first[kind], self._first[kind + 1]) for kind in kinds])

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[which] for which in range(self._count))
