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
    if array.dtype.itemsize > 4 or array.dtype == np.uint32:
        wide = (array > 2**31 - 1) | (array < -(2**31))
        if wide.any():
            index = int(np.argmax(wide))
            raise ValueError(f"{name}[{index}] is {array[index]}: it does not fit in 32 bits")
    return array.astype(np.int32)  # always a copy: the caller may go on changing theirs


def exclusive_cumsum(counts: np.ndarray) -> np.ndarray:
    """int32 [n + 1]: CSR offsets of groups with the given sizes."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def ragged_arange(counts: np.ndarray) -> np.ndarray:
    """``0..counts[0]-1, 0..counts[1]-1, ...`` as one int32 array."""
    offsets = exclusive_cumsum(counts)
    return np.arange(offsets[-1], dtype=np.int32) - np.repeat(offsets[:-1], counts)


def ragged_ranges(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate ``range(begin[i], end[i])``. Returns ``(owner, value)``, both int32."""
    counts = np.maximum(end - begin, 0)
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    offsets = exclusive_cumsum(counts)
    return owner, np.arange(offsets[-1], dtype=np.int32) + (begin - offsets[:-1]).astype(np.int32)[owner]


def ceil_div(a: Any, b: Any) -> Any:
    return -(-a // b)
