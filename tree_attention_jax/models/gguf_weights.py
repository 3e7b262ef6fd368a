"""Llama weights and configuration from a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tree_attention_jax.models.configs import LlamaConfig
from tree_attention_jax.models.gguf_file import GGUFFile
from tree_attention_jax.models.llama import Llama, default_dtype
from tree_attention_jax.models.rope import FrequencyFactors, LinearScaling, RopeScaling

ROPE_FACTORS = "rope_freqs.weight"

Shape = tuple[int, ...]
Layout = Callable[[np.ndarray], np.ndarray]
ParamPath = tuple[str | int, ...]


def load_gguf(file: GGUFFile | str | os.PathLike[str], dtype: DTypeLike | None = None) -> Llama:
    """The decoder a GGUF file holds, with weights of any type that `gguf` can dequantize cast to `dtype`.

    Raises FileNotFoundError; ValueError where the file contradicts itself (naming file, tensor, found and
    expected); NotImplementedError where it needs something this decoder hasn't: another architecture,
    experts, biases, YaRN, partial rotary dimensions.
    """
    file = GGUFFile.open(file)
    config = read_config(file)
    expected = tensor_table(config)
    unknown = sorted(set(file.tensors) - set(expected) - {ROPE_FACTORS})
    if unknown:
        raise NotImplementedError(
            f"{file.path}: {len(unknown)} tensors that this decoder has no place for, the first "
            f"{unknown[0]!r}; it reads plain Llama layers, no biases, experts or adapters"
        )
    dtype = jnp.dtype(default_dtype() if dtype is None else dtype)
    # Shapes only: random weights are never made, and memory peaks at a few tensors above the model's.
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0))))
    weights: dict[ParamPath, jax.Array] = {}
    for name, (path, shape, layout) in expected.items():
        weight = jnp.asarray(layout(file.tensor(name, shape)), dtype)
        weights[path] = jnp.concatenate([weights[path], weight], axis=1) if path in weights else weight
    nnx.replace_by_pure_dict(state, _nested(weights))
    return nnx.merge(graph, state)


def read_config(file: GGUFFile) -> LlamaConfig:
    """The configuration in a GGUF file's metadata."""
    architecture = file.require("general.architecture", str)
    if architecture != "llama":
        raise NotImplementedError(
            f"{file.path}: general.architecture is {architecture!r}, this decoder reads 'llama' only"
        )
    if file.get("llama.expert_count", 0):
        raise NotImplementedError(
            f"{file.path}: a mixture of {file.get('llama.expert_count')} experts; it reads dense layers"
        )
    hidden = file.require("llama.embedding_length", int)
    num_q_heads = file.require("llama.attention.head_count", int)
    if num_q_heads < 1:
        raise ValueError(f"{file.path}: llama.attention.head_count must be at least 1, found {num_q_heads}")
    head_dim = file.get("llama.attention.key_length", hidden // num_q_heads)
    v_head_dim = file.get("llama.attention.value_length", head_dim)
    if v_head_dim != head_dim:
        raise NotImplementedError(f"{file.path}: V head dim {v_head_dim} differs from K head dim {head_dim}")
    rotary = file.get("llama.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise NotImplementedError(f"{file.path}: RoPE over {rotary} of {head_dim} dimensions; it rotates all")
    try:
        return LlamaConfig(
            vocab_size=_vocab_size(file),
            hidden_size=hidden,
            intermediate_size=file.require("llama.feed_forward_length", int),
            num_layers=file.require("llama.block_count", int),
            num_q_heads=num_q_heads,
            num_kv_heads=file.get("llama.attention.head_count_kv", num_q_heads),
            head_dim=head_dim,
            rope_base=_published(file.get("llama.rope.freq_base", 10_000.0)),
            rope_scaling=_rope_scaling(file, head_dim),
            rms_norm_eps=_published(file.require("llama.attention.layer_norm_rms_epsilon", float)),
            tie_embeddings="output.weight" not in file.tensors,
            sliding_window=file.get("llama.attention.sliding_window") or None,
            context_length=file.require("llama.context_length", int),
        )
    except ValueError as error:
        raise error if str(file.path) in str(error) else ValueError(f"{file.path}: {error}") from error


def tensor_table(config: LlamaConfig) -> dict[str, tuple[ParamPath, Shape, Layout]]:
    """GGUF tensor name -> (path in the NNX state, stored shape, stored array -> ours), for every tensor.

    Tensors of one path are the columns of one parameter, side by side in this order.
    """
    hidden, mlp, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q_size, kv_size = (heads * config.head_dim for heads in (config.num_q_heads, config.num_kv_heads))
    table: dict[str, tuple[ParamPath, Shape, Layout]] = {
        "token_embd.weight": (("embedding",), (vocab, hidden), np.asarray),
        "output_norm.weight": (("final_norm", "scale"), (hidden,), np.asarray),
    }
    if not config.tie_embeddings:
        table["output.weight"] = (("unembedding",), (vocab, hidden), np.asarray)
    layer: dict[str, tuple[ParamPath, Shape, Layout]] = {
        "attn_norm": (("attention_norm", "scale"), (hidden,), np.asarray),
        "attn_q": (("qkv_proj", "kernel"), (q_size, hidden), _rope_kernel(config.num_q_heads)),
        "attn_k": (("qkv_proj", "kernel"), (kv_size, hidden), _rope_kernel(config.num_kv_heads)),
        "attn_v": (("qkv_proj", "kernel"), (kv_size, hidden), np.transpose),
        "attn_output": (("o_proj", "kernel"), (hidden, q_size), np.transpose),
        "ffn_norm": (("mlp_norm", "scale"), (hidden,), np.asarray),
        "ffn_gate": (("gate_proj", "kernel"), (mlp, hidden), np.transpose),
        "ffn_up": (("up_proj", "kernel"), (mlp, hidden), np.transpose),
        "ffn_down": (("down_proj", "kernel"), (hidden, mlp), np.transpose),
    }
    for index in range(config.num_layers):
        for name, (path, shape, layout) in layer.items():
            table[f"blk.{index}.{name}.weight"] = (("layers", index, *path), shape, layout)
    return table


def _rope_kernel(num_heads: int) -> Layout:
    """Undoes GGUF's row order of Q and K, which has each head's rotated pairs side by side: 0, D/2, 1, ..."""

    def layout(stored: np.ndarray) -> np.ndarray:
        rows, columns = stored.shape
        pairs = stored.reshape(num_heads, rows // num_heads // 2, 2, columns)
        return pairs.swapaxes(1, 2).reshape(rows, columns).T

    return layout


def _rope_scaling(file: GGUFFile, head_dim: int) -> RopeScaling | None:
    kind = file.get("llama.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise NotImplementedError(f"{file.path}: llama.rope.scaling.type {kind!r}; it reads 'none' and 'linear'")
    # Files of 2023 have the factor under the second name and no type.
    factor = file.get("llama.rope.scaling.factor", file.get("llama.rope.scale_linear", 1.0))
    factor = 1.0 if kind == "none" or factor == 0 else factor
    if ROPE_FACTORS in file.tensors:
        factors = file.tensor(ROPE_FACTORS, (head_dim // 2,)) * factor
        return FrequencyFactors(tuple(float(value) for value in factors))
    return None if factor == 1.0 else LinearScaling(factor)


def _published(stored: float) -> float:
    """The decimal number that was rounded to float32 on its way into the file: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(stored)))


def _vocab_size(file: GGUFFile) -> int:
    """The key is optional; the token list, if there, has one entry an embedding row."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if "llama.vocab_size" in file.metadata:
        return file.require("llama.vocab_size", int)
    if tokens is not None:
        return len(tokens.data)
    if "token_embd.weight" in file.tensors:
        return int(file.tensors["token_embd.weight"].shape[-1])
    raise ValueError(f"{file.path}: tensor 'token_embd.weight' is missing")


def _nested(flat: dict[ParamPath, jax.Array]) -> dict:
    """{('layers', 0, 'scale'): x} -> {'layers': {0: {'scale': x}}}."""
    nested: dict = {}
    for path, value in flat.items():
        place = nested
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return nested
