"""Rows of a warpgroup, [64, columns], between shared memory as copies bring or take them and as registers hold them.

Copies bring boxes, [boxes, box, columns]: heads of a query, one query after another. Nothing is swizzled there, because
a box has fewer rows than a swizzle. The matrix units hold eight rows of the same columns in a warp, so a warp that read
or wrote those at once would meet eight-way bank conflicts. So rows take two steps: a row's 128 bytes by eight threads
that stand side by side, between the two forms in memory; and between swizzled memory and the matrix units, which the
swizzle is for.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_geometry import Geometry

SWIZZLE = 128
TILE_ROWS = 8


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array [.., rows, columns] as the matrix units read it, and as they are written without bank conflicts."""
    tile = (TILE_ROWS, SWIZZLE // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(SWIZZLE)))


def take_rows(boxes: Any, to: Any, geo: Geometry) -> None:
    """``to[...] = boxes``: [boxes, box, columns] to swizzled [64, columns]."""
    if geo.simulated:  # which knows no reshaped references
        to[...] = boxes[...].reshape(to.shape)
    else:
        to[...] = _side_by_side(boxes.reshape(*to.shape))


def put_rows(boxes: Any, by_way_of: Any, value: jax.Array, geo: Geometry) -> None:
    """``boxes[...] = value``: [64, columns] of the matrix units to [boxes, box, columns].

    ``by_way_of``: the same memory, swizzled. None: directly, with bank conflicts.
    """
    if geo.simulated:
        boxes[...] = value.reshape(boxes.shape)
        return
    if by_way_of is not None:
        by_way_of[...] = value
        # All of it is in registers before any of it is overwritten: a store begins with a barrier of the warpgroup.
        value = _side_by_side(by_way_of)
    put(boxes.reshape(*value.shape), value)


def _side_by_side(rows: Any) -> jax.Array:
    """Rows in registers, 16 bytes a thread and a row's 128 bytes side by side."""
    load: Any = plgpu.load  # whose signature is another in older versions
    return load(rows, layout=plgpu.Layout.SMEM_GMEM_COPY(rows.shape, rows.dtype, SWIZZLE), optimized=False)


def put(ref: Any, value: jax.Array) -> None:
    """``ref[...] = value``, with or without bank conflicts, which the compiler is not to look for."""
    store_to: Any = getattr(plgpu, "store", None)
    if store_to is None:  # before jax 0.12 a plain store does not ask
        ref[...] = value
    else:
        store_to(ref, value, optimized=False)
