"""Measure what tile shapes cost on this GPU, for ``tree_attention_jax/planning/profiles/*.json``.

    python -m benchmarks.calibrate --json out.json

Five numbers a shape (see ``planning/profile.py``), each from a plan in which it dominates:

- ``step_us``: 1,024 queries over one node of 2,048 tokens: K/V from the L2, hundreds of steps an SM.
- ``mixed_step_us``: the same, plain as before, in a program that could also mask.
- ``masked_step_us``: the same with every token's interval compared.
- ``item_us``: the same queries, eight times as many, over one node of one step: programs that start and end, less the
  time that their queries and outputs take to be copied, which hides behind other programs' work where there is any.
- ``latency_us``: fewer programs than SMs, each walking 2,048 tokens of its own: one program's time a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

import tree_attention_jax as ta
from benchmarks import harness
from pallas_kernels.layout import TileClass
from tree_attention_jax.planning import packing
from tree_attention_jax.planning.lowering import lower
from tree_attention_jax.planning.plan import make_problem
from tree_attention_jax.planning.strategies._common import make_tiling

UNIT = 16
# (rows, block_kv, warps, stages)
CANDIDATES = [
    (16, 16, 1, 2),
    (16, 32, 1, 3),
    (16, 32, 2, 6),
    (16, 64, 2, 3),
    (16, 64, 4, 3),
    (16, 64, 4, 5),
    (16, 64, 4, 7),
    (16, 128, 4, 2),
    (16, 128, 4, 3),
    (32, 64, 4, 5),
    (32, 128, 4, 2),
    (64, 64, 4, 3),
    (64, 32, 4, 5),
    (128, 64, 4, 3),
    (128, 32, 4, 5),
    (128, 128, 8, 3),
]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    sms, copy_rate = ta.planning.profile_for(None).num_sms, harness.copy_rate()
    shapes = [TileClass(rows, block, UNIT, 0, warps, stages) for rows, block, warps, stages in CANDIDATES]
    found = {shape: {} for shape in shapes}
    with ThreadPoolExecutor(16) as pool:
        for name, make in MEASUREMENTS:
            trees = {shape: make(shape) for shape in shapes}
            jobs = {shape: pool.submit(_compile, *trees[shape], shape, name) for shape in shapes}
            for shape in shapes:
                tree, heads = trees[shape]
                try:
                    plan, call, layers, items = jobs[shape].result()
                    data = harness.make_data(tree, heads, layers=layers)
                    us = sum(harness.kernel_times(call, (data.q, data.k, data.v, plan), layers).values())
                    programs = items * heads[1]
                    steps = -(-int(tree.kv_len[0]) // shape.block_kv)
                    if name.endswith("step_us"):
                        value = us * sms / (programs * steps)
                    elif name == "item_us":
                        us -= 2 * data.q.nbytes / copy_rate
                        value = us * sms / programs - found[shape].get("step_us", 0.0)
                    else:
                        value = us / steps
                    found[shape][name] = round(value, 4)
                    print(
                        f"{shape.name():18s} {name:10s} {value:8.3f}   ({us:.1f} us, {programs} programs)", flush=True
                    )
                except Exception as error:
                    print(f"{shape.name():18s} {name:10s} failed: {error!r:.200}", flush=True)
    tiles = [
        {"rows": s.rows, "block_kv": s.block_kv, "warps": s.warps, "stages": s.stages, **numbers}
        for s, numbers in found.items()
    ]
    report = {"environment": harness.environment(), "copy_bytes_per_us": copy_rate, "tiles": tiles}
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _steps(_: TileClass):
    return ta.TokenTree([-1] + [0] * 1024, [2048] + [1] * 1024, [0] + [1] * 1024), (32, 8)


def _items(shape: TileClass):
    return ta.TokenTree([-1] + [0] * 8192, [shape.block_kv] + [1] * 8192, [0] + [1] * 8192), (32, 8)


def _latency(_: TileClass):
    return ta.TokenTree([-1] * 96, [2048] * 96), (16, 1)


MEASUREMENTS = (
    ("step_us", _steps),
    ("mixed_step_us", _steps),
    ("masked_step_us", _steps),
    ("item_us", _items),
    ("latency_us", _latency),
)


def one_tile_plan(
    tree: ta.TokenTree, heads: tuple[int, int], shape: TileClass, can_mask: bool = False, masked: bool = False
) -> tuple[ta.TreePlan, int]:
    """A plan that runs only the long nodes, all in one shape; and how many items that takes.

    ``can_mask``: in programs that can mask; ``masked``: every token, although all rows see it.
    """
    problem = make_problem(tree, num_q_heads=heads[0], num_kv_heads=heads[1])
    node = np.flatnonzero(tree.kv_len > 1).astype(np.int32)
    layout = problem.layout
    tiling = make_tiling(
        problem,
        layout.row_begin[node],
        layout.row_end[node],
        np.arange(len(node) + 1, dtype=np.int32),
        node,
        np.zeros(len(node), np.int32),
        tree.kv_len[node],
        kind=np.zeros(len(node), np.int32),
        tiles=(shape,),
    )
    items = lower(problem, tiling, mask_all=masked)
    if can_mask:
        items = items._replace(tiles=tuple(replace(tile, masked_unit=tile.unit) for tile in items.tiles))
    packed = packing.pack(problem, items, ta.Buckets())
    return ta.TreePlan(jax.device_put(packed.buffer), packed.shape), sum(packed.num_items)


def _compile(tree: ta.TokenTree, heads: tuple[int, int], shape: TileClass, name: str):
    plan, items = one_tile_plan(
        tree, heads, shape, can_mask=name in ("mixed_step_us", "masked_step_us"), masked=name == "masked_step_us"
    )
    layers = 4
    data = jax.eval_shape(lambda: harness.arrays(tree, heads, 128, 16, jax.numpy.bfloat16, layers))
    call = harness.over_layers(ta.tree_attention).lower(*data, plan).compile()
    return plan, call, layers, items


if __name__ == "__main__":
    sys.exit(main())
