"""Plans beside the one that ``auto`` picks, all measured: what the cost model is fitted to, and what it misses.

    python -m benchmarks.alternatives --json
    python -m benchmarks.alternatives --halves --json
    for i in 0 1 2 3; do python -m benchmarks.alternatives --part $i/4 --lock /tmp/gpu --json /tmp/$i.json & done; wait
    python -m benchmarks.alternatives --join /tmp/?.json --json

For every cell of FastTree's suite (but trees that are nearly the same), of the suite ``odd``, and of sequences that
share nothing: ``auto``'s plan, its plans where it may use one tile shape only, and all of these where partials cost a
quarter, or four times as much. ``benchmarks/fit.py`` reads the result. The table shows where another plan than the
chosen one was the fastest. Most of a run is compilation, which holds Python's lock: several processes may do a part of
the cells each, and one at a time measures.

``--halves``: plans of Mosaic's tile alone for trees of which its two halves do not see as much as each other (the
suites ``odd``, ``decode`` and ``shared``). ``benchmarks/fit.py`` shows how well the model meets them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import tree_attention_jax as ta
from benchmarks import harness
from benchmarks.launches import launch_rows
from benchmarks.suites import Cell, cells
from tree_attention_jax.planning.plan import make_problem, plan_of
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.profile import GpuProfile
from tree_attention_jax.planning.strategies.auto import auto
from tree_attention_jax.planning.tiles import suits_mosaic

RESULTS = Path(__file__).parent / "results"
PAGE_SIZE = 16
# The others differ from these in one level.
TREES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11)
# No use in measuring what should take so many times as long as the choice.
HOPELESS = 1.5
PARTIAL_RATES = ("write_bytes_per_us", "read_bytes_per_us", "far_bytes_per_us")


Profiles = Callable[[Problem], Iterator[tuple[str, GpuProfile]]]


@dataclass(frozen=True)
class Alternative:
    cell: Cell
    name: str
    plan: ta.TreePlan
    modelled_us: float


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--halves", action="store_true", help="plans of Mosaic's tile for uneven trees")
    parser.add_argument("--part", default="0/1", help="I/N: the Ith of N parts of the cells")
    parser.add_argument("--lock", type=Path, help="a file: of all processes that name it, one at a time measures")
    parser.add_argument("--join", type=Path, nargs="+", help="measure nothing: put these parts together")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS)
    args = parser.parse_args(argv)
    if args.json == RESULTS:
        args.json /= "h200_halves.json" if args.halves else "h200_alternatives.json"
    report = join(args.join) if args.join else _measure(args)
    if args.json:
        args.json.write_text(_lines(report))
    return 0


def join(paths: list[Path]) -> dict[str, Any]:
    parts = [json.loads(path.read_text()) for path in paths]
    lists = {name: [row for part in parts for row in part[name]] for name in ("launches", "reductions")}
    return {"environment": parts[0]["environment"], **lists}


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    profiles = _mosaic_profiles if args.halves else _profiles
    chosen = [*cells("odd"), *cells("decode"), *cells("shared")] if args.halves else _fitted_cells()
    part, parts = map(int, args.part.split("/"))
    found = [one for cell in chosen[part::parts] for one in alternatives(cell, profiles)]
    report: dict[str, Any] = {"environment": harness.environment(), "launches": [], "reductions": []}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // parts)) as pool:
        jobs = [pool.submit(_compile, one) for one in found]
        compiled = [job.result() for job in jobs]
    with harness.locked(args.lock):
        cell, times = None, {}
        for one, (call, layers) in zip(found, compiled):
            if one.cell is not cell:
                _show(cell, times)
                cell, times = one.cell, {}
                data = harness.make_data(cell.tree(), cell.heads, layers=layers)
            kernels = harness.kernel_times(call, (data.q, data.k, data.v, one.plan), layers, 5)
            times[one.name] = sum(kernels.values()), one.modelled_us
            _record(report, one, kernels)
            if args.json:  # what there is, if this is cut short
                args.json.write_text(_lines(report))
        _show(cell, times)
    return report


def _fitted_cells() -> list[Cell]:
    suite = list(cells("fasttree"))
    names = list(dict.fromkeys(cell.name for cell in suite))
    chosen = [cell for cell in suite if names.index(cell.name) in TREES] + list(cells("odd"))
    longest = ("64_4096", 128, PAGE_SIZE)
    return chosen + [cell for cell in cells("heads") if (cell.name, cell.head_dim, cell.page_size) == longest]


def alternatives(cell: Cell, profiles: Profiles | None = None, gpu: str | None = None) -> Iterator[Alternative]:
    """Different plans of a cell, the chosen one first."""
    problem = make_problem(cell.tree(), PAGE_SIZE, *cell.heads, cell.head_dim, gpu=gpu)
    seen, chosen_us = set(), None
    for name, profile in (profiles or _profiles)(problem):
        plan = plan_of(problem, auto(replace(problem, profile=profile)))
        assert plan.host is not None
        key = (tuple(launch.tile for launch in plan.shape.launches), plan.host.num_items, plan.host.num_partials)
        modelled_us = ta.planning.modelled_time(plan)
        chosen_us = chosen_us or modelled_us
        if key not in seen and modelled_us < HOPELESS * chosen_us:
            seen.add(key)
            yield Alternative(cell, name, plan, modelled_us)


def _profiles(problem: Problem) -> Iterator[tuple[str, GpuProfile]]:
    profile, mosaic = problem.profile, suits_mosaic(problem.heads, problem.unit)
    yield "auto", profile
    yield "cheap partials", _other_partials(profile, 0.25)
    yield "dear partials", _other_partials(profile, 4)
    for tile in profile.tiles:
        if tile.block_kv >= 32 and (mosaic or not tile.mosaic):
            kernel = "mosaic" if tile.mosaic else f"w{tile.warps}s{tile.stages}"
            name, alone = f"r{tile.rows}k{tile.block_kv}{kernel}", replace(profile, tiles=(tile,))
            yield name, alone
            yield f"{name}, cheap partials", _other_partials(alone, 0.25)
            yield f"{name}, dear partials", _other_partials(alone, 4)


def _mosaic_profiles(problem: Problem) -> Iterator[tuple[str, GpuProfile]]:
    profile = problem.profile
    alone = replace(profile, tiles=tuple(tile for tile in profile.tiles if tile.mosaic))
    yield "mosaic", alone
    yield "mosaic, dear partials", _other_partials(alone, 4)


def _other_partials(profile: GpuProfile, price: float) -> GpuProfile:
    """Where they, and their reduction's launch, cost so many times as much."""
    rates = {name: getattr(profile.reduction, name) / price for name in PARTIAL_RATES}
    reduction = replace(profile.reduction, **rates, launch_us=price * profile.reduction.launch_us)
    return replace(profile, partial_bytes_per_us=profile.partial_bytes_per_us / price, reduction=reduction)


