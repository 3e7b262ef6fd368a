"""Triton, Mosaic and both mixed, on the same plans: kernel times by launch.

    python -m benchmarks.implementations --json

*Shared*: 1,024 queries over one node of 2,048 tokens, all of the FLOP in wide tiles, beside what JAX's own Mosaic
kernel (``attention_mgpu``) takes for the same matrix products. *Long* and *short*: sequences that share nothing, in
narrow tiles. Then the cells of FastTree's suite whose best plan has a launch of wide plain tiles.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tree_attention_jax as ta
from benchmarks import harness
from benchmarks.suites import cells

RESULT = Path(__file__).parent / "results" / "h200_implementations.json"
IMPLEMENTATIONS = ("pallas_triton", "pallas_mosaic", "pallas_mixed")
HEADS = ((32, 8), (32, 32), (16, 1))
QUERIES, TOKENS = 1024, 2048
WIDE_CELLS = ("1,1024_2048,32",)
LAYERS = 6


@dataclass(frozen=True)
class Case:
    name: str
    heads: tuple[int, int]
    tree: ta.TokenTree
    strategy: str


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, nargs="?", const=RESULT)
    args = parser.parse_args(argv)
    report: dict[str, Any] = {"environment": harness.environment(), "rows": []}
    report["rows"] += jax_own()
    with ThreadPoolExecutor(16) as pool:
        work = [(case, plan_for(case)) for case in cases()]
        jobs = [[pool.submit(_compile, case, plan, name) for name in IMPLEMENTATIONS] for case, plan in work]
        for (case, plan), row_jobs in zip(work, jobs):
            report["rows"] += measure(case, plan, row_jobs)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any("failed" in row for row in report["rows"]))


def cases() -> Iterator[Case]:
    shared = ta.TokenTree([-1] + [0] * QUERIES, [TOKENS] + [1] * QUERIES, [0] + [1] * QUERIES)
    for heads in HEADS:
        yield Case("shared", heads, shared, "node_chunk")
        yield Case("long", heads, ta.TokenTree([-1] * 256, [1024] * 256), "per_query")
        yield Case("short", heads, ta.TokenTree([-1] * 1024, [64] * 1024), "per_query")
    for cell in cells("fasttree"):
        if cell.name in WIDE_CELLS:
            yield Case(cell.name, cell.heads, cell.tree(), "node_chunk")


def plan_for(case: Case) -> ta.TreePlan:
    return ta.plan_tree(case.tree, 16, *case.heads, 128, strategy=case.strategy)


def measure(case: Case, plan: ta.TreePlan, jobs: list) -> Iterator[dict[str, Any]]:
    data, first = harness.make_data(case.tree, case.heads, layers=LAYERS), None
    for name, job in zip(IMPLEMENTATIONS, jobs):
        row: dict[str, Any] = {"case": case.name, "heads": case.heads, "implementation": name}
        try:
            arguments = (data.q, data.k, data.v, plan)
            call = job.result()
            out = np.asarray(call(*arguments)[0], np.float32)
            first = out if first is None else first
            row["difference"] = float(np.linalg.norm(out - first) / np.linalg.norm(first))
            kernels = harness.kernel_times(call, arguments, LAYERS, 5)
            row["us"] = round(sum(kernels.values()), 2)
            row["kernels"] = {kernel: round(us, 2) for kernel, us in kernels.items()}
            if case.name == "shared":
                wide = max(us for kernel, us in kernels.items() if "r128" in kernel or "r64" in kernel)
                row["tflops"] = _tflops(case.heads, wide)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        print(row, flush=True)
        yield row


def jax_own() -> Iterator[dict[str, Any]]:
    """JAX's Mosaic attention kernel on the shared node: every query head's rows against its KV head."""
    try:
        from jax.experimental.pallas.ops.gpu import attention_mgpu
    except ImportError as error:  # some versions import JAX's test tools there
        print(f"no attention_mgpu: {error}", flush=True)
        return
    config = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2)
    key = jax.random.key(0)
    for heads in HEADS:
        q = jax.random.normal(key, (1, QUERIES, heads[0], 128)).astype(jnp.float16)
        k, v = (jax.random.normal(jax.random.fold_in(key, i), (1, TOKENS, heads[1], 128)) for i in (1, 2))
        call = jax.jit(partial(attention_mgpu.attention, config=config))
        arguments = (q, k.astype(jnp.float16), v.astype(jnp.float16))
        us = sum(harness.kernel_times(call, arguments, 1, 5).values())
        row = {"case": "shared", "heads": heads, "implementation": "attention_mgpu", "us": round(us, 2)}
        row["tflops"] = _tflops(heads, us)
        print(row, flush=True)
        yield row


def _tflops(heads: tuple[int, int], us: float) -> float:
    return round(4 * QUERIES * TOKENS * heads[0] * 128 / us / 1e6, 1)


def _compile(case: Case, plan: ta.TreePlan, implementation: str) -> Any:
    pool = (int(case.tree.page_table(16)[1].max()) + 1, 16, case.heads[1], 128)
    kv = [jax.ShapeDtypeStruct(pool, jnp.bfloat16)] * LAYERS
    q = jax.ShapeDtypeStruct((case.tree.num_queries, case.heads[0], 128), jnp.bfloat16)
    attend = partial(ta.tree_attention, implementation=implementation)
    return harness.over_layers(attend).lower(q, kv, kv, plan).compile()


if __name__ == "__main__":
    sys.exit(main())
