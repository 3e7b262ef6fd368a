"""A plan's launches beside what they took: rows that ``benchmarks/fit.py`` can fit the cost model to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import tree_attention_jax as ta
from tree_attention_jax.planning.model import launch_loads


def launch_rows(plan: ta.TreePlan, kernels: dict[str, float]) -> list[dict[str, Any]]:
    """A row a launch that has a kernel of its own: tile, microseconds, load, programs and the room for them.

    Args:
        plan: not out of a trace.
        kernels: microseconds by name, as CUPTI tells them.
    """
    rows = []
    shape = plan.shape
    names = [launch.tile.name() for launch in shape.launches]
    for launch, load in zip(shape.launches, launch_loads(plan)):
        tile = launch.tile
        mine = [us for name, us in kernels.items() if tile.name() in name]
        if len(mine) != 1 or names.count(tile.name()) > 1:
            continue
        rows.append(
            {
                "tile": [tile.rows, tile.block_kv, tile.warps, tile.stages],
                "mosaic": tile.mosaic,
                "can_mask": tile.masked,
                "us": round(mine[0], 3),
                **asdict(load),
                "programs": load.items * shape.num_kv_heads * -(-shape.group // tile.heads_per_tile(shape.group)),
                "grid": launch.grid,
            }
        )
    return rows
