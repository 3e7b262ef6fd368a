"""Speculative decoding on the device: the target's own tokens, whatever the draft; in distribution where sampled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from decoding import greedy, make_decoder, tiny_model

from tree_attention_jax.search.loops import Sampling, speculative_decode, strides
from tree_attention_jax.search.loops.speculation import accept_chain, lookup_draft

pytestmark = pytest.mark.usefixtures("compile_unoptimised")
PROMPT = [5, 1, 7, 7, 2, 9, 5, 1, 7, 0, 4]


def lookup(history, draft_length, max_ngram):
    """The same draft, with loops over the history, and whether the last token occurred before."""
    n = len(history)
    best = 0, n - 1
    for begin in range(1, n):
        back = 0
        while back < max_ngram and back < begin and history[begin - 1 - back] == history[n - 1 - back]:
            back += 1
        best = max(best, (back, begin)) if back else best
    begin = best[1]
    return [history[begin + i % (n - begin)] for i in range(draft_length)], best[0] > 0


def test_the_draft_is_what_followed_the_longest_latest_match():
    draft = jax.jit(lookup_draft, static_argnums=(2, 3))
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(300):
        history = rng.integers(0, 4, rng.integers(1, 25)).tolist()
        wanted, occurred = lookup(history, 5, 3)
        padded = jnp.array(history + [3] * (32 - len(history)), jnp.int32)
        got = draft(padded, len(history), 5, 3).tolist()
        assert got == wanted, history
        found += occurred
    assert found > 200


def host_rounds(prompt, tokens, draft_length, max_ngram):
    """How many rounds of draft and greedy acceptance a host needs for the target's own `tokens`."""
    done, rounds = 1, 0
    while done < len(tokens):
        draft, _ = lookup([*prompt, *tokens[:done]], draft_length, max_ngram)
        right = 0
        while right < draft_length and done + right < len(tokens) and draft[right] == tokens[done + right]:
            right += 1
        done, rounds = done + right + 1, rounds + 1
    return rounds


@pytest.mark.parametrize(
    ("eos", "max_new_tokens", "num_layers", "stride"),
    [((), 21, 1, 1), ((2, 9), 30, 4, 1), ((), 23, 1, 8), ((2,), 29, 1, 8)],
    ids=["length", "eos-deep", "length-in-strides", "eos-in-strides"],
)
def test_tokens_and_rounds_are_the_hosts(eos, max_new_tokens, num_layers, stride, monkeypatch):
    monkeypatch.setattr(strides, "launched_ahead", lambda: stride)  # as on a GPU; no two cases share a program
    decoder = make_decoder(num_layers=num_layers)
    leaf, logits = decoder.prefill(PROMPT)
    free = decoder.tree.pool.num_free
    found = speculative_decode(decoder, leaf, logits, max_new_tokens, draft_length=4, eos=eos)
    wanted = greedy(tiny_model(num_layers), PROMPT, max_new_tokens)
    stops = [i for i, token in enumerate(wanted) if token in eos]
    wanted = wanted[: stops[0] + 1] if stops else wanted
    assert found.tokens.tolist() == wanted
    assert found.rounds == host_rounds(PROMPT, wanted, 4, 3)
    if not eos:  # the tiny model repeats itself, so in the longer answer some of a draft is right
        assert found.rounds < len(wanted) - 1
    assert decoder.tree.pool.num_free == free
    assert decoder.tree.tokens(leaf).tolist() == PROMPT


def test_sampled_acceptance_has_the_targets_distribution():
    """The first two tokens of a round, over many keys, against the product of the target's own distributions."""
    vocab, draws = 5, 40_000
    rng = np.random.default_rng(3)
    sampling = Sampling(temperature=0.8)
    table = rng.normal(0, 1.5, (vocab + 1, vocab))  # logits after the prompt, then after each token
    draft = np.array([2, 1])
    logits = jnp.asarray(table[[0, 1 + draft[0], 1 + draft[1]]])
    key = jax.random.key(0)
    accept = jax.vmap(lambda k: accept_chain(logits, jnp.asarray(draft), k, sampling))
    accepted, token = (np.asarray(x) for x in jax.jit(accept)(jax.random.split(key, draws)))
    first = np.where(accepted > 0, draft[0], token)
    p = np.exp(table / sampling.temperature)
    p /= p.sum(axis=1, keepdims=True)
    seen = np.bincount(first, minlength=vocab)
    assert ((seen - draws * p[0]) ** 2 / (draws * p[0])).sum() < 23.5  # chi-square, 4 degrees of freedom, p = 1e-4
    after = np.where(accepted > 1, draft[1], token)[accepted > 0]
    expected = after.size * p[1 + draft[0]]
    assert ((np.bincount(after, minlength=vocab) - expected) ** 2 / expected).sum() < 23.5


def test_sampling_repeats_with_its_seed():
    decoder = make_decoder(num_layers=1)
    leaf, logits = decoder.prefill(PROMPT)
    options = dict(draft_length=4, sampling=Sampling(1.5))
    runs = [speculative_decode(decoder, leaf, logits, 12, seed=seed, **options).tokens.tolist() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert len(runs[0]) == 12


def test_bad_input_is_named():
    decoder = make_decoder(num_layers=1)
    leaf, logits = decoder.prefill(PROMPT)
    with pytest.raises(ValueError, match="draft_length must be at least 1"):
        speculative_decode(decoder, leaf, logits, 4, draft_length=0)
