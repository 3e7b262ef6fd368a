"""Timing on a GPU: kernel times from CUPTI, a cold L2 as in a real decoder, and the error beside every time."""

from __future__ import annotations

import datetime
import fcntl
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.comparison import COPY_BYTES_PER_US
from tree_attention_jax import TokenTree
from tree_attention_jax.reference import dense_tree_attention

# More than the L2 of any GPU we know (H200: 60 MB) by enough that no layer's K/V survives to its next turn.
COLD_BYTES = 400e6
MAX_LAYERS = 24
# A call as a decoder makes it is over so many layers at least. One CUDA graph begins some 15 us after the last, which
# over three layers would be 5 us each.
WHOLE_CALL_LAYERS = 32


@dataclass
class LayerData:
    """Random q, and K/V pools of several layers that are used in turn."""

    q: jax.Array
    k: list[jax.Array]
    v: list[jax.Array]

    @property
    def layers(self) -> int:
        return len(self.k)


def layers_for(pool: tuple[int, ...], dtype: Any) -> int:
    """Layers whose K/V together never fit in the L2."""
    size = 2 * np.prod(pool) * jnp.dtype(dtype).itemsize
    return int(np.clip(np.ceil(COLD_BYTES / size), 3, MAX_LAYERS))


def arrays(tree: TokenTree, heads: tuple[int, int], head_dim: int, page_size: int, dtype: Any, layers: int):
    """(q, ks, vs), normal random."""
    _, pages = tree.page_table(page_size)
    pool = (int(pages.max()) + 1, page_size, heads[1], head_dim)
    key = jax.random.key(0)

    def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
        return _normal(jax.random.fold_in(key, seed), shape, dtype)

    q = normal(10_000, (tree.num_queries, heads[0], head_dim))
    return q, [normal(2 * i, pool) for i in range(layers)], [normal(2 * i + 1, pool) for i in range(layers)]


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))


def make_data(
    tree: TokenTree,
    heads: tuple[int, int],
    head_dim: int = 128,
    page_size: int = 16,
    dtype: Any = jnp.bfloat16,
    layers: int | None = None,
) -> LayerData:
    """Random tensors made on the device; enough layers (by default) that K/V always come from device memory."""
    pool = (int(tree.page_table(page_size)[1].max()) + 1, page_size, heads[1], head_dim)
    return LayerData(*arrays(tree, heads, head_dim, page_size, dtype, layers or layers_for(pool, dtype)))


def over_layers(attend: Callable) -> Callable:
    """``f(q, ks, vs, *rest)``: one jitted call over all layers, as a decoder makes it."""

    def run(q, ks, vs, *rest):
        return [attend(q, k, v, *rest) for k, v in zip(ks, vs)]

    return jax.jit(run)


