"""Peers' times of a cell: those measured beside ours, and where there are none the recorded ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

# What an H200 copies (`benchmarks.harness.copy_rate`): physical floors are told at this rate.
COPY_BYTES_PER_US = 4.27e6


@dataclass(frozen=True)
class PeerTime:
    """Microseconds a layer of a peer in a cell, measured ``beside`` ours in one process or in a run of its own."""

    us: float
    name: str
    beside: bool = True


def key_of(row: dict[str, Any]) -> tuple:
    """What says which cell a row is of."""
    return row["tree"], *row["heads"], row.get("head_dim", 128), row.get("page_size", 16)


def peer_times(rows: Iterable[dict[str, Any]]) -> dict[tuple, list[PeerTime]]:
    """By cell, of a report's ``peers``.

    A peer counts with the better of its kernels' sum and its whole call: kernels that overlap (programmatic dependent
    launch) take less time than their sum.
    """
    found: dict[tuple, list[PeerTime]] = {}
    for row in rows:
        if "us" in row and "failed" not in row:
            us = min(row["us"], row.get("wall_us", row["us"]))
            found.setdefault(key_of(row), []).append(PeerTime(us, row["peer"]))
    return found


def recorded_times(report: dict[str, Any]) -> dict[tuple, list[PeerTime]]:
    """By cell, of a file that has one time a peer and cell, measured elsewhere."""
    return {key_of(row): [PeerTime(us, name, beside=False) for name, us in row["us"].items()] for row in report["rows"]}


def combined(beside: dict[tuple, list[PeerTime]], recorded: dict[tuple, list[PeerTime]]) -> dict[tuple, list[PeerTime]]:
    """Both: a recorded time counts where that peer has none of its own beside ours."""
    found = {}
    for key in beside.keys() | recorded.keys():
        mine = beside.get(key, [])
        names = {time.name for time in mine}
        found[key] = mine + [time for time in recorded.get(key, []) if time.name not in names]
    return found


def fastest(times: dict[tuple, list[PeerTime]]) -> dict[tuple, PeerTime]:
    """The best peer of each cell."""
    return {key: min(known, key=lambda time: time.us) for key, known in times.items() if known}


def mean(values: Iterable[float]) -> float:
    """Geometric: of ratios."""
    return float(np.exp(np.mean(np.log(list(values)))))
