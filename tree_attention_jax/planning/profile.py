"""What the planner knows of a GPU: one small JSON file each, in ``profiles/``."""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import dataclass, fields
from importlib import resources

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuProfile:
    """Constants of the cost model. Times in microseconds, rates per microsecond.

    Attributes:
        name: as in ``jax.Device.device_kind``, or "generic".
        source: "measured" (by ``benchmarks/calibrate.py``) or "scaled" (from datasheets).
        num_sms: streaming multiprocessors.
        bytes_per_us: device memory rate that a kernel reaches.
        l2_bytes_per_us: rate of re-reads that hit the L2.
        flops_per_us: dense bf16 matrix rate that the kernel reaches in a wide tile.
        tile_us: time of one tile step (rows x block_kv) in a narrow tile, seen by one program.
        item_us: fixed time of one program: start, item record, query rows, epilogue.
        slots_per_sm: programs that run at once on an SM.
        launch_us: time that one more launch costs.
        partial_bytes_per_us: rate at which partials are written and read again.
    """

    name: str
    source: str
    num_sms: int
    bytes_per_us: float
    l2_bytes_per_us: float
    flops_per_us: float
    tile_us: float
    item_us: float
    slots_per_sm: float
    launch_us: float
    partial_bytes_per_us: float


@functools.cache
def load_profiles() -> dict[str, GpuProfile]:
    """All profiles that come with the package, by name."""
    found = {}
    for path in sorted(resources.files(__package__).joinpath("profiles").iterdir(), key=lambda p: p.name):
        if path.name.endswith(".json"):
            data = json.loads(path.read_text())
            profile = GpuProfile(**{f.name: data[f.name] for f in fields(GpuProfile)})
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
        _log.debug("no profile for GPU %r: planning with the generic one; benchmarks/calibrate.py writes one", name)
    return profiles["generic"]
