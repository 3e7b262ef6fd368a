"""PyTorch beside JAX on one GPU: the same memory through DLPack, calls over layers, and their CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.peers import Inputs, Ready, Unsuitable


def load_torch() -> Any:
    """The module, with a GPU behind it."""
    try:
        import torch
    except ImportError as error:
        raise Unsuitable(f"PyTorch cannot be imported: {error}") from None
    if not torch.cuda.is_available():
        raise Unsuitable("PyTorch sees no GPU")
    return torch


def share(x: jax.Array) -> Any:
    """A JAX array as a tensor over the same memory."""
    torch = load_torch()
    return torch.from_dlpack(jax.block_until_ready(x))


def tokens(pages: Any, slots: np.ndarray | None = None) -> Any:
    """[pages, page_size, H, D] -> [tokens, H, D]: every slot as it lies, or a copy of some of them in order."""
    flat = pages.reshape(-1, *pages.shape[2:])
    if slots is None:
        return flat
    torch = load_torch()
    return flat.index_select(0, torch.as_tensor(slots, device=flat.device))


def index(values: Any, dtype: str = "int32") -> Any:
    """Integers as a tensor on the GPU."""
    torch = load_torch()
    return torch.as_tensor(np.ascontiguousarray(values), dtype=getattr(torch, dtype), device="cuda")


def ready(attend: Callable[[int], Any], inputs: Inputs, note: str = "") -> Ready:
    """A peer that attends layer ``i`` by ``attend(i)`` on PyTorch's current stream."""
    torch = load_torch()
    layers = inputs.data.layers

    def run() -> list[Any]:
        return [attend(i) for i in range(layers)]

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    def output(out: list[Any]) -> np.ndarray:
        torch.cuda.synchronize()
        return out[0].float().cpu().numpy()

    return Ready(run, wait, output, layers, lambda turns: capture(run, turns), note)


def capture(run: Callable[[], Any], turns: int) -> Callable[[], Any]:
    """``run``, so many times, as one CUDA graph: what replays it."""
    torch = load_torch()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # JAX's threads call CUDA too: only what this thread does must be capturable.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = [run() for _ in range(turns)]

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def release() -> None:
    """Give PyTorch's idle memory back before the next cell."""
    import gc
    import sys

    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()
