"""The paged forward against plain dense attention, over trees whose pages are shuffled and shared."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tree_attention_jax as ta
from tree_attention_jax.models import (
    CONFIGS,
    SMOLLM2_135M,
    Llama,
    LlamaConfig,
    allocate_pages,
    dense_forward,
    kv_bytes_per_token,
)

PAGE_SIZE = 4
NUM_PAGES = 16
ROWS = 16  # the smallest query bucket
PROMPT = [3, 14, 15, 9, 26, 5]
DRAFTS = {1: [8, 9], 2: [30], 3: [31]}
PATHS = {1: [*PROMPT, 8, 9], 2: [*PROMPT, 30], 3: [*PROMPT, 8, 9, 31]}


def random_model(config: LlamaConfig, dtype: str = "float32") -> Llama:
    """Weights by NumPy: kernels large enough that attention is far from uniform, and nothing to compile."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        values = (
            rng.normal(size=leaf.shape) * 2 / np.sqrt(leaf.shape[0])
            if leaf.ndim == 2
            else rng.uniform(0.5, 2, leaf.shape)
        )
        return jnp.asarray(values, leaf.dtype)

    graph, shapes = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, jax.tree.map(draw, shapes))


@pytest.fixture(scope="module")
def model(tiny_config: LlamaConfig) -> Llama:
    return random_model(tiny_config)


def prompt_tree(kv_len: int, q_len: int) -> ta.TokenTree:
    """The prompt alone, on pages in no order."""
    return ta.TokenTree([-1], [kv_len], [q_len], [0, 2], [9, 2], [0])


def forked_tree(q_len: list[int]) -> ta.TokenTree:
    """The prompt on pages 9 and 2, and three drafts under it, of which the first goes on in page 2."""
    return ta.TokenTree(
        parent=[-1, 0, 0, 1],
        kv_len=[6, 2, 1, 1],
        q_len=q_len,
        page_indptr=[0, 2, 3, 4, 5],
        page_indices=[9, 2, 2, 0, 5],
        first_slot=[0, 2, 0, 1],
    )


def plan_for(config: LlamaConfig, tree: ta.TokenTree) -> ta.TreePlan:
    return ta.plan_tree(
        tree,
        page_size=PAGE_SIZE,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
        sliding_window=config.sliding_window,
    )


def empty_pages(model: Llama) -> Any:
    return allocate_pages(model.config, NUM_PAGES, PAGE_SIZE, model.dtype)


def step(model: Llama, tree: ta.TokenTree, tokens: list[int], pages, rows=None, implementation=None):
    """One forward whose rows fill the query bucket: (logits [len(tokens), vocab], pages)."""
    padded = jnp.array(tokens + [60] * (ROWS - len(tokens)))
    plan = plan_for(model.config, tree)
    logits, *pages = model(padded, *pages, plan, logit_rows=rows, implementation=implementation)
    return np.asarray(logits)[: len(tokens)], tuple(pages)


def dense(model: Llama, token_ids: list[int]) -> np.ndarray:
    """dense_forward at one padded length, so that it compiles once a model."""
    padded = jnp.array(token_ids + [0] * (ROWS - len(token_ids)))
    return np.asarray(dense_forward(model, padded))[: len(token_ids)]


def dense_drafts(model: Llama) -> np.ndarray:
    """Logits after every draft token, in query order."""
    return np.concatenate([dense(model, PATHS[node])[-len(DRAFTS[node]) :] for node in DRAFTS])


@pytest.mark.parametrize("implementation", ["xla", "pallas_triton"])
def test_whole_tree_at_once_equals_dense_attention(model, implementation):
    tokens = [*PROMPT, *DRAFTS[1], *DRAFTS[2], *DRAFTS[3]]
    tree = forked_tree([6, 2, 1, 1])
    logits, _ = step(model, tree, tokens, empty_pages(model), implementation=implementation)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, [*dense(model, PROMPT), *dense_drafts(model)], atol=2e-5)


def test_prefill_fork_and_ragged_decode_equal_dense_attention(model):
    prompt_logits, pages = step(model, prompt_tree(6, 6), PROMPT, empty_pages(model))
    np.testing.assert_allclose(prompt_logits, dense(model, PROMPT), atol=2e-5)
    tokens = [*DRAFTS[1], *DRAFTS[2], *DRAFTS[3]]
    logits, _ = step(model, forked_tree([0, 2, 1, 1]), tokens, pages)
    expected = dense_drafts(model)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    other_start = dense(model, [1, *PATHS[2][1:]])[-1]
    assert np.abs(other_start - expected[2]).max() > 0.01  # so a lost first token would have been seen


def test_chunked_prefill_equals_whole_prefill(model):
    whole, whole_pages = step(model, prompt_tree(6, 6), PROMPT, empty_pages(model))
    first, pages = step(model, prompt_tree(2, 2), PROMPT[:2], empty_pages(model))
    second, pages = step(model, prompt_tree(6, 4), PROMPT[2:], pages)
    np.testing.assert_allclose([*first, *second], whole, atol=2e-5)
    for chunked, once in zip(jax.tree.leaves(pages), jax.tree.leaves(whole_pages), strict=True):
        np.testing.assert_allclose(chunked, once, atol=2e-5)


