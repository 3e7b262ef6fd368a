"""Speculative decoding on the device: rounds of draft, verification and acceptance without the host.

The draft needs no second model: it copies what followed the last tokens where they occurred before (Saxena, "Prompt
Lookup Decoding", 2023; Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2024,
for n-grams of the output). Acceptance is that of Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding", 2022, for a draft that is not random: the tokens are the target's own greedy ones, or have exactly its
distribution. Host twin: `TreeDecoder.verify` and `SpeculativeVerify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tree_attention_jax.planning.plan import TreePlan
from tree_attention_jax.search.controller import as_token_set
from tree_attention_jax.search.loops.paths import for_loops, forward_on_paths
from tree_attention_jax.search.loops.sampling import Sampling, is_any_of, sample_tokens, scaled_log_probs
from tree_attention_jax.search.loops.strides import while_in_strides
from tree_attention_jax.search.loops.workspace import Workspace

if TYPE_CHECKING:
    from tree_attention_jax.search.decoder import TreeDecoder

__all__ = ["Speculated", "accept_chain", "lookup_draft", "speculative_decode", "speculative_loop"]


class Speculated(NamedTuple):
    """What was generated: tokens int32 [n], and in how many calls of the model after the prompt."""

    tokens: np.ndarray
    rounds: int


class _Progress(NamedTuple):
    history: jax.Array  # int32 [longest], the prompt and what follows it
    length: jax.Array  # int32 [], tokens known; the last one has no K/V yet
    rounds: jax.Array  # int32 []
    done: jax.Array  # bool []


def speculative_decode(
    decoder: TreeDecoder,
    leaf: int,
    logits: jax.Array,
    max_new_tokens: int,
    *,
    draft_length: int = 6,
    max_ngram: int = 3,
    eos: Any = None,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Speculated:
    """Continues a prefilled leaf in one program. The leaf itself stays as it is.

    Args:
        logits: [V], after the leaf.
        draft_length: tokens that a round drafts; it verifies them and one more in one call of the model.
        max_ngram: how many last tokens to look up at most.
        eos: token id or ids that end the sequence. sampling: default: greedy.
    """
    for name, value in (
        ("max_new_tokens", max_new_tokens),
        ("draft_length", draft_length),
        ("max_ngram", max_ngram),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    prompt = decoder.tree.tokens(leaf)
    room = max_new_tokens + draft_length + 1
    history = np.zeros(prompt.size + room, np.int32)
    history[: prompt.size] = prompt
    with Workspace.below(decoder, [leaf] * (draft_length + 1), capacity=room) as space:
        (history, length, rounds), decoder.k_pages, decoder.v_pages = speculative_loop(
            decoder.model,
            decoder.k_pages,
            decoder.v_pages,
            space.plan,
            jnp.asarray(space.slots[:room]),
            jnp.asarray(history),
            jnp.int32(prompt.size),
            logits,
            jax.random.key(seed),
            jnp.int32(max_new_tokens),
            draft_length=draft_length,
            max_ngram=max_ngram,
            eos=tuple(int(token) for token in as_token_set(eos)),
            sampling=sampling or Sampling(temperature=0.0),
            implementation=decoder.implementation,
        )
        return Speculated(np.asarray(history)[prompt.size : int(length)], int(rounds))


@partial(
    jax.jit,
    static_argnames=("draft_length", "max_ngram", "eos", "sampling", "implementation"),
    donate_argnames=("k_pages", "v_pages"),
)
def speculative_loop(
    model: Any,
    k_pages: Sequence[jax.Array],
    v_pages: Sequence[jax.Array],
    plan: TreePlan,
    slots: jax.Array,
    history: jax.Array,
    prompt_length: jax.Array,
    logits: jax.Array,
    key: jax.Array,
    max_new_tokens: jax.Array,
    *,
    draft_length: int,
    max_ngram: int,
    eos: tuple[int, ...],
    sampling: Sampling,
    implementation: str | tuple[str, ...] | None = None,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The loop itself, a `lax.while_loop` of rounds (`while_in_strides`: on a GPU it ends up to 7 rounds late).

    Args:
        model, k_pages, v_pages: as for `sample_block`; the pages are donated.
        plan: of a `Workspace` with `draft_length` + 1 rows below one prompt.
        slots: int32 [max_new_tokens + draft_length + 1], for the K/V of what follows the prompt, in order. A rejected
            token's K/V is overwritten by the next round's: nothing ever moves.
        history: int32 [prompt_length + len(slots)], the prompt and then anything.
        logits: [V], after the prompt.

    Returns:
        ((history, length int32 [], rounds int32 []), k_pages, v_pages).
    """
    model = for_loops(model)
    nth = jnp.arange(draft_length + 1)
    path_slots = jnp.broadcast_to(slots, (draft_length + 1, slots.size))
    zero = jnp.zeros(1, jnp.int32)
    first, _ = sample_tokens(logits[None], key, zero, zero, sampling)
    history = history.at[prompt_length].set(first[0])
    done = is_any_of(first[0], eos) | (max_new_tokens <= 1)
    start = _Progress(history, prompt_length + 1, jnp.int32(0), done)

    def one_round(carry):
        at, k_pages, v_pages = carry
        draft = lookup_draft(at.history, at.length, draft_length, max_ngram)
        tokens = jnp.concatenate([at.history[at.length - 1][None], draft])
        cached = at.length - 1 - prompt_length
        logits, k_pages, v_pages = forward_on_paths(
            model,
            k_pages,
            v_pages,
            plan,
            tokens,
            at.length - 1 + nth,
            jax.lax.dynamic_slice_in_dim(slots, cached, draft_length + 1),
            path_slots,
            cached + nth,
            implementation,
        )
        accepted, token = accept_chain(logits, draft, jax.random.fold_in(key, at.length), sampling)
        emitted = jnp.where(nth < accepted, jnp.append(draft, 0), token)
        ends = is_any_of(emitted, eos) & (nth <= accepted)
        left = prompt_length + max_new_tokens - at.length
        count = jnp.minimum(jnp.where(ends.any(), jnp.argmax(ends) + 1, accepted + 1), left)
        history = jax.lax.dynamic_update_slice_in_dim(at.history, emitted, at.length, axis=0)
        done = (ends & (nth < count)).any() | (count == left)
        grown = _Progress(history, at.length + count, at.rounds + 1, done)
        # A round after the end changes nothing but K/V that nobody reads any more.
        kept = jax.tree.map(lambda old, new: jnp.where(at.done, old, new), at, grown)
        return kept, k_pages, v_pages

    end, k_pages, v_pages = while_in_strides(
        lambda carry: ~carry[0].done, one_round, (start, tuple(k_pages), tuple(v_pages))
    )
    return (end.history, end.length, end.rounds), k_pages, v_pages


