"""Programs over a tiny model run once or twice: optimising them would take longer than running them."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture
def compile_unoptimised():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
