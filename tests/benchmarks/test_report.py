"""Tables and pictures from result files, in a copy of the documents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import plots, report
from benchmarks.comparison import PeerTime, combined, fastest, key_of, mean, peer_times, recorded_times

pytest.importorskip("matplotlib")

ENVIRONMENT = {"device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-30"}


def row(tree: str = "1,2_32,16", us: float = 10.0, **more) -> dict:
    return {
        "tree": tree,
        "heads": [32, 8],
        "strategy": "auto",
        "us": us,
        "floor_us": 5.0,
        "modelled_us": 11.0,
        "error": 0.002,
        **more,
    }


def peer(name: str, us: float, tree: str = "1,2_32,16", **more) -> dict:
    return {"tree": tree, "heads": [32, 8], "peer": name, "us": us, **more}


@pytest.fixture
def root(tmp_path) -> Path:
    """README.md, docs/ and benchmarks/results/ as they are."""
    for name in ("README.md", "docs/performance.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(report.ROOT / name, tmp_path / name)
    shutil.copytree(report.ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    return tmp_path


def write(root: Path, name: str, **parts) -> None:
    (root / "benchmarks" / "results" / f"h200_{name}.json").write_text(
        json.dumps({"environment": ENVIRONMENT, **parts})
    )


def forget(root: Path, section: str, title: str) -> None:
    """As if it had never been measured."""
    (root / "benchmarks" / "results" / f"h200_{section}.json").unlink()
    text = (root / "docs" / "performance.md").read_text()
    begin, end = text.index(f"## {title}"), text.index(f"<!-- end {section} -->")
    (root / "docs" / "performance.md").write_text(text[:begin] + text[end:].removeprefix(f"<!-- end {section} -->"))


def test_documents_show_what_the_results_say(root):
    """So nobody has typed a number, nor forgotten to run the program."""
    before = {name: (root / name).read_text() for name in ("README.md", "docs/performance.md")}
    assert report.main(root) == 0
    for name, text in before.items():
        assert (root / name).read_text() == text, f"run python -m benchmarks.report: {name} is not up to date"
    for name in ("fasttree_speedup.png", "fasttree_times.png"):
        assert (root / "docs" / "pictures" / name).stat().st_size > 10_000
        assert (report.ROOT / "docs" / "pictures" / name).is_file()


def test_peers_beside_ours_replace_recorded_ones(root):
    write(root, "peers", rows=[{"tree": "1,2_32,16", "heads": [32, 8], "us": {"PAT": 15.0, "FastTree": 8.0}}])
    write(
        root,
        "fasttree",
        rows=[row(wall_us=10.5, plan_ms=0.16)],
        peers=[peer("FastTree", 30.0, wall_us=20.0), peer("DeFT", 90.0)],
    )
    report.main(root)
    text = (root / "README.md").read_text()
    assert "| all | 1.50 | 1 of 1 |" in text
    assert "Planning takes 0.16 ms of the host a step (median, beside processes that compile); counted in full" in text
    assert "Cells measured" not in text  # all of one commit
    assert "the ratio is 1.00." in text  # 15 us against 10 + 5
    assert "Measured beside ours in one process: DeFT, FastTree." in text
    assert "Recorded in runs of their own on the same kind of machine: PAT." in text
    assert "| 15.0 PAT | 1.50 |" in (root / "docs" / "performance.md").read_text()
    # 20 us of FastTree's as a CUDA graph, against 10.5
    assert "ahead of the best whole call beside them in 1 of 1 cells, 1.90 times" in text


def test_cells_of_several_commits_are_told_apart(root):
    trees = {"1,2_32,16": "abc1234", "1,4_32,16": "abc1234", "1,8_32,16": "0123456"}
    cells = [row(tree, wall_us=10.5, commit=commit) for tree, commit in trees.items()]
    write(root, "fasttree", rows=cells, peers=[peer("FastTree", 30.0)])
    report.main(root)
    told = "Cells measured: 2 at abc1234 (heads 32/8); 1 at 0123456 (heads 32/8), each with its peers."
    assert told in (root / "README.md").read_text()


def test_other_suites_appear_when_they_are_measured(root):
    forget(root, "verify", "Draft verification")
    assert "## Draft verification" not in (root / "docs" / "performance.md").read_text()
    drafts = [row("16x2048+draft64", 120.0, tflops=290.0), row("16x2048+draft64", 400.0) | {"strategy": "per_query"}]
    refused = [{"tree": "16x2048+draft64", "heads": [32, 8], "peer": "FastTree", "why_not": "it takes one root"}]
    write(root, "verify", rows=drafts, peers=[peer("FlashInfer mask", 150.0, "16x2048+draft64"), *refused])
    write(root, "long", rows=[row("256_4096", copy_share=0.96)])
    for _ in range(2):  # the second time the sections are there
        report.main(root)
    text = (root / "docs" / "performance.md").read_text()
    assert text.count("## Draft verification") == 1
    assert "| 16x2048+draft64 | 32/8 | 128 | 16 | 5.0 | 120.0 | 400.0 | - | 150.0 FlashInfer mask | 290.0 |" in text
    assert "Left out: FastTree: it takes one root." in text
    assert "| 256_4096 | 32/8 | 128 | 16 | 5.0 | 10.0 | - | - | 96% |" in text
    assert text.index("## Draft verification") < text.index("## Known and open")


def test_whole_decoding_steps(root):
    step = {"workload": "bestof64", "model": "llama-3-8b", "horizon": 16, "steps_per_s": 50.0, "tokens_per_s": 3200.4}
    costs = {"attention_ms_per_step": 1.25, "attention_share": 0.125, "plan_ms_per_step": 0.3, "kv_gb_read": 427.0}
    costs |= {"kv_gb_saved": 9.0, "steps": 100, "attention_at": "middle"}
    done = {**step, **costs, "strategy": "auto", "device_idle_share": None, "environment": ENVIRONMENT}
    apart = {**done, "strategy": "per_query", "tokens_per_s": 1600.2, "kv_gb_saved": 0}
    write(root, "decode", rows=[apart, done, {**step, "strategy": "jax", "error": "out of memory"}])
    report.main(root)
    text = (root / "docs" / "performance.md").read_text()
    commit = ENVIRONMENT.get("commit", "-")
    assert f"| bestof64 | llama-3-8b | auto | 50.0 | 3200 | - | 1.2 | 12% | 1.0 | - | 0.30 | {commit} |" in text
    assert f"| bestof64 | llama-3-8b | per_query | 50.0 | 1600 | 2.00 | 1.2 | 12% | - | - | 0.30 | {commit} |" in text
    assert "| bestof64 | llama-3-8b | 3,200 | 2.00 | - | - |" in (root / "README.md").read_text()
    plain = {**done, "strategy": "jax", "tokens_per_s": 1000.0}
    write(root, "decode", rows=[plain, *({**row, "device_idle_share": 0.03} for row in (apart, done))])
    report.main(root)
    assert "| bestof64 | llama-3-8b | 3,200 | 2.00 | 3.20 | 3% |" in (root / "README.md").read_text()
    write(root, "decode", rows=[done])  # with nothing beside it
    report.main(root)
    assert "not measured yet" in (root / "README.md").read_text()
    assert "| jax |" not in text[text.index("Whole decoding steps") :].split("<!-- end")[0]


def test_compiling_and_launching(root):
    seconds = {"lower_s": 0.5, "compile_s": 1.5, "first_call_s": 0.01}
    write(
        root,
        "compile",
        tiles=[{"tile": "16 x 16", **seconds}, {"tile": "odd", "failed": "no"}],
        plans=[{"plan": "1,2_3,4 32/8", "launches": 3, **seconds}],
        growth=[
            {"tree": "1,64_4000", "first_tokens": 16, "last_tokens": 512, "horizon": 16, "plans": 32, "programs": 3}
        ],
        graphs=[
            {
                "flags": "",
                "program": "scan",
                "graph_launches": 8,
                "kernel_launches": 0,
                "in_dump": 3,
                "wall_us": 12.0,
            },
            {"flags": "off", "program": "scan", "failed": "exit 1"},
        ],
        gaps=[
            {
                "model": "llama",
                "tree": "64 samples",
                "layers": 32,
                "step_us": 9000.0,
                "idle_us": 90.0,
                "idle_share": 0.01,
                "kernels": 400,
            }
        ],
    )
    report.main(root)
    text = (root / "docs" / "performance.md").read_text()
    assert "| 16 x 16 | 0.50 | 1.50 | 0.010 |" in text
    assert "| default | scan | 8 | 0 | 3 | 12.0 |" in text
    assert "3 programs in 32 plans" in text
    assert "90 us of them (1.0%) idle between 400 kernels" in text


def test_a_missing_section_is_an_error(root):
    (root / "README.md").write_text("nothing here")
    with pytest.raises(ValueError, match=r"README.md has no section 'fasttree-summary'"):
        report.main(root)


def test_peers_that_failed_do_not_count():
    rows = [peer("right", 20.0), peer("wrong", 1.0, failed="its result is wrong"), {**row(), "peer": "no", "us": 3.0}]
    del rows[2]["us"]
    assert fastest(peer_times(rows)) == {("1,2_32,16", 32, 8, 128, 16): PeerTime(20.0, "right")}


def test_overlapping_kernels_count_by_their_whole_call():
    assert fastest(peer_times([peer("pdl", 20.0, wall_us=17.0)]))[key_of(row())].us == 17.0
    assert fastest(peer_times([peer("apart", 20.0, wall_us=25.0)]))[key_of(row())].us == 20.0


def test_a_recorded_time_counts_where_its_peer_has_none_beside_ours():
    recorded = recorded_times({"rows": [{"tree": "a", "heads": [1, 1], "us": {"x": 5.0, "y": 6.0}}]})
    key = ("a", 1, 1, 128, 16)
    assert combined({}, recorded)[key] == recorded[key]
    both = combined({key: [PeerTime(9.0, "x")]}, recorded)
    assert both[key] == [PeerTime(9.0, "x"), PeerTime(6.0, "y", beside=False)]


def test_mean_is_geometric():
    assert mean([1.0, 4.0]) == pytest.approx(2.0)


def test_pictures_of_a_report_alone(tmp_path):
    measured = {"suite": "heads", "environment": ENVIRONMENT, "rows": [row(head_dim=64, page_size=1)]}
    drawn = plots.draw({**measured, "peers": [peer("x", 30.0, head_dim=64, page_size=1)]}, folder=tmp_path)
    assert [path.name for path in drawn] == ["heads_speedup.png", "heads_times.png"]
    assert plots.draw({**measured, "peers": []}, folder=tmp_path) == []  # nothing to compare with
