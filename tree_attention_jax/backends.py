"""Which implementation runs: the one seam between the op and the kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import append_xla, partial_xla, reduce_xla
from pallas_kernels.layout import WorkShape
from pallas_kernels.mosaic_geometry import NEEDS_JAX
from pallas_kernels.options import Options
from pallas_kernels.state import AttentionState

IMPLEMENTATIONS = ("xla", "pallas_triton", "pallas_mosaic", "pallas_mixed", "jax_triton")
# What is tried where none is asked for.
GPU_DEFAULT = ("pallas_mixed", "pallas_triton", "pallas_mosaic", "xla")
WHAT_WORKS = "'pallas_triton' runs on NVIDIA GPUs, 'xla' anywhere"


def resolve(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names to try, in order.

    Raises:
        ValueError: an unknown name.
    """
    if implementation is None:
        return GPU_DEFAULT if jax.default_backend() == "gpu" else ("xla",)
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    if not names:
        raise ValueError("implementation is an empty sequence: name at least one")
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"implementation is {name!r}: it must be one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    return names


def run_first(names: tuple[str, ...], call: Callable[[Callable], Any]) -> Any:
    """``call(attend)`` with the first implementation that does not raise ``NotImplementedError``."""
    reasons = []
    for name in names:
        try:
            return call(_attend_with(name))
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError("; ".join(reasons))


def append_first(names: tuple[str, ...], k_pages, v_pages, k_new, v_new, slots) -> Any:
    """Append with the first implementation that can."""
    reasons = []
    for name in names:
        try:
            if name == "xla":
                return _append_xla(k_pages, v_pages, k_new, v_new, slots)
            if name in ("pallas_triton", "pallas_mixed"):
                return _append_triton(k_pages, v_pages, k_new, v_new, slots, interpret=_interpret())
            raise NotImplementedError(f"there is no such kernel that appends; {WHAT_WORKS}")
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError("; ".join(reasons))


def _attend_with(name: str) -> Callable:
    if name == "xla":
        return _attend_xla
    if name == "pallas_triton":
        return functools.partial(_attend_triton, interpret=_interpret())
    if name == "pallas_mosaic":
        return _attend_mosaic
    if name == "pallas_mixed":
        return _attend_mixed
    raise NotImplementedError(f"there is no jax-triton kernel yet; {WHAT_WORKS}")


def _interpret() -> bool:
    """Without a GPU the Pallas kernels run in Pallas' interpreter."""
    return jax.default_backend() != "gpu"


def _flat(pages: jax.Array) -> jax.Array:
    """[num_pages, page_size, Hkv, D] as [slots, Hkv, D]: no copy."""
    return pages.reshape(-1, *pages.shape[2:])


@functools.partial(jax.jit, static_argnames=("shape", "options"))
def _attend_xla(q, k_pages, v_pages, buffer, per_head, shape: WorkShape, options: Options):
    partial_shape = (max(shape.partial_rows, 1), shape.num_q_heads)
    state = AttentionState(
        out=jnp.zeros((*q.shape[:2], shape.v_head_dim), q.dtype),
        lse=jnp.full(q.shape[:2], -jnp.inf, jnp.float32),
        partial_out=jnp.zeros((*partial_shape, shape.v_head_dim), jnp.float32),
        partial_lse=jnp.full(partial_shape, -jnp.inf, jnp.float32),
    )
    k, v = _flat(k_pages), _flat(v_pages)
    for index in range(len(shape.launches)):
        state = partial_xla.partial_attention(
            q, k, v, buffer, per_head, state, index=index, shape=shape, options=options
        )
    if shape.partial_rows:
        state = reduce_xla.reduce_partials(buffer, state, shape=shape)
    return state.out, state.lse


