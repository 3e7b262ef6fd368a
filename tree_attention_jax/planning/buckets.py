"""Rounding of array lengths, so that a growing tree compiles a handful of programs.

Only *capacity* is rounded; the real counts are data in the buffer. All lengths of a plan follow one level: if each had
powers of two of its own, they would change one after the other and a growing tree would meet dozens of combinations.
Rounding up costs memory, not time: a launch has as many programs as the GPU runs at once, however many items there are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

# Capacities at level 0; each level has GROWTH times as much of everything.
GROWTH = 4
SMALLEST = {"queries": 16, "items": 8, "partials": 64, "buffer": 1024}


@dataclass(frozen=True)
class Buckets:
    """Explicit capacities; ``None`` follows the plan's level.

    Take ``plan.buckets`` of an earlier plan, or set generous values, to pin the compiled program.

    Attributes:
        queries: rows that ``q`` may have at most.
        items: items a launch may have at most.
        partials: rows of the partial buffer.
        buffer: int32 elements of the packed buffer.

    Raises:
        ValueError: a capacity that is not a positive integer.
    """

    queries: int | None = None
    items: int | None = None
    partials: int | None = None
    buffer: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"buckets.{field.name} is {value!r}: a capacity is a positive integer, or None")

    def at_level(self, level: int) -> Buckets:
        """All four capacities."""
        rounded = {name: smallest * GROWTH**level for name, smallest in SMALLEST.items()}
        given = {name: value for name in SMALLEST if (value := getattr(self, name)) is not None}
        return Buckets(**(rounded | given))

    def level_for(self, **needed: int) -> int:
        """The lowest level that holds as much.

        Raises:
            ValueError: an explicit capacity is too small, which no level can help.
        """
        level = 0
        for name, need in needed.items():
            given = getattr(self, name)
            if given is None:
                while SMALLEST[name] * GROWTH**level < need:
                    level += 1
            elif given < need:
                raise ValueError(f"buckets.{name} is {given}: this plan needs {need}")
        return level
