"""The op: checks the arguments, picks a backend, runs the plan's launches and the reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_kernels.layout import WorkShape
from pallas_kernels.options import Options
from tree_attention_jax import backends
from tree_attention_jax.planning.plan import TreePlan

__all__ = ["append_kv", "tree_attention"]


def tree_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    plan: TreePlan,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    attention_sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    implementation: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of every query of a forest over its ancestors' tokens and its own node's, up to itself.

    Args:
        q: [Q, Hq, D], one row a query in the tree's query order. More rows than the tree has queries are padding
            (their result is 0); at most ``plan.query_capacity``.
        k_pages: [num_pages, page_size, Hkv, D]; ``v_pages``: [num_pages, page_size, Hkv, Dv]. The new tokens' K and V
            are in them already (:func:`append_kv`). Slots that no node owns may hold anything.
        plan: from :func:`tree_attention_jax.plan_tree`, for these head counts and this page size.
        scale: factor of q.k; ``None``: ``D ** -0.5``.
        logits_soft_cap: logits become ``cap * tanh(logit / cap)``.
        sliding_window: a query at absolute position s sees t with ``s - sliding_window < t <= s``.
        attention_sinks: [Hq] logits of one more token that has no value (GPT-OSS); they enter the LSE too.
        alibi_slopes: [Hq]; ``slope * (t - s)`` is added to the logits after the cap.
        k_scale, v_scale: factors of quantised K and V, a scalar or [Hkv].
        implementation: ``"xla"``, ``"pallas_triton"``, on Hopper GPUs ``"pallas_mosaic"`` and ``"pallas_mixed"`` (wide
            tiles by Mosaic, all others by Triton), or a sequence of names of which the first that can is taken;
            ``None``: the best that works here.
        return_lse: also return the log-sum-exp.

    Returns:
        [Q, Hq, Dv] in q's dtype; with ``return_lse`` also float32 [Q, Hq], the natural log of the sum of the
        exponentials of the scaled (capped, biased) logits.

    Raises:
        ValueError, TypeError: an argument does not fit the plan; the message names both values.
        NotImplementedError: no requested implementation can do this; the message says why.
    """
    shape = _shape_of(plan)
    _check_arrays(q, k_pages, v_pages, plan)
    _check_window(plan, sliding_window)
    group = shape.group
    alibi = _per_head("alibi_slopes", alibi_slopes, shape.num_q_heads)
    sinks = _per_head("attention_sinks", attention_sinks, shape.num_q_heads)
    options = Options(
        scale=_static_float("scale", shape.head_dim**-0.5 if scale is None else scale),
        logits_soft_cap=None
        if logits_soft_cap is None
        else _static_float("logits_soft_cap", logits_soft_cap, positive=True),
        sliding_window=sliding_window,
        alibi=alibi is not None,
        scaled_keys=k_scale is not None,
    )
    per_head = None
    if options.uses_heads:
        factors = jnp.ones(shape.num_kv_heads) if k_scale is None else _kv_scale("k_scale", k_scale, shape.num_kv_heads)
        slopes = jnp.zeros(shape.num_q_heads) if alibi is None else alibi
        per_head = jnp.stack([slopes, jnp.repeat(factors, group)]).astype(jnp.float32)
    names = backends.resolve(implementation)
    out, lse = backends.run_first(
        names, lambda attend: attend(q, k_pages, v_pages, plan.buffer, per_head, shape, options)
    )
    if v_scale is not None:
        out = (out * jnp.repeat(_kv_scale("v_scale", v_scale, shape.num_kv_heads), group)[:, None]).astype(out.dtype)
    if sinks is not None:
        out, lse = _add_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def append_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    plan: TreePlan,
    *,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write the new tokens' K and V into their slots. In place if the pages are donated to the enclosing ``jit``.

    Args:
        k_pages: [num_pages, page_size, Hkv, D]; ``v_pages``: [num_pages, page_size, Hkv, Dv].
        k_new: [Q, Hkv, D]; ``v_new``: [Q, Hkv, Dv], in the tree's query order; rows of padding are dropped.
        plan: as for :func:`tree_attention`.

    Returns:
        The pages with the new tokens in them.

    Raises:
        ValueError, TypeError: shapes that do not fit the plan, naming both values.
    """
    shape = _shape_of(plan)
    _check_pages(k_pages, v_pages, plan)
    rows = jnp.shape(k_new)[0] if jnp.ndim(k_new) else 0
    _check_shape("k_new", k_new, (rows, shape.num_kv_heads, shape.head_dim))
    _check_shape("v_new", v_new, (rows, shape.num_kv_heads, shape.v_head_dim))
    _check_rows("k_new", rows, plan)
    _check_storable("k_new", k_new, k_pages)
    _check_storable("v_new", v_new, v_pages)
    slots = plan.slots[:rows]
    names = backends.resolve(implementation)
    return backends.append_first(names, k_pages, v_pages, jnp.asarray(k_new), jnp.asarray(v_new), slots)


@jax.jit
def _add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One more token with these logits and no value: it only enlarges the denominator."""
    with_sink = jnp.where(lse == -jnp.inf, -jnp.inf, jnp.logaddexp(lse, sinks))
    factor = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(lse - with_sink))
    return (out * factor[..., None]).astype(out.dtype), with_sink


