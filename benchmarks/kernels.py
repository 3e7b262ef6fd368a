"""Kernel times of every tree of a suite, for each strategy, with the error of each against the float64 oracle.

    python -m benchmarks.kernels --suite fasttree --strategies auto,per_query,node_chunk --json out.json

Times are GPU kernel times from CUPTI, summed over a call and divided by its layers; each layer has K/V of its own, more
than 400 MB in all, so the L2 is cold as in a decoder. Programs are compiled side by side on all cores beforehand.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import tree_attention_jax as ta
from benchmarks import harness
from benchmarks.suites import Cell, cells


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    chosen = [c for c in cells(args.suite) if not args.only or args.only in c.label]
    strategies = args.strategies.split(",")
    rows = []
    report = {"environment": harness.environment(), "suite": args.suite, "page_size": args.page_size, "rows": rows}
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [(cell, s, pool.submit(_compile, cell, s, args.page_size)) for cell in chosen for s in strategies]
        data = None
        for cell, strategy, job in jobs:
            if data is None or data[0] != cell:
                data = None  # free the last one's memory first
                data = (
                    cell,
                    harness.make_data(cell.tree(), (cell.num_q_heads, cell.num_kv_heads), 128, args.page_size),
                )
            try:
                rows.append(_measure(cell, strategy, *job.result(), data[1], args))
            except Exception as error:
                rows.append(
                    {"tree": cell.name, "heads": _heads(cell), "strategy": strategy, "failed": repr(error)[:300]}
                )
            print(_line(rows[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    _summary(rows, strategies)
    return int(any("failed" in row for row in rows))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="fasttree", choices=["fasttree", "pat"])
    parser.add_argument("--strategies", default="auto", help="comma-separated names")
    parser.add_argument("--only", default="", help="only cells whose label contains this")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--wall", action="store_true", help="also time whole calls, queued back to back")
    parser.add_argument("--jobs", type=int, default=16, help="compilations at a time")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args(argv)


def _attend(q, k, v, plan):
    return ta.tree_attention(q, k, v, plan)


def _compile(cell: Cell, strategy: str, page_size: int):
    """The plan, its planning time in ms, and the compiled call over all layers."""
    tree = cell.tree()
    heads = {"num_q_heads": cell.num_q_heads, "num_kv_heads": cell.num_kv_heads}
    times = []
    for _ in range(5):
        fresh = ta.TokenTree(tree.parent, tree.kv_len, tree.q_len, *tree.page_table(page_size))
        begin = time.perf_counter()
        plan = ta.plan_tree(fresh, page_size=page_size, strategy=strategy, **heads)
        times.append((time.perf_counter() - begin) * 1e3)
    pool = (int(tree.page_table(page_size)[1].max()) + 1, page_size, cell.num_kv_heads, 128)
    layers = harness.layers_for(pool, jnp.bfloat16)
    kv = [jax.ShapeDtypeStruct(pool, jnp.bfloat16)] * layers
    q = jax.ShapeDtypeStruct((tree.num_queries, cell.num_q_heads, 128), jnp.bfloat16)
    begin = time.perf_counter()
    call = harness.over_layers(_attend).lower(q, kv, kv, plan).compile()
    return plan, float(np.median(times)), call, time.perf_counter() - begin


def _measure(cell: Cell, strategy: str, plan, plan_ms: float, call, compile_s: float, data, args) -> dict:
    tree, inputs = cell.tree(), (data.q, data.k, data.v, plan)
    kernels = harness.kernel_times(call, inputs, data.layers, args.repeats)
    host = plan.host
    row = {
        "tree": cell.name,
        "heads": _heads(cell),
        "strategy": strategy,
        "us": round(sum(kernels.values()), 2),
        "kernels": {name: round(us, 2) for name, us in kernels.items()},
        "floor_us": round(harness.floor_us(tree, (cell.num_q_heads, cell.num_kv_heads)), 2),
        "modelled_us": round(ta.planning.modelled_time(plan), 2),
        "error": harness.sampled_error(call(*inputs)[0], data, tree, args.page_size),
        "items": list(host.num_items),
        "partials": host.num_partials,
        "plan_ms": round(plan_ms, 3),
        "compile_s": round(compile_s, 2),
        "layers": data.layers,
    }
    if args.wall:
        row["wall_us"] = round(harness.wall_time(call, inputs, data.layers), 2)
    return row


def _heads(cell: Cell) -> list[int]:
    return [cell.num_q_heads, cell.num_kv_heads]


def _line(row: dict) -> str:
    name = f"{row['tree'][:44]:44s} {row['heads'][0]:>2}/{row['heads'][1]:<2} {row['strategy']:10s}"
    if "failed" in row:
        return f"{name} FAILED {row['failed']}"
    wall = f" wall {row['wall_us']:8.1f}" if "wall_us" in row else ""
    parts = " ".join(f"{k.removeprefix('tree_')}={v:.1f}" for k, v in row["kernels"].items())
    return (
        f"{name} {row['us']:8.1f} us (floor {row['floor_us']:6.1f}, model {row['modelled_us']:7.1f}){wall} "
        f"err {row['error']:.1e} {parts}"
    )


def _summary(rows: list[dict], strategies: list[str]) -> None:
    good = [row for row in rows if "us" in row]
    for strategy in strategies:
        ratios = [row["us"] / (row["floor_us"] + 3) for row in good if row["strategy"] == strategy]
        if ratios:
            mean = float(np.exp(np.mean(np.log(ratios))))
            print(f"{strategy:10s} geometric mean of time / (floor + 3 us): {mean:.2f} over {len(ratios)} cells")


if __name__ == "__main__":
    sys.exit(main())
