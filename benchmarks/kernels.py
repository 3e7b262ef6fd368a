"""Ours and the peers on every cell of a suite: kernel times, whole calls, and the error of each against float64.

    python -m benchmarks.kernels --suite fasttree --peers flashinfer,jax,fasttree=PATH,deft=PATH --wall --json --plot
    python -m benchmarks.kernels --suite verify --strategies auto,auto@pallas_triton,per_query
    for suite in odd decode long; do python -m benchmarks.kernels --suite $suite --json --lock /tmp/gpu & done; wait

All run in this process on the same data. Kernel times are from CUPTI, summed over a call and divided by its layers;
each layer has K/V of its own, more than 400 MB in all, so the L2 is cold as in a decoder. Planning is outside. Whole
calls (``--wall``) are queued back to back: JAX's (ours too) as XLA runs a jit in which each layer takes the last one's
result, PyTorch's as a CUDA graph of all layers. A peer that cannot run, or computes something else, is recorded with
the reason; it stops nothing.

Most of a run is compilation, which holds Python's lock: ``--lock`` lets several processes compile at a time, while one
after the other measures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tree_attention_jax as ta
from benchmarks import harness
from benchmarks.comparison import fastest, key_of, mean, peer_times
from benchmarks.launches import launch_rows
from benchmarks.peers import Inputs, Peer, Unsuitable, find_peers, need_torch
from benchmarks.suites import Cell, cells, result_name, suite_names
from tree_attention_jax.backends import IMPLEMENTATIONS
from tree_attention_jax.planning.strategies import STRATEGIES

RESULTS = Path(__file__).parent / "results"
# A result further from float64 than bf16 can explain is of something else.
MOST_ERROR = 0.02
Wanted = dict[int, np.ndarray]


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    chosen = [cell for cell in _cells(args) if args.only in cell.label]
    if not chosen:
        raise SystemExit(f"no cell of suite {args.suite} has {args.only!r} in its label")
    if need_torch(args.peers):  # before JAX takes three quarters of the memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    path = _result_path(args)
    report = _start(args, path)
    done = {(key_of(row), row.get("strategy") or row["peer"]) for row in [*report["rows"], *report["peers"]]}
    wanted = [*args.strategies, *(peer.name for peer in args.peers)]
    chosen = [cell for cell in chosen if any((key_of(_named(cell)), who) not in done for who in wanted)]

    def save() -> None:
        if path:
            path.write_text(json.dumps(report, indent=1) + "\n")

    with _Progress(len(chosen)) as progress, ThreadPoolExecutor(args.jobs) as pool, ExitStack() as stack:
        jobs = [
            [
                (s, pool.submit(_compile, cell, s, args.wall))
                for s in args.strategies
                if (key_of(_named(cell)), s) not in done
            ]
            for cell in chosen
        ]
        progress("compiling")
        for job in (job for cell_jobs in jobs for _, job in cell_jobs):
            job.exception()  # whole calls are timed on an idle host
        if args.lock:
            progress("waiting for the GPU")
            stack.enter_context(harness.locked(args.lock))
        if jax.default_backend() == "gpu":
            report["copy_bytes_per_us"] = round(harness.copy_rate())
        for cell, cell_jobs in zip(chosen, jobs):
            progress(cell.label)
            peers = [peer for peer in args.peers if (key_of(_named(cell)), peer.name) not in done]
            alive = _measure_cell(cell, cell_jobs, peers, args, report, save)
            save()
            progress.done()
            if not alive:
                print("the GPU no longer answers: go on with --resume, which leaves out what the file has", flush=True)
                return 3
    _summary(report, args.strategies)
    if args.plot:
        from benchmarks.plots import draw

        print(*draw(report), sep="\n")
    return int(any("failed" in row for row in report["rows"]))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="fasttree", choices=suite_names())
    parser.add_argument(
        "--strategies", default="auto", help="comma-separated names, or none; NAME@IMPLEMENTATION runs it by that one"
    )
    parser.add_argument("--peers", default="", help="of flashinfer, jax, fasttree=PATH, deft=PATH; comma-separated")
    parser.add_argument("--only", default="", help="only cells whose label contains this")
    parser.add_argument("--page-size", type=int, help="instead of the suite's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--wall", action="store_true", help="also time whole calls, queued back to back")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at a time")
    parser.add_argument("--lock", type=Path, help="a file: of all processes that name it, one at a time measures")
    parser.add_argument(
        "--json", type=Path, nargs="?", const=RESULTS, help="write the results to benchmarks/results/, or to this file"
    )
    parser.add_argument("--resume", action="store_true", help="add to the file of --json the cells that it lacks")
    parser.add_argument("--plot", action="store_true", help="draw docs/pictures/SUITE_*.png of what was measured")
    args = parser.parse_args(argv)
    args.strategies = [name for name in args.strategies.split(",") if name and name != "none"]
    unknown = {name for name in args.strategies if name.partition("@")[0] not in STRATEGIES}
    if unknown:
        parser.error(f"--strategies: {', '.join(sorted(unknown))} unknown: known are {', '.join(STRATEGIES)}")
    unknown = {name.partition("@")[2] for name in args.strategies} - {"", *IMPLEMENTATIONS}
    if unknown:
        parser.error(f"--strategies: {', '.join(sorted(unknown))} unknown: known are {', '.join(IMPLEMENTATIONS)}")
    try:
        args.peers = find_peers(args.peers)
    except ValueError as error:
        parser.error(f"--peers: {error}")
    if args.resume and not args.json:
        parser.error("--resume needs --json")
    return args


def _cells(args: argparse.Namespace) -> list[Cell]:
    found = list(cells(args.suite))
    if args.page_size is None:
        return found
    return list(dict.fromkeys(replace(cell, page_size=args.page_size) for cell in found))


def _result_path(args: argparse.Namespace) -> Path | None:
    if args.json is None or args.json != RESULTS:
        return args.json
    gpu = jax.devices()[0].device_kind.split()[-1].lower()
    return RESULTS / f"{gpu}_{result_name(args.suite)}.json"


def _start(args: argparse.Namespace, path: Path | None) -> dict[str, Any]:
    """An empty report, or the one to resume."""
    report = {"environment": harness.environment(), "suite": args.suite, "rows": [], "peers": []}
    report["copy_bytes_per_us"] = None
    if not (args.resume and path and path.is_file()):
        return report
    before = json.loads(path.read_text())
    return {**report, "rows": before["rows"], "peers": before.get("peers", [])}


def _compile(cell: Cell, strategy: str, wall: bool) -> tuple[ta.TreePlan, Any, float, Any]:
    """The plan, the compiled call over all layers, the seconds that took, and the call to time as a whole."""
    tree, plan = cell.tree(), _plan(cell, strategy)
    pool = (int(tree.page_table(cell.page_size)[1].max()) + 1, cell.page_size, cell.num_kv_heads, cell.head_dim)
    kv = [jax.ShapeDtypeStruct(pool, jnp.bfloat16)] * harness.layers_for(pool, jnp.bfloat16)
    q = jax.ShapeDtypeStruct((tree.num_queries, cell.num_q_heads, cell.head_dim), jnp.bfloat16)
    begin = time.perf_counter()
    attend = partial(ta.tree_attention, implementation=strategy.partition("@")[2] or None)
    call = harness.over_layers(attend).lower(q, kv, kv, plan).compile()
    compile_s = time.perf_counter() - begin
    whole = harness.fed_back(attend, q, kv, kv, plan).compile() if wall else None
    return plan, call, compile_s, whole


def _plan(cell: Cell, strategy: str) -> ta.TreePlan:
    """From a fresh tree, which remembers nothing of the last plan."""
    options = {"num_q_heads": cell.num_q_heads, "num_kv_heads": cell.num_kv_heads, "head_dim": cell.head_dim}
    strategy, _, implementation = strategy.partition("@")
    mosaic = implementation != "pallas_triton"
    return ta.plan_tree(cell.tree(), page_size=cell.page_size, strategy=strategy, mosaic=mosaic, **options)


def _measure_cell(
    cell: Cell, jobs: list, peers: list[Peer], args: argparse.Namespace, report: dict[str, Any], save: Callable
) -> bool:
    """Adds the cell's rows to the report; False if the GPU does not survive it."""
    tree, named = cell.tree(), _named(cell)
    try:
        data = harness.make_data(tree, cell.heads, cell.head_dim, cell.page_size)
        wanted = harness.oracle(data, tree, cell.page_size)
    except Exception as error:
        report["rows"] += [{**named, "strategy": strategy, "failed": _reason(error)} for strategy, _ in jobs]
        return _alive()
    inputs = Inputs(cell, tree, data)
    for strategy, job in jobs:
        row = {**named, "strategy": strategy}
        try:
            row |= _measure_ours(inputs, wanted, strategy, job.result(), args, report["copy_bytes_per_us"])
        except Exception as error:
            row["failed"] = _reason(error)
        report["rows"].append(row)
        print(_line(row), flush=True)
    for peer in peers:
        report["peers"].append({**named, "peer": peer.name, "failed": "this process ended while it ran"})
        save()  # what a crash leaves behind, so that --resume goes on after it
        try:
            row = {**named, "peer": peer.name, **_measure_peer(inputs, wanted, peer, args)}
        except (KeyboardInterrupt, SystemExit):  # no fault of the peer's
            report["peers"].pop()
            save()
            raise
        report["peers"][-1] = row
        print(_line(row), flush=True)
        if "failed" in row and not _alive():
            return False
    report["environment"] = harness.environment()  # what the peers have loaded is known by now
    return _alive()


