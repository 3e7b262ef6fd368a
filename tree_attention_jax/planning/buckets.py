"""Rounding of array lengths, so that a growing tree compiles a handful of programs.

What is rounded is only *capacity*; the real counts are data in the buffer. Rounding up costs memory, and empty
programs where it widens a grid: so a large launch rounds its grid *down* instead and lets programs take a second item.
"""

from __future__ import annotations

from dataclasses import dataclass

# Programs (items x KV heads) that a launch may have before it stops rounding its grid up. An empty program costs
# below a nanosecond of GPU time, so 4,096 of them cost a microsecond or two.
MAX_PADDED_PROGRAMS = 4096


@dataclass(frozen=True)
class Buckets:
    """Explicit capacities; ``None`` rounds that length by the default rule.

    Take ``plan.buckets`` of an earlier plan, or set generous values, to pin the compiled program.

    Attributes:
        queries: rows that ``q`` may have at most.
        items: items a launch may have at most.
        partials: rows of the partial buffer.
        buffer: int32 elements of the packed buffer.
    """

    queries: int | None = None
    items: int | None = None
    partials: int | None = None
    buffer: int | None = None

    def __post_init__(self) -> None:
        for name in ("queries", "items", "partials", "buffer"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"buckets.{name} is {value!r}: a capacity is a non-negative integer, or None")

    def capacity(self, name: str, needed: int, smallest: int, growth: int = 2) -> int:
        """The bucket for ``needed`` elements of the length called ``name``."""
        explicit = getattr(self, name)
        if explicit is not None:
            if explicit < needed:
                raise ValueError(f"buckets.{name} is {explicit}: this plan needs {needed}")
            return explicit
        size = smallest
        while size < needed:
            size *= growth
        return size


def grid_for(capacity: int, heads: int) -> int:
    """Programs along the item axis of a launch with room for ``capacity`` items."""
    return capacity if capacity * heads <= MAX_PADDED_PROGRAMS or capacity < 2 else capacity // 2
