"""Small NumPy helpers for ragged data, shared by the planner."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_int_vector(name: str, value: Any, length: int | None = None) -> np.ndarray:
    """A private int32 copy of a 1-D integer array-like; ``ValueError``/``TypeError`` name the argument."""
    array = np.asarray(value)
    if array.size == 0:
        array = array.reshape(-1).astype(np.int32) if array.ndim <= 1 else array
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: it must be one-dimensional")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: it must hold integers")
    if length is not None and len(array) != length:
        raise ValueError(f"{name} has {len(array)} entries where {length} are needed")
    vector = array.astype(np.int32)  # always a copy: the caller may go on changing theirs
    if array.dtype.itemsize > 4 or array.dtype.kind == "u":
        wide = vector != array
        if any_of(wide):
            index = int(np.argmax(wide))
            raise ValueError(f"{name}[{index}] is {array[index]}: it does not fit in 32 bits")
    return vector


def exclusive_cumsum(counts: np.ndarray) -> np.ndarray:
    """int32 [n + 1]: CSR offsets of groups with the given sizes."""
    offsets = np.empty(len(counts) + 1, np.int32)
    offsets[0] = 0
    if counts.dtype == np.int32:
        np.add.accumulate(counts, out=offsets[1:])  # np.cumsum, in half the time
    else:
        offsets[1:] = np.add.accumulate(counts)
    return offsets


def starts_of(counts: np.ndarray) -> np.ndarray:
    """The same as intp, which takes no conversion where these are indices; of intp counts."""
    offsets = np.zeros(len(counts) + 1, np.intp)
    np.add.accumulate(counts, out=offsets[1:])
    return offsets


def ragged_arange(counts: np.ndarray) -> np.ndarray:
    """``0..counts[0]-1, 0..counts[1]-1, ...`` as one int32 array."""
    return ragged_runs(0, counts)


def ragged_runs(begin: np.ndarray | int, counts: np.ndarray) -> np.ndarray:
    """Concatenate ``range(begin[i], begin[i] + counts[i])``: int32, unless ``begin`` is wider."""
    offsets = exclusive_cumsum(counts)
    value = np.arange(offsets[-1], dtype=np.int32)
    return value + (begin - offsets[:-1]).repeat(counts)


def ragged_places(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(owner, nth)`` of each element of groups with the given sizes: its group, and its place there.

    The owner is intp, as other types of indices make NumPy slow; the place is int32.
    """
    owner = np.arange(len(counts)).repeat(counts)
    nth = np.arange(len(owner), dtype=np.int32)
    nth -= exclusive_cumsum(counts).take(owner)
    return owner, nth


def ragged_ranges(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate ``range(begin[i], end[i])``. Returns ``(owner, value)``, intp and int32."""
    counts = np.maximum(end - begin, 0)
    return np.arange(len(counts)).repeat(counts), ragged_runs(begin, counts).astype(np.int32, copy=False)


def all_of(mask: np.ndarray) -> bool:
    """``mask.all()`` of a vector, in a fraction of the time where masks are short; so is :func:`any_of`.

    Also of numbers, none of them negative.
    """
    return len(mask) == 0 or bool(mask[mask.argmin()])


def any_of(mask: np.ndarray) -> bool:
    return len(mask) > 0 and bool(mask[mask.argmax()])


def largest(values: np.ndarray) -> Any:
    """The largest number of an array, none of them negative; 0 if there are none. As :func:`all_of` in less time."""
    return values.item(values.argmax()) if values.size else 0


def ceil_div(a: Any, b: Any) -> Any:
    """Of integers, ``b`` positive."""
    return (a + (b - 1)) // b
