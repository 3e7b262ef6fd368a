"""What a segment costs: a node's rows times some levels, cut into tiles of each of the profile's shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree_attention_jax._arrays import ceil_div
from tree_attention_jax.planning.cost import MASKED_SHARE, OVERLAP, ShapeTable
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._levels import Levels
from tree_attention_jax.planning.strategies._segmentation import Segments


@dataclass(frozen=True)
class Sums:
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
        return np.minimum(self.total + self.extra / queries, self.total * tiles)

    def masked(self, tiles: np.ndarray, walked: np.ndarray) -> np.ndarray:
        """About how many of the tokens walked are masked: never the top's own, which every row sees."""
        masked = walked - self.own * tiles
        np.maximum(masked, 0, out=masked)
        masked *= np.float32(MASKED_SHARE)
        return masked

    @staticmethod
    def concatenate(parts: list[Sums]) -> Sums:
        return Sums(*(np.concatenate([getattr(part, name) for part in parts]) for name in Sums.__dataclass_fields__))

    def tiles(self, queries: np.ndarray) -> np.ndarray:
        return np.ceil(self.rows / queries)


@dataclass(frozen=True)
class SegmentSums:
    """Sums of every segment that ``auto`` may choose.

    An inner node's segments are [own, span, inner node]: ``own`` 0 with the node's own tokens and 1 without. A leaf's
    only segment is itself.
    """

    inner: Sums
    leaf: Sums

    @staticmethod
    def of(levels: Levels, unit: int) -> SegmentSums:
        rows = levels.rows.astype(np.float32)
        padded = ceil_div(levels.tokens, unit) * unit
        # Short runs will get entries of one token (:func:`.entries._units`).
        tokens = np.where(2 * levels.tokens < padded, levels.tokens, padded).astype(np.float32)
        extra = tokens * (rows - 1)

        def with_and_without(value: np.ndarray) -> np.ndarray:
            sums = np.empty((2, levels.spans, len(levels.inner)), np.float32)
            sums[0] = levels.sum_down(value)
            np.subtract(sums[0], sums[0, 0], out=sums[1])
            return sums

        inner, leaf = levels.inner, levels.leaf
        own = np.stack([tokens[inner], _of_only_child(levels, tokens)])[:, None]
        return SegmentSums(
            Sums(rows[inner], with_and_without(tokens), with_and_without(extra), own),
            Sums(rows[leaf], tokens[leaf], extra[leaf], tokens[leaf]),
        )

    def pick(self, levels: Levels, segments: Segments) -> Sums:
        """Sums of chosen segments, [M]."""
        place = np.empty(levels.num_nodes, np.int32)
        place[levels.inner] = np.arange(len(levels.inner))
        place[levels.leaf] = np.arange(len(levels.leaf))
        at = place[segments.top]
        is_leaf = np.ones(levels.num_nodes, bool)
        is_leaf[levels.inner] = False
        leaf = is_leaf[segments.top]
        inner = ~leaf

        def gather(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
            out = np.empty(len(at), np.float32)
            out[inner] = ours[segments.below[inner], segments.span[inner], at[inner]]
            out[leaf] = theirs[at[leaf]]
            return out

        own = levels.tokens[segments.top].astype(np.float32)
        below = segments.below > 0
        own[below] = _of_only_child(levels, levels.tokens)[at[below]]
        return Sums(
            levels.rows[segments.top].astype(np.float32),
            gather(self.inner.total, self.leaf.total),
            gather(self.inner.extra, self.leaf.extra),
            own,
        )


def _of_only_child(levels: Levels, tokens: np.ndarray) -> np.ndarray:
    """float32 [I]: tokens of inner nodes' children that have no siblings, as a root under the virtual one; else 0."""
    child, last = levels.low[1], levels.high[1]
    return np.where(last - child == 1, tokens[child], 0).astype(np.float32)


def segment_times(problem: Problem, shapes: ShapeTable, sums: Sums, alone: np.ndarray | bool) -> np.ndarray:
    """float32 [S, ...]: time of each segment with each of S shapes, as a part of a launch that fills the GPU.

    Args:
        problem: gives the rates.
        shapes: S of them.
        sums: of the segments.
        alone: where, or whether, a segment is one node by itself, which needs no masks; nor does a tile of one query.
    """

    def column(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float32).reshape(-1, *[1] * sums.total.ndim)

    several = shapes.queries > 1
    token_us = shapes.programs * shapes.token_us
    mixed_us = np.where(several, shapes.programs * shapes.mixed_token_us, token_us)
    masked_us = np.where(several, shapes.programs * shapes.masked_token_us, token_us)
    width = problem.heads.token_bytes
    queries = column(shapes.queries)
    tiles = sums.tiles(queries)
    walked = sums.walked(queries, tiles)
    if alone is True:
        work = walked * column(token_us)
    else:
        work = sums.masked(tiles, walked)
        work *= column(masked_us - mixed_us)
        work += walked * column(mixed_us)
        work[:, alone] = walked[:, alone] * token_us.astype(np.float32).reshape(-1, 1)
    work += tiles * column(shapes.programs * (shapes.item_us + 0.5 * shapes.step_us))
    memory = sums.total * np.float32(width / problem.profile.bytes_per_us)
    time = np.maximum(work, memory)
    np.minimum(work, memory, out=work)
    work *= np.float32(OVERLAP)
    time += work
    walked *= np.float32(width / problem.profile.l2_bytes_per_us)
    return np.maximum(time, walked, out=time)
