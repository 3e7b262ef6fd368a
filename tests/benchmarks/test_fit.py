"""The cost model's constants come from the recorded measurements, and the plans measured for them are right."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import alternatives, fit
from benchmarks.launches import launch_rows
from benchmarks.suites import cells
from tree_attention_jax.planning.profile import load_profiles


def recorded() -> tuple[list[dict], dict]:
    tiles = json.loads((fit.RESULTS / "h200_tiles.json").read_text())["tiles"]
    return tiles, json.loads((fit.RESULTS / "h200_alternatives.json").read_text())


def constants(profile) -> np.ndarray:
    rates = [getattr(profile, rate) for rate in fit.RATES]
    return np.array([*rates, *(getattr(tile, cost) for tile in profile.tiles for cost in fit.COSTS)])


@pytest.mark.slow
def test_the_profile_is_what_the_fit_finds():
    tiles, measured = recorded()
    begin = fit.first_guess(tiles, measured["environment"])
    launches = [*measured["launches"], *fit.launches_of_named()]
    found = fit.fit_all(replace(begin, reduction=fit.fit_reduction(measured["reductions"])), launches)
    assert found.reduction == load_profiles()["NVIDIA H200"].reduction
    np.testing.assert_allclose(constants(found), constants(load_profiles()["NVIDIA H200"]), rtol=0.1)
    before, after = (np.sqrt(np.mean(fit.errors(one, measured["launches"]) ** 2)) for one in (begin, found))
    assert after < 0.08 < before
    ratios = np.array([us / best for _, us, best in fit.choices(found, measured)])
    assert ratios.min() >= 1  # of the fastest plan measured
    assert np.exp(np.log(ratios).mean()) < 1.02
    assert ratios.max() < 1.15


def test_launches_of_named_strategies_are_those_recorded():
    launches = fit.launches_of_named()
    assert len(launches) > 80
    assert {tuple(row["tile"]) for row in launches} == {fit.NAMED_SHAPE}
    assert {tuple(row["heads"]) for row in launches} == {(16, 1), (32, 8), (32, 32)}
    assert all(row["steps"] >= row["items"] > 0 for row in launches)


def test_errors_are_logarithms_of_modelled_over_measured():
    tiles, measured = recorded()
    profile = fit.first_guess(tiles, measured["environment"])
    rows = measured["launches"][::20]
    twice = [{**row, "us": 2 * row["us"]} for row in rows]
    np.testing.assert_allclose(fit.errors(profile, twice), fit.errors(profile, rows) - np.log(2), rtol=1e-9)


def test_scaled_profiles_are_of_the_fit():
    h200, a100 = load_profiles()["NVIDIA H200"], load_profiles()["NVIDIA A100"]
    name, sms, memory, l2, slower = fit.SCALED["a100"]
    assert fit.scaled(h200, name, sms, memory, l2, slower).tiles == a100.tiles
    assert a100.source.startswith("scaled")


@pytest.mark.parametrize("label", ["1,2,64_8,256,32 32/8", "1,10_4000,400 16/1"])
def test_alternatives_are_different_and_exact(label: str):
    cell = next(cell for cell in cells("fasttree") if cell.label.startswith(label))
    found = list(alternatives.alternatives(cell, gpu="NVIDIA H200"))
    assert found[0].name == "auto"
    assert len(found) > 3
    assert len({one.plan.shape for one in found}) > 1
    for one in found:
        one.plan.check(cell.tree())


def test_launches_of_a_measured_plan_are_rows_for_the_fit():
    (cell,) = [cell for cell in cells("fasttree") if cell.label == "1,16,64_1024,256,32 16/1"]
    (one,) = [one for one in alternatives.alternatives(cell, gpu="NVIDIA H200") if one.name == "auto"]
    names = [launch.tile.name() for launch in one.plan.shape.launches]
    kernels = {f"tree_partial_{name}": 10.0 + i for i, name in enumerate(names)} | {"tree_reduce": 3.0}
    rows = launch_rows(one.plan, kernels)
    assert [row["us"] for row in rows] == [10.0 + i for i in range(len(names))]
    assert [row["items"] for row in rows] == list(one.plan.host.num_items)
    assert sum(row["partials"] for row in rows) == one.plan.host.num_partials
    rows = [{"tree": cell.name, "heads": list(cell.heads), **row} for row in rows]
    assert np.isfinite(fit.errors(load_profiles()["NVIDIA H200"], rows)).all()
    assert launch_rows(one.plan, {"tree_reduce": 3.0}) == []