def turns(layers: int) -> int:
    """How often a whole call goes through K/V of so many layers."""
    return -(-WHOLE_CALL_LAYERS // layers)


def fed_back(attend: Callable, *data: Any) -> Any:
    """Lowered ``f(q, ks, vs, *rest)``: each layer attends with what the last one returned, and q is donated.

    That is how a decoder calls it: activations stay where they are, so XLA launches one CUDA graph again and again.
    Results of :func:`over_layers` lie elsewhere each time, and the graph is updated before it can run. The layers are
    gone through :func:`turns` times.
    """
    attend = jax.jit(attend)  # traced once, not once a layer

    def run(q, ks, vs, *rest):
        for _ in range(turns(len(ks))):
            for k, v in zip(ks, vs):
                q = attend(q, k, v, *rest)
        return q

    return jax.jit(run, donate_argnums=0).lower(*data)


def feeding_back(call: Callable, q: jax.Array, *rest: Any) -> Callable[[], jax.Array]:
    """Calls a compiled :func:`fed_back` on its own last result, and on ``q`` at first."""
    last = jnp.copy(q)

    def run() -> jax.Array:
        nonlocal last
        last = call(last, *rest)
        return last

    return run


def kernel_times(call: Callable, args: tuple, layers: int, repeats: int = 3) -> dict[str, float]:
    """Microseconds of GPU time a layer by kernel name, median over ``repeats``, from CUPTI."""
    return kernel_times_of(lambda: call(*args), jax.block_until_ready, layers, repeats)


def kernel_times_of(
    run: Callable[[], Any], wait: Callable[[Any], Any], layers: int, repeats: int = 3
) -> dict[str, float]:
    """The same of any program on this process's GPU, PyTorch's too: CUPTI sees all kernels, whoever launched them.

    It takes one client a process, and this is JAX's own: do not profile with PyTorch beside it.
    """
    from jax.experimental.mosaic.gpu import profiler

    if profiler.mosaic_gpu_lib is None:
        raise RuntimeError("this jaxlib has no CUPTI: kernel times need an NVIDIA GPU")
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    wait(run())  # compiles, and warms up
    cupti._cupti_init()
    try:
        for _ in range(repeats):
            wait(run())
    finally:
        events = cupti._cupti_get_timings(True)
    if not events:
        raise RuntimeError("CUPTI saw no kernel: is there a GPU?")
    return _median_run(events, layers, repeats)


def _median_run(events: list[tuple[str, float]], layers: int, repeats: int) -> dict[str, float]:
    """Times of the median run by kernel name. Runs that launched unlike numbers of kernels are averaged."""
    runs = 1 if len(events) % repeats else repeats
    size = len(events) // runs
    samples: list[dict[str, float]] = []
    for i in range(runs):
        by_name: dict[str, float] = {}
        for name, milliseconds in events[i * size : (i + 1) * size]:
            by_name[name] = by_name.get(name, 0.0) + milliseconds * 1e3 / layers * runs / repeats
        samples.append(by_name)
    samples.sort(key=lambda sample: sum(sample.values()))
    return samples[len(samples) // 2]


def wall_time(call: Callable, args: tuple, layers: int, calls: int = 20, repeats: int = 3) -> float:
    """Microseconds a layer of ``calls`` calls queued back to back, median over ``repeats``."""
    return wall_time_of(lambda: call(*args), jax.block_until_ready, layers, calls, repeats)


def wall_time_of(
    run: Callable[[], Any],
    wait: Callable[[Any], Any],
    layers: int,
    calls: int = 20,
    repeats: int = 3,
    most_seconds: float = 1.0,
) -> float:
    """The same of any program. Slow ones are called less often: ``most_seconds`` for all repeats."""
    wait(run())
    begin = time.perf_counter()
    wait(run())
    once = time.perf_counter() - begin
    calls = int(min(calls, max(2, most_seconds / repeats / once)))
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            out = run()
        wait(out)
        samples.append((time.perf_counter() - begin) * 1e6 / layers / calls)
    return statistics.median(samples)


@contextmanager
def locked(path: Path | None, alone: bool = True) -> Iterator[None]:
    """While no other process is, by the lock of a file; not ``alone``: while no other one is alone.

    It goes with the process, however that ends. None: at once.
    """
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def sampled_error(out: Any, data: LayerData, tree: TokenTree, page_size: int = 16, samples: int = 12) -> float:
    """Largest relative error by norm of some queries of layer 0, against the float64 oracle."""
    return largest_error(out, oracle(data, tree, page_size, samples))


def oracle(data: LayerData, tree: TokenTree, page_size: int = 16, samples: int = 12) -> dict[int, np.ndarray]:
    """What some queries should get from layer 0, in float64."""
    slots = np.split(tree.token_slots(page_size), np.cumsum(tree.kv_len)[:-1])
    nodes = tree.query_nodes()
    first = np.cumsum(tree.q_len) - tree.q_len
    k, v = (np.asarray(pages[0]).reshape(-1, *pages[0].shape[2:]) for pages in (data.k, data.v))
    q = np.asarray(data.q)
    wanted = {}
    for query in np.unique(np.linspace(0, tree.num_queries - 1, samples).astype(int)).tolist():
        node = nodes[query]
        own = tree.kv_len[node] - tree.q_len[node] + (query - first[node]) + 1
        path, above = [slots[node][:own]], tree.parent[node]
        while above >= 0:
            path.insert(0, slots[above])
            above = tree.parent[above]
        seen = np.concatenate(path)
        alone = TokenTree([-1], [len(seen)])
        wanted[query] = dense_tree_attention(q[query][None], k[seen][None], v[seen][None], alone, len(seen))[0]
    return wanted


def largest_error(out: Any, wanted: dict[int, np.ndarray]) -> float:
    """Relative by norm; NaN if any of it is."""
    got = np.asarray(out[np.array(list(wanted))]).astype(np.float64)
    norms = [np.linalg.norm(one - right) / np.linalg.norm(right) for one, right in zip(got, wanted.values())]
    return float(np.max(norms))


def environment() -> dict[str, str]:
    """What every number must be quoted with."""
    import jaxlib

    device = jax.devices()[0]
    found = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    for name in ("torch", "triton", "flashinfer"):  # of the peers, if they have been loaded
        if name in sys.modules:
            found[name] = getattr(sys.modules[name], "__version__", "unknown")
    commit = _commit()
    return {**found, "commit": commit} if commit else found


def _commit() -> str | None:
    """The checkout's commit, with a + where files differ from it; or what GIT_COMMIT says, for copies of one."""
    if told := os.environ.get("GIT_COMMIT"):
        return told
    try:
        told = [
            subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
            for arguments in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return told[0].stdout.strip() + ("+" if told[1].stdout.strip() else "")


def copy_rate() -> float:
    """Bytes a microsecond of a large device copy, read and written: the memory ceiling."""
    x = jnp.arange(2**28, dtype=jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    times = kernel_times(copy, (x,), 1)
    return 2 * x.nbytes / sum(times.values())


def floor_us(
    tree: TokenTree,
    heads: tuple[int, int],
    head_dim: int = 128,
    itemsize: int = 2,
    bytes_per_us: float = COPY_BYTES_PER_US,
    flops_per_us: float = 790e6,
) -> float:
    """No kernel is faster: unique K/V bytes over the copy rate, or the FLOP over the matrix rate."""
    return max(
        kv_bytes(tree, heads, head_dim, itemsize) / bytes_per_us, attention_flops(tree, heads, head_dim) / flops_per_us
    )


def kv_bytes(tree: TokenTree, heads: tuple[int, int], head_dim: int = 128, itemsize: int = 2) -> int:
    """Bytes of K and V of all tokens, each once."""
    return 2 * int(tree.kv_len.sum()) * heads[1] * head_dim * itemsize


def attention_flops(tree: TokenTree, heads: tuple[int, int], head_dim: int = 128) -> int:
    """Multiplications and additions of both matrix products, over what each query sees."""
    return 4 * int((tree.query_positions().astype(np.int64) + 1).sum()) * heads[0] * head_dim
