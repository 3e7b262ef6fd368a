"""Prices of launches: no bound may hide one that gains by a split."""

import numpy as np
import pytest

import tree_attention_jax as ta
from tree_attention_jax.planning.cost import ShapeTable, shapes_for
from tree_attention_jax.planning.plan import make_problem
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.profile import load_profiles
from tree_attention_jax.planning.strategies import _launches
from tree_attention_jax.planning.strategies._launches import SOME_GAIN, Blocks, Launches, blocks_of, price
from tree_attention_jax.planning.strategies.auto import SHORTEST_STEP


def random_launches(rng: np.random.Generator, problem: Problem, shapes: ShapeTable) -> tuple[Launches, Blocks]:
    """A few launches, each of one group of tiles, or of several groups of one tile each."""
    count, several = int(rng.integers(1, 12)), rng.random() < 0.5
    launch = rng.integers(0, 2 * len(shapes.tiles), count)
    groups = rng.integers(1, 40, count) if several else np.ones(count, int)
    of_group = np.arange(count).repeat(groups)
    first = np.cumsum(groups) - groups
    tiles = np.ones(len(of_group)) if several else rng.integers(1, 300, count).astype(float)
    # Of a tree that many tiles walk alike, or each its own part of.
    most = 10 ** rng.uniform(1, 4.5)
    tokens = np.ceil(most * rng.uniform(rng.choice([0.01, 0.9]), 1, len(of_group)))
    rows = np.ceil(rng.uniform(0, 1, len(of_group)) * shapes.queries.take(launch >> 1).take(of_group))
    rows = np.maximum(rows, 1)
    masked = rng.uniform(0, 1, count) * (launch & 1)
    one_sided = masked * rng.uniform(0, 1, count) * shapes.two_halves.take(launch >> 1)
    walked = np.add.reduceat(tokens * tiles, first)
    memory = rng.uniform(0.02, 1, count) * walked * problem.heads.token_bytes / problem.profile.bytes_per_us
    launches = Launches(launch, masked, one_sided, memory, None)
    return launches, Blocks(first, of_group, tiles, tokens, rows)


@pytest.mark.parametrize("gpu", load_profiles())
@pytest.mark.parametrize("heads", [(16, 1), (32, 8), (32, 32), (8, 8)], ids=str)
@pytest.mark.parametrize("hopeless", [np.inf, 1.25])
def test_bounds_change_nothing_that_counts(monkeypatch, gpu: str, heads: tuple[int, int], hopeless: float):
    rng = np.random.default_rng(heads)
    problem = make_problem(ta.TokenTree([-1], [64]), 16, *heads, gpu=gpu)
    shapes = shapes_for(problem, SHORTEST_STEP)
    found, whole = [], _launches._whole
    monkeypatch.setattr(_launches, "_whole", lambda *arguments: found.append(whole(*arguments)) or found[-1])
    for _ in range(200):
        arguments = problem, shapes, *random_launches(rng, problem, shapes), hopeless
        times, limits = price(*arguments)
        all_times, all_limits = price(*arguments, gains=True)
        enough = hopeless * all_times.min()
        counts = all_times <= enough
        np.testing.assert_array_equal(times[counts], all_times[counts])
        np.testing.assert_array_equal(limits[counts], all_limits[counts])
        assert (times[~counts] > enough).all()
    assert 10 < sum(times is not None for times in found) < 190


@pytest.mark.parametrize("gpu", load_profiles())
@pytest.mark.parametrize("heads", [(16, 1), (32, 8), (32, 32)], ids=str)
def test_a_few_launches_one_by_one(monkeypatch, gpu: str, heads: tuple[int, int]):
    rng = np.random.default_rng(heads)
    problem = make_problem(ta.TokenTree([-1], [64]), 16, *heads, gpu=gpu)
    shapes, splits, best_split = shapes_for(problem, SHORTEST_STEP), [], _launches._best_split
    monkeypatch.setattr(
        _launches, "_best_split", lambda *arguments: splits.append(best_split(*arguments)) or splits[-1]
    )
    for _ in range(400):
        launches, blocks = random_launches(rng, problem, shapes)
        count = len(launches.launch)
        if count <= SOME_GAIN and len(blocks.tokens) == count:
            # Of few tiles, and little to read: a long one is worth a split.
            blocks = blocks._replace(tiles=rng.integers(1, 9, count).astype(float))
            launches = launches._replace(memory=launches.memory / 100)
            for numbers, others in zip(
                price(problem, shapes, launches, blocks), price(problem, shapes, launches, blocks, gains=True)
            ):
                np.testing.assert_array_equal(numbers, others)
    assert sum(limit > 0 for _, limit in splits) > 5


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("partials", [False, True])
def test_groups_of_a_tile_need_no_ones(gains: bool, partials: bool):
    rng = np.random.default_rng(3)
    problem = make_problem(ta.TokenTree([-1], [64]), 16, 32, 8, gpu="NVIDIA H200")
    shapes = shapes_for(problem, SHORTEST_STEP)
    several = 0
    for _ in range(200):
        launches, blocks = random_launches(rng, problem, shapes)
        if partials:
            some = rng.integers(0, 2, len(launches.launch)) * rng.integers(64, 4000, len(launches.launch))
            launches = launches._replace(partials=some.astype(float))
        if (blocks.tiles == 1).all():
            several += 1
            expected = price(problem, shapes, launches, blocks, gains=gains)
            found = price(problem, shapes, launches, blocks._replace(tiles=None), gains=gains)
            for numbers, others in zip(found, expected):
                np.testing.assert_array_equal(numbers, others)
    assert several > 50


@pytest.mark.parametrize("gains", [False, True])
def test_equal_neighbours_may_be_one_group(gains: bool):
    rng = np.random.default_rng(4)
    problem = make_problem(ta.TokenTree([-1], [64]), 16, 32, 8, gpu="NVIDIA H200")
    shapes, grouped = shapes_for(problem, SHORTEST_STEP), 0
    for _ in range(200):
        launches, groups = random_launches(rng, problem, shapes)
        copies = groups.tiles.astype(int) * 40
        first = np.append(0, np.cumsum(copies))[groups.first]
        launch, tokens, rows = (column.repeat(copies) for column in (groups.launch, groups.tokens, groups.rows))
        expected = price(problem, shapes, launches, Blocks(first, launch, None, tokens, rows), gains=gains)
        blocks = blocks_of(first, launch, tokens, rows)
        grouped += blocks.tiles is not None
        for numbers, others in zip(price(problem, shapes, launches, blocks, gains=gains), expected):
            np.testing.assert_array_equal(numbers, others)
    assert grouped > 50
