"""``flatten``: the whole tree's tokens end to end, depth first, cut into blocks of equal length.

DeFT-Flatten (Yao et al., "DeFT: Decoding with Flash Tree-Attention for Efficient Tree-structured LLM Inference", ICLR
2025). A block takes the queries of all nodes that it touches and masks what a query does not see, so every item is
equally long however the tokens are spread over nodes, and short nodes share items instead of having one each.

In depth-first order a block's queries are an interval of rows, and its mask is two integers a run. DeFT stores a 64-bit
word a token and reads the block again for every 32 queries; here a row tile does that, and skips the runs that none of
its rows sees.

Weakness: it knows nothing of rows. A block over the root's last tokens and a subtree's first ones computes the subtree
for every query; a block over many leaves computes each leaf for all of them, and throws most of it away. The block
length is fixed, so a short forest does not fill the GPU and a long one writes more partials than it needs to.
"""

from __future__ import annotations

import numpy as np

from tree_attention_jax._arrays import exclusive_cumsum
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._common import make_tiling
from tree_attention_jax.planning.strategies._runs import at_entry_borders, cut_runs, first_row_to_see, laid_end_to_end
from tree_attention_jax.planning.tiling import Tiling


def flatten(problem: Problem, block: int = 128) -> Tiling:
    """``block``: tokens a block, give or take an entry, so that none is read in two halves; 128 is DeFT's."""
    if block < 1:
        raise ValueError(f"block is {block}: it must be at least 1")
    tree, layout = problem.tree, problem.layout
    order = layout.order
    order = order[(tree.kv_len[order] > 0) & (layout.row_end[order] > layout.row_begin[order])]
    offset = laid_end_to_end(tree.kv_len[order])
    cuts = at_entry_borders(problem, offset, order, np.append(np.arange(0, offset[-1], block), offset[-1]))
    cuts = np.unique(cuts)
    which, run, begin, end = cut_runs(offset, cuts[:-1], cuts[1:])
    node = order[run]
    run_indptr = exclusive_cumsum(np.bincount(which, minlength=len(cuts) - 1))
    first_run = run_indptr[:-1]
    if len(node):
        # Depth first, no row between the first and the last is left out: the nodes of a block are neighbours.
        row_begin = np.minimum.reduceat(first_row_to_see(layout, node, begin), first_run)
        row_end = np.maximum.reduceat(layout.row_end[node], first_run)
    else:
        row_begin = row_end = first_run
    return make_tiling(
        problem, row_begin=row_begin, row_end=row_end, run_indptr=run_indptr, node=node, begin=begin, end=end
    )
