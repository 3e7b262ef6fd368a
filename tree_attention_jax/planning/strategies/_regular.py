"""The dynamic programme of ``auto`` for regular trees, all nodes of whose levels are alike.

The nodes of a level then have the same segments to choose from, at the same costs, so one of them chooses for all: the
programme has as many nodes as the tree has levels, and what is below a node k levels down is so many times one of them.
Prompts with samples, beams and trees of drafts begin like this. What comes out is what :mod:`._segmentation` finds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tree_attention_jax._arrays import any_of, starts_of
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._levels import Levels
from tree_attention_jax.planning.strategies._segmentation import costs_of
from tree_attention_jax.planning.strategies._segments import BELOW, FROM, NodeTokens, SegmentTable, Sums


class RegularTable(NamedTuple):
    """Every segment that ``auto`` may choose in a regular tree, and the [K] kinds that they are of.

    A kind has a segment from each node of a level. Kinds, and the segments of a kind, are in the same order as those of
    :class:`.SegmentTable`.
    """

    table: SegmentTable  # all segments; without what only :mod:`._segmentation` needs
    kinds: SegmentTable  # one segment of each kind
    counts: np.ndarray  # segments of each kind
    first: np.ndarray  # of each kind, in the table; and their number
    nodes: list[int]  # of each level

    @staticmethod
    def of(levels: Levels, nodes: NodeTokens) -> RegularTable | None:
        """None if the tree is not regular."""
        depth, spans, begin = levels.depth, levels.spans, levels.begin
        if len(levels.leaf) != begin[-1] - begin[-2]:  # leaves of several levels
            return None
        differs = levels.children[1:] != levels.children[:-1]
        differs |= levels.rows[1:] != levels.rows[:-1]
        differs |= levels.tokens[1:] != levels.tokens[:-1]
        for level in range(1, depth):
            differs[begin[level] - 1] = False
        if any_of(differs):
            return None
        level, span, deepest, own = _kinds(depth, spans)
        first_nodes = np.array(begin[:-1])
        num_nodes = [end - first for first, end in zip(begin, begin[1:])]
        of_levels = np.array(num_nodes)
        counts = of_levels.take(level)

        # Sums over a node and what is down to so many levels below it: its share of the sums over these levels.
        tokens, rows = nodes.tokens.take(first_nodes), nodes.rows.take(first_nodes)
        upto = np.zeros((2, depth + 1))
        upto[0, 1:], upto[1, 1:] = tokens, nodes.extra.take(first_nodes)
        upto[:, 1:] *= of_levels
        np.add.accumulate(upto, axis=1, out=upto)
        below = 1 + (len(level) - 1) // 2  # the first kind without its top's own tokens
        sums = upto.take(deepest + 1, axis=1)
        sums -= upto.take(level, axis=1)
        sums /= counts
        exact = np.empty((4, len(level)), np.float32)
        exact[0], exact[1:3] = rows.take(level), sums
        exact[1:3, below:] -= exact[1:3].take(own, axis=1)
        # The node that all rows of the segment see whole; the virtual root stands for none.
        only_child = [below if num_nodes[below] == num_nodes[below - 1] else 0 for below in range(1, depth)]
        whole = level.copy()
        whole[below:] = np.array(only_child).take(level[below:])
        exact[3] = levels.tokens.take(first_nodes).take(whole)

        partial_rows = levels.rows.take(first_nodes).take(level)
        partial_rows[_final(depth, spans)] = 0
        kinds = SegmentTable(
            levels=levels,
            top=first_nodes.take(level),
            span=span,
            pairs=span[:0],
            first=span[:0],
            num_alone=depth,
            first_below=below,
            sums=Sums(exact[0], exact[1], exact[2], tokens.take(whole)),
            exact=exact,
            token_sums=nodes.sums,
            partial_rows=partial_rows,
        )
        first = starts_of(counts)
        top = np.arange(first[-1])
        top += (kinds.top - first[:-1]).repeat(counts)
        table = kinds._replace(
            top=top,
            span=span.repeat(counts),
            num_alone=levels.num_nodes,
            first_below=int(first[below]),
            exact=exact.repeat(counts, axis=1),
        )
        return RegularTable(table, kinds, counts, first, num_nodes)


@functools.lru_cache(maxsize=64)
def _kinds(depth: int, spans: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """[K]: level of the tops of each kind, levels below them, and the deepest level; of those below their tops, the
    kind that is the top alone."""
    listed = [(level, span) for span in range(spans) for level in range(depth - 1) if level + span < depth]
    level, span = np.array([(depth - 1, 0), *listed, *listed]).T
    arrays = np.ascontiguousarray(level), np.ascontiguousarray(span), level + span, 1 + level[1 + len(listed) :]
    for array in arrays:
        array.setflags(write=False)
    return arrays


@functools.lru_cache(maxsize=64)
def _places(depth: int, spans: int) -> list[np.ndarray]:
    """[2, spans] of each level: the kinds from its nodes and below them, with so many levels below."""
    level, span, *_ = _kinds(depth, spans)
    below = 1 + (len(level) - 1) // 2
    of_levels = [1 + (level[1:below] == nth).nonzero()[0] for nth in range(depth - 1)]
    return [np.stack([places, places + (below - 1)]) for places in of_levels]


@functools.lru_cache(maxsize=64)
def _final(depth: int, spans: int) -> list[int]:
    """Kinds of segments that write final results: from a root, or from the virtual root, to all leaves."""
    final = [0] if depth == 2 else []
    if 0 <= depth - 2 < spans and depth > 2:
        final.append(int(_places(depth, spans)[1][FROM, depth - 2]))
    if depth <= spans:
        final.append(int(_places(depth, spans)[0][BELOW, depth - 1]))
    return final


class RegularOptima:
    """As :class:`.Optima`: the C segmentations with the least costs, as places of their segments in the table."""

    def __init__(self, problem: Problem, regular: RegularTable, times: np.ndarray, prices: list[float]):
        """``times`` [lists, F] and ``prices`` as in :func:`.options_of`."""
        levels, num_nodes = regular.kinds.levels, regular.nodes
        depth, spans = levels.depth, levels.spans
        of_kinds = times.take(regular.first[:-1], axis=1)
        cost = costs_of(problem, regular.kinds.partial_rows, of_kinds, prices)
        self._regular, self._places, self._count = regular, _places(depth, spans), cost.shape[1]
        # Of a node of each level: the least cost of all below it; of a node of the level at hand: with its own tokens.
        below_it, from_it = np.zeros((depth, self._count)), cost[0]
        self._spans: list[list[list[int]]] = [[]] * (depth - 1)
        for level in reversed(range(depth - 1)):
            options = cost.take(self._places[level], axis=0)  # [2, spans, C]
            reach, each = options.shape[1], num_nodes[level]
            under = [num_nodes[further] // each for further in range(level + 1, level + reach)]
            options[:, 1:] += below_it[level + 1 : level + reach] * np.array(under)[:, None]
            np.multiply(from_it, num_nodes[level + 1] // each, out=options[BELOW, 0])
            below_it[level] = np.minimum.reduce(options[BELOW])
            options[FROM, 0] += below_it[level]
            from_it = np.minimum.reduce(options[FROM])
            self._spans[level] = options.argmin(axis=1).tolist()

    def __getitem__(self, which: int) -> np.ndarray:
        """Follow the best options from the virtual root."""
        first, depth = self._regular.first, len(self._regular.nodes)
        chosen: tuple[list[int], list[int]] = ([], [])  # from nodes, and below them
        level, begins = 0, False  # begins: nodes of this level begin segments
        while level < depth - 1:
            span, places = 0, self._places[level]
            if begins:
                span = self._spans[level][FROM][which]
                chosen[FROM].append(places[FROM, span])
            if span == 0:
                span = self._spans[level][BELOW][which]
                if span > 0:
                    chosen[BELOW].append(places[BELOW, span])
            begins = span == 0
            level += max(span, 1)
        kinds = [*chosen[FROM], *chosen[BELOW], *([0] if begins else [])]
        return np.concatenate([np.arange(first[kind], first[kind + 1]) for kind in kinds])

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[which] for which in range(self._count))
