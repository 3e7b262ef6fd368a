"""GGUF files that the tests write: what loads must compute what was written; what can't load must say why."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from tree_attention_jax.models import FrequencyFactors, LinearScaling, dense_forward  # noqa: E402
from tree_attention_jax.models.gguf_file import GGUFFile  # noqa: E402
from tree_attention_jax.models.gguf_weights import load_gguf, read_config  # noqa: E402

TOKENS = [7, 60, 0, 33, 12, 12, 5]
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def test_round_trip_equals_numpy(write_gguf, tiny_config, numpy_logits):
    model = load_gguf(write_gguf(), jnp.float32)
    assert model.config == tiny_config
    np.testing.assert_allclose(dense_forward(model, jnp.array(TOKENS)), numpy_logits(TOKENS), atol=1e-4)


def test_tied_embeddings_where_output_is_absent(write_gguf, tiny_weights):
    model = load_gguf(write_gguf(change={"output.weight": None}), jnp.float32)
    assert model.config.tie_embeddings
    np.testing.assert_array_equal(model.embedding[...], tiny_weights["token_embd"])


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "Q4_1", "BF16"])
def test_quantized_tensors(write_gguf, tiny_weights, kind):
    quantize = {"blk.1.ffn_up.weight": gguf.GGMLQuantizationType[kind]}
    model = load_gguf(write_gguf(quantize=quantize), jnp.float32)
    found, stored = model.layers[1].up_proj.kernel[...], tiny_weights["blk.1.ffn_up"].T
    np.testing.assert_allclose(found, stored, atol=0.03)
    assert (np.asarray(found) != stored).any()


def test_dtype_of_weights(write_gguf):
    model = load_gguf(write_gguf(), "bfloat16")
    assert model.dtype == model.embedding[...].dtype == model.layers[0].qkv_proj.kernel[...].dtype == jnp.bfloat16


def test_rope_freqs_tensor(write_gguf, numpy_logits):
    factors = np.linspace(1, 8, 32).astype(np.float32)
    model = load_gguf(write_gguf(change={"rope_freqs.weight": factors}), jnp.float32)
    assert model.config.rope_scaling == FrequencyFactors(tuple(factors.tolist()))
    np.testing.assert_allclose(dense_forward(model, jnp.array(TOKENS)), numpy_logits(TOKENS, factors), atol=1e-4)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_rope_scaling(write_gguf, numpy_logits, metadata):
    model = load_gguf(write_gguf(metadata=metadata), jnp.float32)
    assert model.config.rope_scaling == LinearScaling(4.0)
    np.testing.assert_allclose(dense_forward(model, jnp.array(TOKENS)), numpy_logits(TOKENS, 4.0), atol=1e-4)


def test_optional_metadata_has_defaults(write_gguf, tiny_config):
    absent = ("llama.vocab_size", "llama.attention.value_length")
    assert read_config(GGUFFile(write_gguf(metadata=dict.fromkeys(absent)))) == tiny_config
    windowed = read_config(GGUFFile(write_gguf(metadata={"llama.attention.sliding_window": 7})))
    assert windowed.sliding_window == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"change": {"blk.1.attn_k.weight": None}},
            r"tensor 'blk.1.attn_k.weight' is missing, expected shape \[128, 96\]",
        ),
        (
            {"change": {"blk.0.attn_v.weight": np.zeros((96, 96), np.float32)}},
            r"tensor 'blk.0.attn_v.weight' has shape \[96, 96\], the metadata's is \[128, 96\]",
        ),
        ({"metadata": {"llama.vocab_size": 64}}, r"'token_embd.weight' has shape \[61, 96\], .* \[64, 96\]"),
        ({"metadata": {"llama.block_count": 3}}, "tensor 'blk.2.attn_norm.weight' is missing"),
        ({"metadata": {"llama.embedding_length": None}}, "metadata key 'llama.embedding_length' is missing"),
        ({"metadata": {"llama.embedding_length": "96"}}, "'llama.embedding_length' must be int, found '96'"),
        ({"metadata": {"llama.attention.head_count_kv": 4}}, "multiple of num_kv_heads, got 6 and 4"),
        ({"metadata": {"llama.attention.head_count": 0}}, "head_count must be at least 1, found 0"),
        ({"metadata": {"general.architecture": None}}, "metadata key 'general.architecture' is missing"),
    ],
)
def test_contradictory_files(write_gguf, options, message):
    path = write_gguf(**options)
    with pytest.raises(ValueError, match=message) as caught:
        load_gguf(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": {"general.architecture": "qwen2"}}, "general.architecture is 'qwen2'"),
        ({"metadata": {"llama.expert_count": 8}}, "a mixture of 8 experts"),
        ({"metadata": {"llama.rope.dimension_count": 32}}, "RoPE over 32 of 64 dimensions"),
        ({"metadata": {"llama.attention.value_length": 32}}, "V head dim 32 differs from K head dim 64"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "scaling.type 'yarn'"),
        ({"change": {"blk.0.attn_q.bias": np.zeros(384, np.float32)}}, "1 tensors .* 'blk.0.attn_q.bias'"),
    ],
)
def test_unsupported_files(write_gguf, options, message):
    path = write_gguf(**options)
    with pytest.raises(NotImplementedError, match=message) as caught:
        load_gguf(path)
    assert str(path) in str(caught.value)


def test_type_that_cannot_be_dequantized(write_gguf, monkeypatch):
    def refuse(data, kind):
        raise NotImplementedError(f"Dequantization for {kind.name} is not yet implemented")

    path = write_gguf(quantize={"blk.0.ffn_up.weight": Q8_0})
    monkeypatch.setattr(gguf, "dequantize", refuse)
    with pytest.raises(NotImplementedError, match=r"tiny.gguf: tensor .* is stored as .* convert the file"):
        load_gguf(path)


def test_files_that_are_no_gguf(tmp_path, write_gguf):
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf: no such file"):
        load_gguf(tmp_path / "absent.gguf")
    whole = write_gguf().read_bytes()
    for name, content in {
        "empty": b"",
        "text": b"not a model at all, just some text",
        "cut": whole[:3000],
    }.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}\.gguf: not a GGUF file, or cut short"):
            load_gguf(path)