def test_logit_rows_select_and_pages_are_donated(model):
    donated = empty_pages(model)
    every, _ = step(model, prompt_tree(6, 6), PROMPT, donated)
    assert all(pages.is_deleted() for pages in jax.tree.leaves(donated))
    some, _ = step(model, prompt_tree(6, 6), PROMPT, empty_pages(model), rows=jnp.array([5, 2]))
    np.testing.assert_allclose(some, every[[5, 2]], atol=2e-5)


def test_whole_model_as_one_program(model):
    @partial(jax.jit, donate_argnames="pages")
    def compiled(model, token_ids, pages, plan):
        return model(token_ids, *pages, plan, implementation=["xla"])

    donated = empty_pages(model)
    plan = plan_for(model.config, prompt_tree(6, 6))
    logits, *_ = compiled(model, jnp.array(PROMPT), donated, plan)
    assert all(pages.is_deleted() for pages in jax.tree.leaves(donated))
    np.testing.assert_allclose(logits, dense(model, PROMPT), atol=2e-5)


def test_tied_embeddings_in_bfloat16(tiny_config):
    model = random_model(replace(tiny_config, tie_embeddings=True), "bfloat16")
    assert not hasattr(model, "unembedding")
    logits, pages = step(model, prompt_tree(4, 4), PROMPT[:4], empty_pages(model))
    assert logits.dtype == jnp.float32
    assert {page.dtype for page in jax.tree.leaves(pages)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(logits, dense(model, PROMPT[:4]), atol=0.05)


def test_dense_sliding_window_forgets(model, tiny_config):
    """With one layer, a window of 3 sees the last 3 tokens and nothing else of the sequence."""
    config = replace(tiny_config, num_layers=1)
    full = random_model(config)
    windowed = random_model(replace(config, sliding_window=3))
    tail = dense(windowed, PROMPT)[-1]
    np.testing.assert_allclose(tail, dense(windowed, [40, 41, 42, *PROMPT[3:]])[-1], atol=1e-6)
    np.testing.assert_allclose(tail, dense(full, PROMPT[3:])[-1], atol=2e-5)
    assert np.abs(tail - dense(full, PROMPT)[-1]).max() > 1e-3


def test_paged_sliding_window_crosses_nodes(tiny_config):
    """A prompt of 3 and two continuations under a window of 2: each sees one token of the prompt."""
    model = random_model(replace(tiny_config, sliding_window=2))
    tree = ta.TokenTree([-1, 0, 0], [3, 1, 1], [3, 1, 1])
    logits, _ = step(model, tree, [3, 14, 15, 8, 30], empty_pages(model))
    expected = [*dense(model, [3, 14, 15, 8]), dense(model, [3, 14, 15, 30])[-1]]
    np.testing.assert_allclose(logits, expected, atol=2e-5)


def test_random_weights_follow_the_seed():
    config = LlamaConfig(32, 32, 32, num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=32)
    a, b, c = (Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a.embedding[...], b.embedding[...])
    assert (a.embedding[...] != c.embedding[...]).any()
    assert (a.layers[0].gate_proj.kernel[...] != a.layers[0].up_proj.kernel[...]).any()


def test_wrong_pages_and_tokens_are_named(model):
    k_pages, v_pages = empty_pages(model)
    plan = plan_for(model.config, prompt_tree(6, 6))
    with pytest.raises(ValueError, match="k_pages and v_pages need one array a layer, 2; got 1 and 2"):
        model(jnp.array(PROMPT), k_pages[:1], v_pages, plan)
    with pytest.raises(ValueError, match="token_ids must be"):
        model(jnp.zeros(plan.query_capacity + 1, int), k_pages, v_pages, plan)


def test_page_shapes_and_bytes():
    k_pages, v_pages = allocate_pages(SMOLLM2_135M, 5, 16, "bfloat16")
    assert len(k_pages) == len(v_pages) == 30
    assert k_pages[0].shape == (5, 16, 3, 64)
    assert k_pages[0].dtype == jnp.bfloat16
    assert kv_bytes_per_token(SMOLLM2_135M, "bfloat16") == 2 * 30 * 3 * 64 * 2
    with pytest.raises(ValueError, match="num_pages"):
        allocate_pages(SMOLLM2_135M, 0, 16, "bfloat16")


PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_parameter_counts(name):
    def count(num_layers: int) -> int:
        config = replace(CONFIGS[name], num_layers=num_layers)
        model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))

    assert count(1) + (CONFIGS[name].num_layers - 1) * (count(2) - count(1)) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_kv_heads": 4}, "multiple of num_kv_heads, got 6 and 4"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"sliding_window": 0}, "sliding_window must be None or at least 1"),
    ],
)
def test_impossible_configs(tiny_config, change, message):
    with pytest.raises(ValueError, match=message):
        replace(tiny_config, **change)
