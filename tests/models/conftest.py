"""A tiny Llama in the published (half-split) layout, a GGUF writer for it, and its forward pass in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tree_attention_jax.models import LlamaConfig

TINY = LlamaConfig(
    vocab_size=61,
    hidden_size=96,
    intermediate_size=160,
    num_layers=2,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rope_base=500.0,
    context_length=128,
)


@pytest.fixture(autouse=True)
def compile_quickly() -> Iterator[None]:
    """These programs run once or twice: optimising them would take longer than running them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def tiny_config() -> LlamaConfig:
    return TINY


@pytest.fixture(scope="session")
def tiny_weights() -> dict[str, np.ndarray]:
    """Weights by GGUF name, [out, in] as published, float32; every part moves the logits."""
    rng = np.random.default_rng(3)
    q, kv = TINY.num_q_heads * TINY.head_dim, TINY.num_kv_heads * TINY.head_dim
    hidden, mlp, vocab = TINY.hidden_size, TINY.intermediate_size, TINY.vocab_size
    shapes = {
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (mlp, hidden),
        "ffn_up": (mlp, hidden),
        "ffn_down": (hidden, mlp),
    }
    weights = {name: rng.normal(size=(vocab, hidden)) for name in ("token_embd", "output")}
    weights["output_norm"] = rng.uniform(0.5, 2, hidden)
    for layer in range(TINY.num_layers):
        for name, shape in shapes.items():
            weights[f"blk.{layer}.{name}"] = rng.normal(size=shape) / np.sqrt(shape[1])
        for name in ("attn_norm", "ffn_norm"):
            weights[f"blk.{layer}.{name}"] = rng.uniform(0.5, 2, hidden)
    return {name: values.astype(np.float32) for name, values in weights.items()}


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order in which GGUF stores Q and K: rotated pairs next to each other."""
    heads = []
    for head in np.split(rows, num_heads):
        first, second = np.split(head, 2)
        heads += [row for pair in zip(first, second, strict=True) for row in pair]
    return np.stack(heads)


WriteGGUF = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path, tiny_weights: dict[str, np.ndarray]) -> WriteGGUF:
    """write_gguf(change=, metadata=, quantize=) -> path of the tiny model's file.

    change: tensor name -> array, or None to leave it out; metadata: GGUF key -> value, or None likewise;
    quantize: tensor name -> gguf.GGMLQuantizationType.
    """
    gguf = pytest.importorskip("gguf")

    def write(
        change: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        quantize: dict[str, Any] | None = None,
    ) -> Path:
        tensors = {f"{name}.weight": values for name, values in tiny_weights.items()}
        for name in tensors:
            for kind, heads in (("attn_q.weight", TINY.num_q_heads), ("attn_k.weight", TINY.num_kv_heads)):
                if name.endswith(kind):
                    tensors[name] = interleave(tensors[name], heads)
        values = {
            "general.architecture": "llama",
            "llama.block_count": TINY.num_layers,
            "llama.context_length": TINY.context_length,
            "llama.embedding_length": TINY.hidden_size,
            "llama.feed_forward_length": TINY.intermediate_size,
            "llama.attention.head_count": TINY.num_q_heads,
            "llama.attention.head_count_kv": TINY.num_kv_heads,
            "llama.attention.key_length": TINY.head_dim,
            "llama.attention.value_length": TINY.head_dim,
            "llama.attention.layer_norm_rms_epsilon": TINY.rms_norm_eps,
            "llama.rope.freq_base": TINY.rope_base,
            "llama.vocab_size": TINY.vocab_size,
        }
        values |= metadata or {}
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, values["general.architecture"] or "none")
        if values.pop("general.architecture") is None:
            writer.kv_data[0].pop("general.architecture")
        for key, value in values.items():
            if value is not None:
                add = {
                    str: writer.add_string,
                    float: writer.add_float32,
                    bool: writer.add_bool,
                    list: writer.add_array,
                }
                add.get(type(value), writer.add_uint32)(key, value)
        for name, array in (tensors | (change or {})).items():
            if array is None:
                continue
            kind = (quantize or {}).get(name)
            writer.add_tensor(name, array if kind is None else gguf.quantize(array, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def numpy_logits(tiny_weights: dict[str, np.ndarray]) -> Callable[..., np.ndarray]:
    """numpy_logits(token_ids, frequency_factors=1.0) -> float64 [T, vocab], from the published weights."""
    w = {name: values.astype(np.float64) for name, values in tiny_weights.items()}

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + TINY.rms_norm_eps) * scale

    def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        pairs = np.exp(1j * angles) * (x[: TINY.head_dim // 2] + 1j * x[TINY.head_dim // 2 :])
        return np.concatenate([pairs.real, pairs.imag])

    def attention(x: np.ndarray, layer: str, frequencies: np.ndarray) -> np.ndarray:
        q, k, v = ((x @ w[f"{layer}.attn_{name}"].T).reshape(len(x), -1, TINY.head_dim) for name in ("q", "k", "v"))
        out = np.zeros_like(q)
        for t in range(len(x)):
            for head in range(TINY.num_q_heads):
                kv_head = head // (TINY.num_q_heads // TINY.num_kv_heads)
                query = rotate(q[t, head], t * frequencies)
                scores = [query @ rotate(k[s, kv_head], s * frequencies) for s in range(t + 1)]
                weights = np.exp(np.array(scores) / np.sqrt(TINY.head_dim))
                out[t, head] = weights / weights.sum() @ v[: t + 1, kv_head]
        return out.reshape(len(x), -1) @ w[f"{layer}.attn_output"].T

    def forward(token_ids: list[int], frequency_factors: Any = 1.0) -> np.ndarray:
        pair = np.arange(TINY.head_dim // 2)
        frequencies = TINY.rope_base ** (-2 * pair / TINY.head_dim) / frequency_factors
        x = w["token_embd"][token_ids]
        for index in range(TINY.num_layers):
            layer = f"blk.{index}"
            x = x + attention(norm(x, w[f"{layer}.attn_norm"]), layer, frequencies)
            y = norm(x, w[f"{layer}.ffn_norm"])
            gate = y @ w[f"{layer}.ffn_gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (y @ w[f"{layer}.ffn_up"].T)) @ w[f"{layer}.ffn_down"].T
        return norm(x, w["output_norm"]) @ w["output"].T

    return forward
