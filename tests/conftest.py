"""What all tests share: GPU tests are left out without a GPU, and the op's many small programs compile unoptimised."""

from __future__ import annotations

import os
from importlib.metadata import version

import jax
import pytest

if version("jaxlib").startswith("0.10."):
    # Half of what our programs take to compile is the MLIR emitters of fusions. Later versions have no others, and
    # end the process at a flag they do not know. Read when the backend starts, which no import does.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"

# A simulated GPU's threads wait for one another in callbacks, each of which holds a thread of XLA's pool: that has one
# for each device, if there are more of them than cores.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=12"

# Each of these tests compiles a program of its own and runs it once, on a few tokens.
QUICK = {"core", "planning", "kernels", "cases"}


# Parameters that often leave the compiled program as it is.
SAME_PROGRAM = {"strategy", "sharing"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in QUICK:
            item.add_marker(pytest.mark.xdist_group(_programs_of(item)))
    if jax.default_backend() == "gpu":
        return
    without_gpu = [item for item in items if item.get_closest_marker("gpu") is None]
    if len(without_gpu) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = without_gpu


def _programs_of(item: pytest.Item) -> str:
    """Equal for tests that may share programs: ``--dist loadgroup`` then keeps them in one process."""
    varied = getattr(item, "callspec", None)
    rest = [] if varied is None else [f"{name}{i}" for name, i in varied.indices.items() if name not in SAME_PROGRAM]
    return "-".join([item.path.stem, getattr(item, "originalname", item.name), *rest])


@pytest.fixture(autouse=True)
def compile_quickly(request: pytest.FixtureRequest):
    """Skip XLA's optimisations on the CPU; what they do is no business of these tests."""
    quick = jax.default_backend() == "cpu" and request.node.path.parent.name in QUICK
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Modules share hardly any programs, and thousands of them fill the memory of a laptop."""
    yield
    jax.clear_caches()
