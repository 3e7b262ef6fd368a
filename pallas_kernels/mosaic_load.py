"""The loading warpgroup of the Mosaic GPU kernel: bulk copies of query rows and of K and V, an entry at a time.

K and V go through a ring of ``stages`` steps that outlives an item, so the next item's first steps load while this
one's output is written. A step comes and is given back in parts, each with a *slot* of the ring's barriers; beside the
keys of a part lies the piece of the entry list that begins with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_clean import clean, unfilled
from pallas_kernels.mosaic_geometry import META_ALIGN, META_WORDS, WARPGROUP_ROWS, Geometry
from pallas_kernels.mosaic_work import Scalar, Work, div, for_each_work, rem


class Shared(NamedTuple):
    """What a program keeps in shared memory, and the barriers over it.

    Attributes:
        rows: int32 [2, row_words], of this pass and the next: see :func:`bring_rows`.
        raw: [consumers, boxes, box, D] query rows as they come, one query's heads after another's.
        queries: the same as [consumers, 64, D], tiled and swizzled for the matrix units.
        keys: [stages, block, D]; ``values``: [stages, block, Dv].
        lines: the values' memory as int32 words (see :mod:`.mosaic_clean`); None in the simulator.
        meta: int32 [slots, META_WORDS], the entries from each part on, from the last multiple of META_ALIGN words on.
        staged: what is on its way out: :class:`Staged`; ``lse``: float32 [consumers, boxes, box, lse_copies].
        rows_full: the list of rows has come.
        raw_full, raw_free: the query rows have come; have been read.
        keys_full, values_full: a part's tokens have come; ``keys_free``, ``values_free``: no one needs them any more.
            Of masked parts, what holds no token is zero by then: if there is any, the second half of ``values_full``
            says that the copies have come.
        clean: the same of a plain part.
        turn: where two consumers meet to take turns at the matrix units.
    """

    rows: Any
    raw: Any
    queries: Any
    staged: Any
    lse: Any
    keys: Any
    values: Any
    lines: Any
    meta: Any
    rows_full: Any
    raw_full: Any
    raw_free: Any
    keys_full: Any
    keys_free: Any
    values_full: Any
    values_free: Any
    clean: Any
    turn: Any


class Staged(NamedTuple):
    """Rows on their way out: float32 ``partial`` ones, and ``final`` ones in q's type.

    Each is two views of the same bytes: [consumers, boxes, box, columns] as the copies take them, and swizzled
    [consumers, 64, columns] (see :mod:`.mosaic_rows`; None in the simulator).
    """

    partial: tuple[Any, Any]
    final: tuple[Any, Any]


def barriers(geo: Geometry) -> tuple[Any, ...]:
    """The last fields of :class:`Shared`. A copy arrives once; so does a warpgroup in place of a copy it leaves out."""
    return (
        plgpu.Barrier(num_arrivals=1),
        plgpu.Barrier(num_arrivals=geo.consumers * geo.live_boxes),
        plgpu.Barrier(num_arrivals=geo.consumers),
        plgpu.Barrier(num_arrivals=geo.part_entries + 1, num_barriers=geo.slots),
        plgpu.Barrier(num_arrivals=geo.consumers, num_barriers=geo.slots),
        plgpu.Barrier(num_arrivals=geo.part_entries, num_barriers=2 * geo.slots),
        plgpu.Barrier(num_arrivals=geo.consumers, num_barriers=geo.slots),
        plgpu.Barrier(num_arrivals=1, num_barriers=geo.slots),
        plgpu.Barrier(num_arrivals=geo.consumers),
    )


def produce(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    buffer_ref: Any,
    shared: Shared,
    program: Scalar,
    *,
    index: int,
    grid: int,
    shape: lo.WorkShape,
    geo: Geometry,
) -> None:
    """Load everything that the consumers of this program ask for, in their order."""
    masked_too = shape.launches[index].tile.masked

    def one(turn: Scalar, work: Work, step: Scalar) -> Scalar:
        def words(i: Scalar, masked: bool) -> tuple[Scalar, ...]:
            return _read_words(buffer_ref, work, i, masked, geo)

        kinds = (False, True) if masked_too else (False,)
        first_words = [words(jnp.int32(0), masked) for masked in kinds]  # on their way while the queries are

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(shared.raw_free)

        row_of = bring_rows(buffer_ref, shared, turn, work, shape, geo, fetch=True)
        _load_queries(q_ref, shared, work, row_of, geo)
        unclean = _pack(((jnp.int32(0), jnp.int32(geo.unit)),) * geo.entries)  # no step yet: as if it were full
        for masked, first in zip(kinds, first_words):

            def load(i: Scalar, carry: Any, masked: bool = masked) -> Any:
                step, here, unclean = carry
                following = words(i + 1, masked)  # read ahead, for the reason given at `for_each_work`
                unclean = _load_block(k_ref, v_ref, buffer_ref, shared, work, step, i, here, masked, unclean, geo)
                return step + 1, following, unclean

            step, _, unclean = lax.fori_loop(0, work.blocks(masked, geo), load, (step, first, unclean))
        if masked_too:
            for part in range(geo.parts):
                _finish(shared, step - 1, part, unclean, geo)
        return step

    steps = for_each_work(buffer_ref, program, index=index, grid=grid, shape=shape, geo=geo, body=one)

    # See every phase end: what is still in flight must not outlive the program.
    @pl.when(buffer_ref[index] * (shape.num_kv_heads * geo.works) > program)
    def _():
        plgpu.barrier_wait(shared.raw_free)

    def drain(i: Scalar, carry: None) -> None:
        for part in range(geo.parts):
            slot = rem(i, geo.stages) * geo.parts + part
            plgpu.barrier_wait(shared.keys_free.at[slot])
            plgpu.barrier_wait(shared.values_free.at[slot])

    lax.fori_loop(jnp.maximum(steps - geo.stages, 0), steps, drain, None)


def bring_rows(
    buffer_ref: Any, shared: Shared, turn: Scalar, work: Work, shape: lo.WorkShape, geo: Geometry, fetch: bool = False
) -> Callable[[Scalar], Scalar]:
    """A function of n that gives the index in ``q`` of the nth query of a pass.

    If they do not lie side by side there, a list says where. To look up eight at a time in global memory would take
    longer than to move the queries themselves; so one copy brings the list. ``fetch``: of the loading warpgroup.
    """
    start = shape.rows_at + work.row
    if not geo.row_words:
        return lambda n: buffer_ref[start + n]
    words = min(geo.row_words, shape.buffer_size & -META_ALIGN)
    begin = pl.multiple_of(jnp.minimum(start & -META_ALIGN, (shape.buffer_size - words) & -META_ALIGN), META_ALIGN)
    place = turn & 1

    @pl.when(work.query < 0)
    def _():
        if fetch:
            rows = shared.rows.at[place, pl.ds(0, words)]
            plgpu.copy_gmem_to_smem(buffer_ref.at[pl.ds(begin, words)], rows, shared.rows_full)
        plgpu.barrier_wait(shared.rows_full)

    return lambda n: jnp.where(work.query < 0, shared.rows[place, start - begin + n], work.query + n)


def _load_queries(q_ref: Any, shared: Shared, work: Work, row_of: Callable[[Scalar], Scalar], geo: Geometry) -> None:
    """Query rows of a pass; a box that is no query of it only arrives, and its rows keep what they held."""

    def load(warpgroup: Scalar, carry: None) -> None:
        def there(here: Any, boxes: Any) -> None:
            plgpu.copy_gmem_to_smem(q_ref.at[here], shared.raw.at[warpgroup, boxes], shared.raw_full)

        for_each_box(
            work,
            warpgroup,
            row_of,
            geo=geo,
            there=there,
            absent=lambda: plgpu.barrier_arrive(shared.raw_full),
        )

    lax.fori_loop(0, geo.consumers, load, None)


def for_each_box(work, warpgroup, row_of, *, geo, there, absent=None) -> None:
    """``there(here, boxes)`` for every box of rows of a warpgroup that is live, ``absent()`` for the others.

    ``here`` are the indices of the box in an array [queries, heads, ..], or in [partials, heads, ..] if ``row_of`` is
    None, and ``boxes`` is its index among those of the warpgroup. Boxes of queries side by side are joined: then both
    are slices, and all of them but one are ``absent()`` too.
    """
    final = row_of is not None
    rows = jnp.clip(work.queries * geo.heads - warpgroup * WARPGROUP_ROWS, 0, WARPGROUP_ROWS)
    count = geo.live_boxes if absent is not None else div(rows + geo.box - 1, geo.box)
    first_row = warpgroup * WARPGROUP_ROWS

    def joined(place, head, begin, size: int) -> None:
        there((pl.ds(place, size), pl.ds(head, geo.box)), pl.ds(begin, size))
        for _ in range(size - 1 if absent is not None else 0):
            absent()

    def one_by_one(found) -> None:
        for live, place, head, box in found:

            @pl.when(live)
            def _(place=place, head=head, box=box):
                there((place, pl.ds(head, geo.box)), box)

            if absent is not None:
                pl.when(jnp.logical_not(live))(absent)

    def batch(i: Scalar, size: int) -> None:
        found = []
        for j in range(size):
            box = i * size + j
            row = first_row + box * geo.box
            n, head = div(row, geo.heads), work.head + rem(row, geo.heads)
            live = (n < work.queries) & (head < geo.group)
            place = row_of(jnp.where(live, n, 0)) if final else work.partial + n
            found.append((live, place, work.kv_head * geo.group + head, box))
        if not (geo.joined and final):
            one_by_one(found)
            return
        (_, first, head, box), *others = found
        side_by_side = found[-1][0]  # live rows come first
        for j, other in enumerate(others, 1):
            side_by_side &= other[1] == first + j
        pl.when(side_by_side)(lambda: joined(first, head, box, size))
        pl.when(jnp.logical_not(side_by_side))(functools.partial(one_by_one, found))

    def batches(size: int) -> None:
        lax.fori_loop(0, div(count + size - 1, size), lambda i, _: batch(i, size), None)

    size = geo.batch if final else 1
    if geo.joined:  # partials lie side by side, as most items' queries do: then their places need no reading
        begin, head = work.query if final else work.partial, work.kv_head * geo.group
        whole = (rows == WARPGROUP_ROWS) & (begin >= 0)
        pl.when(whole)(lambda: joined(begin + div(first_row, geo.heads), head, 0, geo.boxes))
        pl.when(jnp.logical_not(whole))(lambda: batches(size))
    else:
        batches(size)


def _read_words(buffer_ref: Any, work: Work, i: Scalar, masked: bool, geo: Geometry) -> tuple[Scalar, ...]:
    """The words of the entries of step ``i``; where the list has ended, of any."""
    begin, count = work.entries(masked)
    size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
    last = jnp.maximum(count - 1, 0)
    places = [begin + jnp.minimum(i * geo.entries + e, last) * size + lo.WORD for e in range(geo.entries)]
    return tuple(buffer_ref[jnp.minimum(place, buffer_ref.shape[0] - 1)] for place in places)


def _load_block(
    k_ref, v_ref, buffer_ref, shared, work, step, i, words, masked, unclean: tuple[Scalar, ...], geo
) -> tuple[Scalar, ...]:
    """Step ``i`` of a pass. An entry is copied with the whole stretch of ``unit`` slots it lies in, from a multiple of
    ``unit`` on, because tiles in shared memory begin at multiples of 8 rows.

    When the values of a masked part are on their way, those of the same part of the step before are made fit for use
    (:func:`_finish`): so a step's parts are all in flight while the loader waits for one of them. ``unclean``: what
    :func:`_pack` makes of the step before if it was a masked one; returned is that of this one.
    """
    stage = rem(step, geo.stages)
    begin, count = work.entries(masked)
    size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
    used = step >= geo.stages
    listed = [i * geo.entries + e < count for e in range(geo.entries)]
    held = [((word >> lo.COUNT_BITS) & (geo.unit - 1), word & lo.COUNT_MASK) for word in words]
    held = [(begin, jnp.where(there, filled, 0)) for there, (begin, filled) in zip(listed, held)]

    def load(part: int, of_values: bool) -> None:
        slot, first = stage * geo.parts + part, i * geo.entries + part * geo.part_entries
        full, free = (shared.values_full, shared.values_free) if of_values else (shared.keys_full, shared.keys_free)
        cache_ref, ring = (v_ref, shared.values) if of_values else (k_ref, shared.keys)

        @pl.when(used)
        def _():
            plgpu.barrier_wait(free.at[slot])

        if not of_values:
            list_from = pl.multiple_of((begin + first * size) & -META_ALIGN, META_ALIGN)
            plgpu.copy_gmem_to_smem(buffer_ref.at[pl.ds(list_from, META_WORDS)], shared.meta.at[slot], full.at[slot])
        here = slice(part * geo.part_entries, (part + 1) * geo.part_entries)
        to = ring.at[stage, pl.ds(part * geo.part, geo.part)]
        if not (masked and of_values):
            _load_tokens(cache_ref, to, full.at[slot], work.kv_head, listed[here], words[here], geo)
            return
        come = slot + jnp.where(unfilled([filled for _, filled in held[here]], geo), geo.slots, 0)
        _load_tokens(cache_ref, to, full.at[come], work.kv_head, listed[here], words[here], geo)
        _finish(shared, step - 1, part, unclean, geo)

    # In the order in which they are given back: whole steps where all see them, else parts.
    order = [(part, of_values) for of_values in (False, True) for part in range(geo.parts)]
    for part, of_values in sorted(order) if masked else order:
        load(part, of_values)
    return _pack(held) if masked else unclean


def _pack(held: Sequence[tuple[Scalar, Scalar]]) -> tuple[Scalar, ...]:
    """Where the tokens of a step's entries begin and how many there are, two entries a word: the loading warpgroup has
    few registers to keep them in."""
    half = [begin << 8 | filled for begin, filled in held]
    half += [jnp.int32(0)] * (len(half) % 2)
    return tuple(low | high << 16 for low, high in zip(half[::2], half[1::2]))


def _finish(shared: Shared, step: Scalar, part: int, packed: tuple[Scalar, ...], geo: Geometry) -> None:
    """Clean the values of a masked part, and say that they have come; of a full part, the copies have said so."""
    half = [word >> shift for word in packed for shift in (0, 16)]
    half = half[part * geo.part_entries : (part + 1) * geo.part_entries]
    begin, filled = [(word >> 8) & 0xFF for word in half], [word & 0xFF for word in half]

    @pl.when(unfilled(filled, geo))
    def _():
        stage = rem(step, geo.stages)
        slot = stage * geo.parts + part
        plgpu.barrier_wait(shared.values_full.at[geo.slots + slot])
        clean(shared, stage, part * geo.part, begin, filled, geo)
        for _ in half:
            plgpu.barrier_arrive(shared.values_full.at[slot])


def _load_tokens(cache_ref, to, full, kv_head, listed, words, geo) -> None:
    """Bring the tokens of a part. Whatever the copies are, there is an arrival an entry.

    Where the entries are full and lie side by side in the cache, one copy brings them all.
    """
    run = listed[-1] & ((words[0] & lo.COUNT_MASK) == geo.unit)
    for e, word in enumerate(words[1:], 1):
        run &= word == words[0] + e * (geo.unit << lo.COUNT_BITS)

    def copy(word, rows: Any, tokens: int) -> None:
        slot = pl.multiple_of((word >> lo.COUNT_BITS) & -geo.unit, geo.unit)
        plgpu.copy_gmem_to_smem(cache_ref.at[pl.ds(slot, tokens), kv_head], rows, full)

    @pl.when(run)
    def _():
        copy(words[0], to, geo.part)
        for _ in range(geo.part_entries - 1):
            plgpu.barrier_arrive(full)

    @pl.when(jnp.logical_not(run))
    def _():
        for e, (there, word) in enumerate(zip(listed, words)):
            rows = to.at[pl.ds(e * geo.unit, geo.unit)]
            pl.when(there)(functools.partial(copy, word, rows, geo.unit))

            @pl.when(jnp.logical_not(there))
            def _():
                plgpu.barrier_arrive(full)
