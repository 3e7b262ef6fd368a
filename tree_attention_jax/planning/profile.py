"""What the planner knows of a GPU: one small JSON file each, in ``profiles/``."""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import dataclass
from importlib import resources

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TileCost:
    """What a tile shape costs, for head dim 128 and two-byte K/V.

    Attributes:
        rows, block_kv, warps, stages, mosaic: the shape, as in :class:`pallas_kernels.layout.TileClass`.
        item_us: microseconds of one SM that a program costs beside its steps (start, query rows, epilogue).
        step_us: microseconds of one SM a step of ``block_kv`` tokens, K/V in the L2.
        mixed_step_us: the same in a program that can also mask, which needs more registers.
        masked_step_us: the same where every token's row interval is compared.
        latency_us: time one program needs for a step when the SM is otherwise idle.
        mixed_latency_us, masked_latency_us: the same of the other two kinds of step.
        masked_memory: how many times as long a program that masks takes to read device memory; 1 or more.
    """

    rows: int
    block_kv: int
    warps: int
    stages: int
    item_us: float
    step_us: float
    mixed_step_us: float
    masked_step_us: float
    latency_us: float
    mixed_latency_us: float
    masked_latency_us: float
    masked_memory: float = 1.0
    mosaic: bool = False


@dataclass(frozen=True)
class ReductionCost:
    """What partials cost; microseconds, and bytes (float32) a microsecond.

    Attributes:
        launch_us: of the reduction's launch. row_us: of each query's output in one head.
        write_bytes_per_us: rate at which launches write partials, beside what else they do.
        read_bytes_per_us: rate at which the reduction reads them out of the L2, which holds the first ``near_bytes``;
            ``far_bytes_per_us``: rate at which it reads the others.
        round_us: of each round of loads after the first, if a query has more partials than are merged at a time.
    """

    launch_us: float
    row_us: float
    write_bytes_per_us: float
    read_bytes_per_us: float
    near_bytes: float
    far_bytes_per_us: float
    round_us: float


@dataclass(frozen=True, eq=False)  # compared, and hashed, by identity: there is one of each
class GpuProfile:
    """Constants of the cost model.

    Attributes:
        name: as in ``jax.Device.device_kind``, or "generic".
        source: "fitted" (by ``benchmarks/fit.py`` to measured launches, with versions and date) or "scaled" (from
            datasheets).
        num_sms: streaming multiprocessors.
        bytes_per_us: rate at which the kernels read device memory.
        l2_bytes_per_us: rate at which many programs read K/V that others have read: the L2.
        partial_bytes_per_us: rate at which partials are written, and read again by the reduction, where they are many:
            what the dynamic programme takes them for.
        reduction: what they cost as a whole.
        launch_us: time that one more launch costs, beside its work.
        tiles: tile shapes to choose from, narrow to wide.
    """

    name: str
    source: str
    num_sms: int
    bytes_per_us: float
    l2_bytes_per_us: float
    partial_bytes_per_us: float
    launch_us: float
    reduction: ReductionCost
    tiles: tuple[TileCost, ...]


@functools.cache
def load_profiles() -> dict[str, GpuProfile]:
    """All profiles that come with the package, by name."""
    found = {}
    for path in sorted(resources.files(__package__).joinpath("profiles").iterdir(), key=lambda p: p.name):
        if path.name.endswith(".json"):
            data = json.loads(path.read_text())
            tiles = tuple(TileCost(**tile) for tile in data.pop("tiles"))
            reduction = ReductionCost(**data.pop("reduction"))
            profile = GpuProfile(**data, reduction=reduction, tiles=tiles)
            found[profile.name] = profile
    return found


def profile_for(name: str | None) -> GpuProfile:
    """The profile of a GPU by device kind; ``None``: of the first local GPU, or the generic one without a GPU."""
    return _nearest(name if name is not None else _local_gpu())


@functools.cache
def _local_gpu() -> str:
    import jax

    device = jax.devices()[0]
    return device.device_kind if device.platform == "gpu" else "generic"


@functools.cache
def _nearest(name: str) -> GpuProfile:
    profiles = load_profiles()
    for known, profile in profiles.items():
        if known != "generic" and known.split()[-1].lower() in name.lower():
            return profile
    if name != "generic":
        _log.debug("no profile for GPU %r: planning with the generic one; benchmarks/fit.py writes one", name)
    return profiles["generic"]
