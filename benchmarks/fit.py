"""Fit the cost model's constants to measured launches, and write ``tree_attention_jax/planning/profiles/*.json``.

    python -m benchmarks.fit            # show; --write: also write the profiles

``benchmarks/calibrate.py`` measures each constant by itself, where it dominates; in real launches they act together,
and programs of several kinds share an SM. So its numbers are where the fit begins, and what it stays near: least
squares of the logarithms of the times in ``benchmarks/results/h200_alternatives.json``, robust against outliers, with a
penalty for every constant that moves by more than about a quarter. GPUs that nobody has measured get the H200's
constants scaled by the datasheets' ratios.

To these come launches of published strategies in FastTree's cells, of a kind that ``auto``'s plans lack
(``launches_of_named``). Tiles that came later (``LATER_SHAPES``) are fitted to their own launches while all else stays.

The reductions of the same plans are fitted likewise. Shown, too, is what the profile would choose among those plans.

What it costs that only one half of a Mosaic tile works (``cost.ONE_SIDED``) is not fitted with the rest: shown is how
well the profile in use meets ``h200_halves.json`` with it and with other values.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

import tree_attention_jax as ta
from benchmarks.launches import launch_rows
from benchmarks.suites import cells
from tree_attention_jax.planning import cost
from tree_attention_jax.planning.cost import launch_time, shape_table
from tree_attention_jax.planning.plan import make_problem
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.profile import GpuProfile, ReductionCost, TileCost, profile_for
from tree_attention_jax.planning.reduction import reduction_of
from tree_attention_jax.topology import TokenTree

RESULTS = Path(__file__).parent / "results"
PROFILES = Path(__file__).parents[1] / "tree_attention_jax" / "planning" / "profiles"
# Of the shapes that calibrate.py measures, those that some plan was fastest with. (rows, block_kv, warps, stages)
SHAPES = [
    (16, 16, 1, 2),
    (16, 32, 1, 3),
    (16, 64, 2, 3),
    (16, 64, 4, 5),
    (16, 128, 4, 3),
    (32, 64, 4, 5),
    (64, 64, 4, 3),
    (128, 32, 4, 5),
    (128, 64, 4, 3),
]
# Those that came later, fitted to launches of their own while all else stays as it is.
LATER_SHAPES = [(16, 128, 4, 3)]
# ... but for how slowly they read device memory if they mask: as one warp does, since few launches of theirs show it.
LATER_MASKED_MEMORY = 1.12
# The wide tile of Mosaic's kernels, which calibrate.py does not measure; and where its fit begins, by hand, from the
# first launches seen. A masked step costs a long tile about what a plain one does: its halves work apart.
MOSAIC_SHAPE = (128, 32, 4, 5)
NAMED_SHAPE, NAMED_MOST_US = (16, 32, 1, 3), 600.0
MOSAIC_COSTS = {
    "item_us": 4.7,
    "step_us": 0.42,
    "mixed_step_us": 0.43,
    "masked_step_us": 0.55,
    "latency_us": 0.42,
    "mixed_latency_us": 0.43,
    "masked_latency_us": 0.55,
}
# Where the fit begins: a masked step waits for the intervals too, before it can weigh what it loaded.
MASKED_LATENCY = 1.5
RATES = {"bytes_per_us": 4.3e6, "l2_bytes_per_us": 6.3e6}
KNOWN: dict[str, Any] = {"name": "NVIDIA H200", "num_sms": 132, "partial_bytes_per_us": 3.7e6, "launch_us": 3.0}
# Where the fit of reductions begins. How fast partials are written, and how many the L2 holds, stays as it is: that is
# what the launches that write them, and the longest reductions, are met best with.
REDUCTION = ReductionCost(
    launch_us=2.5,
    row_us=2e-4,
    write_bytes_per_us=7.4e6,
    read_bytes_per_us=1e7,
    near_bytes=17e6,
    far_bytes_per_us=3e6,
    round_us=1.0,
)
FITTED = ("launch_us", "row_us", "read_bytes_per_us", "far_bytes_per_us", "round_us")
# Standard deviations, of logarithms: of a launch's time, and of how far a constant may be from where it begins.
TIME_ERROR, CONSTANT_ERROR = 0.08, 0.25
# From datasheets: SMs, device memory, L2 (both relative), and how much longer an SM takes for the same work.
SCALED = {
    "h100": ("NVIDIA H100", 132, 0.70, 0.95, 1.0),
    "a100": ("NVIDIA A100", 108, 0.41, 0.63, 1.6),
    "l4": ("NVIDIA L4", 58, 0.06, 0.24, 2.4),
    "generic": ("generic", 108, 0.41, 0.63, 1.6),
}
# Of similar shapes one will do where nothing is measured: each more is more programs to compile as a tree grows.
SCALED_SHAPES = [(16, 16, 1, 2), (16, 32, 1, 3), (16, 64, 4, 5), (64, 64, 4, 3), (128, 64, 4, 3)]
COSTS = [field.name for field in fields(TileCost) if field.name.endswith("_us")]
ROUNDED = [*COSTS, "masked_memory"]
# Tiles of so many rows may read device memory more slowly if they mask: programs wait longer, with fewer bytes on their
# way.
NARROW = 16


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the profiles")
    parser.add_argument("--leave-out", action="store_true", help="also show the error of trees left out of the fit")
    args = parser.parse_args(argv)
    tiles = json.loads((RESULTS / "h200_tiles.json").read_text())["tiles"]
    measured = json.loads((RESULTS / "h200_alternatives.json").read_text())
    begin, launches = first_guess(tiles, measured["environment"]), [*measured["launches"], *launches_of_named()]
    reduction = fit_reduction(measured["reductions"])
    begin = replace(begin, reduction=reduction)
    error = np.sqrt(np.mean(np.square(reduction_errors(begin, measured["reductions"]))))
    print(f"reductions: {error:.3f}, {len(measured['reductions'])} of them; {reduction}")
    found = fit_all(begin, launches)
    for profile, what in ((begin, "calibrated"), (found, "fitted")):
        error = np.sqrt(np.mean(np.square(errors(profile, launches))))
        print(f"{what}: {error:.3f} root mean square of log(modelled / measured), {len(launches)} launches")
    for before, after in zip(begin.tiles, found.tiles):
        changes = [f"{name} {getattr(before, name):.3f} to {getattr(after, name):.3f}" for name in ROUNDED]
        kernel = "Mosaic" if after.mosaic else f"{after.warps} warps"
        print(f"{after.rows} x {after.block_kv}, {kernel}: {', '.join(changes)}")
    show_choices(found, measured)
    show_one_sided(json.loads((RESULTS / "h200_halves.json").read_text())["launches"])
    if args.leave_out:
        error = np.sqrt(np.mean(np.square(left_out(begin, launches))))
        print(f"fitted to the launches of all other trees: {error:.3f}")
    if args.write:
        _write("h200", found)
        for file, (name, sms, memory, l2, slower) in SCALED.items():
            _write(file, scaled(found, name, sms, memory, l2, slower))
    return 0


def launches_of_named() -> list[dict[str, Any]]:
    """Launches of the published strategies' plans, in FastTree's cells: those of the smallest tile worth planning with.

    ``auto``'s plans hardly have any of these without masks, and then mostly for a single KV head.
    """
    found = []
    by_name = {(cell.name, cell.heads): cell for cell in cells("fasttree")}
    for row in json.loads((RESULTS / "h200_fasttree_strategies.json").read_text())["rows"]:
        cell = by_name[row["tree"], tuple(row["heads"])]
        plan = ta.plan_tree(
            cell.tree(),
            page_size=cell.page_size,
            num_q_heads=cell.num_q_heads,
            num_kv_heads=cell.num_kv_heads,
            head_dim=cell.head_dim,
            strategy=row["strategy"],
            gpu=KNOWN["name"],
        )
        if plan.host is None or list(plan.host.num_items) != row["items"]:
            continue  # that strategy's plan is another one by now
        named = {"tree": cell.name, "heads": list(cell.heads), "variant": row["strategy"]}
        for launch in launch_rows(plan, row["kernels"]):
            if tuple(launch["tile"]) == NAMED_SHAPE and not launch["mosaic"] and launch["us"] < NAMED_MOST_US:
                found.append({**named, **launch})
    return found


def show_choices(profile: GpuProfile, measured: dict[str, list[dict[str, Any]]]) -> None:
    """How far the plan that the profile would choose, of those measured for a tree, is from the fastest of them."""
    ratios = [(us / best, name) for name, us, best in choices(profile, measured)]
    logs = np.log([ratio for ratio, _ in ratios])
    worst, where = max(ratios)
    print(
        f"chosen among the plans measured: {np.exp(logs.mean()):.3f} times the fastest (geometric mean), {worst:.2f} "
        f"at worst ({where}), of {len(ratios)} trees and heads"
    )


def choices(profile: GpuProfile, measured: dict[str, list[dict[str, Any]]]) -> list[tuple[str, float, float]]:
    """Of each tree and heads: its name, the time of the plan chosen, and that of the fastest one measured."""
    plans: dict[str, dict[str, np.ndarray]] = {}
    for kind, found in (("launches", errors), ("reductions", reduction_errors)):
        rows = measured[kind]
        for row, error in zip(rows, found(profile, rows)):
            cell = "{} {}/{}".format(row["tree"], *row["heads"])
            times = plans.setdefault(cell, {}).setdefault(row["variant"], np.zeros(2))
            times += row["us"], row["us"] * np.exp(error)
    out = []
    for cell, variants in plans.items():
        us, modelled = np.array(list(variants.values())).T
        out.append((cell, float(us[modelled.argmin()]), float(us.min())))
    return out


def show_one_sided(launches: list[dict[str, Any]]) -> None:
    profile = profile_for(KNOWN["name"])
    in_use = cost.ONE_SIDED
    try:
        for value in sorted({*np.linspace(0, 2, 5).tolist(), in_use}):
            cost.ONE_SIDED = value
            cost.shape_table.cache_clear()
            found = errors(profile, launches)
            error = np.sqrt(np.mean(np.square(found)))
            mark = " (in use)" if value == in_use else ""
            print(f"one half alone, {value:.1f} more{mark}: {error:.3f}, mean {found.mean():+.3f}, of uneven trees")
    finally:
        cost.ONE_SIDED = in_use
        cost.shape_table.cache_clear()


def first_guess(tiles: list[dict[str, Any]], environment: dict[str, str]) -> GpuProfile:
    """A profile of calibrate.py's numbers."""
    by_shape = {(tile["rows"], tile["block_kv"], tile["warps"], tile["stages"]): tile for tile in tiles}
    costs = []
    for shape in SHAPES:
        tile = by_shape[shape]
        latency = {"mixed_latency_us": tile["latency_us"], "masked_latency_us": MASKED_LATENCY * tile["latency_us"]}
        named = {field.name: tile[field.name] for field in fields(TileCost) if field.name in tile}
        costs.append(TileCost(**{**named, **latency}))
    costs.append(TileCost(*MOSAIC_SHAPE, **MOSAIC_COSTS, mosaic=True))
    source = f"fitted: benchmarks/fit.py, jax {environment['jax']}, {environment['date']}"
    return GpuProfile(**KNOWN, **RATES, source=source, reduction=REDUCTION, tiles=tuple(costs))