def _measure_ours(
    inputs: Inputs,
    wanted: Wanted,
    strategy: str,
    compiled: tuple,
    args: argparse.Namespace,
    copy_rate: float | None,
) -> dict[str, Any]:
    plan, call, compile_s, whole = compiled
    cell, tree, data = inputs.cell, inputs.tree, inputs.data
    arguments = (data.q, data.k, data.v, plan)
    kernels = harness.kernel_times(call, arguments, data.layers, args.repeats)
    us = sum(kernels.values())
    flops = harness.attention_flops(tree, cell.heads, cell.head_dim)
    row: dict[str, Any] = {
        "us": round(us, 2),
        "kernels": {name: round(time_us, 2) for name, time_us in kernels.items()},
        "floor_us": round(harness.floor_us(tree, cell.heads, cell.head_dim), 2),
        "modelled_us": round(ta.planning.modelled_time(plan), 2),
        "tflops": round(flops / us / 1e6, 1),
        "longest_tflops": round(flops / max(kernels.values()) / 1e6, 1),  # of a shared node's launch, nearly all FLOP
        "error": harness.largest_error(call(*arguments)[0], wanted),
        "compile_s": round(compile_s, 2),
        "plan_ms": round(harness.wall_time_of(partial(_plan, cell, strategy), _on_device, 1, calls=1) / 1e3, 3),
        "layers": data.layers,
    }
    if copy_rate:
        row["copy_share"] = round(harness.kv_bytes(tree, cell.heads, cell.head_dim) / us / copy_rate, 3)
    if plan.host is not None:
        row |= {"items": list(plan.host.num_items), "partials": plan.host.num_partials}
        row["launches"] = launch_rows(plan, kernels)
    if args.wall:
        run = harness.feeding_back(whole, *arguments)
        whole_layers = data.layers * harness.turns(data.layers)
        row["wall_us"] = round(harness.wall_time_of(run, jax.block_until_ready, whole_layers), 2)
    return _checked(row)


