"""Loops of steps that a GPU's host launches ahead of the device.

To know whether a `lax.while_loop` goes on, XLA's host waits for the GPU after each step, and only then launches the
next one: a step of 32 layers is a CUDA graph of 500 kernels, and the GPU idles for a millisecond until it begins.
Nor does the call return before the last step, so nothing else is planned meanwhile. How often a `fori_loop` with
constant bounds goes round is known beforehand: its steps are launched ahead, and the call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

__all__ = ["launched_ahead", "while_in_strides"]

Carry = TypeVar("Carry")
# Of so many steps, half are taken in vain on average when a loop ends early.
GPU_STRIDE = 8


def launched_ahead() -> int:
    """Steps to launch without a look at whether they are needed: 1 where the host need not wait for the device."""
    return 1 if jax.default_backend() == "cpu" else GPU_STRIDE


def while_in_strides(
    goes_on: Callable[[Carry], jax.Array], one_step: Callable[[Carry], Carry], start: Carry, most: int | None = None
) -> Carry:
    """``lax.while_loop(goes_on, one_step, start)``, in strides of up to :func:`launched_ahead` steps.

    one_step: it may be called some times more after ``goes_on`` is False, and must change nothing that counts then.
    most: if given, there are never more calls than that, because the stride divides it. One stride of `most` steps
        does without a look at ``goes_on``.
    """
    stride = max(n for n in range(1, launched_ahead() + 1) if most is None or max(most, 1) % n == 0)

    def one_stride(carry: Carry) -> Carry:
        return jax.lax.fori_loop(0, stride, lambda _, carry: one_step(carry), carry)

    if stride == 1:
        return jax.lax.while_loop(goes_on, one_step, start)
    return one_stride(start) if stride == most else jax.lax.while_loop(goes_on, one_stride, start)