def fit_reduction(reductions: list[dict[str, Any]]) -> ReductionCost:
    start = np.log([getattr(REDUCTION, name) for name in FITTED])
    profile = profile_for(KNOWN["name"])

    def cost_of(logs: np.ndarray) -> ReductionCost:
        return replace(REDUCTION, **dict(zip(FITTED, np.exp(logs).tolist())))

    def residuals(logs: np.ndarray) -> np.ndarray:
        missed = reduction_errors(replace(profile, reduction=cost_of(logs)), reductions)
        return np.concatenate([missed / TIME_ERROR, (logs - start) / CONSTANT_ERROR])

    found = cost_of(least_squares(residuals, start, loss="soft_l1").x)
    return replace(found, **{name: float(f"{getattr(found, name):.2g}") for name in FITTED})


def reduction_errors(profile: GpuProfile, reductions: list[dict[str, Any]]) -> np.ndarray:
    """log(modelled / measured) of each reduction, without the writing of its partials."""
    out = np.empty(len(reductions))
    for index, row in enumerate(reductions):
        problem = _problem(profile, row["heads"], row["queries"])
        cost = reduction_of(problem)
        us = cost.time(np.array(row["partials"])) - row["partials"] * cost.write_us
        out[index] = np.log(us / row["us"])
    return out