# ---------------------------------------------------------------------- checks


def _shape_of(plan: Any) -> WorkShape:
    if not isinstance(plan, TreePlan):
        raise TypeError(f"plan is a {type(plan).__name__}: it must be a TreePlan (see plan_tree)")
    return plan.shape


def _check_arrays(q: Any, k_pages: Any, v_pages: Any, plan: TreePlan) -> None:
    shape = plan.shape
    if jnp.ndim(q) != 3:
        raise ValueError(f"q has shape {jnp.shape(q)}: it must be [Q, {shape.num_q_heads}, {shape.head_dim}]")
    rows = jnp.shape(q)[0]
    _check_shape("q", q, (rows, shape.num_q_heads, shape.head_dim))
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"q has dtype {q.dtype}: it must be a floating-point type")
    _check_rows("q", rows, plan)
    _check_pages(k_pages, v_pages, plan)


def _check_pages(k_pages: Any, v_pages: Any, plan: TreePlan) -> None:
    shape = plan.shape
    pages = jnp.shape(k_pages)[0] if jnp.ndim(k_pages) else 0
    _check_shape("k_pages", k_pages, (pages, shape.page_size, shape.num_kv_heads, shape.head_dim))
    _check_shape("v_pages", v_pages, (pages, shape.page_size, shape.num_kv_heads, shape.v_head_dim))
    if k_pages.dtype != v_pages.dtype:
        raise TypeError(f"k_pages has dtype {k_pages.dtype} but v_pages has dtype {v_pages.dtype}")
    if not (jnp.issubdtype(k_pages.dtype, jnp.floating) or k_pages.dtype == jnp.int8):
        raise TypeError(f"k_pages has dtype {k_pages.dtype}: it must be a floating-point type or int8")
    if plan.host is not None and plan.host.num_pages > pages:
        raise ValueError(f"k_pages has {pages} pages but the plan reads page {plan.host.num_pages - 1}")


def _check_shape(name: str, value: Any, wanted: tuple[int, ...]) -> None:
    if jnp.shape(value) != wanted:
        raise ValueError(f"{name} has shape {jnp.shape(value)} but the plan was made for {wanted}")


def _check_storable(name: str, new: Any, pages: Any) -> None:
    """Floats round to any float; a cast to or from integers would lose the scale."""
    dtype = jnp.result_type(new)
    if dtype != pages.dtype and not (jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(pages.dtype, jnp.floating)):
        raise TypeError(f"{name} has dtype {dtype} but the pages hold {pages.dtype}: quantise it before appending")


def _check_rows(name: str, rows: int, plan: TreePlan) -> None:
    if rows > plan.query_capacity:
        raise ValueError(f"{name} has {rows} rows but the plan's query bucket holds {plan.query_capacity}")
    if plan.host is not None and rows < plan.host.num_queries:
        raise ValueError(f"{name} has {rows} rows but the plan has {plan.host.num_queries} queries")


def _check_window(plan: TreePlan, sliding_window: int | None) -> None:
    if sliding_window is not None and (isinstance(sliding_window, bool) or not isinstance(sliding_window, int)):
        raise TypeError(f"sliding_window is {sliding_window!r}: it must be an integer or None")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}: it must be at least 1")
    planned = plan.sliding_window
    if planned is not None and (sliding_window is None or sliding_window > planned):
        raise ValueError(
            f"sliding_window is {sliding_window} but the plan leaves out tokens beyond a window of {planned}: "
            f"plan with the window you attend with"
        )


def _per_head(name: str, value: ArrayLike | None, heads: int) -> jax.Array | None:
    if value is None:
        return None
    if jnp.shape(value) != (heads,):
        raise ValueError(f"{name} has shape {jnp.shape(value)}: it must be [{heads}], one a query head")
    _check_finite(name, value)
    return jnp.asarray(value, jnp.float32)


def _kv_scale(name: str, value: ArrayLike, heads: int) -> jax.Array:
    if jnp.shape(value) not in ((), (heads,)):
        raise ValueError(f"{name} has shape {jnp.shape(value)}: it must be a scalar or [{heads}], one a KV head")
    _check_finite(name, value)
    return jnp.broadcast_to(jnp.asarray(value, jnp.float32), (heads,))


def _check_finite(name: str, value: ArrayLike) -> None:
    """Of values on the host: looking at a device array would wait for it."""
    if isinstance(value, jax.Array):
        return
    numbers = np.atleast_1d(np.asarray(value, np.float64))
    wrong = ~np.isfinite(numbers)
    if wrong.any():
        index = int(np.argmax(wrong))
        where = f"[{index}]" if np.ndim(value) else ""
        raise ValueError(f"{name}{where} is {numbers[index]}: it must be finite")


def _static_float(name: str, value: Any, positive: bool = False) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(f"{name} must be a Python number: it is compiled into the kernel ({error})") from None
    if not number == number or number in (float("inf"), float("-inf")) or (positive and number <= 0):
        raise ValueError(f"{name} is {number}: it must be finite{' and positive' if positive else ''}")
    return number
