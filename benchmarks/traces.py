"""What a GPU did and when, from JAX's profiler (XLA's CUPTI client): kernels, gaps between them, and launches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np


@dataclass
class Trace:
    """Kernels as (name, begin, end) in microseconds, and how often the host called which launch function."""

    kernels: list[tuple[str, float, float]] = field(default_factory=list)
    graph_launches: int = 0
    kernel_launches: int = 0

    def busy_us(self) -> float:
        """Time in which at least one kernel ran."""
        return self.span_us() - self.idle_us()

    def span_us(self) -> float:
        """From the first begin to the last end."""
        return max(end for _, _, end in self.kernels) - min(begin for _, begin, _ in self.kernels)

    def idle_us(self) -> float:
        """The gaps in between, in which none ran."""
        times = np.array(sorted((begin, end) for _, begin, end in self.kernels))
        ended = np.maximum.accumulate(times[:, 1])
        return float(np.maximum(times[1:, 0] - ended[:-1], 0).sum())


def record(run: Callable[[], Any]) -> Trace:
    """Runs once under the profiler. Warm it up before.

    Raises:
        RuntimeError: the profiler saw no kernel on a GPU.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        trace = read(jax.profiler.ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb"))
    if not trace.kernels:
        raise RuntimeError("the profiler saw no kernel: is there a GPU?")
    return trace


def read(profiles: Iterable[Any]) -> Trace:
    """The first GPU's streams, and launches on any thread of the host."""
    found = Trace()
    for profile in profiles:
        for plane in profile.planes:
            on_gpu = plane.name.startswith("/device:GPU:0")
            for line in plane.lines:
                if on_gpu and line.name.startswith("Stream"):  # the other lines sum streams up
                    for event in line.events:
                        begin = event.start_ns / 1e3
                        found.kernels.append((event.name, begin, begin + event.duration_ns / 1e3))
                elif plane.name.startswith("/host"):
                    for event in line.events:
                        found.graph_launches += "GraphLaunch" in event.name
                        found.kernel_launches += event.name.startswith(("cuLaunchKernel", "cudaLaunchKernel"))
    return found