def _compile(one: Alternative) -> tuple[Any, int]:
    cell, tree = one.cell, one.cell.tree()
    pool = (int(tree.page_table(PAGE_SIZE)[1].max()) + 1, PAGE_SIZE, cell.num_kv_heads, cell.head_dim)
    layers = min(harness.layers_for(pool, jnp.bfloat16), 16)
    kv = [jax.ShapeDtypeStruct(pool, jnp.bfloat16)] * layers
    q = jax.ShapeDtypeStruct((tree.num_queries, cell.num_q_heads, cell.head_dim), jnp.bfloat16)
    return harness.over_layers(ta.tree_attention).lower(q, kv, kv, one.plan).compile(), layers


def _record(report: dict[str, Any], one: Alternative, kernels: dict[str, float]) -> None:
    plan = one.plan
    assert plan.host is not None
    named = {"tree": one.cell.name, "heads": list(one.cell.heads), "variant": one.name}
    report["launches"] += [{**named, **row} for row in launch_rows(plan, kernels)]
    for name, us in kernels.items():
        if "reduce" in name:
            counts = {"partials": plan.host.num_partials, "queries": plan.host.num_queries}
            report["reductions"].append({**named, "us": round(us, 3), **counts, "block": plan.shape.reduce_block})


def _show(cell: Cell | None, times: dict[str, tuple[float, float]]) -> None:
    if cell is not None:
        best = min(times, key=lambda name: times[name][0])
        first = next(iter(times))
        (us, modelled), (best_us, best_modelled) = times[first], times[best]
        better = "" if best == first else f"; {best} {best_us:.1f} us (modelled {best_modelled:.1f})"
        print(f"{cell.label:60s} {us:7.1f} us (modelled {modelled:.1f}){better}", flush=True)


def _lines(report: dict[str, Any]) -> str:
    """JSON with a line a row."""
    parts = []
    for name, value in report.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
