"""``benchmarks.kernels`` whole, on small cells: what it records of ours and of peers that run, refuse, fail or err."""

from __future__ import annotations

import fcntl
import json
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness, kernels
from benchmarks.peers import Ready, Unsuitable, jax_own
from benchmarks.suites import Cell

# Whole programs, each of which compiles many small ones.
pytestmark = pytest.mark.slow

CELLS = [Cell("1,2,4_32,16,8", 4, 2, head_dim=16), Cell("2x32+draft16", 4, 2, head_dim=16)]


class Oracle:
    """A peer that is right."""

    name = "oracle"

    def prepare(self, inputs):
        ready = jax_own.JaxAttention("xla").prepare(inputs)
        return Ready(ready.run, ready.wait, ready.output, ready.layers, note="as told")


class Wrong(Oracle):
    name = "wrong"

    def prepare(self, inputs):
        ready = super().prepare(inputs)
        return Ready(ready.run, ready.wait, lambda out: ready.output(out) * np.float32(1.1), ready.layers)


class Refusing:
    name = "refusing"

    def prepare(self, inputs):
        raise Unsuitable("only on Sundays")


class Failing:
    name = "failing"

    def prepare(self, inputs):
        raise ZeroDivisionError("in its planner")


@pytest.mark.parametrize("layers", [1, 3, 24, 32, 40])
def test_a_whole_call_goes_through_all_layers_equally_often(layers):
    ks, vs = [jnp.float32(1)] * layers, [jnp.float32(2**-10 * i) for i in range(layers)]
    q = jnp.float32(0)
    whole = harness.fed_back(lambda q, k, v: q + k + v, q, ks, vs).compile()
    run = harness.feeding_back(whole, q, ks, vs)
    turns = harness.turns(layers)
    once = sum(float(k + v) for k, v in zip(ks, vs))
    assert float(run()) == turns * once
    assert float(run()) == 2 * turns * once  # its own last result
    assert harness.WHOLE_CALL_LAYERS <= turns * layers < harness.WHOLE_CALL_LAYERS + layers


class Captured(Oracle):
    """Its graph cannot be captured."""

    name = "captured"

    def prepare(self, inputs):
        ready = super().prepare(inputs)

        def capture(turns):
            raise RuntimeError("an operation that no graph takes")

        return Ready(ready.run, ready.wait, ready.output, ready.layers, capture)


@pytest.fixture
def program(monkeypatch, clock_for_cupti, tmp_path):
    """Runs it with some peers: (exit code, what it wrote)."""
    monkeypatch.setattr(kernels, "cells", lambda suite: iter(CELLS))
    path = tmp_path / "out.json"

    def run(*arguments: str, peers: tuple = ()) -> tuple[int, dict]:
        monkeypatch.setattr(kernels, "find_peers", lambda spec: [peer() for peer in peers])
        code = kernels.main(["--json", str(path), *arguments])
        return code, json.loads(path.read_text())

    return run


def test_rows_of_ours(program, capsys):
    strategies = ["auto", "auto@pallas_triton", "per_query"]
    code, report = program("--only", "draft", "--strategies", ",".join(strategies), "--wall")
    assert code == 0
    assert [(row["tree"], row["strategy"]) for row in report["rows"]] == [(CELLS[1].name, name) for name in strategies]
    for row in report["rows"]:
        assert row["error"] < 0.01
        assert row["us"] > 0
        assert row["wall_us"] > 0
        assert row["floor_us"] >= 0
        assert row["heads"] == [4, 2]
        assert (row["head_dim"], row["page_size"]) == (16, 16)
    assert report["suite"] == "fasttree"
    assert report["environment"]["jax"] == jax.__version__
    assert "geometric mean" in capsys.readouterr().out


def test_peers_beside_ours(program, capsys):
    code, report = program("--only", "1,2,4", "--wall", peers=(Failing, Refusing, Wrong, Captured, Oracle))
    assert code == 0  # what a peer cannot do is no failure of this program
    rows = {row["peer"]: row for row in report["peers"]}
    assert rows["failing"]["failed"] == "ZeroDivisionError: in its planner"
    assert rows["refusing"]["why_not"] == "only on Sundays"
    assert "its result is wrong: relative error 1.0e-01" in rows["wrong"]["failed"]
    assert "no graph takes" in rows["captured"]["not_captured"]
    assert rows["captured"]["wall_us"] > 0
    assert rows["oracle"]["note"] == "as told"
    assert rows["oracle"]["error"] < 0.01
    assert "failed" not in rows["oracle"]
    shown = capsys.readouterr().out
    assert "only on Sundays" in shown
    assert "best peer / ours" in shown


def test_a_strategy_that_cannot_plan_is_recorded(program, monkeypatch):
    def compile_or_not(cell, strategy, wall):
        if strategy == "per_node":
            raise MemoryError("too many items")
        return compiled(cell, strategy, wall)

    compiled = kernels._compile
    monkeypatch.setattr(kernels, "_compile", compile_or_not)
    code, report = program("--only", "draft", "--strategies", "per_node,auto")
    assert code == 1
    assert [row.get("failed") for row in report["rows"]] == ["MemoryError: too many items", None]


