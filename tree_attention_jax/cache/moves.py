"""Moving the K/V of single tokens from slot to slot, on the device."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_NOWHERE = np.iinfo(np.int32).max


class Moves(NamedTuple):
    """K/V of slot `src[i]` goes to slot `dst[i]`, all at once; a slot is `page * page_size + slot in page`.

    Both int32 [n]. Reads happen before writes, so a slot may be source and destination.
    """

    src: np.ndarray
    dst: np.ndarray

    def pad(self, n: int) -> Moves:
        """The same moves in arrays of length `n`, so that jit compiles for few lengths."""
        extra = n - self.src.size
        if extra < 0:
            raise ValueError(f"n is {n}, but there are {self.src.size} moves")
        fill = partial(np.pad, pad_width=(0, extra), mode="constant")
        return Moves(fill(self.src, constant_values=0), fill(self.dst, constant_values=_NOWHERE))

    @classmethod
    def concatenate(cls, moves: list[Moves]) -> Moves:
        """Moves of several requests in one; their slots are their own, so the order does not matter."""
        if not moves:
            return cls(np.zeros(0, np.int32), np.zeros(0, np.int32))
        return cls(*(np.concatenate(x) for x in zip(*moves)))


@partial(jax.jit, donate_argnums=(0, 1))
def move_slots(k_pages: Any, v_pages: Any, src: jax.Array, dst: jax.Array) -> tuple[Any, Any]:
    """Copies the K/V of slots `src` to slots `dst`, in place.

    Args:
        k_pages, v_pages: arrays [num_pages, page_size, ...], or pytrees of them (all layers at once, scales too).
            Donated: use what is returned.
        src, dst: int32 [n], flat slots; pairs whose `dst` is past the end are skipped (see `Moves.pad`).
    """

    def move(pages):
        flat = pages.reshape(pages.shape[0] * pages.shape[1], *pages.shape[2:])
        moved = flat.at[dst].set(flat[src], mode="drop")
        return moved.reshape(pages.shape)

    src, dst = jnp.asarray(src), jnp.asarray(dst)
    return jax.tree.map(move, k_pages), jax.tree.map(move, v_pages)
