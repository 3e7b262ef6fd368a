"""Rounding of array lengths, so that a growing tree compiles a handful of programs.

Only *capacity* is rounded; the real counts are data in the buffer. Lengths of arrays follow one level: if each had
powers of two of its own, they would change one after the other and a growing tree would meet dozens of combinations.
Rounding them up costs memory, not time.

An item is a program on the GPU for every KV head, and a program that finds no item ends at once, but it takes its turn:
three for each one that works cost 3 us of a launch of 50 (docs/performance.md). So a launch has room for its own number
of items, counted in the queries that they hold. Plans of many launches would meet too many combinations of these: there
all launches follow the level of the arrays, and no more programs than the GPU holds share the items.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

# Capacities at level 0; each level has GROWTH times as much of everything.
GROWTH = 4
SMALLEST = {"queries": 64, "items": 32, "partials": 256, "buffer": 4096}
# ... and room for so much at least: a few queries of a long context have hundreds of partials.
LEAST = {"partials": 1024, "buffer": 16384}
# Launches of a plan that may each have room of their own.
FEW_LAUNCHES = 2
# Which is for so many queries at least, or for more programs than cost anything; then for GROWTH times as many, ...
FEWEST_QUERIES = 256
FEWEST_PROGRAMS = 256


@dataclass(frozen=True)
class Buckets:
    """Explicit capacities; ``None`` follows the plan's level.

    Take ``plan.buckets`` of an earlier plan, or set generous values, to pin the compiled program.

    Attributes:
        queries: rows that ``q`` may have at most.
        items: items a launch may have at most; of several numbers each launch takes its own where there are as many
            launches, else the largest.
        partials: rows of the partial buffer.
        buffer: int32 elements of the packed buffer.

    Raises:
        ValueError: a capacity that is not a positive integer.
    """

    queries: int | None = None
    items: int | tuple[int, ...] | None = None
    partials: int | None = None
    buffer: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None:
                continue
            numbers = value if name == "items" and isinstance(value, tuple) and value else (value,)
            if any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in numbers):
                raise ValueError(f"buckets.{name} is {value!r}: a capacity is a positive integer, or None")

    def at_level(self, level: int) -> Buckets:
        """All four capacities."""
        return _at_level(self, level)

    def items_of(self, counts: list[int], programs: list[int], queries: list[int]) -> tuple[int, ...]:
        """Room for the items of each launch: there are so many, of so many programs each, in tiles of so many queries.

        Raises:
            ValueError: an explicit capacity is too small.
        """
        if self.items is None:
            return tuple(_room(*launch) for launch in zip(counts, programs, queries))
        given = self.items if isinstance(self.items, tuple) else (self.items,)
        room = given if len(given) == len(counts) else (max(given),) * len(counts)
        if any(most < count for count, most in zip(counts, room)):
            raise ValueError(f"buckets.items is {self.items}: this plan needs {max(counts)}")
        return room

    def level_for(self, **needed: int) -> int:
        """The lowest level that holds as much.

        Raises:
            ValueError: an explicit capacity is too small, which no level can help.
        """
        level = 0
        for name, need in needed.items():
            given = getattr(self, name)
            if given is None:
                while _capacity(name, level) < need:
                    level += 1
                continue
            given = max(given) if isinstance(given, tuple) else given
            if given < need:
                raise ValueError(f"buckets.{name} is {given}: this plan needs {need}")
        return level


@functools.lru_cache(maxsize=64)
def _at_level(buckets: Buckets, level: int) -> Buckets:
    rounded = {name: _capacity(name, level) for name in SMALLEST}
    given = {name: value for name, value in vars(buckets).items() if value is not None}
    return Buckets(**(rounded | given))


@functools.lru_cache(maxsize=128)
def _capacity(name: str, level: int) -> int:
    return max(SMALLEST[name] * GROWTH**level, LEAST.get(name, 0))


def _room(count: int, programs: int, queries: int) -> int:
    room, most = 0, FEWEST_QUERIES
    while room < max(count, 1):
        room = max(-(-most // queries), FEWEST_PROGRAMS // programs)
        most *= GROWTH
    return room
