"""What a step's tokens are, from the entries beside them: which slots hold one, who sees it, where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import layout as lo
from pallas_kernels.mosaic_geometry import META_ALIGN, Geometry
from pallas_kernels.mosaic_work import Scalar


class Entries(NamedTuple):
    """Some entries of one step, a scalar each.

    Attributes:
        begin: the slot of the first token within the stretch of ``unit`` slots that was copied.
        filled: how many tokens; 0 where the list has ended.
        position: of the first token; ``low``, ``high``: who sees it (masked entries).
    """

    begin: tuple[Scalar, ...]
    filled: tuple[Scalar, ...]
    position: tuple[Scalar, ...]
    low: tuple[Scalar, ...]
    high: tuple[Scalar, ...]

    def part(self, number: int, geo: Geometry) -> Entries:
        """Those of a part of the step."""
        begin = number * geo.part_entries
        return Entries(*(field[begin : begin + geo.part_entries] for field in self))


def read_entries(
    meta_ref: Any, slot: Scalar, first: Scalar, left: Scalar, count: int, masked: bool, geo: Geometry
) -> Entries:
    """``count`` entries, which begin at ``first`` in the buffer, and of which ``left`` are in the list."""
    size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
    skipped = first & (META_ALIGN - 1)

    def field(which: int) -> tuple[Scalar, ...]:
        return tuple(meta_ref[slot, skipped + (e * size + which)] for e in range(count))

    words = field(lo.WORD)
    return Entries(
        begin=tuple((word >> lo.SLOT_SHIFT) & (geo.unit - 1) for word in words),
        filled=tuple(jnp.where(e < left, word & lo.COUNT_MASK, 0) for e, word in enumerate(words)),
        position=field(lo.POSITION),
        low=field(lo.LOW) if masked else (),
        high=field(lo.HIGH) if masked else (),
    )


def all_filled(entries: Entries, geo: Geometry) -> Scalar:
    """Whether every slot of the entries holds a token."""
    least = entries.filled[0]
    for filled in entries.filled[1:]:
        least = jnp.minimum(least, filled)
    return least == geo.unit


def may_be_seen(meta_ref: Any, slot: Scalar, first: Scalar, left: Scalar, half: Scalar, geo: Geometry) -> Scalar:
    """Whether rows of a half of the tile may see any token of a part's masked entries: read from their words alone."""
    skipped = first & (META_ALIGN - 1)
    some = jnp.int32(0)
    for e in range(geo.part_entries):
        word = meta_ref[slot, skipped + (e * lo.MASKED_SIZE + lo.WORD)]
        some |= jnp.where((e < left) & ((word & lo.COUNT_MASK) != 0), word, 0)
    return ((some >> (lo.HALVES_SHIFT + half)) & 1) != 0


def _seen_from(entries: Entries) -> list[tuple[Scalar, Scalar]]:
    """The first row that sees any token of each masked entry, and the first one that sees all of them.

    Token x of a causal entry is seen from row ~low + x on. Without `where`, for the reason given at `pick`.
    """
    first = [jnp.maximum(low, ~low) for low in entries.low]
    return [(row, row + ((low >> 31) & (n - 1))) for row, low, n in zip(first, entries.low, entries.filled)]


def seen_by_some(entries: Entries, begin: Scalar, end: Scalar) -> Scalar:
    """Whether any of rows ``begin .. end - 1`` sees any token of masked entries."""
    some = jnp.bool_(False)
    for (first, _), high, filled in zip(_seen_from(entries), entries.high, entries.filled):
        some |= (filled > 0) & (first < end) & (high > begin)
    return some & (begin < end)


def seen_by_all(entries: Entries, begin: Scalar, end: Scalar) -> Scalar:
    """Whether all of rows ``begin .. end - 1`` see all tokens of masked entries."""
    every = begin < end
    for (_, last), high in zip(_seen_from(entries), entries.high):
        every &= (last <= begin) & (high >= end)
    return every


def next_all_filled(meta_ref: Any, slot: Scalar, first: Scalar, left: Scalar, geo: Geometry) -> Scalar:
    """The same of the step after the one of plain entries that begin at ``first``."""
    skipped = first & (META_ALIGN - 1)
    least = jnp.where(left >= 2 * geo.entries, geo.unit, 0)
    for e in range(geo.entries, 2 * geo.entries):
        least = jnp.minimum(least, meta_ref[slot, skipped + (e * lo.PLAIN_SIZE + lo.WORD)] & lo.COUNT_MASK)
    return least == geo.unit


def pick(values: Sequence[Scalar], entry: jax.Array) -> jax.Array:
    """``values[entry]`` for an array of entry numbers: the compiler knows most of them, so few selects remain.

    The scalar stands in the second place of each ``where``, and never alone: Mosaic takes the sign of the result from
    the condition if the first place holds a scalar, and compares it as an unsigned number ever after.
    """
    picked = values[0] + (entry - entry)
    for e, value in enumerate(values[1:], 1):
        picked = jnp.where(entry != e, picked, value)
    return picked


class Tokens(NamedTuple):
    """Arrays over the slots of a step, of any shape.

    Attributes:
        number: which token of its entry a slot holds; ``entry``: of which entry.
        filled: whether it holds one.
    """

    entry: jax.Array
    number: jax.Array
    filled: jax.Array


def tokens_at(slot: jax.Array, entries: Entries, geo: Geometry) -> Tokens:
    """The tokens in slots ``slot`` of a step."""
    entry = slot >> (geo.unit.bit_length() - 1)
    number = (slot & (geo.unit - 1)) - pick(entries.begin, entry)
    return Tokens(entry, number, (number >= 0) & (number < pick(entries.filled, entry)))


def step_slots(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Slot numbers along ``axis``, spread over a matrix as the matrix units hold it."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def seen_by(row: jax.Array, tokens: Tokens, entries: Entries) -> jax.Array:
    """Whether rows ``row`` see the tokens of masked entries; both of the same shape."""
    low = pick(entries.low, tokens.entry)
    low = jnp.where(low < 0, ~low + tokens.number, low)
    return tokens.filled & (low <= row) & (row < pick(entries.high, tokens.entry))


def positions(tokens: Tokens, entries: Entries) -> jax.Array:
    """Absolute positions of tokens."""
    return pick(entries.position, tokens.entry) + tokens.number
