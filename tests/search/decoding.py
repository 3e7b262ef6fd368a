"""What the tests of the decoder and of the device loops share: a tiny model, and the same by dense attention."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

PAGE_SIZE = 4


@cache
def tiny_config(num_layers=2):
    from tree_attention_jax.models import LlamaConfig

    return LlamaConfig(13, 32, 48, num_layers, num_q_heads=6, num_kv_heads=2, head_dim=16)


@cache
def tiny_model(num_layers=2):
    """Two layers: the second one's K/V tell what the first attended to. One: half as much to compile for a loop."""
    from flax import nnx

    from tree_attention_jax.models import Llama

    config = tiny_config(num_layers)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype="float32", rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(19)

    def weights(x):
        # Small random weights predict nearly the same everywhere; these have opinions.
        return jnp.asarray(rng.normal(0, 0.25, x.shape) if len(x.shape) == 2 else np.ones(x.shape), jnp.float32)

    return nnx.merge(graph, jax.tree.map(weights, shapes))


TINY = tiny_config()
LONGEST = 48


@cache
def _dense_program():
    from tree_attention_jax.models import dense_forward

    return jax.jit(lambda model, tokens: jax.nn.log_softmax(dense_forward(model, tokens), axis=-1))


def dense_log_probs(model, tokens):
    """float32 [n, V]: log-probabilities after each token of one sequence, by dense attention."""
    padded = np.zeros(LONGEST, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_dense_program()(model, jnp.asarray(padded)))[: len(tokens)]


def greedy(model, prompt, n):
    """The n likeliest tokens after a prompt, one by one."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(dense_log_probs(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def make_decoder(num_pages=64, num_layers=2, strategy="flatten", **options):
    """A decoder that compiles little: with one block of queries, plans of growing trees have one shape.

    That every strategy computes the same is shown elsewhere.
    """
    from tree_attention_jax.search import TreeDecoder

    return TreeDecoder(tiny_model(num_layers), num_pages, PAGE_SIZE, strategy=strategy, **options)
