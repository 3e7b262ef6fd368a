"""Beam search on the device: which beam goes on from which is data, so no host is asked between two steps.

The beams' K/V hang in a `TreeState` below the prompt; a step forks and frees nodes there and moves no K/V. The rules
are those of `search.BeamSearch`, its host twin: Wu et al., "Google's Neural Machine Translation System", 2016 (length
penalty); a hypothesis ends with an eos token among the best `width` candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tree_attention_jax.planning.plan import TreePlan
from tree_attention_jax.search.controller import Hypothesis, as_token_set
from tree_attention_jax.search.loops.paths import for_loops, forward_on_paths
from tree_attention_jax.search.loops.sampling import is_any_of
from tree_attention_jax.search.loops.strides import while_in_strides
from tree_attention_jax.search.loops.workspace import Workspace
from tree_attention_jax.search.tree_state import TreeState, append, fork, path_pages

if TYPE_CHECKING:
    from tree_attention_jax.search.decoder import TreeDecoder

__all__ = ["BeamRules", "beam_loop", "beam_search"]


@dataclass(frozen=True)
class BeamRules:
    """See `search.BeamSearch`. Hashable: compiled into the loop."""

    width: int
    max_length: int
    eos: tuple[int, ...] = ()
    length_penalty: float = 0.0
    early_stop: bool = False

    def __post_init__(self) -> None:
        if self.width < 1 or self.max_length < 1:
            raise ValueError(f"width and max_length must be at least 1, got {self.width} and {self.max_length}")

    def score(self, log_prob: jax.Array, length: jax.Array | int) -> jax.Array:
        return log_prob / ((5 + jnp.asarray(length, jnp.float32)) / 6) ** self.length_penalty


class Ended(NamedTuple):
    """Finished hypotheses, best first; score -inf: none."""

    tokens: jax.Array  # int32 [width, max_length]
    lengths: jax.Array  # int32 [width]
    scores: jax.Array  # float32 [width]
    log_probs: jax.Array  # float32 [width]


class Beams(NamedTuple):
    """Running beams, and what they grew from; log-probability -inf: none."""

    tokens: jax.Array  # int32 [width, max_length]
    log_probs: jax.Array  # float32 [width]
    parents: jax.Array  # int32 [width], which beam of the step before each goes on from
    length: jax.Array  # int32 []
    over: jax.Array  # bool [], none of them can matter any more
    ended: Ended


def beam_search(
    decoder: TreeDecoder,
    leaf: int,
    logits: jax.Array,
    width: int,
    max_length: int,
    *,
    eos: Any = None,
    length_penalty: float = 0.0,
    early_stop: bool = False,
) -> list[Hypothesis]:
    """`BeamSearch` below a prefilled leaf in one program: its hypotheses, best first. The leaf stays as it is.

    logits: [V], after the leaf. Other arguments as for `search.BeamSearch`.
    """
    eos = tuple(int(token) for token in as_token_set(eos))
    rules = BeamRules(width, max_length, eos, length_penalty, early_stop)
    with Workspace.below(decoder, [leaf] * width, capacity=max(1, width * (max_length - 1))) as space:
        ended, decoder.k_pages, decoder.v_pages = beam_loop(
            decoder.model,
            decoder.k_pages,
            decoder.v_pages,
            space.plan,
            TreeState.create(slots=space.slots),
            space.prompt_lengths[0],
            logits,
            rules=rules,
            implementation=decoder.implementation,
        )
        tokens, lengths, scores, log_probs = (np.asarray(x) for x in ended)
    return [
        Hypothesis(tokens[i, : lengths[i]], float(scores[i]), float(log_probs[i]))
        for i in np.flatnonzero(scores > -np.inf)
    ]


@partial(jax.jit, static_argnames=("rules", "implementation"), donate_argnames=("k_pages", "v_pages"))
def beam_loop(
    model: Any,
    k_pages: Sequence[jax.Array],
    v_pages: Sequence[jax.Array],
    plan: TreePlan,
    state: TreeState,
    prompt_length: jax.Array,
    logits: jax.Array,
    *,
    rules: BeamRules,
    implementation: str | tuple[str, ...] | None = None,
) -> tuple[Ended, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The loop itself: a `lax.while_loop` until no running beam can matter (`while_in_strides`: on a GPU, up to 7 steps
    longer).

    Args:
        model, k_pages, v_pages: as for `sample_block`; the pages are donated.
        plan: of a `Workspace` with `rules.width` rows. state: empty, with room for width * (max_length - 1) tokens.
        prompt_length: int32 []. logits: [V], after the prompt.
    """
    width = rules.width
    needed = width * (rules.max_length - 1)
    if state.capacity < needed:
        raise ValueError(f"state holds {state.capacity} tokens; {width} beams of {rules.max_length} may need {needed}")
    model = for_loops(model)
    nobody = jnp.full(width, -jnp.inf)
    blank = jnp.zeros((width, rules.max_length), jnp.int32)
    none = jnp.zeros(width, jnp.int32)
    ended = Ended(blank, none, nobody, nobody)
    beams = Beams(blank, nobody.at[0].set(0.0), none, jnp.int32(0), jnp.bool_(False), ended)
    beams = _decide(beams, jnp.broadcast_to(logits, (width, logits.shape[-1])), rules)
    leaves = jnp.full(width, -1, jnp.int32)  # the prompt: no node of the tree

    def goes_on(carry):
        beams = carry[0]
        return ~beams.over & (beams.length < rules.max_length)

    def one_step(carry):
        beams, state, leaves, k_pages, v_pages = carry
        state, above = fork(state, leaves, beams.parents)
        slots, lengths = path_pages(state, above, max(1, rules.max_length - 1))
        new = jnp.take_along_axis(beams.tokens, beams.length[None, None] - 1, axis=1)[:, 0]
        state, leaves = append(state, above, new)
        positions = prompt_length + beams.length - 1 + none
        logits, k_pages, v_pages = forward_on_paths(
            model, k_pages, v_pages, plan, new, positions, state.slot[leaves], slots, lengths, implementation
        )
        # A step after the end changes nothing but K/V that nobody reads any more.
        grown = _decide(beams, logits, rules), state, leaves
        kept = jax.tree.map(partial(jnp.where, goes_on(carry)), grown, carry[:3])
        return *kept, k_pages, v_pages

    start = (beams, state, leaves, tuple(k_pages), tuple(v_pages))
    beams, _, _, k_pages, v_pages = while_in_strides(goes_on, one_step, start)
    left = jnp.where(beams.over, -jnp.inf, beams.log_probs)  # those that run into the length limit end there
    return _with_ended(beams.ended, beams.tokens, left, beams.length, rules), k_pages, v_pages