@functools.partial(jax.jit, static_argnames=("shape", "options", "interpret"))
def _attend_triton(q, k_pages, v_pages, buffer, per_head, shape: WorkShape, options: Options, interpret: bool):
    for pages in (k_pages, v_pages):
        if pages.dtype.itemsize == 1 and pages.size >= 2**31:
            raise NotImplementedError(
                f"a one-byte pool of {pages.size} elements: Pallas computes its offsets in 32 bits; use 'xla', or "
                f"pools below 2**31 elements"
            )
    _require_triton()
    from pallas_kernels import partial_triton, reduce_triton

    if q.shape[0] == 0:
        return jnp.zeros((0, shape.num_q_heads, shape.v_head_dim), q.dtype), jnp.zeros((0, shape.num_q_heads))
    k, v = _flat(k_pages), _flat(v_pages)
    state = None
    for index in range(len(shape.launches)):
        state = partial_triton.partial_attention(
            q, k, v, buffer, per_head, state, index=index, shape=shape, options=options, interpret=interpret
        )
    assert state is not None
    if shape.partial_rows:
        state = reduce_triton.reduce_partials(buffer, state, shape=shape, interpret=interpret)
    return state.out, state.lse


def _attend_mosaic(q, k_pages, v_pages, buffer, per_head, shape: WorkShape, options: Options):
    """The Mosaic GPU kernels. No default: they are faster than Triton's on wide tiles only."""
    _require_a_jax_for_mosaic()
    from pallas_kernels import attend_mosaic, partial_mosaic  # which older versions of jax cannot import

    k, v = _flat(k_pages), _flat(v_pages)
    try:
        partial_mosaic.check(q, k, v, shape)
    except NotImplementedError as error:
        raise NotImplementedError(f"{error}; {WHAT_WORKS}") from None
    _require_hopper()
    return attend_mosaic.attend(q, k, v, buffer, per_head, shape=shape, options=options)


def _attend_mixed(q, k_pages, v_pages, buffer, per_head, shape: WorkShape, options: Options):
    """Wide tiles in Mosaic GPU kernels, all others in Triton's: just Triton's where no tile is wide."""
    _require_a_jax_for_mosaic()
    _require_hopper()
    _require_triton()
    from pallas_kernels import attend_mixed

    k, v = _flat(k_pages), _flat(v_pages)
    if not attend_mixed.wide_launches(q, k, v, shape):
        return _attend_triton(q, k_pages, v_pages, buffer, per_head, shape, options, interpret=_interpret())
    return attend_mixed.attend(q, k, v, buffer, per_head, shape=shape, options=options)


def _require_triton() -> None:
    """Pallas' Triton backend is deprecated: later versions of JAX will not have it."""
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError as error:
        raise NotImplementedError(
            f"jax {jax.__version__} has no Triton backend of Pallas ({error}); 'pallas_mosaic' runs on Hopper GPUs, "
            f"'xla' anywhere"
        ) from None


def _require_a_jax_for_mosaic() -> None:
    if jax.__version_info__ < NEEDS_JAX:
        needed = ".".join(map(str, NEEDS_JAX))
        raise NotImplementedError(f"the Mosaic kernel needs jax {needed}, this is {jax.__version__}; {WHAT_WORKS}")


def _require_hopper() -> None:
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        raise NotImplementedError(f"the Mosaic kernel is for Hopper GPUs, this is {device.device_kind}; {WHAT_WORKS}")


def _append_xla(k_pages, v_pages, k_new, v_new, slots):
    k = append_xla.append(_flat(k_pages), k_new, slots).reshape(k_pages.shape)
    v = append_xla.append(_flat(v_pages), v_new, slots).reshape(v_pages.shape)
    return k, v


@functools.partial(jax.jit, static_argnames="interpret")
def _append_triton(k_pages, v_pages, k_new, v_new, slots, interpret: bool):
    _require_triton()
    from pallas_kernels import append_triton

    k, v = append_triton.append(_flat(k_pages), _flat(v_pages), k_new, v_new, slots, interpret=interpret)
    return k.reshape(k_pages.shape), v.reshape(v_pages.shape)
