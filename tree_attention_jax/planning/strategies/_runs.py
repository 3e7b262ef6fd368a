"""Lists of token runs, laid end to end and cut anywhere: what strategies that ignore node boundaries need."""

from __future__ import annotations

import numpy as np

from tree_attention_jax._arrays import ragged_ranges
from tree_attention_jax._layout import Layout
from tree_attention_jax.planning.problem import Problem


def laid_end_to_end(lengths: np.ndarray) -> np.ndarray:
    """int64 [R + 1]: where each run begins on one long axis. Paths that many items walk may sum past 2^31."""
    offset = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offset[1:])
    return offset


def cut_runs(
    offset: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut runs that lie end to end into slices ``begin[i] .. end[i] - 1`` of their common axis.

    Args:
        offset: [R + 1] from :func:`laid_end_to_end`; no run is empty.
        begin, end: [S] the slices, none of them empty.

    Returns:
        ``(slice, run, begin, end)`` of each part, sorted by slice; begin and end count from the run's own beginning.
    """
    first = np.searchsorted(offset, begin, "right") - 1
    last = np.searchsorted(offset, end, "left")
    piece, run = ragged_ranges(first, last)
    part_begin = np.maximum(begin[piece] - offset[run], 0)
    part_end = np.minimum(end[piece], offset[run + 1]) - offset[run]
    return piece, run, part_begin.astype(np.int32), part_end.astype(np.int32)


def at_entry_borders(problem: Problem, offset: np.ndarray, node: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Move cuts of whole nodes that lie end to end back to where an entry begins, so that none is read in two halves.

    Args:
        problem: gives the nodes' first slots, and the size of an entry.
        offset: [R + 1] from :func:`laid_end_to_end`.
        node: [R] the node that each run is.
        cuts: positions on the common axis, up to and including its end.
    """
    unit = problem.unit
    run = np.searchsorted(offset, cuts, "right") - 1
    inside = run < len(node)  # the end of the axis belongs to no run
    token = (cuts - offset[run])[inside]
    slot = problem.tree.first_slot[node[run[inside]]] + token
    moved = cuts.copy()
    moved[inside] -= np.minimum(slot % unit, token)
    return moved


def first_row_to_see(layout: Layout, node: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """The first row that sees token ``begin`` of ``node``: new tokens of one node are causal among its own rows."""
    return layout.row_begin[node] + np.maximum(begin - layout.old_len[node], 0)
