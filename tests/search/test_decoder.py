"""`TreeDecoder` against dense attention over each sequence alone, and its blocks against its own single steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from decoding import PAGE_SIZE, TINY, dense_log_probs, greedy, make_decoder, tiny_model
from freezing import freeze
from toy_model import ToyModel, run

from tree_attention_jax.cache import OutOfPages
from tree_attention_jax.search import BeamSearch, BestOfN, Decision, SpeculativeVerify, TreeDecoder
from tree_attention_jax.search.loops import Sampling, sample_tokens, strides
from tree_attention_jax.search.step_statistics import StepStatistics, kv_tokens
from tree_attention_jax.topology import TokenTree

PROMPT = [5, 1, 7, 7, 2, 9, 3, 3, 1, 0, 4]


pytestmark = pytest.mark.usefixtures("compile_unoptimised")


class DenseModel(ToyModel):
    """The toy model's interface over dense attention."""

    def __init__(self):
        super().__init__(TINY.vocab_size, 0)

    def log_probs(self, tokens):
        key = tuple(int(t) for t in tokens)
        if key not in self._rows:
            self._rows[key] = dense_log_probs(tiny_model(), key)[-1].astype(np.float64)
        return self._rows[key]


def test_chunked_prefill_gives_the_logits_of_dense_attention():
    for chunk in (3, 4, 64):
        decoder = make_decoder(prefill_chunk=chunk, strategy="auto")
        _, logits = decoder.prefill(PROMPT)
        np.testing.assert_allclose(
            jax.nn.log_softmax(logits), dense_log_probs(tiny_model(), PROMPT)[-1], rtol=0, atol=2e-4
        )
        assert len(decoder.statistics) == -(-len(PROMPT) // chunk)
        assert sum(s.queries for s in decoder.statistics) == len(PROMPT)


def test_a_second_prompt_computes_only_what_the_first_did_not():
    decoder = make_decoder(prefix_cache=True)
    decoder.prefill(PROMPT)
    _, logits = decoder.prefill([*PROMPT[:8], 2, 2])
    assert [s.queries for s in decoder.statistics] == [len(PROMPT), 2]
    wanted = dense_log_probs(tiny_model(), [*PROMPT[:8], 2, 2])[-1]
    np.testing.assert_allclose(jax.nn.log_softmax(logits), wanted, rtol=0, atol=2e-4)


def test_questions_of_different_lengths_below_one_prompt():
    decoder = make_decoder(prefill_chunk=5)
    leaf, _ = decoder.prefill(PROMPT)
    leaves = decoder.tree.fork(leaf, 3)
    questions = [[1], [2, 3, 4, 5, 6, 7, 8], [9, 9, 9]]
    for one, question in zip(leaves, questions):
        decoder.tree.append(int(one), question)
    logits = decoder.forward(leaves)
    for row, question in zip(logits, questions):
        wanted = dense_log_probs(tiny_model(), [*PROMPT, *question])[-1]
        np.testing.assert_allclose(jax.nn.log_softmax(row), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("top_k", [None, 9])
def test_beam_search_is_the_one_over_dense_attention(top_k):
    def controller():
        return BeamSearch(width=3, max_length=6, eos=[7, 2], length_penalty=0.6)

    decoder = make_decoder(strategy="auto")
    leaf, logits = decoder.prefill(PROMPT)
    [found] = decoder.search([leaf], logits, [controller()], top_k)
    wanted = controller()
    run(wanted, DenseModel(), PROMPT)
    assert [h.tokens.tolist() for h in found] == [h.tokens.tolist() for h in wanted.results()]
    np.testing.assert_allclose([h.score for h in found], [h.score for h in wanted.results()], atol=1e-3)
    assert decoder.tree.num_leaves == 0
    assert decoder.tree.pool.num_free == decoder.tree.pool.capacity


def test_two_requests_in_the_same_steps():
    prompts = [PROMPT, PROMPT[3:]]
    alone = []
    for prompt in prompts:
        decoder = make_decoder()
        leaf, logits = decoder.prefill(prompt)
        alone += decoder.search([leaf], logits, [BestOfN(3, 4, temperature=0.7, seed=len(prompt))])
    decoder = make_decoder()
    leaves, logits = zip(*map(decoder.prefill, prompts))
    prefills = len(decoder.statistics)
    controllers = [BestOfN(3, 4, temperature=0.7, seed=len(prompt)) for prompt in prompts]
    together = decoder.search(leaves, jnp.stack(logits), controllers)
    for one, other in zip(alone, together):
        assert [h.tokens.tolist() for h in one] == [h.tokens.tolist() for h in other]
    assert len(decoder.statistics) - prefills == 3


# ---------------------------------------------------------------------- blocks


def host_samples(prompt, n, max_new_tokens, sampling, eos, seed):
    """The twin of `generate`: one step at a time, by `forward`, each sequence on its own."""
    found = []
    for sequence in range(n):
        tokens: list[int] = []
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in eos):
            logits = dense_log_probs(tiny_model(), [*prompt, *tokens])[-1:]
            one = jnp.array([sequence]), jnp.array([len(tokens)])
            token, _ = sample_tokens(jnp.asarray(logits), jax.random.key(seed), *one, sampling)
            tokens.append(int(token[0]))
        found.append(tokens)
    return found


@pytest.mark.parametrize(
    ("sampling", "horizon", "stride"),
    [(Sampling(0.0), 4, 1), (Sampling(1.3), 16, 1), (Sampling(1.0, 0.7), 1, 1), (Sampling(1.3), 12, 8)],
    ids=["greedy", "hot", "top-p", "in strides of 6"],
)
def test_blocks_give_the_tokens_of_single_steps(sampling, horizon, stride, monkeypatch):
    monkeypatch.setattr(strides, "launched_ahead", lambda: stride)  # as on a GPU; no two cases share a program
    n, length, eos = 4, 11, (7, 1)
    wanted = host_samples(PROMPT, n, length, sampling, eos, seed=5)
    decoder = make_decoder()
    leaf, logits = decoder.prefill(PROMPT)
    leaves = decoder.tree.fork(leaf, n)
    found = decoder.generate(leaves, logits, length, sampling=sampling, eos=eos, horizon=horizon, seed=5)
    assert [g.tokens.tolist() for g in found] == wanted
    assert [g.stopped for g in found] == [tokens[-1] in eos for tokens in wanted]
    for one, result, tokens in zip(leaves, found, wanted):
        assert decoder.tree.tokens(int(one)).tolist() == [*PROMPT, *tokens]
        log_probs = dense_log_probs(tiny_model(), [*PROMPT, *tokens])
        chosen = log_probs[len(PROMPT) - 1 : -1][np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(result.log_probs, chosen, atol=5e-4)


def test_a_plan_serves_several_blocks(monkeypatch):
    monkeypatch.setattr(strides, "launched_ahead", lambda: 4)  # as on a GPU, where blocks are short
    decoder = make_decoder()
    leaf, logits = decoder.prefill(PROMPT)
    plans = []

    def plan(*args, **options):
        plans.append(TreeDecoder.plan(decoder, *args, **options))
        return plans[-1]

    monkeypatch.setattr(decoder, "plan", plan)
    leaves = decoder.tree.fork(leaf, 2)
    before = len(decoder.statistics)
    found = decoder.generate(leaves, logits, 20, sampling=Sampling(0.0), horizon=7)
    assert found[0].tokens.tolist() == found[1].tokens.tolist() == greedy(tiny_model(), PROMPT, 20)
    blocks = decoder.statistics[before:]
    assert [block.steps for block in blocks] == [4] * 5  # two of 4 steps a plan; 19 are needed
    assert [plan.horizon for plan in plans] == [8] * 3
    assert [block.plan_seconds > 0 for block in blocks] == [True, False, True, False, True]
    width = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    reads = [[len(PROMPT) + 2 * (4 * block + step) for step in (1, 2, 3, 4)] for block in range(5)]
    assert [block.kv_bytes_read for block in blocks] == [sum(one) * width for one in reads]


def test_leaves_go_on_after_a_block():
    """What a block left in the cache is right: decoding goes on from it, forked."""
    decoder = make_decoder()
    leaf, logits = decoder.prefill(PROMPT)
    leaves = decoder.tree.fork(leaf, 3)
    decoder.generate(leaves, logits, 18, sampling=Sampling(1.3), eos=(7, 1), horizon=16, seed=1)
    logits = decoder.forward(leaves)
    leaves = decoder.tree.branch(leaves, [2, 0, 2, 1])
    for one, row in zip(leaves, np.asarray(logits)[[2, 0, 2, 1]]):
        tokens = decoder.tree.tokens(int(one))
        wanted = dense_log_probs(tiny_model(), tokens)[-1]
        np.testing.assert_allclose(jax.nn.log_softmax(row), wanted, rtol=0, atol=2e-4)
    again = decoder.generate(leaves, logits[jnp.array([2, 0, 2, 1])], 5, sampling=Sampling(0.0), horizon=1)
    assert again[0].tokens.tolist() == again[2].tokens.tolist()
    tokens = decoder.tree.tokens(int(leaves[1]))
    assert tokens[-5:].tolist() == greedy(tiny_model(), tokens[:-5].tolist(), 5)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlowModel:
    """The tiny model, with a pause on the device in every call."""

    model: Any
    pause: jax.Array  # int32, of about 10 us each

    config, dtype = TINY, jnp.dtype(jnp.float32)

    def __call__(self, *args, **options):
        logits, k_pages, v_pages = self.model(*args, **options)
        spun = jax.lax.fori_loop(0, self.pause, lambda _, x: jnp.sin(x), logits)
        return logits + 0 * spun, k_pages, v_pages


def test_the_next_block_is_planned_while_the_last_one_runs(monkeypatch):
    """Plan, plan, land, plan, land, ...: and when the host is through with a plan, the block before is not."""
    from tree_attention_jax.search import generation

    events, blocks = [], []
    dispatch, land = generation._Run.dispatch, generation._Run.land

    def traced_dispatch(self, ahead):
        flying = dispatch(self, ahead)
        if ahead and flying is not None:
            events.append("planned ahead" if not blocks[-1].steps.is_ready() else "planned late")
        else:
            events.append("dispatched" if flying is not None else "nothing left")
        if flying is not None:
            blocks.append(flying.block)
        return flying

    def traced_land(self, flying):
        land(self, flying)
        events.append("landed")

    monkeypatch.setattr(generation._Run, "dispatch", traced_dispatch)
    monkeypatch.setattr(generation._Run, "land", traced_land)
    decoder = make_decoder(num_layers=1)
    leaf, logits = decoder.prefill(PROMPT)
    decoder.model = SlowModel(decoder.model, jnp.int32(30_000))
    decoder.generate([leaf], logits, 13, sampling=Sampling(0.0), horizon=4)
    landed = "landed"
    assert events[1] in ("planned ahead", "planned late")  # it may have compiled its program first
    assert events[:1] + events[2:] == ["dispatched", landed, "planned ahead", landed, "nothing left", landed]


# ---------------------------------------------------------------------- drafts


def test_drafts_change_nothing_but_the_number_of_steps():
    wanted = greedy(tiny_model(), PROMPT, 9)
    decoder = make_decoder()
    leaf, logits = decoder.prefill(PROMPT)
    tokens = [int(jnp.argmax(logits))]
    verifier, rounds = SpeculativeVerify(), 0
    while len(tokens) < 9:
        decoder.tree.append(leaf, tokens[-1])
        # Two branches: the right tokens with an error at depth 2, and rubbish.
        right = [*wanted[len(tokens) : len(tokens) + 3], 0, 0, 0][:3]
        draft = [8, right[0], right[1], (right[2] + 1) % TINY.vocab_size]
        parents = [-1, -1, 1, 2]
        nodes, target = decoder.verify(leaf, parents, draft)
        verdict = verifier.verify(parents, draft, target)
        decoder.accept(leaf, nodes[verdict.path])
        tokens += [draft[i] for i in verdict.path] + [verdict.token]
        rounds += 1
    assert tokens[:9] == wanted
    assert rounds <= 4


# ---------------------------------------------------------------------- statistics and errors


def test_statistics_count_shared_bytes_once():
    tree = TokenTree.from_levels([1, 2, 4], [100, 10, 5])
    assert kv_tokens(tree) == (140, 4 * 115)
    assert kv_tokens(TokenTree([-1, 0, 0], [100, 10, 20], [0, 3, 0])) == (110, 110)
    seen = []
    decoder = make_decoder(on_step=seen.append)
    leaf, logits = decoder.prefill(PROMPT)
    leaves = decoder.tree.fork(leaf, 3)
    decoder.generate(leaves, logits, 5, sampling=Sampling(0.0), eos=(7, 1), horizon=4)
    assert seen == decoder.statistics
    width = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    block = seen[1]
    assert (block.steps, block.queries) == (4, 12)
    assert block.kv_bytes_read == sum(11 + 3 * step for step in (1, 2, 3, 4)) * width
    assert block.kv_bytes_saved == 4 * 2 * 11 * width
    assert block.device_seconds > 0
    total = StepStatistics.total(seen)
    assert (total.steps, total.queries) == (5, 11 + 12)


def test_an_aborted_prefill_leaves_nothing_behind(monkeypatch):
    decoder = make_decoder(prefix_cache=True)

    def fails(*args, **kwargs):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(TreeDecoder, "_dispatch", fails)
        with pytest.raises(RuntimeError, match="device lost"):
            decoder.prefill(PROMPT)
    assert decoder.tree.num_leaves == 0
    assert decoder.tree.cache.match_prefix(np.array(PROMPT)).length == 0
    decoder.prefill(PROMPT)


def test_bad_input_is_named_and_changes_nothing():
    decoder = make_decoder(num_pages=4)
    with pytest.raises(OutOfPages):
        decoder.prefill(list(range(8)) * 3)
    leaf, logits = decoder.prefill(PROMPT)
    before = decoder.tree.tokens(leaf).tolist(), decoder.tree.pool.num_free
    with pytest.raises(ValueError, match=r"nodes\[0\] has no token left"):
        decoder.forward([leaf])
    with pytest.raises(ValueError, match="horizon must be at least 1"):
        decoder.generate([leaf], logits, 4, horizon=0)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        decoder.generate([leaf], logits, 0)
    with pytest.raises(ValueError, match="no pending token"):
        decoder.verify(leaf, [-1], [3])
    with pytest.raises(ValueError, match="1 entries and controllers 0"):
        decoder.search([leaf], logits, [])
    with pytest.raises(ValueError, match="temperature"):
        Sampling(-1.0)
    assert (decoder.tree.tokens(leaf).tolist(), decoder.tree.pool.num_free) == before
    decoder.tree.append(leaf, 3)
    with pytest.raises(ValueError, match="pending tokens"):
        decoder.generate([leaf], logits, 4)


class Script:
    """A controller that says what it was told to say: (parents, tokens) for each step, then that it is done."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def decide(self, scores):
        parents, tokens = self.steps.pop(0) if self.steps else ([], [])
        return Decision(np.array(parents, int), np.array(tokens, int), not parents)

    def results(self):
        return []


@pytest.mark.parametrize(
    ("parents", "tokens", "message"),
    [
        ([0] * 4, [1] * 4, r"controllers\[1\] asks for 4 leaves: 5 in all, of at most 4"),
        ([0, 1], [1, 1], r"controllers\[1\]: parents\[1\] is 1, not a row of its scores \(0..0\)"),
        ([0, 0], [1, 13], r"controllers\[1\]: tokens\[1\] is 13, not a token id \(0..12\)"),
    ],
    ids=["leaves", "parents", "tokens"],
)
def test_a_controller_that_asks_too_much_changes_nothing(parents, tokens, message):
    decoder = make_decoder(max_leaves=4)
    leaves = [decoder.tree.add_request(prompt) for prompt in (PROMPT, PROMPT[3:])]
    decoder.tree.commit()
    before = freeze(decoder.tree)
    with pytest.raises(ValueError, match=message):
        decoder.search(leaves, jnp.zeros((2, TINY.vocab_size)), [BeamSearch(1, 5), Script((parents, tokens))])
    assert freeze(decoder.tree) == before


def test_requests_that_shrink_make_room_for_those_that_grow():
    decoder = make_decoder(max_leaves=4)
    leaves = [decoder.tree.add_request(prompt) for prompt in (PROMPT, PROMPT[3:])]
    decoder.tree.commit()
    one, three = ([0], [5]), ([0, 0, 0], [1, 2, 3])
    decoder.search(leaves, jnp.zeros((2, TINY.vocab_size)), [Script(one, three), Script(three, one)])
    assert [s.queries for s in decoder.statistics] == [4, 4]
    assert decoder.tree.num_leaves == 0


# Below a prompt that fills its page two leaves take a page each. Three below the first one take two more, and the
# second one gives its own back.
FORKS = ([0, 0], [1, 2]), ([0, 0, 0], [3, 4, 5])


def forking(free_pages: int) -> tuple[TreeDecoder, int]:
    decoder = make_decoder()
    leaf = decoder.tree.add_request(PROMPT[:PAGE_SIZE])
    decoder.tree.commit()
    decoder.tree.pool.alloc(decoder.tree.pool.num_free - free_pages)
    return decoder, leaf


def test_a_search_that_runs_out_of_pages_changes_nothing():
    decoder, leaf = forking(free_pages=2)
    frozen = []

    class Watched(Script):
        def decide(self, scores):
            frozen.append(freeze(decoder.tree))
            return super().decide(scores)

    with pytest.raises(OutOfPages):
        decoder.search([leaf], jnp.zeros((1, TINY.vocab_size)), [Watched(*FORKS)])
    assert len(frozen) == 2
    assert freeze(decoder.tree) == frozen[1]
    leaves = decoder.tree.leaves()
    assert [decoder.tree.tokens(int(one))[PAGE_SIZE:].tolist() for one in leaves] == [[1], [2]]
    decoder.search(leaves, jnp.zeros((2, TINY.vocab_size)), [Script(([0], [6])), Script(([0], [7]))])


def test_pages_of_pruned_leaves_serve_those_that_grow():
    decoder, leaf = forking(free_pages=3)
    decoder.search([leaf], jnp.zeros((1, TINY.vocab_size)), [Script(*FORKS)])
    assert [record.queries for record in decoder.statistics] == [2, 3]
    assert decoder.tree.pool.num_free == 4


def test_running_out_of_pages_leaves_whole_blocks():
    decoder = make_decoder()
    leaf, logits = decoder.prefill(PROMPT)
    leaves = decoder.tree.fork(leaf, 4)
    taken = decoder.tree.pool.alloc(decoder.tree.pool.num_free - 13)
    with pytest.raises(OutOfPages):
        decoder.generate(leaves, logits, 30, sampling=Sampling(0.0), eos=(7, 1), horizon=4)
    decoder.tree.pool.free(taken)
    lengths = {decoder.tree.length(int(one)) - len(PROMPT) for one in leaves}
    assert len(lengths) == 1
    assert (lengths.pop() - 1) % 4 == 0
    assert decoder.tree.pending_tokens().size == 4
    for one, row in zip(leaves, decoder.forward(leaves)):
        wanted = dense_log_probs(tiny_model(), decoder.tree.tokens(int(one)))[-1]
        np.testing.assert_allclose(jax.nn.log_softmax(row), wanted, rtol=0, atol=2e-4)
