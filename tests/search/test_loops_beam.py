"""Beam search on the device against its host twin, and the attention that both loops below a prompt build on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from decoding import PAGE_SIZE, dense_log_probs, make_decoder, tiny_model

import tree_attention_jax as ta
from tree_attention_jax.search import BeamSearch, TreeState
from tree_attention_jax.search.loops import (
    BeamRules,
    Workspace,
    beam_loop,
    beam_search,
    forward_on_paths,
    path_attention,
    strides,
)

pytestmark = pytest.mark.usefixtures("compile_unoptimised")
PROMPT = [5, 1, 7, 7, 2, 9, 3, 3, 1, 0, 4]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
def test_path_attention_is_the_oracle_over_the_listed_slots(heads):
    rng = np.random.default_rng(0)
    lengths = np.array([0, 1, 5, 7, 3], np.int32)
    slots = np.stack([rng.permutation(40)[:7] for _ in lengths]).astype(np.int32)
    q = rng.normal(size=(5, heads[0], 16)).astype(np.float32)
    k, v = (rng.normal(size=(40, heads[1], d)).astype(np.float32) for d in (16, 24))
    unseen = np.setdiff1d(np.arange(40), np.concatenate([s[:n] for s, n in zip(slots, lengths)]))
    k[unseen], v[unseen] = np.nan, np.inf
    out, lse = jax.jit(path_attention)(*map(jnp.asarray, (q, k, v, slots, lengths)))
    assert lse.dtype == jnp.float32
    assert (np.asarray(out[0]) == 0).all()
    assert (np.asarray(lse[0]) == -np.inf).all()
    for i in range(1, 5):
        seen = slots[i, : lengths[i]]
        alone = ta.TokenTree([-1], [len(seen)])
        wanted, wanted_lse = ta.reference.dense_tree_attention(
            q[i : i + 1], k[None, seen], v[None, seen], alone, page_size=len(seen), return_lse=True
        )
        np.testing.assert_allclose(out[i], wanted[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(lse[i], wanted_lse[0], rtol=0, atol=1e-5)


def test_path_attention_names_what_does_not_fit():
    q, pool, lengths = jnp.zeros((2, 4, 8)), jnp.zeros((9, 3, 8)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="4 heads but k_pool has 3"):
        path_attention(q, pool, pool, jnp.zeros((2, 3), jnp.int32), lengths)
    with pytest.raises(ValueError, match=r"\(3, 3\)"):
        path_attention(q, pool[:, :2], pool[:, :2], jnp.zeros((3, 3), jnp.int32), lengths)


CASES = {
    "one token": dict(width=3, max_length=1),
    "eos": dict(width=4, max_length=9, eos=[7, 2, 5], length_penalty=0.7),
    "early stop": dict(width=3, max_length=9, eos=[7, 2, 5, 0], early_stop=True),
    # As on a GPU, where a loop goes on past its end: of length, or of all beams.
    "length in strides": dict(width=4, max_length=6, eos=[7]),
    "early stop in strides": dict(width=3, max_length=11, eos=[7, 2, 5, 0], early_stop=True),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name == "one token")) for name in CASES]
)
def test_the_device_finds_what_the_host_finds(case, monkeypatch):
    options = CASES[case]
    if "strides" in case:  # no other case has a program of this size
        monkeypatch.setattr(strides, "launched_ahead", lambda: 8)
    decoder = make_decoder(num_layers=1)
    leaf, logits = decoder.prefill(PROMPT)
    free = decoder.tree.pool.num_free
    found = beam_search(decoder, leaf, logits, **options)
    assert decoder.tree.pool.num_free == free  # the leaf is as it was
    [wanted] = decoder.search([leaf], logits, [BeamSearch(**options)])
    assert [h.tokens.tolist() for h in found] == [h.tokens.tolist() for h in wanted]
    np.testing.assert_allclose([h.score for h in found], [h.score for h in wanted], rtol=0, atol=1e-4)
    np.testing.assert_allclose([h.log_probability for h in found], [h.log_probability for h in wanted], atol=1e-4)


def test_a_workspace_below_several_prompts():
    """Rows below a request's fork, its other branch and another request see their own prompt and path only."""
    decoder = make_decoder()
    first, _ = decoder.prefill(PROMPT)
    other, _ = decoder.prefill([3, 3, 3])
    a, b = decoder.tree.fork(first, 2)
    decoder.tree.append([a, b], [[1, 2], [8, 8]])
    with pytest.raises(ValueError, match="without K/V"):
        Workspace.below(decoder, [a], 4)
    decoder.forward([a, b])
    free = decoder.tree.pool.num_free
    with Workspace.below(decoder, [b, other, a, b], capacity=8) as space:
        assert space.prompt_lengths.tolist() == [13, 3, 13, 13]
        assert decoder.tree.pool.num_free == free - 12 // PAGE_SIZE
        tokens, more = jnp.array([4, 5, 6, 7]), jnp.array([9, 10, 11, 12])
        slots = jnp.asarray(space.slots)
        nothing = jnp.zeros((4, 1), jnp.int32), jnp.zeros(4, jnp.int32)
        pages = decoder.k_pages, decoder.v_pages
        forward = jax.jit(forward_on_paths)
        _, *pages = forward(
            tiny_model(), *pages, space.plan, tokens, jnp.asarray(space.prompt_lengths), slots[:4], *nothing
        )
        above = slots[:4, None], jnp.ones(4, jnp.int32)
        logits, decoder.k_pages, decoder.v_pages = forward(
            tiny_model(), *pages, space.plan, more, jnp.asarray(space.prompt_lengths) + 1, slots[4:8], *above
        )
    assert decoder.tree.pool.num_free == free
    for row, leaf in enumerate([b, other, a, b]):
        one = decoder.tree.tokens(int(leaf)).tolist() + [int(tokens[row]), int(more[row])]
        wanted = dense_log_probs(tiny_model(), one)[-1]
        np.testing.assert_allclose(jax.nn.log_softmax(logits[row]), wanted, rtol=0, atol=2e-4)
    with pytest.raises(ValueError, match=r"leaves\[1\] is 12345, which is not live"):
        Workspace.below(decoder, [a, 12345], 4)
    with pytest.raises(ta.cache.OutOfPages):
        Workspace.below(decoder, [a], 1000)
    assert decoder.tree.pool.num_free == free


def test_more_beams_than_the_tree_on_the_device_holds_are_refused():
    decoder = make_decoder(num_layers=1)
    leaf, logits = decoder.prefill(PROMPT)
    free = decoder.tree.pool.num_free
    with Workspace.below(decoder, [leaf] * 3, capacity=4) as space:
        state, pages = TreeState.create(slots=space.slots[:4]), (decoder.k_pages, decoder.v_pages)
        with pytest.raises(ValueError, match="state holds 4 tokens; 3 beams of 5 may need 12"):
            beam_loop(decoder.model, *pages, space.plan, state, space.prompt_lengths[0], logits, rules=BeamRules(3, 5))
    with pytest.raises(ta.cache.OutOfPages):
        beam_search(decoder, leaf, logits, width=30, max_length=90)
    assert decoder.tree.pool.num_free == free
    assert decoder.tree.tokens(leaf).tolist() == PROMPT
