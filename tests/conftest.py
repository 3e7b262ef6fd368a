"""What all tests share: GPU tests are left out without a GPU, and the op's many small programs compile unoptimised."""

from __future__ import annotations

import jax
import pytest

# Each of these tests compiles a program of its own and runs it once, on a few tokens.
QUICK = {"core", "planning", "kernels", "cases"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if jax.default_backend() == "gpu":
        return
    without_gpu = [item for item in items if item.get_closest_marker("gpu") is None]
    if len(without_gpu) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = without_gpu


@pytest.fixture(autouse=True)
def compile_quickly(request: pytest.FixtureRequest):
    """Skip XLA's optimisations on the CPU; what they do is no business of these tests."""
    quick = jax.default_backend() == "cpu" and request.node.path.parent.name in QUICK
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
