"""Write the measured tables into README.md and docs/performance.md, from ``benchmarks/results/*.json``.

    python -m benchmarks.report

Text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is replaced; nobody types a number by hand.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def main() -> int:
    ours, peers = _load("h200_fasttree.json"), _load("h200_peers.json")
    _replace(ROOT / "README.md", "fasttree-summary", _summary(ours, peers))
    performance = ROOT / "docs" / "performance.md"
    _replace(performance, "fasttree-summary", _summary(ours, peers))
    _replace(performance, "fasttree-cells", _cells(ours, peers, _load("h200_fasttree_strategies.json")))
    _replace(performance, "tiles", _tiles(_load("h200_tiles.json")))
    return 0


def _load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def _key(row: dict) -> tuple:
    return row["tree"], *row["heads"]


def _mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def _quote(environment: dict) -> str:
    return f"{environment['device']}, jax {environment['jax']}, {environment['date']}"


def _summary(ours: dict, peers: dict) -> str:
    best = {_key(row): min(row["us"].values()) for row in peers["rows"]}
    gain = {_key(row): best[_key(row)] / row["us"] for row in ours["rows"]}
    lines = [
        f"FastTree's 15 trees x 3 head settings ({_quote(ours['environment'])}; bf16, head dim 128, cold L2, planning "
        f"excluded):",
        "",
        "| heads q/kv | best peer / ours, geometric mean | cells faster than every peer |",
        "|---|---|---|",
    ]
    for heads in sorted({key[1:] for key in gain}):
        mine = [value for key, value in gain.items() if key[1:] == heads]
        lines.append(f"| {heads[0]}/{heads[1]} | {_mean(mine):.2f} | {sum(v > 1 for v in mine)} of {len(mine)} |")
    lines.append(f"| all | {_mean(list(gain.values())):.2f} | {sum(v > 1 for v in gain.values())} of {len(gain)} |")
    floor = _mean([row["us"] / (row["floor_us"] + 3) for row in ours["rows"]])
    wall = [row["wall_us"] / row["us"] for row in ours["rows"] if "wall_us" in row]
    error = max(row["error"] for row in ours["rows"])
    lines += [
        "",
        f"Time over (physical floor + 3 us): {floor:.2f} on average. Whole calls queued back to back take "
        f"{np.median(wall):.2f} times the kernels' sum (median). Largest relative error against float64: {error:.1e}.",
    ]
    return "\n".join(lines)


def _cells(ours: dict, peers: dict, named: dict) -> str:
    best = {_key(row): min((us, who) for who, us in row["us"].items()) for row in peers["rows"]}
    others: dict[tuple, list] = {}
    for row in named["rows"]:
        others.setdefault(_key(row), []).append((row["us"], row["strategy"]))
    lines = [
        f"Microseconds a layer ({_quote(ours['environment'])}). *Best named*: the fastest of the published strategies "
        f"in our own kernels, where measured.",
        "",
        "| tree: nodes_tokens per level | heads | floor | auto | modelled | whole call | best named | best peer "
        "| peer / auto |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ours["rows"]:
        peer_us, peer = best[_key(row)]
        strategy = min(others.get(_key(row), [(None, "")]), key=lambda x: x[0] or 0)
        lines.append(
            f"| {row['tree']} | {row['heads'][0]}/{row['heads'][1]} | {row['floor_us']:.1f} | {row['us']:.1f} "
            f"| {row['modelled_us']:.1f} | {row.get('wall_us', '-')} "
            f"| {f'{strategy[0]:.1f} {strategy[1]}' if strategy[0] else '-'} | {peer_us:.1f} {peer} "
            f"| {peer_us / row['us']:.2f} |"
        )
    return "\n".join(lines)


def _tiles(report: dict) -> str:
    lines = [
        f"SM-microseconds (latency: microseconds) at head dim 128, bf16 ({_quote(report['environment'])}; device copy "
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


def _replace(path: Path, name: str, text: str) -> None:
    before = path.read_text()
    pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not pattern.search(before):
        raise ValueError(f"{path} has no section {name!r}")
    path.write_text(pattern.sub(lambda m: f"{m.group(1)}{text}\n{m.group(2)}", before))


if __name__ == "__main__":
    sys.exit(main())