def _problem(profile: GpuProfile, heads: Sequence[int], queries: int = 1) -> Problem:
    """Of so many queries."""
    problem = make_problem(TokenTree([-1], [queries], [queries]), 16, *heads, 128, gpu=KNOWN["name"])
    return replace(problem, profile=profile)


def fit(begin: GpuProfile, launches: list[dict[str, Any]], moving: Sequence[int] | None = None) -> GpuProfile:
    """``moving``: tiles whose costs are fitted, and nothing else is; None: all of them, and the rates."""
    rates = list(RATES) if moving is None else []
    which = list(range(len(begin.tiles))) if moving is None else list(moving)
    narrow = [index for index in which if begin.tiles[index].rows <= NARROW and moving is None]
    costs = [getattr(begin.tiles[index], cost) for index in which for cost in COSTS]
    factors = [begin.tiles[index].masked_memory for index in narrow]
    start = np.log([*(getattr(begin, rate) for rate in rates), *costs, *factors])

    def profile_of(logs: np.ndarray) -> GpuProfile:
        found, costs, memory = np.split(np.exp(logs), [len(rates), len(logs) - len(narrow)])
        tiles = list(begin.tiles)
        for index, row in zip(which, costs.reshape(-1, len(COSTS))):
            tiles[index] = replace(tiles[index], **dict(zip(COSTS, row.tolist())))
        for index, factor in zip(narrow, memory.tolist()):
            tiles[index] = replace(tiles[index], masked_memory=max(1.0, factor))
        return replace(begin, **dict(zip(rates, found.tolist())), tiles=tuple(tiles))

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(profile_of(logs), launches) / TIME_ERROR, (logs - start) / CONSTANT_ERROR])

    found = profile_of(least_squares(residuals, start, loss="soft_l1").x)
    tiles = [replace(tile, **{name: round(getattr(tile, name), 3) for name in ROUNDED}) for tile in found.tiles]
    return replace(found, **{rate: round(getattr(found, rate), -4) for rate in RATES}, tiles=tuple(tiles))


