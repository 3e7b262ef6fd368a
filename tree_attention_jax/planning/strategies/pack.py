"""``pack``: items packed by the traffic they save, then balanced.

PAT (Yi et al., "PAT: Accelerating LLM Decoding via Prefix-Aware Attention with Resource Efficient Multi-Tile Kernel",
ASPLOS 2026). Each child of a node either stays in the node's item or takes its queries out and reads the node's tokens
again. With ``m`` queries a tile, ``S`` of them in the item and ``s`` in the child, it leaves when

    (ceil(S / m) - ceil((S - s) / m) - ceil(s / m)) * tokens + 4 * s >= 0

that is when the reads of the node's tokens it adds (one a new tile) are worth the ``s`` partials it saves, at four
tokens' bytes each; a child that holds all of the item's queries always leaves. Items are one row tile high. Then those
longer than five times the average are cut to about the average, and while there are fewer than the GPU needs the
longest is halved.

Weakness: a child moves as a whole, by itself: short siblings never share a masked item, so a level of 16-token nodes
stays a level of tiny items with a partial each. The weight of a partial ignores head dims, types and the reduction's
launch; and balance counts items only, not what they cost.

PAT wants 54, 27, 13 or 6 items for 4, 8, 16 or 32 KV heads: two programs for each of an A100's 108 SMs. Here the same
rule follows the GPU's SM count (fewer than 4 heads count as 4, as in PAT). PAT packs pages; lengths here are in pages
too, but nodes need not end on a page border, and a cut falls on the border of an entry.
"""

from __future__ import annotations

import heapq

import numpy as np

from tree_attention_jax._arrays import ceil_div, exclusive_cumsum, ragged_places
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.strategies._common import make_tiling, profile_tile
from tree_attention_jax.planning.strategies._pulling import Blocks, blocks_of, decide
from tree_attention_jax.planning.strategies._runs import at_entry_borders, cut_runs, first_row_to_see, laid_end_to_end
from tree_attention_jax.planning.tiles import choose
from tree_attention_jax.planning.tiling import Tiling

# PAT has eleven tiles, of 16, 32 and 64 rows; these are (rows, tokens a step), narrow to wide.
TILES = ((16, 16), (16, 32), (64, 64))
TILE_ROWS = 64
TOKENS_A_PARTIAL = 4
LONG = 5  # times the average: an item that long is cut
SHORT_TOKENS = 128  # items below this do not count for the average
MAX_PARTIALS = 32  # partials a query may have before halving stops
MIN_PAGES = 8  # an item shorter than this is not halved


def pack(problem: Problem) -> Tiling:
    most = max(1, TILE_ROWS // problem.heads.group)

    def pulls(queries: int, tokens: int, child_queries: int, _: int) -> bool:
        if queries == child_queries:
            return True
        tiles = ceil_div(queries, most) - ceil_div(queries - child_queries, most) - ceil_div(child_queries, most)
        return tiles * tokens + TOKENS_A_PARTIAL * child_queries >= 0

    blocks = blocks_of(problem, decide(problem, pulls).pulled).cut_rows(most)
    offset = laid_end_to_end(problem.tree.kv_len[blocks.node])
    tokens = offset[blocks.run_indptr[1:]] - offset[blocks.run_indptr[:-1]]
    block, begin, end = _cut_long(tokens, problem.page_size)
    block, begin, end = _halve(problem, blocks, block, begin, end)
    return _emit(problem, blocks, offset, block, begin, end)


def items_wanted(problem: Problem) -> int:
    """Items that fill the GPU: two programs an SM."""
    return 2 * problem.profile.num_sms // max(problem.heads.num_kv_heads, 4)


def _cut_long(tokens: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(block, begin, end) of pieces, in tokens from the block's beginning: blocks over 5x the average are cut."""
    pages = ceil_div(tokens, page_size)
    counted = pages[tokens >= SHORT_TOKENS]
    pieces = np.ones(len(tokens), np.int64)
    if len(counted):
        average = counted.mean()
        pieces = np.where(pages > LONG * average, ceil_div(pages, max(int(average), 1)), 1)
    step = ceil_div(pages, pieces) * page_size
    block, nth = ragged_places(ceil_div(tokens, np.maximum(step, 1)))
    begin = nth * step[block]
    return block, begin, np.minimum(begin + step[block], tokens[block])


def _halve(
    problem: Problem, blocks: Blocks, block: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Halve the longest piece until there are enough. There are few pieces when this runs, and so few queries."""
    wanted = items_wanted(problem)
    if not 0 < len(block) < wanted:
        return block, begin, end
    page_size = problem.page_size
    first, last = blocks.row_begin[block], blocks.row_end[block]
    change = np.bincount(first, minlength=problem.layout.num_rows + 1)
    partials = np.cumsum(change - np.bincount(last, minlength=problem.layout.num_rows + 1))
    # Longest first; the block's number and the place in it make the order complete.
    heap = [(-ceil_div(e - b, page_size), i, b, e) for i, b, e in zip(block.tolist(), begin.tolist(), end.tolist())]
    heapq.heapify(heap)
    while len(heap) < wanted and partials.max() < MAX_PARTIALS and -heap[0][0] >= MIN_PAGES:
        pages, which, start, stop = heapq.heappop(heap)
        half = ceil_div(-pages, 2)
        middle = start + half * page_size
        heapq.heappush(heap, (-half, which, start, middle))
        heapq.heappush(heap, (pages + half, which, middle, stop))
        partials[blocks.row_begin[which] : blocks.row_end[which]] += 1
    block, begin, end = (np.array(column) for column in zip(*sorted(entry[1:] for entry in heap)))
    return block, begin, end


def _emit(problem: Problem, blocks: Blocks, offset: np.ndarray, block, begin, end) -> Tiling:
    layout = problem.layout
    base = offset[blocks.run_indptr[block]]
    begin, end = (at_entry_borders(problem, offset, blocks.node, base + cut) for cut in (begin, end))
    piece, run, run_begin, run_end = cut_runs(offset, begin, end)
    node = blocks.node[run]
    run_indptr = exclusive_cumsum(np.bincount(piece, minlength=len(block)))
    row_begin, row_end = blocks.row_begin[block], blocks.row_end[block]
    if len(block):
        # A piece of a node's new tokens is seen by none of the rows above it.
        seen = np.minimum.reduceat(first_row_to_see(layout, node, run_begin), run_indptr[:-1])
        row_begin = np.minimum(np.maximum(row_begin, seen), row_end)
    used = row_begin < row_end
    kept = np.repeat(used, np.diff(run_indptr))
    row_begin, row_end = row_begin[used], row_end[used]
    tiles = tuple(dict.fromkeys(profile_tile(problem, *shape) for shape in TILES))
    return make_tiling(
        problem,
        row_begin=row_begin,
        row_end=row_end,
        run_indptr=exclusive_cumsum(np.diff(run_indptr)[used]),
        node=node[kept],
        begin=run_begin[kept],
        end=run_end[kept],
        kind=choose(row_end - row_begin, (end - begin)[used], tiles, problem.heads.group),
        tiles=tiles,
    )
