"""Which passes a program runs: item records read ahead, and cut into passes and head tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_geometry import Geometry

Scalar = jax.Array


class Work(NamedTuple):
    """One pass of an item for one KV head. All are scalars.

    Attributes:
        kv_head: the KV head.
        head: the first query head of the pass, within the group of ``kv_head``.
        row: the first query row; ``queries``: how many there are (0: nothing to do).
        query: the first one's index in ``q`` if the others follow it there; else negative.
        partial: where the first of them writes its partial, or -1: final outputs.
        plain_begin, plain_count, masked_begin, masked_count: entries.
    """

    kv_head: Scalar
    head: Scalar
    row: Scalar
    queries: Scalar
    query: Scalar
    partial: Scalar
    plain_begin: Scalar
    plain_count: Scalar
    masked_begin: Scalar
    masked_count: Scalar

    def entries(self, masked: bool) -> tuple[Scalar, Scalar]:
        """Where the entries begin in the buffer, and how many there are."""
        return (self.masked_begin, self.masked_count) if masked else (self.plain_begin, self.plain_count)

    def blocks(self, masked: bool, geo: Geometry) -> Scalar:
        """Steps that the entries take."""
        return div(self.entries(masked)[1] + geo.entries - 1, geo.entries)


def div(x: Scalar, n: int) -> Scalar:
    """Quotient of non-negative integers."""
    return x >> (n.bit_length() - 1) if n & (n - 1) == 0 else lax.div(x, jnp.int32(n))


def rem(x: Scalar, n: int) -> Scalar:
    return x & (n - 1) if n & (n - 1) == 0 else lax.rem(x, jnp.int32(n))


def for_each_work(
    buffer_ref: Any,
    program: Scalar,
    *,
    index: int,
    grid: int,
    shape: lo.WorkShape,
    geo: Geometry,
    body: Callable[[Scalar, Work, Scalar], Scalar],
) -> Scalar:
    """``step = body(turn, work, step)`` for every pass of this program; returns the last ``step``, at first 0.

    Every warpgroup of a program walks the same passes. The longest come first, so every other turn goes through the
    programs backwards: else the first program would have the longest of each turn. The record of the next pass is read
    while this one runs: a load from global memory costs as much time as a short item.
    """
    launch = shape.launches[index]
    each = shape.num_kv_heads * geo.works
    total = buffer_ref[index] * each
    whole_turns = div(total, grid)

    def place(turn: Scalar) -> Scalar:
        return jnp.where((turn & 1) == 1, grid - 1 - program, program)

    turns = whole_turns + jnp.where(place(whole_turns) < total - whole_turns * grid, 1, 0)

    def read(turn: Scalar) -> Work:
        number = jnp.minimum(turn * grid + place(turn), launch.capacity * each - 1)
        item, part = div(number, each), rem(number, each)
        at = launch.items_at + item * lo.ITEM_SIZE
        field = [buffer_ref[at + i] for i in range(lo.ITEM_SIZE)]
        part_pass = rem(part, geo.works)
        skipped = div(part_pass, geo.head_tiles) * geo.queries
        queries = jnp.clip(field[lo.NUM_ROWS] - skipped, 0, geo.queries)
        idle = queries == 0
        return Work(
            kv_head=div(part, geo.works),
            head=rem(part_pass, geo.head_tiles) * geo.heads,
            row=field[lo.ROW] + skipped,
            queries=queries,
            query=jnp.where(field[lo.QUERY] < 0, -1, field[lo.QUERY] + skipped),
            partial=jnp.where(field[lo.PARTIAL] < 0, -1, field[lo.PARTIAL] + skipped),
            plain_begin=field[lo.PLAIN_BEGIN],
            plain_count=jnp.where(idle, 0, field[lo.PLAIN_COUNT]),
            masked_begin=field[lo.MASKED_BEGIN],
            masked_count=jnp.where(idle, 0, field[lo.MASKED_COUNT]),
        )

    def turn(i: Scalar, carry: tuple[Scalar, Work]) -> tuple[Scalar, Work]:
        step, work = carry
        following = read(i + 1)
        return body(i, work, step), following

    step, _ = lax.fori_loop(0, turns, turn, (jnp.int32(0), read(jnp.int32(0))))
    return step
