"""Rows of a warpgroup, [64, columns] in registers, that lie in shared memory as the copies bring or take them.

That is in boxes, [boxes, box, columns]: heads of a query, one query after another. Nothing is swizzled there, because a
box has fewer rows than a swizzle, so reads and writes have bank conflicts: they are to say that this is meant.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_geometry import WARPGROUP_ROWS, Geometry


def read_rows(boxes: Any, geo: Geometry) -> jax.Array:
    """[boxes, box, columns] as [64, columns]."""
    if geo.simulated:  # which knows no reshaped references
        return boxes[...].reshape(WARPGROUP_ROWS, boxes.shape[-1])
    load: Any = plgpu.load  # whose signature is another in older versions
    rows = boxes.reshape(WARPGROUP_ROWS, boxes.shape[-1])
    return load(rows, layout=plgpu.Layout.WGMMA, optimized=False)


def write_rows(boxes: Any, value: jax.Array, geo: Geometry) -> None:
    """The opposite."""
    if geo.simulated:
        boxes[...] = value.reshape(boxes.shape)
    else:
        put(boxes.reshape(value.shape), value)


def put(ref: Any, value: jax.Array) -> None:
    """``ref[...] = value``, with bank conflicts."""
    store_to: Any = getattr(plgpu, "store", None)
    if store_to is None:  # before jax 0.12 a plain store does not ask
        ref[...] = value
    else:
        store_to(ref, value, optimized=False)