def _measure_peer(inputs: Inputs, wanted: Wanted, peer: Peer, args: argparse.Namespace) -> dict[str, Any]:
    """Its part of a row: times and error, or why there are none."""
    from benchmarks.peers import _torch

    row: dict[str, Any] = {}
    try:
        begin = time.perf_counter()
        ready = peer.prepare(inputs)
        row = {"note": ready.note, "layers": ready.layers, "prepare_ms": round((time.perf_counter() - begin) * 1e3, 1)}
        row["error"] = harness.largest_error(ready.output(ready.run()), wanted)
        kernels = harness.kernel_times_of(ready.run, ready.wait, ready.layers, args.repeats)
        row["us"] = round(sum(kernels.values()), 2)
        row["kernels"] = {name[:80]: round(us, 2) for name, us in kernels.items()}
        if args.wall:
            row |= _wall_of_peer(ready)
        return _checked(row)
    except Unsuitable as reason:
        return {"why_not": str(reason)}
    except Exception as error:
        return {**row, "failed": _reason(error)}
    finally:
        ready = None
        _torch.release()


def _wall_of_peer(ready: Any) -> dict[str, Any]:
    if ready.capture is None:
        return {"wall_us": round(harness.wall_time_of(ready.run, ready.wait, ready.layers), 2)}
    turns = harness.turns(ready.layers)
    try:
        run = ready.capture(turns)
    except Exception as error:
        alone = round(harness.wall_time_of(ready.run, ready.wait, ready.layers), 2)
        return {"wall_us": alone, "not_captured": _reason(error)}
    return {"wall_us": round(harness.wall_time_of(run, ready.wait, turns * ready.layers), 2)}


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    if not row["error"] <= MOST_ERROR:  # NaN too
        row["failed"] = f"its result is wrong: relative error {row['error']:.1e} against float64"
    return row


