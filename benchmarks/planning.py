"""Planning time on the host, item counts and modelled time of every strategy, for the trees of a suite.

    python -m benchmarks.planning --json out.json

``plan`` is everything from parent and length arrays to the packed buffer: a fresh ``TokenTree`` each time, so nothing
is remembered from the last one. ``with transfer`` also waits for the buffer to lie on the device. Medians.

The last part plans one page a leaf for very many leaves, and for half as many: time and peak memory must not grow
faster than the number of leaves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import tree_attention_jax as ta
from benchmarks import harness
from benchmarks.suites import Cell, cells
from tree_attention_jax.planning import packing
from tree_attention_jax.planning.lowering import lower
from tree_attention_jax.planning.plan import make_problem
from tree_attention_jax.planning.strategies import STRATEGIES

PAGE_SIZE = 16


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="fasttree", choices=["fasttree", "pat"])
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated names")
    parser.add_argument("--only", default="", help="only cells whose label contains this")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--leaves", type=int, default=100_000, help="of the last part; 0 leaves it out")
    parser.add_argument("--gpu", default="NVIDIA H200", help="device kind to plan for")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args(argv)
    strategies = args.strategies.split(",")
    rows, many = [], []
    for cell in cells(args.suite):
        if args.only in cell.label:
            for strategy in strategies:
                rows.append(_measure(cell, strategy, args.gpu, args.repeats))
                print(_line(rows[-1]), flush=True)
    if args.leaves:
        for strategy in strategies:
            many += [_many_leaves(strategy, leaves, args.gpu) for leaves in (args.leaves // 2, args.leaves)]
            print(_many_line(many[-2:]), flush=True)
    _summary(rows, strategies)
    if args.json:
        report = {"environment": harness.environment(), "suite": args.suite, "gpu": args.gpu, "rows": rows}
        args.json.write_text(json.dumps({**report, "many_leaves": many}, indent=1) + "\n")
    return 0


def plan_on_host(tree: ta.TokenTree, strategy: str, **options) -> packing.Packed:
    """What ``plan_tree`` does, but for the transfer."""
    problem = make_problem(_fresh(tree), PAGE_SIZE, **options)
    return packing.pack(problem, lower(problem, STRATEGIES[strategy](problem)), ta.Buckets())


def _plan_on_device(tree: ta.TokenTree, strategy: str, **options) -> ta.TreePlan:
    plan = ta.plan_tree(_fresh(tree), PAGE_SIZE, strategy=strategy, **options)
    jax.block_until_ready(plan.buffer)
    return plan


def _fresh(tree: ta.TokenTree) -> ta.TokenTree:
    return ta.TokenTree(tree.parent, tree.kv_len, tree.q_len)


def _median_ms(call: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        samples.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(samples)


def _measure(cell: Cell, strategy: str, gpu: str, repeats: int) -> dict:
    tree = cell.tree()
    options = {"num_q_heads": cell.num_q_heads, "num_kv_heads": cell.num_kv_heads, "gpu": gpu}
    plan = _plan_on_device(tree, strategy, **options)  # also warms up
    assert plan.host is not None
    return {
        "tree": cell.name,
        "heads": [cell.num_q_heads, cell.num_kv_heads],
        "strategy": strategy,
        "nodes": tree.num_nodes,
        "plan_ms": round(_median_ms(lambda: plan_on_host(tree, strategy, **options), repeats), 3),
        "with_transfer_ms": round(_median_ms(lambda: _plan_on_device(tree, strategy, **options), repeats), 3),
        "items": list(plan.host.num_items),
        "partials": plan.host.num_partials,
        "buffer_bytes": plan.host.buffer.nbytes,
        "modelled_us": round(ta.planning.modelled_time(plan), 2),
    }


def _many_leaves(strategy: str, leaves: int, gpu: str) -> dict:
    """One prompt and many answers of one page; time first, because tracing slows everything down."""
    parent = np.zeros(leaves + 1, np.int32)
    parent[0] = -1
    kv_len = np.full(leaves + 1, PAGE_SIZE, np.int32)
    kv_len[0] = 1024
    tree = ta.TokenTree(parent, kv_len)
    plan_on_host(tree, strategy, gpu=gpu)
    milliseconds = _median_ms(lambda: plan_on_host(tree, strategy, gpu=gpu), 5)
    tracemalloc.start()
    packed = plan_on_host(tree, strategy, gpu=gpu)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "strategy": strategy,
        "leaves": leaves,
        "plan_ms": round(milliseconds, 2),
        "peak_bytes": peak,
        "buffer_bytes": packed.buffer.nbytes,
        "items": list(packed.num_items),
    }


def _line(row: dict) -> str:
    heads = "/".join(str(h) for h in row["heads"])
    return (
        f"{row['tree'][:44]:44s} {heads:>5s} {row['strategy']:10s} {row['plan_ms']:7.2f} ms, "
        f"with transfer {row['with_transfer_ms']:7.2f} ms; items {'+'.join(str(n) for n in row['items']):>16s}, "
        f"partials {row['partials']:6d}, modelled {row['modelled_us']:7.1f} us"
    )


def _many_line(pair: list[dict]) -> str:
    half, whole = pair
    return (
        f"{whole['leaves']} leaves of one page  {whole['strategy']:10s} {whole['plan_ms']:8.1f} ms "
        f"({whole['plan_ms'] / half['plan_ms']:.2f} x half as many), peak {whole['peak_bytes'] / 1e6:6.1f} MB "
        f"({whole['peak_bytes'] / half['peak_bytes']:.2f} x), buffer {whole['buffer_bytes'] / 1e6:.1f} MB"
    )


def _summary(rows: list[dict], strategies: list[str]) -> None:
    best: dict[tuple, float] = {}
    for row in rows:
        key = (row["tree"], *row["heads"])
        best[key] = min(best.get(key, np.inf), row["modelled_us"])
    for strategy in strategies:
        mine = [row for row in rows if row["strategy"] == strategy]
        if mine:
            times = [row["plan_ms"] for row in mine]
            ratio = np.mean([np.log(row["modelled_us"] / best[row["tree"], *row["heads"]]) for row in mine])
            print(
                f"{strategy:10s} plan: median {statistics.median(times):6.2f} ms, worst {max(times):6.2f} ms; "
                f"modelled time / best strategy's: {np.exp(ratio):.2f} (geometric mean over {len(mine)} cells)"
            )


if __name__ == "__main__":
    sys.exit(main())
