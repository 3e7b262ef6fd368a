"""Parallel sampling on the device: every leaf of a plan grows by a token a step, for up to `horizon` steps.

The random numbers of a token depend on the key, its sequence's number and how many tokens the sequence has, on
nothing else: not on the row it happens to be in, on its neighbours or on where one block ends and the next begins. So
a block gives the same tokens as single steps driven by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tree_attention_jax.planning.plan import TreePlan
from tree_attention_jax.search.loops.paths import for_loops
from tree_attention_jax.search.loops.strides import while_in_strides

__all__ = ["Rows", "Sampling", "first_tokens", "is_any_of", "sample_block", "sample_tokens", "scaled_log_probs"]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Hashable: it is compiled into the loop.

    temperature: 0 takes the likeliest token. top_p: sample among the likeliest tokens that together have at least
    this probability (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019).
    """

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature must be at least 0 and top_p in (0, 1], got {self.temperature} and {self.top_p}"
            )


class Rows(NamedTuple):
    """The sequences that a block decodes, one a query of its plan; all [R], R the plan's query capacity."""

    tokens: jax.Array  # int32, the last token: it has no K/V yet
    sequences: jax.Array  # int32, numbers that tell the sequences apart
    generated: jax.Array  # int32, tokens generated so far, the last one included
    done: jax.Array  # bool, ended; rows of padding are


class Block(NamedTuple):
    """What a block generated: tokens int32 [R, horizon], -1 past a sequence's end; their log-probabilities at
    temperature 1, float32 [R, horizon], 0 there; and how many steps were taken, int32 []."""

    tokens: jax.Array
    log_probs: jax.Array
    steps: jax.Array


def sample_tokens(
    logits: jax.Array, key: jax.Array, sequences: jax.Array, generated: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """One token a row: (int32 [R], its log-probability at temperature 1, float32 [R]).

    logits: [R, V]; sequences, generated: int32 [R], what the row's random numbers depend on beside `key`.
    """
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    if sampling.temperature == 0:
        chosen = jnp.argmax(log_probs, axis=-1)
    else:
        scaled = scaled_log_probs(log_probs, sampling)
        keys = jax.vmap(lambda s, n: jax.random.fold_in(jax.random.fold_in(key, s), n))(sequences, generated)
        noise = jax.vmap(lambda k: jax.random.gumbel(k, scaled.shape[1:], jnp.float32))(keys)
        chosen = jnp.argmax(scaled + noise, axis=-1)
    chosen = chosen.astype(jnp.int32)
    return chosen, jnp.take_along_axis(log_probs, chosen[:, None], axis=1)[:, 0]


def scaled_log_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """What is sampled from, [..., V]; normalised, but for what `top_p` leaves out. Needs a temperature above 0."""
    return _nucleus(jax.nn.log_softmax(logits.astype(jnp.float32) / sampling.temperature, axis=-1), sampling.top_p)


def _nucleus(log_probs: jax.Array, top_p: float) -> jax.Array:
    """-inf for tokens outside the smallest set of likeliest ones that has `top_p`."""
    if top_p == 1:
        return log_probs
    descending = -jnp.sort(-log_probs, axis=-1)
    probs = jnp.exp(descending)
    kept = jnp.sum(jnp.cumsum(probs, axis=-1) - probs < top_p, axis=-1, keepdims=True)
    return jnp.where(log_probs >= jnp.take_along_axis(descending, kept - 1, axis=-1), log_probs, -jnp.inf)


def is_any_of(tokens: jax.Array, wanted: tuple[int, ...]) -> jax.Array:
    """bool, tokens' shape."""
    return jnp.isin(tokens, jnp.array(wanted, jnp.int32)) if wanted else jnp.zeros(tokens.shape, bool)


@partial(jax.jit, static_argnames=("sampling", "eos"))
def first_tokens(
    logits: jax.Array,
    sequences: jax.Array,
    limits: jax.Array,
    active: jax.Array,
    key: jax.Array,
    *,
    sampling: Sampling,
    eos: tuple[int, ...] = (),
) -> tuple[Rows, jax.Array]:
    """The tokens after the prompts, from their logits [R, V]: (rows to begin a block with, log-probabilities [R]).

    limits: int32 [R], tokens a sequence may have; active: bool [R], False for rows of padding.
    """
    none = jnp.zeros_like(sequences)
    tokens, log_probs = sample_tokens(logits, key, sequences, none, sampling)
    done = ~active | is_any_of(tokens, eos) | (limits <= 1)
    return Rows(tokens, sequences, none + 1, done), log_probs


@partial(
    jax.jit,
    static_argnames=("horizon", "sampling", "eos", "implementation"),
    donate_argnames=("k_pages", "v_pages"),
)
def sample_block(
    model: Any,
    k_pages: Sequence[jax.Array],
    v_pages: Sequence[jax.Array],
    plan: TreePlan,
    rows: Rows,
    limits: jax.Array,
    key: jax.Array,
    *,
    horizon: int,
    sampling: Sampling,
    eos: tuple[int, ...] = (),
    implementation: str | tuple[str, ...] | None = None,
) -> tuple[Block, Rows, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Up to `horizon` tokens for every sequence, in one `lax.while_loop` that ends early when all have ended.

    A GPU waits for the host at every look at whether they have. So it looks every 8 steps, or what divides `horizon`,
    and where that is `horizon` itself, not at all: the call returns before the device is through (`while_in_strides`).

    Args:
        model: as `models.Llama`: ``model(tokens, k_pages, v_pages, plan) -> logits, k_pages, v_pages``.
        k_pages, v_pages: one array a layer. Donated: use those returned.
        plan: of a tree whose queries are the sequences' last tokens, made with a horizon of at least `horizon`.
        rows: see `first_tokens`.
        limits: int32 [R], tokens that a sequence may have at most.
        key: the same for all blocks.
        eos: tokens that end a sequence.

    Returns:
        (block, rows for the next block, k_pages, v_pages). A sequence that has ended keeps its row and writes into
        slots reserved for it that nobody reads.
    """
    if plan.horizon < horizon:
        raise ValueError(f"horizon is {horizon} but the plan was made for {plan.horizon} steps")
    model, size = for_loops(model), rows.tokens.shape[0]

    def goes_on(carry):
        step, rows = carry[0], carry[1]
        return (step < horizon) & ~rows.done.all()

    def one_step(carry):
        step, rows, plan, k_pages, v_pages, tokens, log_probs = carry
        logits, k_pages, v_pages = model(rows.tokens, k_pages, v_pages, plan, implementation=implementation)
        chosen, log_prob = sample_tokens(logits, key, rows.sequences, rows.generated, sampling)
        tokens = tokens.at[:, step].set(jnp.where(rows.done, -1, chosen))
        log_probs = log_probs.at[:, step].set(jnp.where(rows.done, 0.0, log_prob))
        generated = rows.generated + ~rows.done
        done = rows.done | is_any_of(chosen, eos) | (generated >= limits)
        rows = Rows(jnp.where(rows.done, rows.tokens, chosen), rows.sequences, generated, done)
        return step + 1, rows, plan.advance(), k_pages, v_pages, tokens, log_probs

    tokens = jnp.full((size, horizon), -1, jnp.int32)
    log_probs = jnp.zeros((size, horizon), jnp.float32)
    start = (jnp.int32(0), rows, plan, tuple(k_pages), tuple(v_pages), tokens, log_probs)
    step, rows, _, k_pages, v_pages, tokens, log_probs = while_in_strides(goes_on, one_step, start, horizon)
    return Block(tokens, log_probs, step), rows, k_pages, v_pages
