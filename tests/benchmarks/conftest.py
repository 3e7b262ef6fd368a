"""Benchmarks on a CPU: small cells, and a clock in CUPTI's place."""

from __future__ import annotations

import time

import jax
import pytest

from benchmarks import harness


@pytest.fixture(autouse=True)
def compile_quickly():
    """Every cell compiles programs of its own: optimising them would take longer than running them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def clock_for_cupti(monkeypatch):
    """Wall time instead of GPU time, as one kernel."""

    def kernel_times_of(run, wait, layers, repeats=3):
        wait(run())
        begin = time.perf_counter()
        wait(run())
        return {"wall": (time.perf_counter() - begin) * 1e6 / layers}

    monkeypatch.setattr(harness, "kernel_times_of", kernel_times_of)
    monkeypatch.setattr(harness, "layers_for", lambda pool, dtype: 1)
