"""The loading warpgroup of the Mosaic GPU kernel: bulk copies of query rows and of K and V, an entry at a time.

K and V go through a ring of ``stages`` steps that outlives an item, so the next item's first steps load while this
one's output is written. Beside each step's keys lies the piece of the entry list that describes them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_geometry import META_ALIGN, META_WORDS, WARPGROUP_ROWS, Geometry
from pallas_kernels.mosaic_work import Scalar, Work, div, for_each_work, rem


class Shared(NamedTuple):
    """What a program keeps in shared memory, and the barriers over it.

    Attributes:
        raw: [consumers, boxes, box, D] query rows as they come, one query's heads after another's.
        queries: the same as [consumers, 64, D], tiled and swizzled for the matrix units.
        keys: [stages, block, D]; ``values``: [stages, block, Dv].
        meta: int32 [stages, META_WORDS], the entries of each step, from the last multiple of META_ALIGN words on.
        staged: what is on its way out: :class:`Staged`; ``lse``: float32 [consumers, boxes, box, lse_copies].
        raw_full, raw_free: the query rows have come; have been read.
        keys_full, values_full: a step's tokens have come; ``keys_free``, ``values_free``: no one needs them any more.
        clean: the slots of a step that hold no token of the entries are zero in ``values``.
        turn: where two consumers meet to take turns at the matrix units.
    """

    raw: Any
    queries: Any
    staged: Any
    lse: Any
    keys: Any
    values: Any
    meta: Any
    raw_full: Any
    raw_free: Any
    keys_full: Any
    keys_free: Any
    values_full: Any
    values_free: Any
    clean: Any
    turn: Any


class Staged(NamedTuple):
    """Two views of the same bytes: float32 ``partial`` and ``out`` in q's type, [consumers, boxes, box, columns]."""

    partial: Any
    out: Any