def fit_all(begin: GpuProfile, launches: list[dict[str, Any]]) -> GpuProfile:
    """First all but the tiles that came later, by launches of others; then these, by theirs."""
    later = [not row["mosaic"] and tuple(row["tile"]) in LATER_SHAPES for row in launches]
    earlier_tiles = tuple(tile for tile in begin.tiles if not _is_later(tile))
    found = fit(replace(begin, tiles=earlier_tiles), [row for row, is_later in zip(launches, later) if not is_later])
    earlier = iter(found.tiles)
    tiles = tuple(
        replace(tile, masked_memory=LATER_MASKED_MEMORY) if _is_later(tile) else next(earlier) for tile in begin.tiles
    )
    moving = [index for index, tile in enumerate(tiles) if _is_later(tile)]
    return fit(replace(found, tiles=tiles), [row for row, is_later in zip(launches, later) if is_later], moving)


def _is_later(tile: TileCost) -> bool:
    return not tile.mosaic and (tile.rows, tile.block_kv, tile.warps, tile.stages) in LATER_SHAPES


def left_out(begin: GpuProfile, launches: list[dict[str, Any]]) -> np.ndarray:
    """:func:`errors` of each launch, by a fit to those of the other trees."""
    out = np.empty(len(launches))
    for tree in {row["tree"] for row in launches}:
        mine = np.array([row["tree"] == tree for row in launches])
        found = fit_all(begin, [row for row, here in zip(launches, mine) if not here])
        out[mine] = errors(found, [row for row, here in zip(launches, mine) if here])
    return out


