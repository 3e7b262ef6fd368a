"""Write the measured tables and pictures into README.md and docs/, from ``benchmarks/results/*.json``.

    python -m benchmarks.report

Text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is replaced; nobody types a number by hand. A section for
another suite is added before "Known and open" as soon as its results are there.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plots
from benchmarks.comparison import PeerTime, combined, fastest, key_of, mean, peer_times, recorded_times
from benchmarks.plots import quote
from benchmarks.report_suites import (
    SUITES,
    compile_table,
    decode_summary,
    decode_table,
    implementations_table,
    planning_table,
    suite_table,
)
from benchmarks.suites import result_name

ROOT = Path(__file__).parent.parent
GPU = "h200"
# New sections go before this one.
NEXT = "## Predicted, not measured yet"
# Of a model that a step's one plan serves.
LAYERS = 32


def main(root: Path = ROOT) -> int:
    results = root / "benchmarks" / "results"
    ours, named, tiles = (_load(results, name) for name in ("fasttree", "fasttree_strategies", "tiles"))
    known = combined(peer_times(ours.get("peers", [])), recorded_times(_load(results, "peers")))
    readme, performance = root / "README.md", root / "docs" / "performance.md"
    drawn = plots.draw({**ours, "suite": "fasttree"}, fastest(known), root / "docs" / "pictures")
    _replace(readme, "fasttree-summary", _summary(ours, known) + _shown(drawn, "docs/pictures"))
    _replace(performance, "fasttree-summary", _summary(ours, known) + _shown(drawn, "pictures"))
    _replace(performance, "fasttree-cells", _cells(ours, known, named))
    _replace(performance, "tiles", _tiles(tiles))
    for suite, (title, _) in SUITES.items():
        if (results / f"{GPU}_{result_name(suite)}.json").is_file():
            _replace(performance, suite, suite_table(suite, _load(results, result_name(suite))), title)
    if (results / f"{GPU}_compile.json").is_file():
        _replace(performance, "compile", compile_table(_load(results, "compile")), "Compiling and launching")
    _replace(performance, "implementations", implementations_table(_load(results, "implementations")))
    if (results / f"{GPU}_decode.json").is_file():
        _replace(performance, "decode-steps", decode_table(_load(results, "decode")), "Whole decoding steps")
        _replace(readme, "decode-summary", decode_summary(_load(results, "decode")))
    planning = results / "cpu_planning.json"
    if planning.is_file():
        _replace(performance, "planning", planning_table(json.loads(planning.read_text())), "Planning")
    return 0


def _load(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / f"{GPU}_{name}.json").read_text())


def _summary(ours: dict[str, Any], known: dict[tuple, list[PeerTime]]) -> str:
    best = fastest(known)
    rows = [row for row in ours["rows"] if row["strategy"] == "auto" and "failed" not in row]
    gain = {key_of(row): best[key_of(row)].us / row["us"] for row in rows if key_of(row) in best}
    lines = [
        f"FastTree's 15 trees x 3 head settings ({quote(ours)}; bf16, head dim 128, cold L2, planning excluded):",
        "",
        "| heads q/kv | best peer / ours, geometric mean | cells faster than every peer |",
        "|---|---|---|",
    ]
    for heads in sorted({tuple(row["heads"]) for row in rows}):
        mine = [gain[key_of(row)] for row in rows if tuple(row["heads"]) == heads and key_of(row) in gain]
        lines.append(f"| {heads[0]}/{heads[1]} | {mean(mine):.2f} | {sum(v > 1 for v in mine)} of {len(mine)} |")
    lines.append(f"| all | {mean(gain.values()):.2f} | {sum(v > 1 for v in gain.values())} of {len(gain)} |")
    floor = mean(row["us"] / (row["floor_us"] + 3) for row in rows)
    wall = [row["wall_us"] / row["us"] for row in rows if "wall_us" in row]
    error = max(row["error"] for row in rows)
    lines += [
        "",
        f"Time over (physical floor + 3 us): {floor:.2f} on average. Whole calls queued back to back take "
        f"{np.median(wall):.2f} times the kernels' sum (median){_whole_calls(ours, rows)}. "
        f"Largest relative error against float64: {error:.1e}. {_where_measured(known)}{_commits(rows)}",
    ]
    planned = [row for row in rows if "plan_ms" in row and key_of(row) in best]
    if planned:
        with_plan = mean(best[key_of(row)].us / (row["us"] + row["plan_ms"] * 1e3 / LAYERS) for row in planned)
        plan_ms = np.median([row["plan_ms"] for row in planned])
        lines[-1] += (
            f" Planning takes {plan_ms:.2f} ms of the host a step (median, beside processes that compile); "
            f"counted in full over {LAYERS} layers, against peers without theirs, the ratio is {with_plan:.2f}."
        )
    return "\n".join(lines)


def _commits(rows: list[dict[str, Any]]) -> str:
    """How many cells are of which commit, if of several."""
    of: dict[str, set[tuple[int, int]]] = {}
    for row in rows:
        of.setdefault(row.get("commit", "?"), set()).add(tuple(row["heads"]))
    if len(of) < 2:
        return ""
    counts = Counter(row.get("commit", "?") for row in rows)
    told = [
        f"{counts[commit]} at {commit} (heads {', '.join(f'{q}/{kv}' for q, kv in sorted(of[commit]))})"
        for commit in sorted(of, key=counts.__getitem__, reverse=True)
    ]
    return f" Cells measured: {'; '.join(told)}, each with its peers."


def _whole_calls(ours: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """How ours compare with those of the peers beside them."""
    best: dict[tuple, float] = {}
    for peer in ours.get("peers", []):
        if "wall_us" in peer and "failed" not in peer:
            best[key_of(peer)] = min(best.get(key_of(peer), np.inf), peer["wall_us"])
    gain = [best[key_of(row)] / row["wall_us"] for row in rows if "wall_us" in row and key_of(row) in best]
    if not gain:
        return ""
    ahead = sum(value > 1 for value in gain)
    return f", and are ahead of the best whole call beside them in {ahead} of {len(gain)} cells, {mean(gain):.2f} times"


def _where_measured(known: dict[tuple, list[PeerTime]]) -> str:
    """Which peers ran beside us, and which times come from runs of their own."""
    beside = sorted({time.name for times in known.values() for time in times if time.beside})
    apart = sorted({time.name for times in known.values() for time in times if not time.beside} - set(beside))
    told = [f"Measured beside ours in one process: {', '.join(beside)}."] if beside else []
    if apart:
        told.append(f"Recorded in runs of their own on the same kind of machine: {', '.join(apart)}.")
    return " ".join(told)


def _shown(pictures: list[Path], folder: str) -> str:
    if not pictures:
        return ""
    row = " | ".join(f"![{path.stem.replace('_', ' ')}]({folder}/{path.name})" for path in pictures)
    return f"\n\n| {row} |\n|{'---|' * len(pictures)}"


def _is_by_triton(row: dict[str, Any]) -> bool:
    return row["strategy"] == "auto@pallas_triton" and "failed" not in row


def _cells(ours: dict[str, Any], known: dict[tuple, list[PeerTime]], named: dict[str, Any]) -> str:
    best, triton = fastest(known), {key_of(row): row["us"] for row in ours["rows"] if _is_by_triton(row)}
    others: dict[tuple, list] = {}
    for row in named["rows"]:
        if "us" in row and row["strategy"] != "auto":
            others.setdefault(key_of(row), []).append((row["us"], row["strategy"]))
    lines = [
        f"Microseconds a layer ({quote(ours)}). *Best named*: the fastest of the published strategies "
        f"in our own kernels. *Triton*: `auto` without Mosaic's tiles.",
        "",
        "| tree: nodes_tokens per level | heads | floor | auto | modelled | whole call | Triton | best named "
        "| best peer | peer / auto |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ours["rows"]:
        if row["strategy"] != "auto" or "failed" in row:
            continue
        peer = best.get(key_of(row))
        beaten = f"{peer.us:.1f} {peer.name} | {peer.us / row['us']:.2f}" if peer else "- | -"
        strategy = min(others.get(key_of(row), [(None, "")]), key=lambda x: x[0] or 0)
        lines.append(
            f"| {row['tree']} | {row['heads'][0]}/{row['heads'][1]} | {row['floor_us']:.1f} | {row['us']:.1f} "
            f"| {row['modelled_us']:.1f} | {row.get('wall_us', '-')} "
            f"| {f'{triton[key_of(row)]:.1f}' if key_of(row) in triton else '-'} "
            f"| {f'{strategy[0]:.1f} {strategy[1]}' if strategy[0] else '-'} "
            f"| {beaten} |"
        )
    return "\n".join(lines)


def _tiles(report: dict) -> str:
    lines = [
        f"SM-microseconds (latency: microseconds) at head dim 128, bf16 ({quote(report)}; device copy "
        f"{report['copy_bytes_per_us'] / 1e6:.2f} TB/s).",
        "",
        "| rows x tokens, warps, stages | a program | a step | a masked step | latency of a step |",
        "|---|---|---|---|---|",
    ]
    for tile in report["tiles"]:
        lines.append(
            f"| {tile['rows']} x {tile['block_kv']}, {tile['warps']}, {tile['stages']} | {tile['item_us']:.2f} "
            f"| {tile['step_us']:.2f} | {tile['masked_step_us']:.2f} | {tile['latency_us']:.2f} |"
        )
    return "\n".join(lines)


def _replace(path: Path, name: str, text: str, title: str | None = None) -> None:
    """Replaces a section; one with a title is added if it is not there yet."""
    before = path.read_text()
    pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not pattern.search(before):
        if title is None or NEXT not in before:
            raise ValueError(f"{path} has no section {name!r}")
        before = before.replace(NEXT, f"## {title}\n\n<!-- begin {name} -->\n<!-- end {name} -->\n\n{NEXT}", 1)
    path.write_text(pattern.sub(lambda m: f"{m.group(1)}{text}\n{m.group(2)}", before))


if __name__ == "__main__":
    sys.exit(main())
