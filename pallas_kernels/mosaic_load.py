"""The loading warpgroup of the Mosaic GPU kernel: bulk copies of query rows and of K and V, an entry at a time.

K and V go through a ring of ``stages`` steps that outlives an item, so the next item's first steps load while this
one's output is written. A step comes and is given back in parts, each with a *slot* of the ring's barriers; beside the
keys of a part lies the piece of the entry list that begins with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_clean import clean, unfilled
from pallas_kernels.mosaic_geometry import META_ALIGN, META_WORDS, WARPGROUP_ROWS, Geometry
from pallas_kernels.mosaic_tokens import pick
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
        source = _Source(k_ref, v_ref, buffer_ref, shared, work, geo)
        first_plain = _read_words(source, jnp.int32(0), geo.entries, masked=False)  # on their way while the queries are
        first_masked = _read_words(source, jnp.int32(0), geo.part_entries, masked=True) if masked_too else ()

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(shared.raw_free)

        row_of = bring_rows(buffer_ref, shared, turn, work, shape, geo, fetch=True)
        _load_queries(q_ref, shared, work, row_of, geo)

        def plain(i: Scalar, carry: Any) -> Any:
            step, words = carry
            following = _read_words(source, i + 1, geo.entries, masked=False)  # ahead, as at `for_each_work`
            _load_step(source, step, i, words)
            return step + 1, following

        step, _ = lax.fori_loop(0, work.blocks(False, geo), plain, (step, first_plain))
        if not masked_too:
            return step

        def masked(i: Scalar, carry: Any) -> Any:
            number, words, unclean = carry
            following = _read_words(source, i + 1, geo.part_entries, masked=True)
            unclean = _load_masked_part(source, number, i, words, unclean)
            return number + 1, following, unclean

        steps = work.blocks(True, geo)
        full = ((jnp.int32(0), jnp.int32(geo.unit)),) * geo.part_entries  # no part yet: as if it were full
        number, _, unclean = lax.fori_loop(
            0, steps * geo.parts, masked, (step * geo.parts, first_masked, full)
        )
        _finish(shared, number - 1, unclean, geo)
        return step + steps

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


class _Source(NamedTuple):
    """Where the tokens of a pass come from and go to."""

    k_ref: Any
    v_ref: Any
    buffer_ref: Any
    shared: Shared
    work: Work
    geo: Geometry


def _read_words(source: _Source, i: Scalar, count: int, *, masked: bool) -> tuple[Scalar, ...]:
    """The words of ``count`` entries, the ``i``-th so many of the list; where it has ended, of any."""
    begin, listed = source.work.entries(masked)
    size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
    last = jnp.maximum(listed - 1, 0)
    places = [begin + jnp.minimum(i * count + e, last) * size + lo.WORD for e in range(count)]
    end = source.buffer_ref.shape[0] - 1
    return tuple(source.buffer_ref[jnp.minimum(place, end)] for place in places)


def _load_step(source: _Source, step: Scalar, i: Scalar, words: tuple[Scalar, ...]) -> None:
    """Plain step ``i`` of a pass: keys, then values, in the order in which they are given back."""
    geo = source.geo

    def load(part: Scalar, of_values: bool) -> None:
        here = [pick(words[e :: geo.part_entries], part) for e in range(geo.part_entries)]
        _load_part(source, step * geo.parts + part, i * geo.parts + part, tuple(here), masked=False, of_values=of_values)

    for of_values in (False, True):
        if geo.parts == 1:
            load(jnp.int32(0), of_values)
        else:
            # A loop, because code that runs for the first time comes as slowly as data: see `docs/performance.md`.
            lax.fori_loop(0, geo.parts, lambda part, _: load(part, of_values), None)


def _load_masked_part(
    source: _Source, number: Scalar, i: Scalar, words: tuple[Scalar, ...], unclean: Any
) -> tuple[tuple[Scalar, Scalar], ...]:
    """Masked part ``i`` of a pass. When it is on its way, the values of the one before are made fit for use
    (:func:`_finish`): ``unclean`` says where its tokens lie; returned is that of this one."""
    geo = source.geo
    _load_part(source, number, i, words, masked=True, of_values=False)
    _, count = source.work.entries(True)
    listed = [i * geo.part_entries + e < count for e in range(geo.part_entries)]
    held = [((word >> lo.SLOT_SHIFT) & (geo.unit - 1), word & lo.COUNT_MASK) for word in words]
    held = [(begin, jnp.where(there, filled, 0)) for there, (begin, filled) in zip(listed, held)]
    dirty = unfilled([filled for _, filled in held], geo)
    _load_part(source, number, i, words, masked=True, of_values=True, dirty=dirty)
    _finish(source.shared, number - 1, unclean, geo)
    return tuple(held)


def _load_part(
    source: _Source,
    number: Scalar,
    i: Scalar,
    words: tuple[Scalar, ...],
    *,
    masked: bool,
    of_values: bool,
    dirty: Scalar | None = None,
) -> None:
    """Keys or values of part ``i`` of a pass, the ``number``-th of the program.

    An entry is copied with the whole stretch of ``unit`` slots it lies in, from a multiple of ``unit`` on, because tiles
    in shared memory begin at multiples of 8 rows. ``dirty``: the copies report to the second half of ``values_full``.
    """
    _, _, buffer_ref, shared, work, geo = source
    begin, count = work.entries(masked)
    slot, first = rem(number, geo.slots), i * geo.part_entries
    full, free = (shared.values_full, shared.values_free) if of_values else (shared.keys_full, shared.keys_free)
    cache_ref, ring = (source.v_ref, shared.values) if of_values else (source.k_ref, shared.keys)

    @pl.when(number >= geo.slots)
    def _():
        plgpu.barrier_wait(free.at[slot])

    if not of_values:
        size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
        list_from = pl.multiple_of((begin + first * size) & -META_ALIGN, META_ALIGN)
        plgpu.copy_gmem_to_smem(buffer_ref.at[pl.ds(list_from, META_WORDS)], shared.meta.at[slot], full.at[slot])
    stage, part = div(slot, geo.parts), rem(slot, geo.parts)
    to = ring.at[stage, pl.ds(pl.multiple_of(part * geo.part, geo.part), geo.part)]
    listed = [first + e < count for e in range(geo.part_entries)]
    come = slot if dirty is None else slot + jnp.where(dirty, geo.slots, 0)
    _load_tokens(cache_ref, to, full.at[come], work.kv_head, listed, words, geo)


def _finish(shared: Shared, number: Scalar, held: tuple[tuple[Scalar, Scalar], ...], geo: Geometry) -> None:
    """Clean the values of a masked part, and say that they have come; of a full part, the copies have said so."""
    begin, filled = zip(*held)

    @pl.when(unfilled(filled, geo))
    def _():
        slot = rem(number, geo.slots)
        plgpu.barrier_wait(shared.values_full.at[geo.slots + slot])
        clean(shared, div(slot, geo.parts), rem(slot, geo.parts) * geo.part, begin, filled, geo)
        for _ in held:
            plgpu.barrier_arrive(shared.values_full.at[slot])


def _load_tokens(cache_ref, to, full, kv_head, listed, words, geo) -> None:
    """Bring the tokens of a part. Whatever the copies are, there is an arrival an entry.

    Where the entries are full and lie side by side in the cache, one copy brings them all.
    """
    bare = [word & ~(3 << lo.HALVES_SHIFT) for word in words]
    run = listed[-1] & ((words[0] & lo.COUNT_MASK) == geo.unit)
    for e, word in enumerate(bare[1:], 1):
        run &= word == bare[0] + e * (geo.unit << lo.SLOT_SHIFT)

    def copy(word, rows: Any, tokens: int) -> None:
        slot = pl.multiple_of((word >> lo.SLOT_SHIFT) & -geo.unit, geo.unit)
        plgpu.copy_gmem_to_smem(cache_ref.at[pl.ds(slot, tokens), kv_head], rows, full)

    @pl.when(run)
    def _():
        copy(words[0], to, geo.part)
        if geo.part_entries > 1:
            lax.fori_loop(0, geo.part_entries - 1, lambda *_: plgpu.barrier_arrive(full), None)

    @pl.when(jnp.logical_not(run))
    def _():
        for e, (there, word) in enumerate(zip(listed, words)):
            rows = to.at[pl.ds(e * geo.unit, geo.unit)]
            pl.when(there)(functools.partial(copy, word, rows, geo.unit))

            @pl.when(jnp.logical_not(there))
            def _():
                plgpu.barrier_arrive(full)