def barriers(geo: Geometry) -> tuple[Any, ...]:
    """The last fields of :class:`Shared`. A copy arrives once; so does a warpgroup in place of a copy it leaves out."""
    return (
        plgpu.Barrier(num_arrivals=geo.consumers * geo.live_boxes),
        plgpu.Barrier(num_arrivals=geo.consumers),
        plgpu.Barrier(num_arrivals=geo.entries + 1, num_barriers=geo.stages),
        plgpu.Barrier(num_arrivals=geo.consumers, num_barriers=geo.stages),
        plgpu.Barrier(num_arrivals=geo.entries, num_barriers=geo.stages),
        plgpu.Barrier(num_arrivals=geo.consumers, num_barriers=geo.stages),
        plgpu.Barrier(num_arrivals=1, num_barriers=geo.stages),
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
        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(shared.raw_free)

        _load_queries(q_ref, buffer_ref, shared, work, shape, geo)
        for masked in (False, True) if masked_too else (False,):

            def words(i: Scalar, masked: bool = masked) -> tuple[Scalar, ...]:
                return _read_words(buffer_ref, work, i, masked, geo)

            def load(i: Scalar, carry: Any, masked: bool = masked, words: Any = words) -> Any:
                step, here = carry
                following = words(i + 1)  # read ahead, for the reason given at `for_each_work`
                _load_block(k_ref, v_ref, buffer_ref, shared, work, step, i, here, masked, geo)
                return step + 1, following

            step, _ = lax.fori_loop(0, work.blocks(masked, geo), load, (step, words(jnp.int32(0))))
        return step

    steps = for_each_work(buffer_ref, program, index=index, grid=grid, shape=shape, geo=geo, body=one)

    # See every phase end: what is still in flight must not outlive the program.
    @pl.when(buffer_ref[index] * (shape.num_kv_heads * geo.works) > program)
    def _():
        plgpu.barrier_wait(shared.raw_free)

    def drain(i: Scalar, carry: None) -> None:
        stage = rem(i, geo.stages)
        plgpu.barrier_wait(shared.keys_free.at[stage])
        plgpu.barrier_wait(shared.values_free.at[stage])

    lax.fori_loop(jnp.maximum(steps - geo.stages, 0), steps, drain, None)


def _load_queries(q_ref: Any, buffer_ref: Any, shared: Shared, work: Work, shape: lo.WorkShape, geo: Geometry) -> None:
    """Query rows of a pass; a box that is no query of it only arrives, and its rows keep what they held."""
    for w in range(geo.consumers):
        for_each_box(
            buffer_ref,
            work,
            jnp.int32(w),
            shape=shape,
            geo=geo,
            final=True,
            there=lambda here, boxes, w=w: plgpu.copy_gmem_to_smem(
                q_ref.at[here], shared.raw.at[w, boxes], shared.raw_full
            ),
            absent=lambda: plgpu.barrier_arrive(shared.raw_full),
        )


def for_each_box(buffer_ref, work, warpgroup, *, shape, geo, final, there, absent=None) -> None:
    """``there(here, boxes)`` for every box of rows of a warpgroup that is live, ``absent()`` for the others.

    ``here`` are the indices of the box in an array [queries, heads, ..] (``final``) or [partials, heads, ..], and
    ``boxes`` is its index among those of the warpgroup. Boxes of queries side by side are joined: then both are slices,
    and all of them but one are ``absent()`` too.
    """
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
            place = buffer_ref[shape.rows_at + work.row + jnp.where(live, n, 0)] if final else work.partial + n
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

    if geo.joined and not final:  # partials lie side by side, and their places need no reading
        place, head = work.partial + div(first_row, geo.heads), work.kv_head * geo.group
        pl.when(rows == WARPGROUP_ROWS)(lambda: joined(place, head, 0, geo.boxes))
        pl.when(rows < WARPGROUP_ROWS)(lambda: batches(1))
    else:
        batches(geo.batch if final else 1)


def _read_words(buffer_ref: Any, work: Work, i: Scalar, masked: bool, geo: Geometry) -> tuple[Scalar, ...]:
    """The words of the entries of step ``i``; where the list has ended, of any."""
    begin, count = work.entries(masked)
    size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
    last = jnp.maximum(count - 1, 0)
    places = [begin + jnp.minimum(i * geo.entries + e, last) * size + lo.WORD for e in range(geo.entries)]
    return tuple(buffer_ref[jnp.minimum(place, buffer_ref.shape[0] - 1)] for place in places)


def _load_block(k_ref, v_ref, buffer_ref, shared, work, step, i, words, masked, geo) -> None:
    """Step ``i`` of a pass. An entry is copied with the whole stretch of ``unit`` slots it lies in, from a multiple of
    ``unit`` on, because tiles in shared memory begin at multiples of 8 rows."""
    stage = rem(step, geo.stages)
    begin, count = work.entries(masked)
    size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
    first = i * geo.entries
    listed = [first + e < count for e in range(geo.entries)]
    run = _are_one_run(words, listed, geo)
    used = step >= geo.stages

    @pl.when(used)
    def _():
        plgpu.barrier_wait(shared.keys_free.at[stage])

    list_from = pl.multiple_of((begin + first * size) & -META_ALIGN, META_ALIGN)
    plgpu.copy_gmem_to_smem(
        buffer_ref.at[pl.ds(list_from, META_WORDS)], shared.meta.at[stage], shared.keys_full.at[stage]
    )
    _load_tokens(k_ref, shared.keys, shared.keys_full, stage, work.kv_head, listed, words, run, geo)

    @pl.when(used)
    def _():
        plgpu.barrier_wait(shared.values_free.at[stage])

    _load_tokens(v_ref, shared.values, shared.values_full, stage, work.kv_head, listed, words, run, geo)


def _are_one_run(words, listed, geo) -> Scalar:
    """Whether the entries of a step are full and lie side by side in the cache: then one copy brings them."""
    run = listed[-1] & ((words[0] & lo.COUNT_MASK) == geo.unit)
    for e, word in enumerate(words[1:], 1):
        run &= word == words[0] + e * (geo.unit << lo.COUNT_BITS)
    return run


def _load_tokens(cache_ref, ring, full, stage, kv_head, listed, words, run, geo) -> None:
    """Bring the tokens of a step. Whatever the copies are, there is an arrival an entry."""

    def copy(word, to, tokens) -> None:
        slot = pl.multiple_of((word >> lo.COUNT_BITS) & -geo.unit, geo.unit)
        plgpu.copy_gmem_to_smem(cache_ref.at[pl.ds(slot, tokens), kv_head], ring.at[stage, to], full.at[stage])

    @pl.when(run)
    def _():
        copy(words[0], pl.ds(0, geo.block), geo.block)
        for _ in range(geo.entries - 1):
            plgpu.barrier_arrive(full.at[stage])

    @pl.when(jnp.logical_not(run))
    def _():
        for e, (there, word) in enumerate(zip(listed, words)):
            pl.when(there)(functools.partial(copy, word, pl.ds(e * geo.unit, geo.unit), geo.unit))

            @pl.when(jnp.logical_not(there))
            def _():
                plgpu.barrier_arrive(full.at[stage])
