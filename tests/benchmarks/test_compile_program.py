"""``benchmarks.compile``: its parts at small sizes, and how it reads profiles and dumps."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import compile as program
from benchmarks import graphs, traces


def profile(**planes: list) -> SimpleNamespace:
    """As ``jax.profiler.ProfileData``: plane name -> (line name, [(event name, start, duration)])."""
    return SimpleNamespace(
        planes=[
            SimpleNamespace(
                name=name.replace("_GPU", "/device:GPU:").replace("_host", "/host:"),
                lines=[
                    SimpleNamespace(
                        name=line,
                        events=[SimpleNamespace(name=n, start_ns=s, duration_ns=d) for n, s, d in events],
                    )
                    for line, events in lines
                ],
            )
            for name, lines in planes.items()
        ]
    )


def test_a_trace_is_the_first_gpu_s_streams():
    kernels = [("a", 1000, 2000), ("b", 5000, 1000)]
    found = traces.read(
        [
            profile(
                _GPU0=[("Stream #1(Compute)", kernels), ("XLA Ops", [("a", 0, 99_000)])],
                _GPU1=[("Stream #1(Compute)", kernels)],
                _hostCPU=[("python", [("cuGraphLaunch", 0, 1), ("cuLaunchKernelEx", 0, 1), ("cuLaunchKernel", 0, 1)])],
            )
        ]
    )
    assert found.kernels == [("a", 1.0, 3.0), ("b", 5.0, 6.0)]
    assert (found.graph_launches, found.kernel_launches) == (1, 2)
    assert found.span_us() == 5.0
    assert found.idle_us() == 2.0
    assert found.busy_us() == 3.0


def test_kernels_that_overlap_leave_no_gap():
    found = traces.Trace([("a", 0.0, 10.0), ("b", 1.0, 2.0), ("c", 9.0, 12.0), ("d", 15.0, 16.0)])
    assert found.idle_us() == 3.0


def test_without_a_gpu_the_profiler_sees_no_kernel():
    with pytest.raises(RuntimeError, match="saw no kernel"):
        traces.record(lambda: None)


@pytest.mark.slow
def test_the_programs_attend_alike():
    """In a jit, a scan and a while loop: the loops run the same steps, with a token more each."""
    results = {}
    for name, (call, arguments, calls) in graphs.programs(tiny=True).items():
        assert calls >= 2
        results[name] = np.asarray(call(*arguments))
    np.testing.assert_allclose(results["scan"], results["while"], rtol=1e-5)
    assert np.isfinite(results["jit"]).all()


@pytest.fixture
def process(monkeypatch):
    """What the measuring processes do, by the flags they get."""

    def replace(run):
        monkeypatch.setattr(subprocess, "run", lambda command, **options: run(options["env"]["XLA_FLAGS"]))

    return replace


def done(stdout: str = "", code: int = 0, stderr: str = "") -> SimpleNamespace:
    return SimpleNamespace(stdout=stdout, returncode=code, stderr=stderr)


def test_each_setting_is_a_process_of_its_own(process):
    flags = []

    def run(given):
        flags.append(given)
        if "min_graph_size" in given:
            raise subprocess.TimeoutExpired("python", 120)
        if "enable_command_buffer=" in given:
            return done(json.dumps({"program": "jit", "wall_us": 2.0}) + "\n", 1, "Unknown flag")
        rows = [{"program": name, "wall_us": 1.0, "graph_launches": 1} for name in graphs.PROGRAMS]
        return done("a warning\n" + "\n".join(map(json.dumps, rows)))

    process(run)
    found = graphs.measure(tiny=True)
    assert len(found) == 9
    assert [row["wall_us"] for row in found[:3]] == [1.0] * 3
    assert found[3]["wall_us"] == 2.0
    assert [row["failed"] for row in found[4:6]] == ["exit 1: Unknown flag"] * 2
    assert [row["failed"] for row in found[6:]] == ["took longer than 120 s"] * 3
    assert all("--xla_dump_to=" in given for given in flags)
    assert all("command_buffers_during_profiling=true" in given for given in flags)


def test_command_buffers_in_a_dump(tmp_path):
    (tmp_path / "module_0001.jit_scan_.gpu_after_optimizations.txt").write_text("call, to_apply=%command_buffer\n")
    (tmp_path / "module_0001.jit_scan_.thunk_sequence.txt").write_text("kCommandBuffer kCommandBuffer")
    (tmp_path / "module_0001.jit_scan_.before_optimizations.txt").write_text("command_buffer")
    (tmp_path / "module_0002.jit_other.thunk_sequence.txt").write_text("kCommandBuffer")
    assert graphs._mentions(tmp_path) == {"scan": 3}


def test_parts_and_their_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "compile.json"
    assert program.main(["--parts", "growth,tiles", "--tiny", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [row["plans"] for row in found["growth"]] == [4]
    assert 1 <= found["growth"][0]["programs"] <= 4
    assert [("masked" in row["tile"], row["compile_s"] > 0) for row in found["tiles"]] == [(False, True), (True, True)]
    assert "environment" in found


def test_a_part_that_fails_is_recorded(tmp_path, monkeypatch):
    def fail(tiny):
        raise MemoryError("too large")

    monkeypatch.setattr(program, "measure_gaps", fail)
    path = tmp_path / "compile.json"
    assert program.main(["--parts", "gaps", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["gaps"] == [{"failed": "MemoryError: too large"}]


def test_unknown_parts_are_named(capsys):
    with pytest.raises(SystemExit):
        program.main(["--parts", "graphs,gap"])
    assert "--parts: gap unknown: known are graphs, tiles" in capsys.readouterr().err
