"""Tree search on the device through mctx, against the same search whose model reads every path anew, densely."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("mctx")

import mctx
from decoding import TINY, greedy, make_decoder, tiny_model

from tree_attention_jax.cache import OutOfPages
from tree_attention_jax.models import dense_forward
from tree_attention_jax.search import TreeState
from tree_attention_jax.search.loops import MctsRules, keep_paths, mcts_decode
from tree_attention_jax.search.tree_state import append, fork, path_tokens

pytestmark = pytest.mark.usefixtures("compile_unoptimised")
PROMPTS = [[5, 1, 7, 7, 2, 9, 3], [4, 4, 0]]
RULES = MctsRules(steps=5, num_simulations=9, num_actions=4, max_depth=3, eos=(7, 2))
WORTH = np.random.default_rng(1).normal(size=TINY.vocab_size).astype(np.float32)


def evaluate(tokens, lengths, log_probs):
    """What the tokens are worth on average, and how sure the model is."""
    seen = jnp.arange(tokens.shape[1]) < lengths[:, None]
    worth = jnp.where(seen, jnp.asarray(WORTH)[tokens], 0.0).sum(axis=1) / jnp.maximum(lengths, 1)
    return worth + 0.1 * log_probs.max(axis=-1)


@partial(jax.jit, static_argnames="rules")
def dense_search(prompts, prompt_lengths, start, start_length, ended, key, *, rules):
    """One search of the twin. An embedding is the whole path, and the model reads prompt and path at every node."""
    model, batch = tiny_model(1), prompts.shape[0]

    def log_probs_after(path, length):
        def one(prompt, n, path, m):
            at = jnp.arange(prompt.size)
            tokens = jnp.where(at < n, prompt, path[jnp.clip(at - n, 0, path.size - 1)])
            return dense_forward(model, tokens)[n + m - 1]

        logits = jax.lax.map(lambda row: one(*row), (prompts, prompt_lengths, path, length))
        return jax.nn.log_softmax(logits, axis=-1)

    def position(path, length, terminal):
        log_probs = log_probs_after(path, length)
        prior, candidates = jax.lax.top_k(log_probs, rules.num_actions)
        return prior, evaluate(path, length, log_probs), (path, length, candidates, terminal)

    def grow(params, key, action, embedding):
        path, length, candidates, terminal = embedding
        rows = jnp.arange(batch)
        token = candidates[rows, action]
        path = jnp.where(terminal[:, None], path, path.at[rows, length].set(token))
        length = length + ~terminal
        ends = jnp.isin(token, jnp.array(rules.eos)) & ~terminal
        prior, value, embedding = position(path, length, ends | terminal)
        over = ends | terminal
        output = mctx.RecurrentFnOutput(
            reward=jnp.where(ends, value, 0.0),
            discount=jnp.where(over, 0.0, 1.0),
            prior_logits=prior,
            value=jnp.where(over, 0.0, value),
        )
        return output, embedding

    prior, value, embedding = position(start, start_length, ended)
    root = mctx.RootFnOutput(prior_logits=prior, value=value, embedding=embedding)
    policy = mctx.gumbel_muzero_policy if rules.policy == "gumbel" else mctx.muzero_policy
    found = policy((), key, root, grow, rules.num_simulations, max_depth=rules.max_depth)
    token = root.embedding[2][jnp.arange(batch), found.action]
    return token, found.action_weights, found.search_tree.node_values[:, 0]


def twin(rules, seed):
    """(tokens, action weights, values) of each prompt, step by step from the host."""
    batch = len(PROMPTS)
    lengths = np.array([len(p) for p in PROMPTS])
    prompts = np.zeros((batch, lengths.max() + rules.longest_path), np.int32)
    for row, prompt in zip(prompts, PROMPTS):
        row[: len(prompt)] = prompt
    path, n, ended = np.zeros((batch, rules.longest_path), np.int32), np.zeros(batch, np.int32), np.zeros(batch, bool)
    found = [([], [], []) for _ in PROMPTS]
    for key in jax.random.split(jax.random.key(seed), rules.steps):
        chosen = dense_search(prompts, lengths, path, n, ended, key, rules=rules)
        for i in np.flatnonzero(~ended):
            for result, x in zip(found[i], chosen):
                result.append(np.asarray(x)[i])
            path[i, n[i]] = found[i][0][-1]
            n[i] += 1
            ended[i] = found[i][0][-1] in rules.eos
    return found


@pytest.mark.parametrize("policy", ["gumbel", pytest.param("muzero", marks=pytest.mark.slow)])
def test_the_search_is_the_one_over_dense_attention(policy):
    rules = replace(RULES, policy=policy)
    decoder = make_decoder(num_pages=32, num_layers=1)
    leaves, logits = zip(*map(decoder.prefill, PROMPTS))
    free = decoder.tree.pool.num_free
    options = {name: getattr(rules, name) for name in rules.__dataclass_fields__}
    found = mcts_decode(decoder, leaves, jnp.stack(logits), evaluate, seed=3, **options)
    assert decoder.tree.pool.num_free == free
    for one, (tokens, weights, values) in zip(found, twin(rules, seed=3), strict=True):
        assert one.tokens.tolist() == [int(token) for token in tokens]
        np.testing.assert_allclose(one.visits, np.stack(weights), rtol=0, atol=5e-3)
        np.testing.assert_allclose(one.values, np.stack(values), rtol=0, atol=1e-3)
        assert (np.take_along_axis(one.candidates, one.candidates.argmax(1)[:, None], 1) < TINY.vocab_size).all()


def test_the_search_finds_better_sequences_than_greedy_decoding():
    decoder = make_decoder(num_pages=32, num_layers=1)
    leaves, logits = zip(*map(decoder.prefill, PROMPTS))
    options = {name: getattr(RULES, name) for name in RULES.__dataclass_fields__}
    found = mcts_decode(decoder, leaves, jnp.stack(logits), evaluate, seed=0, **options)
    for prompt, one in zip(PROMPTS, found):
        assert WORTH[one.tokens].mean() > WORTH[greedy(tiny_model(1), prompt, len(one.tokens))].mean()


def test_keep_paths_frees_the_rest():
    grow = jax.jit(append)
    state = TreeState.create(8)
    state, a = grow(state, jnp.array([-1, -1]), jnp.array([1, 2]))
    state, b = grow(state, a, jnp.array([3, 4]))
    state, c = grow(state, a[:1], jnp.array([5]))  # a second child, unknown to its parent's count
    kept = jax.jit(keep_paths)(state, jnp.array([int(c[0]), -1]))
    assert int(kept.num_free) == 6
    tokens, lengths = jax.jit(path_tokens, static_argnums=2)(kept, c, 4)
    assert (tokens[0, :2].tolist(), int(lengths[0])) == ([1, 5], 2)
    assert int(kept.refs[a[0]]) == int(kept.refs[c[0]]) == 1
    freed = {int(x) for x in (a[1], b[0], b[1])}
    assert freed < set(np.asarray(kept.free[: int(kept.num_free)]).tolist())
    empty, _ = jax.jit(fork)(kept, c, jnp.zeros(0, jnp.int32))
    assert int(empty.num_free) == 8


def test_bad_rules_are_named():
    with pytest.raises(ValueError, match="num_simulations must be at least 1"):
        MctsRules(1, 0, 4, 3)
    with pytest.raises(ValueError, match="policy is 'alphago'"):
        MctsRules(1, 2, 4, 3, policy="alphago")


def test_more_simulations_than_there_are_pages_for_change_nothing():
    decoder = make_decoder(num_pages=32, num_layers=1)
    leaf, logits = decoder.prefill(PROMPTS[0])
    free = decoder.tree.pool.num_free
    with pytest.raises(OutOfPages):
        mcts_decode(decoder, [leaf], logits, evaluate, steps=4, num_simulations=500)
    assert decoder.tree.pool.num_free == free
    assert decoder.tree.tokens(leaf).tolist() == PROMPTS[0]
