"""Whether XLA captures our calls in command buffers (CUDA graphs): in a jit over layers, in a scan, in a while loop.

Flags count when a process starts, so each setting is a process of its own (:func:`measure`), which runs this module.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import tree_attention_jax as ta
from benchmarks import harness

ROOT = Path(__file__).parent.parent
FLAGS = {
    "": "",
    "command buffers off": "--xla_gpu_enable_command_buffer=",
    "also of one call": "--xla_gpu_graph_min_graph_size=1",
}
# Else there are no graphs while the profiler looks, which counts the launches.
PROFILED = "--xla_enable_command_buffers_during_profiling=true"
PROGRAMS = ("jit", "scan", "while")
STEPS = 8


def measure(tiny: bool = False, timeout_s: float = 120) -> list[dict[str, Any]]:
    """A row a setting and program. One that dies says why in ``failed``."""
    rows = []
    for name, flags in FLAGS.items():
        with tempfile.TemporaryDirectory() as folder:
            dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
            environment = {
                **os.environ,
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {PROFILED} {flags} {dump}".strip(),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            }
            command = [sys.executable, "-m", "benchmarks.graphs", *(["--tiny"] if tiny else [])]
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s
                )
                told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
                failed = None if done.returncode == 0 else f"exit {done.returncode}: {done.stderr.strip()[-200:]}"
            except subprocess.TimeoutExpired:
                told, failed = [], f"took longer than {timeout_s:.0f} s"
            mentions = _mentions(Path(folder))
        for program in PROGRAMS:
            row = next((row for row in told if row["program"] == program), {"program": program})
            if "wall_us" not in row and "failed" not in row:
                row["failed"] = failed or "printed nothing"
            rows.append({"flags": name, **row, "in_dump": mentions.get(program, 0)})
    return rows


def _mentions(folder: Path) -> dict[str, int]:
    """How often XLA's dump of each program names a command buffer, in the optimised HLO or the thunks made of it."""
    found: dict[str, int] = {}
    for path in folder.rglob("*"):
        program = next((name for name in PROGRAMS if f"jit_{name}_" in path.name), None)
        if program and path.is_file() and ("thunk" in path.name or "after_optimizations" in path.name):
            text = path.read_text(errors="replace")
            found[program] = found.get(program, 0) + len(re.findall(r"command.?buffer", text, re.IGNORECASE))
    return found


def programs(tiny: bool) -> dict[str, tuple[Callable, tuple, int]]:
    """Name -> (jitted program, its arguments, calls of attention in it), each feeding one result to the next call."""
    heads, head_dim, layers = ((4, 2), 16, 2) if tiny else ((32, 8), 128, 32)
    tree = ta.TokenTree.from_levels([1, 16, 64], [32, 16, 8] if tiny else [1024, 256, 32])
    tree = tree.with_pages(16, reserve=STEPS)
    dtype = jnp.float32 if tiny else jnp.bfloat16
    data = harness.make_data(tree, heads, head_dim, dtype=dtype, layers=layers)
    plan = ta.plan_tree(
        tree, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=dtype.__name__, horizon=STEPS
    )

    def through(q, ks, vs, plan):
        for k, v in zip(ks, vs):
            q = ta.tree_attention(q, k, v, plan)
        return q

    def jit_(q, ks, vs, plan):
        return through(q, ks, vs, plan)

    def scan_(q, ks, vs, plan):
        def step(carry, _):
            q, plan = carry
            return (through(q, ks, vs, plan), plan.advance()), None

        return jax.lax.scan(step, (q, plan), length=STEPS)[0][0]

    def while_(q, ks, vs, plan):
        def step(carry):
            i, q, plan = carry
            return i + 1, through(q, ks, vs, plan), plan.advance()

        return jax.lax.while_loop(lambda carry: carry[0] < STEPS, step, (jnp.int32(0), q, plan))[1]

    inside = max(1, layers // STEPS)  # as many calls in all
    few = (data.q, data.k[:inside], data.v[:inside], plan)
    return {
        "jit": (jax.jit(jit_), (data.q, data.k, data.v, plan), layers),
        "scan": (jax.jit(scan_), few, inside * STEPS),
        "while": (jax.jit(while_), few, inside * STEPS),
    }


def main(argv: list[str] | None = None) -> int:
    """Measures under the flags of this process: a line of JSON a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    for name, (call, arguments, calls) in programs(args.tiny).items():
        row: dict[str, Any] = {"program": name}
        try:
            row["wall_us"] = round(harness.wall_time(call, arguments, calls), 2)
            row |= _launches(call, arguments, calls)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), flush=True)
    return 0


def _launches(call: Callable, arguments: tuple, calls: int) -> dict[str, Any]:
    """Launches and the GPU's idle time of one run; without a profile only the wall clock tells."""
    from benchmarks.traces import record

    try:
        trace = record(lambda: call(*arguments))
    except Exception as error:
        return {"not_traced": f"{type(error).__name__}: {error}"[:200], "graph_launches": "?", "kernel_launches": "?"}
    return {
        "graph_launches": trace.graph_launches,
        "kernel_launches": trace.kernel_launches,
        "kernels": len(trace.kernels),
        "idle_us": round(trace.idle_us() / calls, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
