"""Decoding on a GPU, where loops are launched ahead and blocks are short: what comes out is what the dense model says.

Tokens of equal programs may differ on different devices, so each token is asked to be nearly the likeliest one, and its
log-probability to be nearly the dense model's.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from tree_attention_jax.search import BeamSearch, TreeDecoder
from tree_attention_jax.search.loops import Sampling, beam_search, speculative_decode

pytestmark = pytest.mark.gpu
PROMPT = [5, 1, 7, 7, 2, 9, 3, 3, 1, 0, 4] * 6
LONGEST = 160
TOLERANCE = {"float32": 0.1, "bfloat16": 0.25}  # matrix products of float32 are TF32 on a GPU


@cache
def model_of(dtype):
    from flax import nnx

    from tree_attention_jax.models import Llama, LlamaConfig

    config = LlamaConfig(29, 96, 128, num_layers=2, num_q_heads=8, num_kv_heads=2, head_dim=64)
    model = Llama(config, dtype=dtype, rngs=nnx.Rngs(0))
    # Small random weights predict nearly the same everywhere; these have opinions.
    return jax.tree.map(lambda x: x * 8 if x.ndim == 2 else x, model)


@cache
def dense_program():
    from tree_attention_jax.models import dense_forward

    return jax.jit(lambda model, tokens: jax.nn.log_softmax(dense_forward(model, tokens).astype(jnp.float32), axis=-1))


def check(dtype, tokens, log_probs=None, *, greedy=True):
    """Tokens after the prompt, one sequence's."""
    every = np.zeros(LONGEST, np.int32)
    every[: len(PROMPT) + len(tokens)] = [*PROMPT, *tokens]
    with jax.default_matmul_precision("highest"):
        dense = np.asarray(dense_program()(model_of(dtype), jnp.asarray(every)))[len(PROMPT) - 1 :]
    chosen = dense[np.arange(len(tokens)), tokens]
    if log_probs is not None:
        np.testing.assert_allclose(log_probs, chosen, rtol=0, atol=TOLERANCE[dtype])
    if greedy:
        assert (chosen >= dense[: len(tokens)].max(axis=1) - TOLERANCE[dtype]).all()
    return float(chosen.sum())


def prefilled(dtype):
    decoder = TreeDecoder(model_of(dtype), num_pages=128, page_size=16)
    leaf, logits = decoder.prefill(PROMPT)
    return decoder, leaf, logits


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("horizon", [1, 16])
def test_sampled_blocks(dtype, horizon):
    decoder, leaf, logits = prefilled(dtype)
    leaves = decoder.tree.fork(leaf, 5)
    found = decoder.generate(leaves, logits, 40, sampling=Sampling(0.9), eos=3, horizon=horizon, seed=2)
    assert len({tuple(one.tokens.tolist()) for one in found}) > 1
    for leaf, one in zip(leaves, found):
        check(dtype, one.tokens, one.log_probs, greedy=False)
        assert one.stopped == (one.tokens[-1] == 3)
        assert one.stopped or one.tokens.size == 40
        assert decoder.tree.tokens(int(leaf)).tolist() == [*PROMPT, *one.tokens]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_greedy_blocks(dtype):
    decoder, leaf, logits = prefilled(dtype)
    [one] = decoder.generate([leaf], logits, 50, sampling=Sampling(0.0), horizon=20)
    assert one.tokens.size == 50
    check(dtype, one.tokens, one.log_probs)
    # What the blocks left in the cache is right: decoding goes on from it.
    [more] = decoder.generate([leaf], decoder.forward([leaf])[0], 9, sampling=Sampling(0.0), horizon=1)
    check(dtype, [*one.tokens, *more.tokens])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_speculative_rounds(dtype):
    decoder, leaf, logits = prefilled(dtype)
    found = speculative_decode(decoder, leaf, logits, 45, draft_length=4)
    assert found.tokens.size == 45
    assert found.rounds <= 44
    check(dtype, found.tokens)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_beams(dtype):
    decoder, leaf, logits = prefilled(dtype)
    best = beam_search(decoder, leaf, logits, 4, 12)[0]
    assert abs(check(dtype, best.tokens, greedy=False) - best.log_probability) < 12 * TOLERANCE[dtype]
    [hosts] = decoder.search([leaf], logits, [BeamSearch(width=4, max_length=12)])
    assert abs(hosts[0].log_probability - best.log_probability) < 12 * TOLERANCE[dtype]
