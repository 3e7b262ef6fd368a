"""A plain Llama-family decoder in Flax NNX: the reference user of `tree_attention`.

Needs the extra `flax`; the modules that read files need `models`:
`gguf_weights.load_gguf`, `tokenizer.GGUFTokenizer`, `smollm2.find_smollm2`.
"""

from tree_attention_jax.models.configs import (
    CONFIGS,
    LLAMA_2_7B,
    LLAMA_3_8B,
    MISTRAL_7B,
    SMOLLM2_135M,
    LlamaConfig,
)
from tree_attention_jax.models.dense import dense_forward
from tree_attention_jax.models.llama import Llama, default_dtype
from tree_attention_jax.models.paged_cache import allocate_pages, kv_bytes_per_token
from tree_attention_jax.models.rope import FrequencyFactors, LinearScaling, Llama3Scaling

__all__ = [
    "CONFIGS",
    "LLAMA_2_7B",
    "LLAMA_3_8B",
    "MISTRAL_7B",
    "SMOLLM2_135M",
    "FrequencyFactors",
    "LinearScaling",
    "Llama",
    "Llama3Scaling",
    "LlamaConfig",
    "allocate_pages",
    "default_dtype",
    "dense_forward",
    "kv_bytes_per_token",
]