def lookup_draft(history: jax.Array, length: jax.Array, draft_length: int, max_ngram: int) -> jax.Array:
    """int32 [draft_length]: what followed the longest, and of equally long ones the latest, earlier occurrence of the
    last tokens (at most `max_ngram`). Where none occurred before, whatever: a draft may be wrong.

    history: int32 [n], of which `length` tokens are known. The copy goes on periodically past its end.
    """
    at = jnp.arange(history.shape[0])  # the copy would begin here
    matches = jnp.zeros(at.shape, jnp.int32)
    alike = (at >= 1) & (at < length)
    for back in range(1, max_ngram + 1):
        alike &= (at >= back) & (jnp.roll(history, back) == history[jnp.maximum(length - back, 0)])
        matches += alike
    begin = history.shape[0] - 1 - jnp.argmax(matches[::-1])
    begin = jnp.clip(begin, 0, length - 1)
    return history[begin + jnp.arange(draft_length) % (length - begin)]


def accept_chain(
    logits: jax.Array, draft: jax.Array, key: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """How many tokens of a draft the target accepts, and its own token after those: (int32 [], int32 []).

    logits: [T + 1, V], row i after i draft tokens; draft: int32 [T].
    """
    count = draft.shape[0]
    if sampling.temperature == 0:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        accepted = jnp.cumprod(best[:count] == draft).sum(dtype=jnp.int32)
        return accepted, best[accepted]
    log_probs = scaled_log_probs(logits, sampling)
    chance, rest = jax.random.split(key)
    probs = jax.nn.softmax(log_probs, axis=-1)
    likely = jax.random.uniform(chance, (count,)) < jnp.take_along_axis(probs[:count], draft[:, None], axis=1)[:, 0]
    accepted = jnp.cumprod(likely).sum(dtype=jnp.int32)
    # The draft had all its probability on its token: what a rejection leaves is everything else.
    rejected = jnp.where(accepted < count, jnp.append(draft, 0)[accepted], -1)
    left = jnp.where(jnp.arange(logits.shape[-1]) == rejected, -jnp.inf, log_probs[accepted])
    return accepted, jax.random.categorical(rest, left).astype(jnp.int32)
