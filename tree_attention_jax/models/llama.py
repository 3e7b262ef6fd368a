"""A Llama-family decoder in Flax NNX whose attention is `tree_attention` over a paged K/V cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import tree_attention_jax as ta
from tree_attention_jax.models.configs import LlamaConfig
from tree_attention_jax.models.paged_cache import Pages
from tree_attention_jax.models.rope import apply_rope, rope_cos_sin, rope_frequencies

CosSin = tuple[jax.Array, jax.Array]
# (layer, x, its K pages, its V pages) -> (x, K pages, V pages)
LayerStep = Callable[["LlamaLayer", jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


def default_dtype() -> DTypeLike:
    """bfloat16 on a GPU; float32 elsewhere, where bfloat16 saves memory but no time."""
    return jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation of the last axis, computed in float32, returned in x's dtype."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class LlamaLayer(nnx.Module):
    """One decoder layer, open in the middle: `project_qkv`, any attention, then `finish`.

    So the paged forward, the dense reference and anyone's experiment share the weights and differ in the
    attention alone.
    """

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        linear = partial(
            nnx.Linear,
            use_bias=False,
            dtype=dtype,
            param_dtype=dtype,
            kernel_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        hidden, mlp = config.hidden_size, config.intermediate_size
        self.head_dim, self.heads = config.head_dim, (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        self.attention_norm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype)
        # One matrix, q's columns first: of three, XLA would make one at every step, and copy them for it.
        self.qkv_proj = linear(hidden, sum(self.heads) * config.head_dim)
        self.o_proj = linear(config.num_q_heads * config.head_dim, hidden)
        self.mlp_norm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype)
        self.gate_proj = linear(hidden, mlp)
        self.up_proj = linear(hidden, mlp)
        self.down_proj = linear(mlp, hidden)

    def project_qkv(self, x: jax.Array, rope: CosSin) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [Q, hidden] -> q [Q, Hq, D], k and v [Q, Hkv, D]; q and k rotated by their positions."""
        qkv = self.qkv_proj(self.attention_norm(x)).reshape(x.shape[0], -1, self.head_dim)
        q, k, v = jnp.split(qkv, (self.heads[0], self.heads[0] + self.heads[1]), axis=1)
        return apply_rope(q, *rope), apply_rope(k, *rope), v

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Residual stream x [Q, hidden] and attention output [Q, Hq, D] -> the layer's output [Q, hidden]."""
        x = x + self.o_proj(attended.reshape(x.shape[0], -1))
        normed = self.mlp_norm(x)
        return x + self.down_proj(nnx.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Llama(nnx.Module):
    """The decoder. Weights are random, from `rngs`; `load_gguf` makes one with a file's weights.

    `dtype` is that of weights and activations (None: `default_dtype()`); norms, RoPE and logits use float32.
    """

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs):
        dtype = jnp.dtype(default_dtype() if dtype is None else dtype)
        self.config = config
        self.dtype = dtype
        shape = (config.vocab_size, config.hidden_size)
        initializer = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(initializer(rngs.params(), shape, dtype))
        self.layers = nnx.List([LlamaLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        if not config.tie_embeddings:
            self.unembedding = nnx.Param(initializer(rngs.params(), shape, dtype))

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """Token ids [Q] -> residual stream [Q, hidden]."""
        return self.embedding[...][token_ids]

    def rope(self, positions: jax.Array) -> CosSin:
        """Positions [Q] -> the cosines and sines every layer rotates by, float32 [Q, head_dim // 2]."""
        config = self.config
        return rope_cos_sin(positions, rope_frequencies(config.head_dim, config.rope_base, config.rope_scaling))

    def logits(self, x: jax.Array) -> jax.Array:
        """Residual stream [R, hidden] -> logits [R, vocab], float32."""
        table = self.embedding if self.config.tie_embeddings else self.unembedding
        return jnp.einsum("rh,vh->rv", self.final_norm(x), table[...], preferred_element_type=jnp.float32)

    def run_layers(
        self, step: LayerStep, x: jax.Array, k_pages: Sequence[jax.Array], v_pages: Sequence[jax.Array]
    ) -> tuple[jax.Array, Pages, Pages]:
        """x through all layers, each with its own pages: (x, k_pages, v_pages).

        step: (layer, x, its k pages, its v pages) -> (x, k pages, v pages).
        """
        new_k, new_v = [], []
        for layer, k_layer, v_layer in zip(self.layers, k_pages, v_pages, strict=True):
            x, k_layer, v_layer = step(layer, x, k_layer, v_layer)
            new_k.append(k_layer)
            new_v.append(v_layer)
        return x, tuple(new_k), tuple(new_v)

    def for_loops(self) -> Any:
        """This decoder as a program over many steps should use it: on a CPU, a `RolledLlama`. Call it under `jax.jit`.

        As one program, 30 layers take a CPU minutes to compile. A GPU compiles them faster, and would pay for the
        copies with every step.
        """
        from tree_attention_jax.models.rolled import WORTH_ROLLING, RolledLlama

        worth_it = jax.default_backend() == "cpu" and self.config.num_layers >= WORTH_ROLLING
        return RolledLlama.of(self) if worth_it else self

    def __call__(
        self,
        token_ids: jax.Array,
        k_pages: Sequence[jax.Array],
        v_pages: Sequence[jax.Array],
        plan: ta.TreePlan,
        *,
        logit_rows: jax.Array | None = None,
        implementation: str | Sequence[str] | None = None,
    ) -> tuple[jax.Array, Pages, Pages]:
        """Runs the plan's queries through the model: writes their K and V, attends, predicts.

        Layers share one compiled program, which takes the pages as donated: use those it returns. Inside a
        `jax.jit` all layers become one program: faster to launch, many times slower to compile; donate the pages
        to it, or it copies the cache.

        token_ids: int [Q], the new tokens in the plan's query order; rows past the plan's real queries are
            padding and may hold any id.
        k_pages, v_pages: one array a layer, [num_pages, page_size, num_kv_heads, head_dim].
        logit_rows: int [R], the rows to predict from; None: all. A prefill of T tokens needs one row, and
            [T, vocab] can be larger than the model.
        implementation: as in `tree_attention`.

        Returns logits, float32 [R, vocab], and the updated pages.
        """
        config = self.config
        if len(k_pages) != config.num_layers or len(v_pages) != config.num_layers:
            found = f"{len(k_pages)} and {len(v_pages)}"
            raise ValueError(f"k_pages and v_pages need one array a layer, {config.num_layers}; got {found}")
        if token_ids.ndim != 1 or token_ids.shape[0] > plan.query_capacity:
            wanted = f"[Q] with Q at most the plan's {plan.query_capacity}"
            raise ValueError(f"token_ids must be {wanted}, got shape {token_ids.shape}")
        x, rope = _enter(self, token_ids, plan)
        if implementation is not None and not isinstance(implementation, str):
            implementation = tuple(implementation)
        options = dict(window=config.sliding_window, implementation=implementation)

        def step(layer, x, k_layer, v_layer):
            return _paged_layer(layer, x, rope, k_layer, v_layer, plan, **options)

        x, new_k, new_v = self.run_layers(step, x, k_pages, v_pages)
        return _leave(self, x, logit_rows), new_k, new_v


# Outside of a `jax.jit`, an operation at a time compiles a program each.
@jax.jit
def _enter(model: Any, token_ids: jax.Array, plan: ta.TreePlan) -> tuple[jax.Array, CosSin]:
    return model.embed(token_ids), model.rope(plan.positions[: token_ids.shape[0]])


@jax.jit
def _leave(model: Any, x: jax.Array, rows: jax.Array | None) -> jax.Array:
    return model.logits(x if rows is None else x[rows])


@partial(jax.jit, static_argnames=("window", "implementation"), donate_argnames=("k_pages", "v_pages"))
def _paged_layer(
    layer: LlamaLayer,
    x: jax.Array,
    rope: CosSin,
    k_pages: jax.Array,
    v_pages: jax.Array,
    plan: ta.TreePlan,
    *,
    window: int | None,
    implementation: str | tuple[str, ...] | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer over one pair of page arrays: (its output [Q, hidden], the pages with the new tokens in them)."""
    q, k, v = layer.project_qkv(x, rope)
    k_pages, v_pages = ta.append_kv(k_pages, v_pages, k, v, plan, implementation=implementation)
    attended = ta.tree_attention(q, k_pages, v_pages, plan, sliding_window=window, implementation=implementation)
    return layer.finish(x, attended), k_pages, v_pages
