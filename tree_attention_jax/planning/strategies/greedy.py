"""``greedy``: for each edge of the tree, join or split, by the cost of padding and of reduction.

FastTree (Pan et al., "FastTree: Optimizing Attention Kernel and Runtime for Tree-Structured LLM Inference", MLSys 2025;
constants as in its artifact). Going down from the root, each child either stays in its parent's item, which costs a
partial, or pulls its queries out and puts the parent's tokens before its own. The cost of an item counts only waste:

    mm(nQ, nK) = alpha * padQ * group * nK + beta * padK * nQ * group

with ``padQ`` the queries missing from the last tile and ``padK`` the tokens missing from the first K/V step; a partial
costs ``gamma`` a query. Items of more queries than the narrow tile holds are *phase 0* and use the wide tile, the
others are *phase 1*. Up to three rounds then look for parallelism: a phase with too few programs gets the short K/V
split; if that was not enough, the wide tile gives way to the narrow one (or the narrow to the wide), and the edges are
decided anew.

Weakness: a second read of K/V costs nothing in this model, so a full tile pulls the longest prompt for free. Where the
group is so large that a narrow tile holds one query, nothing is ever padded: every edge joins and all sharing is lost.
``price_reads=True`` adds what is missing; the published rule is the default. The walk goes edge by edge, in Python.

Here: rows beyond the last full wide tile go to the narrow tile if they fit, as in the artifact; but its benchmark
launches the tiles of round 1 whatever round 3 decided, which leaves partials unwritten, and this does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tree_attention_jax._arrays import ceil_div
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._common import make_tiling, profile_tile
from tree_attention_jax.planning.strategies._pulling import Blocks, Pulling, blocks_of, decide
from tree_attention_jax.planning.tiling import Tiling

# Matrix rows of the wide and of the narrow tile.
WIDE_ROWS, NARROW_ROWS = 64, 16
# An H200 reads one token's K and V in about the time in which its tensor cores put 64 rows through them.
ROWS_A_READ = 64


@dataclass(frozen=True)
class CostModel:
    """FastTree's cost of an item; index 0 of each pair is the wide phase, 1 the narrow one."""

    alpha: float
    beta: float
    gamma: float
    group: int
    q_tiles: tuple[int, int]
    kv_tiles: tuple[int, int]
    price_reads: bool = False

    def phase(self, queries: int) -> int:
        return 0 if queries > self.q_tiles[1] else 1

    def item(self, queries: int, tokens: int) -> float:
        """``mm`` of the paper; nothing for an item without queries."""
        phase = self.phase(queries)
        q_tile, kv_tile = self.q_tiles[phase], self.kv_tiles[phase]
        idle = self.alpha * (-queries % q_tile) * tokens + self.beta * max(0, kv_tile - tokens) * queries
        reads = self.alpha * ROWS_A_READ / self.group * ceil_div(queries, q_tile) * tokens if self.price_reads else 0.0
        return (idle + reads) * self.group

    def pulls(self, queries: int, tokens: int, child_queries: int, child_tokens: int) -> bool:
        """Whether the child leaves its parent's item: only if that is strictly cheaper."""
        stay = self.item(queries, tokens) + self.item(child_queries, child_tokens) + self.gamma * child_queries
        pull = self.item(queries - child_queries, tokens) + self.item(child_queries, child_tokens + tokens)
        return stay > pull


