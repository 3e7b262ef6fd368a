"""The specification: dense float64 attention in NumPy, one query at a time.

Slow on purpose, and short enough to check by eye. Everything else in this package is tested against it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tree_attention_jax.topology import TokenTree

__all__ = ["dense_tree_attention"]


def dense_tree_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    tree: TokenTree,
    page_size: int = 16,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    attention_sinks: Any = None,
    alibi_slopes: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale * q.K^T) V over what each query sees, in float64.

    Args and semantics as :func:`tree_attention_jax.tree_attention`, with the tree in place of its plan.

    Returns:
        float64 [num_queries, Hq, Dv], and with ``return_lse`` the natural-log log-sum-exp [num_queries, Hq].
    """
    q = np.asarray(q).astype(np.float64)
    k = np.asarray(k_pages).astype(np.float64)
    v = np.asarray(v_pages).astype(np.float64)
    k = k.reshape(-1, *k.shape[2:]) * _per_head(k_scale)
    v = v.reshape(-1, *v.shape[2:]) * _per_head(v_scale)
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    slots = np.split(tree.token_slots(page_size), np.cumsum(tree.kv_len)[:-1])
    out = np.zeros((len(q), q.shape[1], v.shape[-1]))
    lse = np.full(q.shape[:2], -np.inf)
    query = 0
    for node in range(tree.num_nodes):
        path: list[np.ndarray] = []
        above = tree.parent[node]
        while above >= 0:
            path.insert(0, slots[above])
            above = tree.parent[above]
        for j in range(tree.q_len[node]):
            own = tree.kv_len[node] - tree.q_len[node] + j + 1
            seen = np.concatenate([*path, slots[node][:own]])  # in order of absolute position
            position = np.arange(len(seen))
            if sliding_window is not None:
                young = position > position[-1] - sliding_window
                seen, position = seen[young], position[young]
            keys, values = k[seen], v[seen]
            logits = np.einsum("hd,thd->ht", q[query], np.repeat(keys, group, axis=1)) * scale
            if logits_soft_cap is not None:
                logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
            if alibi_slopes is not None:
                logits = logits + np.asarray(alibi_slopes, np.float64)[:, None] * (position - position[-1])
            peak = logits.max(axis=1, keepdims=True)
            weight = np.exp(logits - peak)
            total = weight.sum(axis=1)
            if attention_sinks is not None:
                total = total + np.exp(np.asarray(attention_sinks, np.float64) - peak[:, 0])
            out[query] = np.einsum("ht,thd->hd", weight, np.repeat(values, group, axis=1)) / total[:, None]
            lse[query] = peak[:, 0] + np.log(total)
            query += 1
    return (out, lse) if return_lse else out


def _per_head(scale: Any) -> Any:
    """A scalar, or one factor a KV head, shaped to multiply [slots, Hkv, D]."""
    if scale is None:
        return 1.0
    return np.asarray(scale, np.float64).reshape(-1, 1)
