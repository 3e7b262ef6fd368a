"""Monte Carlo tree search over tokens on the device, through DeepMind's `mctx`.

mctx hands its recurrent function the embedding of one parent node and stores what it returns: there is no place for
K/V that all nodes share. But its `loop_fn` runs the simulations, and exists so that the recurrent function may have
state of its own (for Haiku's `fori_loop`). `_Threaded` carries the tree of tokens and the K/V pages through that loop.
An embedding then is no more than a node's number there, and the tokens that its actions stand for. A simulation
appends one token below each parent, writes its K/V to the node's slot, and attends to the prompt by the host's plan
and to the node's path by its slots: nothing is copied from node to node, nothing computed twice.

Danihelka et al., "Policy improvement by planning with Gumbel", 2022; Schrittwieser et al., "Mastering Atari, Go, chess
and shogi by planning with a learned model", 2020 (`policy="muzero"`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tree_attention_jax.planning.plan import TreePlan
from tree_attention_jax.search.controller import as_token_set
from tree_attention_jax.search.loops.paths import for_loops, forward_on_paths
from tree_attention_jax.search.loops.sampling import is_any_of
from tree_attention_jax.search.loops.workspace import Workspace
from tree_attention_jax.search.tree_state import FREE, TreeState, append, on_paths, path_pages, path_tokens

if TYPE_CHECKING:
    from tree_attention_jax.search.decoder import TreeDecoder

__all__ = ["MctsRules", "Searched", "keep_paths", "mcts_decode", "mcts_loop"]

Evaluate = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class MctsRules:
    """Hashable: compiled into the loop. See `mcts_decode`."""

    steps: int
    num_simulations: int
    num_actions: int
    max_depth: int
    eos: tuple[int, ...] = ()
    policy: str = "gumbel"

    def __post_init__(self) -> None:
        for name in ("steps", "num_simulations", "num_actions", "max_depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.policy not in ("gumbel", "muzero"):
            raise ValueError(f"policy is {self.policy!r}: it must be 'gumbel' or 'muzero'")

    @property
    def longest_path(self) -> int:
        return self.steps + self.max_depth


class Searched(NamedTuple):
    """What a search chose below each prompt; one entry a token, none after an eos token.

    tokens: int32 [n]. values: float32 [n], of the root of each search. visits: float32 [n, num_actions], the
    improved policy (mctx's `action_weights`) over `candidates` int32 [n, num_actions].
    """

    tokens: np.ndarray
    values: np.ndarray
    visits: np.ndarray
    candidates: np.ndarray


class Position(NamedTuple):
    """The embedding of a node of mctx, each [B, ...]."""

    node: jax.Array  # int32, in the `TreeState`; -1: the prompt
    candidates: jax.Array  # int32 [B, A], the tokens that the actions stand for
    terminal: jax.Array  # bool, an eos token came before


class Memory(NamedTuple):
    """What all nodes share."""

    state: TreeState
    k_pages: tuple[jax.Array, ...]
    v_pages: tuple[jax.Array, ...]


class _Threaded:
    """A `loop_fn` for mctx that carries `memory` along; the loop's body reads and sets it."""

    def __init__(self, memory: Memory):
        self.memory = memory

    def __call__(self, lower: Any, upper: Any, body: Callable, init: Any) -> Any:
        def step(i, carry):
            self.memory, inner = carry
            inner = body(i, inner)
            return self.memory, inner

        self.memory, result = jax.lax.fori_loop(lower, upper, step, (self.memory, init))
        return result


def mcts_decode(
    decoder: TreeDecoder,
    leaves: Sequence[int] | np.ndarray,
    logits: jax.Array,
    evaluate: Evaluate,
    *,
    steps: int,
    num_simulations: int,
    num_actions: int = 8,
    max_depth: int = 8,
    eos: Any = None,
    policy: str = "gumbel",
    seed: int = 0,
) -> list[Searched]:
    """Continues prefilled leaves by `steps` tokens, each chosen by a search; all in one program. The leaves stay.

    Args:
        leaves: B handles. logits: [V] or [B, V], after them.
        evaluate: (tokens int32 [B, T], lengths int32 [B], log_probs float32 [B, V]) -> values float32 [B], higher is
            better; jnp code. The tokens are those below the prompt, from `lengths` on 0; log_probs follow from them.
        num_simulations: of each search. num_actions: a node's likeliest tokens, between which a search chooses.
        max_depth: tokens that a search looks ahead at most.
        eos: tokens that end a sequence.
        policy: "gumbel" (`mctx.gumbel_muzero_policy`) or "muzero" (`mctx.muzero_policy`).

    Raises:
        ImportError: mctx is missing (the extra `search`). OutOfPages: B * (steps + num_simulations) slots are not to
            be had.
    """
    eos = tuple(int(token) for token in as_token_set(eos))
    rules = MctsRules(steps, num_simulations, num_actions, max_depth, eos, policy)
    batch = len(leaves)
    logits = jnp.broadcast_to(jnp.atleast_2d(logits), (batch, logits.shape[-1]))
    with Workspace.below(decoder, leaves, capacity=batch * (steps + num_simulations)) as space:
        found, decoder.k_pages, decoder.v_pages = mcts_loop(
            decoder.model,
            decoder.k_pages,
            decoder.v_pages,
            space.plan,
            TreeState.create(slots=space.slots),
            jnp.asarray(space.prompt_lengths),
            logits,
            jax.random.key(seed),
            rules=rules,
            evaluate=evaluate,
            implementation=decoder.implementation,
        )
        tokens, values, visits, candidates = (np.asarray(x) for x in found)
    counts = (tokens >= 0).sum(axis=0)
    return [Searched(*(x[: counts[i], i] for x in (tokens, values, visits, candidates))) for i in range(batch)]


@partial(
    jax.jit,
    static_argnames=("rules", "evaluate", "implementation"),
    donate_argnames=("k_pages", "v_pages"),
)
def mcts_loop(
    model: Any,
    k_pages: Sequence[jax.Array],
    v_pages: Sequence[jax.Array],
    plan: TreePlan,
    state: TreeState,
    prompt_lengths: jax.Array,
    logits: jax.Array,
    key: jax.Array,
    *,
    rules: MctsRules,
    evaluate: Evaluate,
    implementation: str | tuple[str, ...] | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The loop itself: a `lax.scan` over the chosen tokens, a search in each.

    The root of the next search is the chosen child, whose K/V, logits and value the last search has computed: the
    model runs in the simulations only.

    Args:
        model, k_pages, v_pages: as for `sample_block`; the pages are donated.
        plan: of a `Workspace` with B rows. state: empty, with room for B * (steps + num_simulations) tokens.
        prompt_lengths: int32 [B]. logits: [B, V].

    Returns:
        ((tokens int32 [steps, B], -1 after the end; values [steps, B]; visits, candidates [steps, B, A]), k_pages,
        v_pages).
    """
    import mctx

    batch = logits.shape[0]
    needed = batch * (rules.steps + rules.num_simulations)
    if state.capacity < needed:
        raise ValueError(f"state holds {state.capacity} tokens; {batch} searches of these rules may need {needed}")
    model = for_loops(model)
    nothing = jnp.zeros((batch, rules.longest_path), jnp.int32), jnp.zeros(batch, jnp.int32)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    prior, candidates = jax.lax.top_k(log_probs, rules.num_actions)
    start = Position(jnp.full(batch, -1, jnp.int32), candidates.astype(jnp.int32), jnp.zeros(batch, bool))
    root = mctx.RootFnOutput(prior_logits=prior, value=evaluate(*nothing, log_probs), embedding=start)

    def choose(carry, key):
        memory, root = carry
        threaded = _Threaded(memory)
        grow = _recurrent_fn(model, plan, prompt_lengths, threaded, rules, evaluate, implementation)
        policy = mctx.gumbel_muzero_policy if rules.policy == "gumbel" else mctx.muzero_policy
        found = policy(
            params=(),
            rng_key=key,
            root=root,
            recurrent_fn=grow,
            num_simulations=rules.num_simulations,
            max_depth=rules.max_depth,
            loop_fn=threaded,
        )
        at, tree = jnp.arange(batch), found.search_tree
        child = tree.children_index[at, 0, found.action]
        position = jax.tree.map(lambda x: x[at, child], tree.embeddings)
        below = mctx.RootFnOutput(
            prior_logits=tree.children_prior_logits[at, child], value=tree.raw_values[at, child], embedding=position
        )
        token = jnp.where(root.embedding.terminal, -1, root.embedding.candidates[at, found.action])
        memory = threaded.memory._replace(state=keep_paths(threaded.memory.state, position.node))
        chosen = token, tree.node_values[:, 0], found.action_weights, root.embedding.candidates
        return (memory, below), chosen

    memory = Memory(state, tuple(k_pages), tuple(v_pages))
    (memory, _), chosen = jax.lax.scan(choose, (memory, root), jax.random.split(key, rules.steps))
    return chosen, memory.k_pages, memory.v_pages


def _recurrent_fn(model, plan, prompt_lengths, threaded, rules, evaluate, implementation):
    """mctx's recurrent function: appends a token to each parent's path and runs the model on it."""
    import mctx

    def grow(params, key, action, position):
        state, k_pages, v_pages = threaded.memory
        rows = jnp.arange(action.shape[0])
        token = position.candidates[rows, action]
        slots, lengths = path_pages(state, position.node, rules.longest_path)
        state, node = append(state, position.node, token, ~position.terminal)
        new_slots = jnp.where(position.terminal, np.iinfo(np.int32).max, state.slot[node])
        logits, k_pages, v_pages = forward_on_paths(
            model, k_pages, v_pages, plan, token, prompt_lengths + lengths, new_slots, slots, lengths, implementation
        )
        threaded.memory = Memory(state, k_pages, v_pages)
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        prior, candidates = jax.lax.top_k(log_probs, rules.num_actions)
        value = evaluate(*path_tokens(state, node, rules.longest_path), log_probs)
        ends = is_any_of(token, rules.eos) & ~position.terminal
        over = ends | position.terminal
        # A sequence's end has its value as a reward, and nothing comes after it.
        result = mctx.RecurrentFnOutput(
            reward=jnp.where(ends, value, 0.0),
            discount=jnp.where(over, 0.0, 1.0),
            prior_logits=prior,
            value=jnp.where(over, 0.0, value),
        )
        return result, Position(node, candidates.astype(jnp.int32), over)

    return grow


def keep_paths(state: TreeState, leaves: jax.Array) -> TreeState:
    """Frees every node that is on no path to one of `leaves` int32 [B], whoever else referred to it."""
    kept = on_paths(state, leaves)
    # What needs a node: its children that stay, and the leaves that it is.
    above = jnp.concatenate([jnp.where(kept, state.parent, -1), leaves])
    refs = jnp.zeros_like(state.refs).at[jnp.where(above < 0, state.capacity, above)].add(1, mode="drop")
    return replace(
        state,
        parent=jnp.where(kept, state.parent, FREE),
        refs=refs,
        free=jnp.argsort(kept, stable=True).astype(jnp.int32),
        num_free=(~kept).sum(dtype=jnp.int32),
    )
