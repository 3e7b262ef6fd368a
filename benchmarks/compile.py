"""What happens before and between kernels: compile times, programs along a growing decode, CUDA graphs, idle gaps.

    python -m benchmarks.compile --json
    python -m benchmarks.compile --parts growth,graphs --tiny       # seconds on a CPU, to see that it works

- ``graphs``: our calls in a jit over 32 layers, a scan and a while loop, with XLA's command buffers as they are by
  default, off, and also around single calls: launches and wall time.
- ``tiles``: seconds to compile a kernel of each tile class that the planner chooses from, alone in a process with
  nothing compiled yet.
- ``plans``: the same for whole plans of FastTree's suite at 32/8 heads; of those with equal launches, for one.
- ``growth``: how many programs a decode needs whose leaves grow from 16 to 512 tokens.
- ``gaps``: how long the GPU idles in a decode step of a whole model of 32 layers (random weights).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tree_attention_jax as ta
from benchmarks import graphs, harness
from benchmarks.calibrate import UNIT, one_tile_plan
from benchmarks.kernels import RESULTS
from benchmarks.suites import cells
from tree_attention_jax.planning.tiles import tile_class

PARTS = ("graphs", "tiles", "plans", "growth", "gaps")
# Nodes a level, and tokens of all but the leaves.
GROWTH = ("1,64_4000", "8,128_2000", "1,4,16,512_1024,256,128")
HORIZON = 16


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; comma-separated")
    parser.add_argument("--tiny", action="store_true", help="small sizes: to see that it works, not for numbers")
    parser.add_argument(
        "--json", type=Path, nargs="?", const=RESULTS, help="write the results to benchmarks/results/, or to this file"
    )
    args = parser.parse_args(argv)
    wanted = args.parts.split(",")
    if set(wanted) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(set(wanted) - set(PARTS)))} unknown: known are {', '.join(PARTS)}")
    measure: dict[str, Callable[[bool], Any]] = {
        "graphs": graphs.measure,  # first: its processes need the GPU's memory, which this one takes at its first use
        "tiles": measure_tiles,
        "plans": measure_plans,
        "growth": measure_growth,
        "gaps": measure_gaps,
    }
    report: dict[str, Any] = {}
    for part in PARTS:
        if part in wanted:
            try:
                report[part] = measure[part](args.tiny)
            except Exception as error:
                report[part] = [{"failed": f"{type(error).__name__}: {error}"[:300]}]
            for row in report[part]:
                print(part, json.dumps(row), flush=True)
            if args.json:
                _write(report, args.json)
    return int(any("failed" in row for part in PARTS for row in report.get(part, [])))


def _write(report: dict[str, Any], path: Path) -> None:
    environment = harness.environment()
    if path == RESULTS:
        path = RESULTS / f"{environment['device'].split()[-1].lower()}_compile.json"
    path.write_text(json.dumps({"environment": environment, **report}, indent=1) + "\n")


def measure_tiles(tiny: bool) -> list[dict[str, Any]]:
    tree = ta.TokenTree([-1] + [0] * 64, [256] + [1] * 64, [0] + [1] * 64)
    found = []
    chosen_from = ta.planning.profile_for(None).tiles
    for cost in chosen_from[:1] if tiny else chosen_from:
        for masked in (False, True):
            shape = tile_class(cost.rows, cost.block_kv, cost.warps, cost.stages, UNIT, cost.mosaic)
            kernel = "Mosaic" if cost.mosaic else f"{cost.warps} warps, {cost.stages} stages"
            row = {"tile": f"{cost.rows} x {cost.block_kv}, {kernel}{', masked' if masked else ''}"}
            plan, _ = one_tile_plan(tree, (32, 8), shape, can_mask=masked, masked=masked)
            found.append(row | _first_call(tree, (32, 8), plan))
    return found


def measure_plans(tiny: bool) -> list[dict[str, Any]]:
    found, seen = [], set()
    for cell in cells("fasttree"):
        if cell.heads == (32, 8):
            tree = ta.TokenTree.from_levels([1, 4], [32, 8]) if tiny else cell.tree()
            plan = ta.plan_tree(tree, num_q_heads=32, num_kv_heads=8)
            launches = *(launch.tile.name() for launch in plan.shape.launches), plan.shape.partial_rows > 0
            if launches in seen:
                continue
            seen.add(launches)
            row = {"plan": cell.label, "launches": len(plan.shape.launches) + (plan.shape.partial_rows > 0)}
            found.append(row | _first_call(tree, cell.heads, plan))
            if tiny:
                break
    return found


def _first_call(tree: ta.TokenTree, heads: tuple[int, int], plan: ta.TreePlan) -> dict[str, Any]:
    """Seconds of tracing and lowering, of compiling, and of the first call after that."""
    data = harness.make_data(tree, heads, layers=1)
    inputs = (data.q, data.k[0], data.v[0], plan)
    jax.block_until_ready(inputs[:3])
    jax.clear_caches()
    try:
        begin = time.perf_counter()
        lowered = jax.jit(ta.tree_attention).lower(*inputs)
        traced = time.perf_counter()
        compiled = lowered.compile()
        built = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        ended = time.perf_counter()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    return {
        "lower_s": round(traced - begin, 3),
        "compile_s": round(built - traced, 3),
        "first_call_s": round(ended - built, 4),
    }


def measure_growth(tiny: bool) -> list[dict[str, Any]]:
    """Plans of forests whose leaves have one token more a step, every HORIZON steps: equal shapes share a program."""
    found = []
    last = 64 if tiny else 512
    for name in GROWTH[:1] if tiny else GROWTH:
        levels, tokens = ([int(x) for x in part.split(",")] for part in name.split("_"))
        shapes = []
        for grown in range(16, last + 1, HORIZON):
            tree = ta.TokenTree.from_levels(levels, [*tokens, grown]).with_pages(16, reserve=HORIZON)
            shapes.append(ta.plan_tree(tree, num_q_heads=32, num_kv_heads=8, horizon=HORIZON).shape)
        row = {"tree": name, "first_tokens": 16, "last_tokens": last, "horizon": HORIZON}
        switches = sum(one != next_ for one, next_ in pairwise(shapes))
        found.append(row | {"plans": len(shapes), "programs": len(set(shapes)), "switches": switches})
    return found


def measure_gaps(tiny: bool) -> list[dict[str, Any]]:
    """One block of decode steps, best of 64 below one prompt, traced."""
    from flax import nnx

    from benchmarks.traces import record
    from tree_attention_jax.models import CONFIGS, Llama, LlamaConfig
    from tree_attention_jax.search import Sampling, TreeDecoder

    name, prompt, samples = ("tiny", 40, 4) if tiny else ("llama-3-8b", 4000, 64)
    config = (
        LlamaConfig(64, 64, 96, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16) if tiny else CONFIGS[name]
    )
    model = Llama(config, dtype="float32" if tiny else "bfloat16", rngs=nnx.Rngs(0))
    steps = HORIZON
    decoder = TreeDecoder(model, -(-prompt // 16) + samples * 8, 16)

    def decode() -> Any:
        """One token from the logits, then one block of steps on the device."""
        leaf = decoder.tree.add_request(np.ones(prompt, np.int32))
        decoder.tree.commit()
        leaves = decoder.tree.fork(leaf, samples)
        decoder.generate(leaves, jnp.zeros(config.vocab_size), steps + 1, sampling=Sampling(), horizon=steps)
        decoder.tree.prune(decoder.tree.leaves())
        return decoder.k_pages

    for _ in range(2):
        begin = time.perf_counter()
        jax.block_until_ready(decode())
        step_us = (time.perf_counter() - begin) * 1e6 / steps
    trace = record(decode)  # without CUDA graphs, so its gaps are not those of a run
    idle_us = max(0.0, step_us - trace.busy_us() / steps)
    return [
        {
            "model": name,
            "tree": f"{samples} samples of a {prompt:,}-token prompt",
            "layers": config.num_layers,
            "step_us": round(step_us, 1),
            "idle_us": round(idle_us, 1),
            "idle_share": round(idle_us / step_us, 4),
            "kernels": round(len(trace.kernels) / steps),
            "graph_launches": trace.graph_launches,
            "kernel_launches": trace.kernel_launches,
        }
    ]


if __name__ == "__main__":
    sys.exit(main())