def test_measures_only_while_it_has_the_lock(program, monkeypatch, tmp_path):
    """It compiles while another process has it."""
    compiled, measured, compile_it, measure = threading.Event(), threading.Event(), kernels._compile, harness.make_data
    monkeypatch.setattr(kernels, "_compile", lambda *job: [compile_it(*job), compiled.set()][0])
    monkeypatch.setattr(harness, "make_data", lambda *told: [measured.set(), measure(*told)][1])
    lock = tmp_path / "lock"
    run = threading.Thread(target=program, args=("--only", "draft", "--lock", str(lock)))
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run.start()
        assert compiled.wait(60)
        assert not measured.wait(0.5)
    run.join(60)
    assert measured.is_set()
    assert not run.is_alive()


def test_resume_adds_what_is_missing(program):
    program("--only", "1,2,4")
    before, _ = program("--only", "draft", "--resume", peers=(Refusing,))
    _, report = program("--resume", peers=(Refusing,))
    assert [row["tree"] for row in report["rows"]] == [cell.name for cell in CELLS]
    assert sorted(row["tree"] for row in report["peers"]) == [cell.name for cell in CELLS]
    assert before == 0


class Crash(BaseException):
    """Nothing that the program could catch."""


@pytest.mark.parametrize(("end", "left"), [(Crash, ["this process ended while it ran"]), (KeyboardInterrupt, [])])
def test_a_process_that_ends_leaves_the_name_of_a_guilty_peer(program, tmp_path, end, left):
    class Fatal(Failing):
        name = "fatal"

        def prepare(self, inputs):
            raise end

    arguments = ("--only", "draft", "--strategies", "none")
    with pytest.raises(end):
        program(*arguments, peers=(Fatal,))
    rows = json.loads((tmp_path / "out.json").read_text())["peers"]
    assert [row["failed"] for row in rows] == left
    _, report = program(*arguments, "--resume", peers=(Refusing, *((Fatal,) if left else ())))
    assert [row["peer"] for row in report["peers"]] == ["fatal"] * len(left) + ["refusing"]


def test_a_gpu_that_no_longer_answers_ends_the_run(program, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "_alive", lambda: False)
    code, report = program("--strategies", "none", peers=(Failing, Oracle))
    assert code == 3
    assert [row["peer"] for row in report["peers"]] == ["failing"]  # the rest is for --resume
    assert "--resume" in capsys.readouterr().out


def test_page_size_of_all_cells(program):
    _, report = program("--only", "1,2,4", "--page-size", "4")
    assert [row["page_size"] for row in report["rows"]] == [4]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--suite", "fastree"], "invalid choice: 'fastree'"),
        (["--strategies", "auto,best"], "--strategies: best unknown: known are"),
        (["--strategies", "auto,auto@cuda"], "--strategies: cuda unknown: known are xla, pallas_triton"),
        (["--peers", "pat"], "--peers: peer is 'pat': known are flashinfer"),
        (["--peers", "deft"], "--peers: peer deft needs a checkout"),
        (["--resume"], "--resume needs --json"),
    ],
)
def test_command_lines_that_say_what_is_wrong(arguments, told, capsys):
    with pytest.raises(SystemExit):
        kernels.main(arguments)
    assert told in capsys.readouterr().err


def test_no_cell_of_that_name():
    with pytest.raises(SystemExit, match="no cell of suite long has '16/1' in its label"):
        kernels.main(["--suite", "long", "--only", "16/1"])


class Cupti:
    """jaxlib's extension, with recorded events."""

    def __init__(self, events):
        self.events, self.on = events, False

    def _cupti_init(self):
        self.on = True

    def _cupti_get_timings(self, finalize):
        assert self.on
        self.on = False
        return self.events


@pytest.mark.parametrize(
    ("events", "wanted"),
    [
        ([("a", 2.0), ("b", 1.0)] * 2 + [("a", 8.0), ("b", 1.0)], {"a": 1000.0, "b": 500.0}),  # the median run
        ([("a", 1.0), ("a", 2.0), ("b", 6.0), ("a", 3.0)], {"a": 1000.0, "b": 1000.0}),  # runs unlike: their mean
    ],
)
def test_kernel_times_from_cupti(monkeypatch, events, wanted):
    from jax.experimental.mosaic.gpu import profiler

    calls = []
    monkeypatch.setattr(profiler, "mosaic_gpu_lib", types.SimpleNamespace(_mosaic_gpu_ext=Cupti(events)))
    found = harness.kernel_times_of(lambda: calls.append(1), lambda _: None, layers=2, repeats=3)
    assert found == pytest.approx(wanted)
    assert len(calls) == 4  # one to warm up


def test_kernel_times_without_cupti(monkeypatch):
    from jax.experimental.mosaic.gpu import profiler

    monkeypatch.setattr(profiler, "mosaic_gpu_lib", None)
    with pytest.raises(RuntimeError, match="need an NVIDIA GPU"):
        harness.kernel_times_of(lambda: None, lambda _: None, 1)
    monkeypatch.setattr(profiler, "mosaic_gpu_lib", types.SimpleNamespace(_mosaic_gpu_ext=Cupti([])))
    with pytest.raises(RuntimeError, match="saw no kernel"):
        harness.kernel_times_of(lambda: None, lambda _: None, 1)


def test_the_environment_names_what_peers_have_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(__version__="0.0.1"))
    assert harness.environment()["flashinfer"] == "0.0.1"


def test_the_commit_of_a_copy_without_git(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "__file__", str(tmp_path / "harness.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert "commit" not in harness.environment()
    monkeypatch.setenv("GIT_COMMIT", "abc1234")
    assert harness.environment()["commit"] == "abc1234"