def greedy(
    problem: Problem,
    *,
    alpha: float = 0.66,
    beta: float = 0.33,
    gamma: float = 0.1,
    q_tiles: tuple[int, int] | None = None,
    kv_tiles: tuple[int, int] = (32, 32),
    kv_splits: tuple[int, int] = (1024, 128),
    split_below: tuple[int, int] = (132, 528),
    retile_below: tuple[int, int] = (132, 132),
    price_reads: bool = False,
) -> Tiling:
    """FastTree's plan; pairs are (wide, narrow) unless said otherwise.

    Args:
        problem: what to plan.
        alpha, beta, gamma: cost of a padded query times a token, of a padded token times a query, and of a partial.
        q_tiles: queries a tile; ``None``: 64 and 16 rows' worth.
        kv_tiles: tokens a K/V step.
        kv_splits: (long, short): tokens an item may have, and what that becomes in a phase that lacks parallelism.
        split_below: programs below which a phase gets the short split.
        retile_below: programs below which all items get the other phase's tile.
        price_reads: also charge for reading K/V, as ``ROWS_A_READ`` padded rows a token and tile (not in the paper).
    """
    if q_tiles is None:
        q_tiles = (max(1, WIDE_ROWS // problem.heads.group), max(1, NARROW_ROWS // problem.heads.group))
    for name, pair in (("q_tiles", q_tiles), ("kv_tiles", kv_tiles), ("kv_splits", kv_splits)):
        if len(pair) != 2 or min(pair) < 1:
            raise ValueError(f"{name} is {pair}: it must be two positive numbers")
    costs = CostModel(alpha, beta, gamma, problem.heads.group, q_tiles, kv_tiles, price_reads)
    costs, pulling, splits = _rounds(problem, costs, kv_splits, split_below, retile_below)
    return _emit(problem, costs, pulling, splits)


def _rounds(
    problem: Problem,
    costs: CostModel,
    kv_splits: tuple[int, int],
    split_below: tuple[int, int],
    retile_below: tuple[int, int],
) -> tuple[CostModel, Pulling, list[int]]:
    """Decide the edges, then split and change tiles as far as parallelism asks for it."""
    pulling = decide(problem, costs.pulls)
    splits = [kv_splits[0]] * 2
    programs = _programs(problem, costs, pulling, splits)
    short = [phase for phase in (0, 1) if 0 < programs[phase] < split_below[phase]]
    for phase in short:
        splits[phase] = kv_splits[1]
    if short:
        programs = _programs(problem, costs, pulling, splits)
        for phase in (0, 1):
            if 0 < programs[phase] < retile_below[phase]:
                other = 1 - phase
                costs = replace(costs, q_tiles=(costs.q_tiles[other],) * 2, kv_tiles=(costs.kv_tiles[other],) * 2)
                pulling = decide(problem, costs.pulls)
                break
    return costs, pulling, splits


def _programs(problem: Problem, costs: CostModel, pulling: Pulling, splits: list[int]) -> tuple[int, int]:
    """Programs of each phase: K/V splits x query tiles x KV heads."""
    live = pulling.staying > 0
    queries, tokens = pulling.staying[live], pulling.tokens[live]
    narrow = queries <= costs.q_tiles[1]
    programs = ceil_div(queries, np.where(narrow, costs.q_tiles[1], costs.q_tiles[0]))
    programs = programs * ceil_div(tokens, np.where(narrow, splits[1], splits[0])) * problem.heads.num_kv_heads
    return int(programs[~narrow].sum()), int(programs[narrow].sum())


def _emit(problem: Problem, costs: CostModel, pulling: Pulling, splits: list[int]) -> Tiling:
    blocks: Blocks = blocks_of(problem, pulling.pulled).cut_rows(costs.q_tiles[0])
    # The split goes by the queries of the whole item, the tile by those of the part.
    split = np.where(pulling.staying[blocks.owner] <= costs.q_tiles[1], splits[1], splits[0])
    narrow = blocks.row_end - blocks.row_begin <= costs.q_tiles[1]
    pair = tuple(
        profile_tile(problem, queries * problem.heads.group, kv_tile)
        for queries, kv_tile in zip(costs.q_tiles, costs.kv_tiles)
    )
    same = pair[0] == pair[1]
    tiling = make_tiling(
        problem,
        row_begin=blocks.row_begin,
        row_end=blocks.row_end,
        run_indptr=blocks.run_indptr,
        node=blocks.node,
        begin=np.zeros(len(blocks.node), np.int32),
        end=problem.tree.kv_len[blocks.node],
        kind=np.where(narrow & (not same), 1, 0),
        tiles=pair[:1] if same else pair,
    )
    tiling.max_tokens[:] = split
    return tiling
