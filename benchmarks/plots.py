"""Pictures of measured times: speed-up over the best peer by cell, and times against the floor on log axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison import PeerTime, fastest, key_of, mean, peer_times

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
OURS, PEER, FLOOR = "#1f6f8b", "#d1495b", "#8d99ae"
MOST_LABEL = 60


def draw(report: dict[str, Any], best: dict[tuple, PeerTime] | None = None, folder: Path = FOLDER) -> list[Path]:
    """Both pictures of a report of :mod:`benchmarks.kernels`, against ``best`` (default: the report's own peers)."""
    best = fastest(peer_times(report["peers"])) if best is None else best
    rows = [row for row in report["rows"] if row["strategy"] == "auto" and "failed" not in row and key_of(row) in best]
    if not rows:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _save(_speedups(rows, best, report), folder / f"{report['suite']}_speedup.png"),
        _save(_times(rows, best, report), folder / f"{report['suite']}_times.png"),
    ]


def quote(report: dict[str, Any]) -> str:
    environment = report["environment"]
    return f"{environment['device']}, jax {environment['jax']}, {environment['date']}"


def _speedups(rows: list[dict[str, Any]], best: dict[tuple, PeerTime], report: dict[str, Any]) -> Any:
    """A panel a head setting, a bar a tree."""
    plt = _pyplot()
    heads = sorted({tuple(row["heads"]) for row in rows})
    tall = max(sum(tuple(row["heads"]) == one for row in rows) for one in heads)
    figure, axes = plt.subplots(1, len(heads), figsize=(3.6 * len(heads) + 2.8, 0.25 * tall + 1.6), sharex=True)
    for axis, one in zip(np.atleast_1d(axes), heads):
        mine = [row for row in rows if tuple(row["heads"]) == one]
        gains = [best[key_of(row)].us / row["us"] for row in mine]
        place = np.arange(len(mine))[::-1]
        axis.barh(place, gains, color=[OURS if gain > 1 else PEER for gain in gains], height=0.7)
        for y, gain, row in zip(place, gains, mine):
            axis.text(max(gain, 1), y, f" {gain:.2f} {best[key_of(row)].name}", va="center", fontsize=7)
        axis.axvline(1, color="black", linewidth=0.8)
        labels = [_short(row) for row in mine] if axis is np.atleast_1d(axes)[0] else []
        axis.set_yticks(place if labels else [], labels, fontsize=6.5)
        axis.set_title(f"{one[0]}/{one[1]} heads: {mean(gains):.2f}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    top = max(best[key_of(row)].us / row["us"] for row in rows)
    np.atleast_1d(axes)[0].set_xlim(0, 1.45 * top)
    figure.supxlabel("time of the best peer / ours (its name beside it)", fontsize=9)
    figure.suptitle(f"Speed-up over the best peer, {quote(report)}", fontsize=10)
    return figure


def _times(rows: list[dict[str, Any]], best: dict[tuple, PeerTime], report: dict[str, Any]) -> Any:
    """Ours and the best peer over the floor: how far each is from what the memory allows."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(6.5, 5))
    floor = np.array([row["floor_us"] for row in rows])
    line = np.geomspace(floor.min() / 1.3, floor.max() * 1.3, 100)
    axis.plot(line, line, color=FLOOR, linewidth=1, label="floor: K/V once at the copy rate, or the FLOP")
    axis.plot(line, line + 3, color=FLOOR, linewidth=1, linestyle="--", label="floor + 3 us")
    peers = np.array([best[key_of(row)].us for row in rows])
    ours = np.array([row["us"] for row in rows])
    axis.vlines(floor, np.minimum(ours, peers), np.maximum(ours, peers), color=FLOOR, linewidth=0.6, alpha=0.6)
    axis.scatter(floor, peers, color=PEER, s=18, label="best peer", zorder=3)
    axis.scatter(floor, ours, color=OURS, s=18, label="ours", zorder=3)
    axis.set(xscale="log", yscale="log", xlabel="floor, us", ylabel="GPU time of a layer, us")
    axis.grid(alpha=0.2, which="both")
    axis.legend(fontsize=8, frameon=False)
    axis.set_title(f"Time against the floor, {quote(report)}", fontsize=10)
    return figure


def _short(row: dict[str, Any]) -> str:
    name = row["tree"]
    extra = "" if row.get("head_dim", 128) == 128 else f" d{row['head_dim']}"
    extra += "" if row.get("page_size", 16) == 16 else f" p{row['page_size']}"
    return (name if len(name) <= MOST_LABEL else f"{name[: MOST_LABEL - 1]}…") + extra


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
    return path


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
