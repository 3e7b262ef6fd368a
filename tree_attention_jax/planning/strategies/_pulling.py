"""Children that pull their queries out of the parent's block: the move that FastTree and PAT share.

A block is a node's tokens times the rows below it. A child may leave it: its rows go to the child's own block, in front
of whose tokens the parent's are then read once more. That saves its rows a partial, and costs a second read of the
parent's tokens (and perhaps a fuller or emptier tile). The two papers differ in when that pays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tree_attention_jax._arrays import exclusive_cumsum
from tree_attention_jax.planning.problem import Problem

# (rows still in the parent's block, its tokens, the child's rows, the child's tokens) -> does the child pull?
Rule = Callable[[int, int, int, int], bool]


@dataclass(frozen=True)
class Pulling:
    """Per node, in node order."""

    pulled: np.ndarray  # bool: the node's rows left the parent's block and walk the parent's tokens themselves
    staying: np.ndarray  # rows that remain in the node's own block
    tokens: np.ndarray  # int64: tokens that block walks, pulled ones included


def decide(problem: Problem, rule: Rule) -> Pulling:
    """Ask the rule for each child in turn, parents before children and siblings in node order.

    That is the papers' breadth-first walk: an answer changes only what later siblings and the child's own children are
    asked, so any order that keeps these two gives the same result.
    """
    tree, layout = problem.tree, problem.layout
    rows = (layout.row_end - layout.row_begin).tolist()
    parent, tokens, staying = tree.parent.tolist(), tree.kv_len.tolist(), list(rows)
    pulled = [False] * tree.num_nodes
    for child, above in enumerate(parent):
        if above >= 0 and rows[child] and rule(staying[above], tokens[above], rows[child], tokens[child]):
            pulled[child] = True
            staying[above] -= rows[child]
            tokens[child] += tokens[above]
    return Pulling(np.array(pulled, bool), np.array(staying, np.int32), np.array(tokens, np.int64))


@dataclass(frozen=True)
class Blocks:
    """What the pulling leaves: rows times whole nodes."""

    owner: np.ndarray  # [B] the node whose block it is
    row_begin: np.ndarray
    row_end: np.ndarray
    run_indptr: np.ndarray  # [B + 1] into `node`
    node: np.ndarray  # [R] ancestors first

    def cut_rows(self, most: int) -> Blocks:
        """The same with at most so many rows a block."""
        cuts = -(-(self.row_end - self.row_begin) // most)
        block = np.repeat(np.arange(len(cuts)), cuts)
        nth = np.arange(len(block)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
        row_begin = (self.row_begin[block] + nth * most).astype(np.int32)
        runs = np.diff(self.run_indptr)
        run = np.repeat(self.run_indptr[block], runs[block])
        run_indptr = exclusive_cumsum(runs[block])
        run += np.arange(len(run), dtype=np.int32) - np.repeat(run_indptr[:-1], runs[block])
        return Blocks(
            self.owner[block],
            row_begin,
            np.minimum(row_begin + most, self.row_end[block]),
            run_indptr,
            self.node[run],
        )


def blocks_of(problem: Problem, pulled: np.ndarray) -> Blocks:
    """One block a contiguous range of the rows that stay with a node.

    Both papers list an item's queries one by one. A block here is an interval of rows, so where a child in the middle
    has left, its siblings to the left and to the right no longer share a block, and read the tokens once each.
    """
    owner, row_begin, row_end = _ranges_of_staying_rows(problem, pulled)
    block, node = _climb(problem, owner, pulled)
    filled = problem.tree.kv_len[node] > 0
    block, node = block[filled], node[filled]
    runs = np.bincount(block, minlength=len(owner))
    keep = runs > 0  # a node without tokens that pulled none
    return Blocks(owner[keep], row_begin[keep], row_end[keep], exclusive_cumsum(runs[keep]), node)


def _ranges_of_staying_rows(problem: Problem, pulled: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(node, row_begin, row_end): a node's own rows and those of children that stay, neighbours joined."""
    tree, layout = problem.tree, problem.layout
    own = np.flatnonzero(tree.q_len > 0)
    child = np.flatnonzero((tree.parent >= 0) & ~pulled & (layout.row_end > layout.row_begin))
    owner = np.concatenate([own, tree.parent[child]])
    begin = np.concatenate([layout.row_begin[own], layout.row_begin[child]])
    end = np.concatenate([layout.row_begin[own] + tree.q_len[own], layout.row_end[child]])
    order = np.lexsort((begin, owner))
    owner, begin, end = owner[order], begin[order], end[order]
    opens = np.ones(len(owner), bool)
    opens[1:] = (owner[1:] != owner[:-1]) | (begin[1:] != end[:-1])
    closes = np.ones(len(owner), bool)
    closes[:-1] = opens[1:]
    return owner[opens].astype(np.int32), begin[opens], end[closes]


def _climb(problem: Problem, owner: np.ndarray, pulled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(block, node) pairs: the owner, and its ancestors as long as each one pulled from the next. Top first."""
    block, node = np.arange(len(owner), dtype=np.int32), owner
    blocks, nodes = [block], [node]
    while True:
        goes_on = pulled[node]
        if not goes_on.any():
            break
        block, node = block[goes_on], problem.tree.parent[node[goes_on]]
        blocks.append(block)
        nodes.append(node)
    block, node = np.concatenate(blocks), np.concatenate(nodes)
    order = np.lexsort((problem.layout.depth[node], block))
    return block[order], node[order]
