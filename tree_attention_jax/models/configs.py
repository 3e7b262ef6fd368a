"""Shapes of Llama-family decoders, and the published ones by name."""

from __future__ import annotations

from dataclasses import dataclass

from tree_attention_jax.models.rope import RopeScaling


@dataclass(frozen=True)
class LlamaConfig:
    """Everything that decides a decoder's shapes and arithmetic, hashable.

    `sliding_window` W: a query at position s sees positions t with s - W < t <= s; None sees all of its past.
    `context_length` is what the model was trained for; nothing is allocated by it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    sliding_window: int | None = None
    context_length: int = 2048

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
        )
        for name in (*sizes, "head_dim", "context_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"LlamaConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"LlamaConfig.num_q_heads must be a multiple of num_kv_heads, "
                f"got {self.num_q_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"LlamaConfig.head_dim must be even, RoPE rotates pairs; got {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"LlamaConfig.sliding_window must be None or at least 1, got {self.sliding_window}")


SMOLLM2_135M = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_q_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_base=100_000.0,
    tie_embeddings=True,
    context_length=8192,
)

LLAMA_2_7B = LlamaConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=32,
    head_dim=128,
    context_length=4096,
)

LLAMA_3_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_base=500_000.0,
    context_length=8192,
)

# Version 0.3, which has no sliding window; 0.1 had 4096, a rope_base of 10,000 and 32,000 tokens.
MISTRAL_7B = LlamaConfig(
    vocab_size=32_768,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_base=1_000_000.0,
    context_length=32_768,
)

CONFIGS = {
    "smollm2-135m": SMOLLM2_135M,
    "llama-2-7b": LLAMA_2_7B,
    "llama-3-8b": LLAMA_3_8B,
    "mistral-7b": MISTRAL_7B,
}