def errors(profile: GpuProfile, launches: list[dict[str, Any]]) -> np.ndarray:
    """log(modelled / measured) of each launch."""
    out = np.empty(len(launches))
    of_heads: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(launches):
        of_heads.setdefault(tuple(row["heads"]), []).append(index)
    for heads, indices in of_heads.items():
        problem = _problem(profile, heads)
        shapes = shape_table(profile, problem.heads, problem.unit, problem.unit)  # all, whatever JAX this is
        place = {(t.rows, t.block_kv, t.warps, t.stages, t.mosaic): i for i, t in enumerate(shapes.tiles)}
        rows = [launches[i] for i in indices]

        def column(name: str, rows: list[dict[str, Any]] = rows) -> np.ndarray:
            return np.array([row.get(name, 0.0) for row in rows], np.float64)

        launch = np.array([2 * place[(*row["tile"], row["mosaic"])] + (row["can_mask"] > 0) for row in rows])
        costs = shapes.launches(launch, column("masked"), column("one_sided"))
        memory = column("tokens") * problem.heads.token_bytes / profile.bytes_per_us * shapes.launch_memory[launch]
        us = launch_time(profile, costs, column("steps"), column("items"), column("longest"), memory)
        us += column("partials") * reduction_of(problem).write_us  # which the model adds to the reduction
        out[indices] = np.log(us / column("us"))
    return out


def scaled(profile: GpuProfile, name: str, sms: int, memory: float, l2: float, slower: float) -> GpuProfile:
    """Another GPU's, by ratios; latencies are taken to be the same."""
    work = [cost for cost in COSTS if "latency" not in cost]
    tiles = [
        replace(tile, **{c: round(getattr(tile, c) * slower, 3) for c in work})
        for tile in profile.tiles
        if ("H100" in name if tile.mosaic else (tile.rows, tile.block_kv, tile.warps, tile.stages) in SCALED_SHAPES)
    ]
    reduction = profile.reduction
    return replace(
        profile,
        name=name,
        source="scaled: H200 by the datasheets' bandwidth and matrix rate",
        num_sms=sms,
        bytes_per_us=round(profile.bytes_per_us * memory, -4),
        l2_bytes_per_us=round(profile.l2_bytes_per_us * l2, -4),
        partial_bytes_per_us=round(profile.partial_bytes_per_us * memory, -4),
        reduction=replace(
            reduction,
            row_us=float(f"{reduction.row_us * slower:.2g}"),
            write_bytes_per_us=float(f"{reduction.write_bytes_per_us * l2:.2g}"),
            read_bytes_per_us=float(f"{reduction.read_bytes_per_us * l2:.2g}"),
            far_bytes_per_us=float(f"{reduction.far_bytes_per_us * memory:.2g}"),
        ),
        tiles=tuple(tiles),
    )


def _write(file: str, profile: GpuProfile) -> None:
    (PROFILES / f"{file}.json").write_text(json.dumps(asdict(profile), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