def _decide(beams: Beams, logits: jax.Array, rules: BeamRules) -> Beams:
    """The next beams, from the logits [width, V] after the current ones."""
    width, vocab = logits.shape
    total = beams.log_probs[:, None] + jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    # Enough for `width` that don't end.
    log_probs, at = jax.lax.top_k(total.reshape(-1), min(width * (1 + len(rules.eos)), width * vocab))
    rows, chosen = at // vocab, (at % vocab).astype(jnp.int32)
    length = beams.length + 1
    grown = beams.tokens[rows].at[:, beams.length].set(chosen)
    ends = is_any_of(chosen, rules.eos)
    ending = jnp.where(ends & (jnp.arange(at.size) < width), log_probs, -jnp.inf)[:width]
    ended = _with_ended(beams.ended, grown[:width], ending, length, rules)
    keep = jnp.argsort(ends | (log_probs == -jnp.inf), stable=True)[:width]
    running = jnp.where(ends[keep], -jnp.inf, log_probs[keep])
    over = _is_over(ended, running.max(), length, rules)
    return Beams(grown[keep], running, rows[keep], length, over, ended)


def _with_ended(ended: Ended, tokens: jax.Array, log_probs: jax.Array, length: jax.Array, rules: BeamRules) -> Ended:
    """The best `width` of those ended before and of these; log-probability -inf: does not end."""
    lengths = jnp.full(log_probs.shape, length)
    new = Ended(tokens, lengths, rules.score(log_probs, length), log_probs)
    both = jax.tree.map(lambda old, more: jnp.concatenate([old, more]), ended, new)
    _, best = jax.lax.top_k(both.scores, rules.width)
    return jax.tree.map(lambda x: x[best], both)


def _is_over(ended: Ended, best_running: jax.Array, length: jax.Array, rules: BeamRules) -> jax.Array:
    full = ended.scores[-1] > -jnp.inf
    if rules.early_stop:
        return full | (best_running == -jnp.inf)
    # The penalty is monotonous in the length, so a beam's best is at one end of the lengths to come.
    hope = jnp.maximum(rules.score(best_running, length), rules.score(best_running, rules.max_length))
    return (full & (hope <= ended.scores[-1])) | (best_running == -jnp.inf)
