"""Argument checks shared by the cache: every error names the argument, the index and the value."""

import numbers

import numpy as np

INT32_MAX = 2**31 - 1


def as_ints(name, values):
    """`values`, an integer or a sequence of them, as a 1-D int64 array; TypeError for anything else."""
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    if array.ndim > 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    return array.reshape(-1).astype(np.int64, copy=False)


def as_count(name, value, minimum=0):
    """`value` as an int that is at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return int(value)


def check_range(name, values, low, high, what):
    """Raises ValueError for the first of `values` outside `low <= value < high`."""
    bad = (values < low) | (values >= high)
    if bad.any():
        at = int(np.argmax(bad.reshape(-1)))
        raise ValueError(f"{name}[{at}] is {values.reshape(-1)[at]}, not a {what} ({low}..{high - 1})")


def as_tokens(name, tokens, vocab_size=None):
    """Token ids as a 1-D int32 array, all of them in 0..vocab_size-1."""
    array = as_ints(name, tokens)
    check_range(name, array, 0, INT32_MAX if vocab_size is None else vocab_size, "token id")
    return array.astype(np.int32)