def _on_device(plan: ta.TreePlan) -> None:
    jax.block_until_ready(plan.buffer)


def _alive() -> bool:
    """Whether this process can still use the GPU: after an illegal access it never can."""
    try:
        return float(jnp.ones(2).sum()) == 2.0
    except Exception:
        return False


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _named(cell: Cell) -> dict[str, Any]:
    named = {"tree": cell.name, "heads": list(cell.heads), "head_dim": cell.head_dim, "page_size": cell.page_size}
    commit = harness.environment().get("commit")
    return {**named, "commit": commit} if commit else named  # --resume adds to rows of another one


class _Progress:
    """A bar at the bottom of a terminal; nothing elsewhere, or without ``rich``: the printed lines tell enough."""

    def __init__(self, total: int):
        self._bar: Any = None
        if sys.stdout.isatty() and find_spec("rich") is not None:
            from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

            self._bar = Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=text[:40])

    def done(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)


def _line(row: dict[str, Any]) -> str:
    width = "" if row["head_dim"] == 128 else f" d{row['head_dim']}"
    where = f"{row['tree'][:36]:36s} {row['heads'][0]:>2}/{row['heads'][1]:<2}{width} p{row['page_size']:<3}"
    name = f"{where} {row.get('strategy') or row['peer']:18s}"
    if "us" not in row:
        return f"{name} {row.get('why_not') or 'FAILED ' + row['failed']}"
    wall = f" wall {row['wall_us']:8.1f}" if "wall_us" in row else ""
    against = f" (floor {row['floor_us']:6.1f}, model {row['modelled_us']:7.1f})" if "floor_us" in row else ""
    parts = " ".join(f"{k.removeprefix('tree_')[:24]}={v:.1f}" for k, v in list(row["kernels"].items())[:6])
    failed = f" FAILED {row['failed']}" if "failed" in row else ""
    return f"{name} {row['us']:8.1f} us{against}{wall} err {row['error']:.1e} {parts}{failed}"


def _summary(report: dict[str, Any], strategies: list[str]) -> None:
    best = fastest(peer_times(report["peers"]))
    for strategy in strategies:
        rows = [row for row in report["rows"] if row["strategy"] == strategy and "failed" not in row]
        if rows:
            floor = mean([row["us"] / (row["floor_us"] + 3) for row in rows])
            print(f"{strategy:10s} time / (floor + 3 us), geometric mean: {floor:.2f} over {len(rows)} cells")
        gains = [best[key_of(row)].us / row["us"] for row in rows if key_of(row) in best]
        if gains:
            won = sum(gain > 1 for gain in gains)
            print(f"{strategy:10s} best peer / ours: {mean(gains):.2f}; ahead in {won} of {len(gains)} cells")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # as `timeout` ends it
    sys.exit(main())
