"""Pieces to entries: the stretches of cache slots that kernels walk."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pallas_kernels import layout as lo
from tree_attention_jax._arrays import all_of, any_of, ceil_div, exclusive_cumsum, starts_of
from tree_attention_jax.planning.interleaving import take_turns
from tree_attention_jax.planning.pieces import Pieces
from tree_attention_jax.planning.problem import Problem, pads_many
from tree_attention_jax.planning.tiling import Tiling


class Entries(NamedTuple):
    """A table of entries. Tile i has ``real[i]`` of them from ``begin[i]`` on, which other tiles may have too.

    Behind those of a tile with growing leaves lies its reserve: room for the tokens that they will append.
    """

    # Two int32 are one int64 here, the first one its lower half: that takes half as many repeats and copies.
    head: np.ndarray  # word (slot and count, packed), position
    seen: np.ndarray  # of masked entries, rows that see them: low (complemented where the entry is causal), high
    begin: np.ndarray
    real: np.ndarray
    # Of each entry, for leaves that grow: empty without a horizon.
    tile: np.ndarray  # whose list it was made for
    node: np.ndarray
    chunk: np.ndarray  # (first_slot + token index) // unit: which stretch of its node's pages this is


class _Chunks(NamedTuple):
    """Stretches of a unit of slots that pieces touch, each an entry. Of each piece:"""

    start: np.ndarray  # its slots, counted from where its node's pages begin
    stop: np.ndarray
    first: np.ndarray  # the first stretch
    counts: np.ndarray  # how many they are; intp, as repeat would make them each time
    units: tuple[int, int]  # tokens that an entry of a plain and of a masked piece holds


def make_entries(problem: Problem, pieces: Pieces, tiling: Tiling) -> tuple[Entries, Entries, tuple[int, int]]:
    """Entries of the plain pieces, entries of the masked ones, and how many tokens either hold."""
    num_tiles = tiling.num_blocks
    # Plain pieces first, either kind in order of its tiles.
    border = len(pieces.masked) - int(np.count_nonzero(pieces.masked))
    if not all_of(pieces.masked[border:]):
        pieces = pieces.take(pieces.masked.argsort(kind="stable"))
    chunks = _chunks(problem, pieces, border, tiling.uniform)
    counts, repeats = chunks.counts, None
    # Where the pieces of each tile begin, plain ones, then masked ones.
    of_tiles = np.empty(2 * num_tiles, np.intp)
    of_tiles[:num_tiles] = np.bincount(pieces.tile[:border], minlength=num_tiles)
    of_tiles[num_tiles:] = np.bincount(pieces.tile[border:], minlength=num_tiles)
    indptr = starts_of(of_tiles)
    if border:
        repeats = _repeats(pieces, of_tiles[:num_tiles], indptr)
        if repeats is not None:
            counts[:border] *= ~repeats.take(pieces.tile[:border])
    upto = starts_of(counts)
    num_plain = int(upto[border])
    head, seen = _fields(problem, pieces, border, chunks, upto, tiling)
    masked_pieces = Pieces(*[column[border:] for column in pieces])
    slots = chunks.start[border:], chunks.stop[border:]
    turns = take_turns(problem, tiling, masked_pieces, *slots, upto[border:] - num_plain, chunks.units[1])
    begins = upto.take(indptr).astype(np.int32)
    real = begins[1:] - begins[:-1]
    none: np.ndarray = np.zeros(0, np.int32)
    tile = node = chunk = none
    if problem.horizon:
        lists = pieces.tile + num_tiles * pieces.masked  # not in order
        begins = exclusive_cumsum(np.bincount(lists, counts, 2 * num_tiles).astype(np.int32))
        real = np.bincount(lists, counts * ~pieces.reserve, 2 * num_tiles).astype(np.int32)
        piece = np.arange(len(counts)).repeat(counts)
        chunk = np.arange(len(piece), dtype=np.int32)
        chunk += (chunks.first - upto[:-1]).take(piece)
        order = _with_reserves_last(pieces, piece, chunk)
        piece, chunk, head = (column.take(order) for column in (piece, chunk, head))
        seen = seen.take(order[num_plain:] - num_plain)
        if turns is not None:
            piece[num_plain:], chunk[num_plain:] = turns.of(piece[num_plain:]), turns.of(chunk[num_plain:])
        tile, node = pieces.tile.take(piece), pieces.node.take(piece)
    of_plain = begins[:num_tiles], real[:num_tiles]
    if repeats is not None:
        same_as = np.arange(num_tiles)
        same_as *= ~repeats
        np.maximum.accumulate(same_as, out=same_as)
        of_plain = of_plain[0].take(same_as), of_plain[1].take(same_as)
    growing = tile[:num_plain], node[:num_plain], chunk[:num_plain]
    plain = Entries(head[:num_plain], seen[:0], *of_plain, *growing)
    of_masked = begins[num_tiles:-1] - num_plain, real[num_tiles:]
    growing = tile[num_plain:], node[num_plain:], chunk[num_plain:]
    head = head[num_plain:]
    if turns is not None:
        head, seen = turns.of(head), turns.of(seen)
    masked = Entries(head, seen, *of_masked, *growing)
    return plain, masked, chunks.units


def _chunks(problem: Problem, pieces: Pieces, border: int, uniform: bool) -> _Chunks:
    """Of pieces the first ``border`` of which are plain.

    Plain entries are no shorter than masked ones: a growing tree would meet one more combination. And a leaf that grows
    on the device moves on from entry to entry, wherever its entries are: then it is one unit for all.
    """
    tree, unit = problem.tree, problem.unit
    if problem.horizon and not uniform:
        unit = problem.unit_for(tree.first_slot, tree.kv_len)
    start, stop = pieces.begin, pieces.end
    if tree.page_indices is not None:
        first_slot = tree.first_slot.take(pieces.node)
        start, stop = start + first_slot, stop + first_slot
    # A unit is a power of two: bits are shifted in a fraction of the time that divisions take.
    shift = unit.bit_length() - 1
    first, counts = start >> shift, stop + (unit - 1)
    counts >>= shift
    if problem.horizon:
        # A reserve that begins in the middle of an entry goes on in that entry, which exists already.
        first = np.where(pieces.reserve, ceil_div(start, unit), first)
    counts -= first
    counts, units = counts.astype(np.intp), (unit, unit)
    if not (uniform or problem.horizon):
        tokens = (stop - start).astype(np.intp)  # sums of int32 take twice as long
        # As Problem.unit_for would find, from the counts.
        masked_pads = pads_many(unit * int(np.add.reduce(counts[border:])), int(np.add.reduce(tokens[border:])))
        if masked_pads or border == len(tokens):
            plain_pads = pads_many(unit * int(np.add.reduce(counts[:border])), int(np.add.reduce(tokens[:border])))
            units = 1 if plain_pads else unit, 1 if masked_pads else unit
            ones = slice(0 if plain_pads else border, None)
            if masked_pads or plain_pads:
                first[ones], counts[ones] = start[ones], tokens[ones]
    return _Chunks(start, stop, first, counts, units)


def _repeats(pieces: Pieces, count: np.ndarray, indptr: np.ndarray) -> np.ndarray | None:
    """bool [num_tiles]: tiles with the same plain pieces (the first ones) as the tile before; None if there are none.

    The row tiles of a segment all walk its top, and a thousand copies of a prompt's entries would be most of a plan.

    Args:
        pieces: those of all tiles.
        count: [num_tiles] plain pieces of each.
        indptr: where they begin.
    """
    num_tiles, num_plain = len(count), int(indptr[len(count)])
    tile, node, begin, end, *_, reserve = [column[:num_plain] for column in pieces]
    each, rest = divmod(num_plain, num_tiles)
    if rest == 0 and all_of(count == each):  # those of a regular tree
        last = node[each - 1 :: each]
        if not any_of(last[1:] == last[:-1]):
            return None
        differs = node[each:] != node[:-each]
        differs |= begin[each:] != begin[:-each]
        differs |= end[each:] != end[:-each]
        differs |= reserve[each:]
        if each > 1:
            differs = np.logical_or.reduce(differs.reshape(-1, each), axis=1)
        same = np.zeros(num_tiles, bool)
        np.logical_not(differs, out=same[1:])
        return same if any_of(same) else None
    same = count > 0
    same[0] = False
    same[1:] &= count[1:] == count[:-1]
    # Most tiles that differ do so in the last one.
    last = node.take(indptr[1 : num_tiles + 1] - 1)
    same[1:] &= last[1:] == last[:-1]
    if not any_of(same):
        return None
    # The piece at the same place in the tile before, if that has as many.
    before = np.arange(num_plain)
    before -= count.take(tile - 1)
    differs = node != node.take(before)
    differs |= begin != begin.take(before)
    differs |= end != end.take(before)
    differs |= reserve
    same[tile[differs]] = False
    return same if any_of(same) else None


def _fields(
    problem: Problem, pieces: Pieces, border: int, chunks: _Chunks, upto: np.ndarray, tiling: Tiling
) -> tuple[np.ndarray, np.ndarray]:
    """``head`` of all entries, ``seen`` of the masked ones.

    They are worked out for the first entry of each piece, as if it were full, and repeated; in each next one they are a
    unit further on. Pieces are few.

    Args:
        problem: gives where nodes lie.
        pieces: the first ``border`` of them are plain.
        border: see there.
        chunks: what each piece touches.
        upto: [pieces + 1] where the entries of each begin.
        tiling: gives the tiles' halves.
    """
    layout, tree, node = problem.layout, problem.tree, pieces.node
    start, stop, first, counts, units = chunks
    consecutive = tree.page_indices is None
    further = (1 << 32) + (consecutive << lo.SLOT_SHIFT)  # what a head gains a slot, but for its count
    count: Any = units[0] if units[0] == units[1] else np.where(pieces.masked, units[1], units[0])
    before = start - first * count  # slots of the first entry that are not the piece's
    behind = -stop  # ... of the last one
    behind &= count - 1
    of_node = (layout.position if consecutive else layout.position - tree.first_slot).astype(np.int64)
    of_node <<= 32
    if consecutive:
        of_node += problem.first_page[:-1] * (problem.page_size << lo.SLOT_SHIFT)
    head = first - upto[:-1]
    head *= count * further
    head += of_node.take(node)
    if problem.horizon:
        count, behind = count * ~pieces.reserve, behind * ~pieces.reserve
    head += count
    of_node = layout.row_end.astype(np.int64)
    of_node <<= 32
    of_node += layout.row_begin
    seen = of_node.take(node[border:])
    both = seen.view(np.int32)
    low, high = both[::2], both[1::2]
    head[border:] += _halves(problem, tiling, pieces.tile[border:], low, high)
    head = head.repeat(counts)
    step = units[0] * further
    if units[0] == units[1]:
        head += np.arange(0, len(head) * step, step)
    else:
        nth = np.arange(len(head))
        nth[: upto[border]] *= step
        nth[upto[border] :] *= units[1] * further
        head += nth
    # Where a piece begins or ends within an entry, its first or last one is shorter. Pieces that repeat have none.
    if any_of(before):
        which = (before * counts > 0).nonzero()[0]
        head[upto.take(which)] += before.take(which) * np.int64(further - 1)
    if any_of(behind):
        which = (behind * counts > 0).nonzero()[0]
        at = upto[1:].take(which)
        at -= 1
        head[at] -= behind.take(which)
    position = head.view(np.int32)[1::2]
    if not consecutive:
        place = (tree.first_slot - layout.position).take(node).repeat(counts)
        place += position
        slots = problem.slots(problem.first_page.take(node).repeat(counts), place)
        slots <<= lo.SLOT_SHIFT
        head += slots
    node, counts = node[border:], counts[border:]
    seen = seen.repeat(counts)
    if any_of(pieces.causal):
        causal = pieces.causal[border:].repeat(counts).nonzero()[0]
        seen_from = (layout.row_begin - layout.old_len - layout.position).take(node).repeat(counts).take(causal)
        seen.view(np.int32)[2 * causal] = ~(seen_from + position[upto[border] :].take(causal))
    return head, seen


def _halves(problem: Problem, tiling: Tiling, tile: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Bits of the halves of their tiles that may see masked pieces, which such rows see: 0 where no tile has two."""
    if max([shape.rows for shape in tiling.tiles]) <= lo.HALF:
        return np.zeros(len(tile), np.int32)
    ends, begins = zip(*[shape.halves(problem.heads.group) for shape in tiling.tiles])
    row = tiling.row_begin
    first_end = second_begin = (row + tiling.of_blocks(ends)).take(tile)
    if begins != ends:
        second_begin = (row + tiling.of_blocks(begins)).take(tile)
    halves = (high > second_begin).astype(np.int32)
    halves += halves
    halves += low < first_end
    halves <<= lo.HALVES_SHIFT
    return halves


def _with_reserves_last(pieces: Pieces, piece: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """The order of entries in which each tile's reserves follow, step by step, all that it has filled."""
    nth = chunk - chunk.take(np.searchsorted(piece, piece))
    later = np.where(pieces.reserve[piece], nth + 1, 0)
    return np.lexsort((later, pieces.tile[piece], pieces.masked[piece]))
