"""`TreeDecoder.generate`: blocks of steps on the device, and the host one block ahead with its plans.

Until a block's tokens are there, the host does not know them, nor who ended. But it knows how the tree looks after the
block: every leaf is so many tokens longer. That is all a plan needs, so block N + 1 is planned and dispatched while
block N runs. A sequence that ended in N idles through N + 1, and is gone in the next plan.

A plan is good for `horizon` steps. On a GPU those are several blocks (`loops/strides.py` says why they are short): all
but a plan's first one go on with the same plan, grown.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tree_attention_jax.planning import Buckets, TreePlan
from tree_attention_jax.search.controller import as_token_set
from tree_attention_jax.search.loops import strides
from tree_attention_jax.search.loops.sampling import Block, Rows, Sampling, first_tokens, sample_block, sample_tokens
from tree_attention_jax.topology import TokenTree

if TYPE_CHECKING:
    from tree_attention_jax.search.decoder import TreeDecoder

__all__ = ["Generated", "generate"]


class Generated(NamedTuple):
    """What a leaf generated: tokens int32 [n], their log-probabilities float32 [n], whether an eos token ended it."""

    tokens: np.ndarray
    log_probs: np.ndarray
    stopped: bool


@dataclass
class _InFlight:
    """A block that has been dispatched."""

    sequences: np.ndarray  # which of the leaves decode in it, by row
    tree: TokenTree  # when it begins
    block: Block
    planned: float
    dispatched: float


def generate(
    decoder: TreeDecoder,
    leaves: Any,
    logits: jax.Array,
    max_new_tokens: int,
    sampling: Sampling,
    eos: Any,
    horizon: int,
    seed: int,
) -> list[Generated]:
    """See `TreeDecoder.generate`."""
    leaves = np.atleast_1d(np.asarray(leaves, np.int64))
    for name, value in (("max_new_tokens", max_new_tokens), ("horizon", horizon)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if decoder.tree.pending_tokens().size:
        raise ValueError("leaves have pending tokens: forward() computes them, and gives the logits to go on from")
    run = _Run(decoder, leaves, max_new_tokens, sampling, as_token_set(eos), horizon, seed)
    run.begin(logits)
    while horizon == 1 and run.running.size:
        run.step()
    flying = run.dispatch(ahead=0)
    while flying is not None:
        following = run.dispatch(ahead=run.block_steps)
        run.land(flying)
        # Where all have ended, the next block brings nothing: on a CPU it ends at once, on a GPU it takes its steps.
        flying = following
    return run.finish()


@dataclass
class _Planned:
    """A plan, its rows' limits, the tree that it is of, and for how many steps it is still good."""

    plan: TreePlan
    limits: jax.Array
    tree: TokenTree
    steps_left: int


class _Run:
    """The state of one `generate`."""

    def __init__(self, decoder, leaves, max_new_tokens, sampling, eos, horizon, seed):
        self.decoder, self.leaves, self.horizon = decoder, leaves, horizon
        self.max_new_tokens, self.sampling = max_new_tokens, sampling
        ahead = strides.launched_ahead()
        blocks = -(-horizon // ahead) if ahead > 1 else 1
        self.block_steps = -(-horizon // blocks)
        self.plan_steps = blocks * self.block_steps
        self.eos = tuple(int(token) for token in eos)
        self.key = jax.random.key(seed)
        self.tokens: list[list[int]] = [[] for _ in leaves]
        self.log_probs: list[list[float]] = [[] for _ in leaves]
        self.last: dict[int, int] = {}  # ended sequence -> its last token, which is not in the tree yet
        self.running = np.arange(leaves.size)
        self.rows: Rows | None = None  # on the device, after the last block dispatched
        self.rows_of = np.zeros(0, np.int64)  # row -> sequence, there
        self.planned: _Planned | None = None  # the plan of the last block dispatched, and of the tree after it
        self.buckets: Buckets | None = None

    def begin(self, logits):
        """The first tokens, from the prompts' logits."""
        size = self.leaves.size
        logits = jnp.broadcast_to(jnp.atleast_2d(logits), (size, logits.shape[-1]))
        rows, log_probs = first_tokens(
            logits,
            jnp.arange(size, dtype=jnp.int32),
            jnp.full(size, self.max_new_tokens, jnp.int32),
            jnp.ones(size, bool),
            self.key,
            sampling=self.sampling,
            eos=self.eos,
        )
        self.rows, self.rows_of = rows, np.arange(size)
        tokens, log_probs, done = (np.asarray(x) for x in (rows.tokens, log_probs, rows.done))
        for i in range(size):
            self.tokens[i].append(int(tokens[i]))
            self.log_probs[i].append(float(log_probs[i]))
        self._retire(done)
        if self.running.size:
            self.decoder.tree.append(self.leaves[self.running], tokens[self.running])

    def step(self):
        """One token for every running sequence, by the host: compiles no loop."""
        running = self.running
        logits = self.decoder.forward(self.leaves[running])
        generated = len(self.tokens[running[0]])
        tokens, log_probs = _sample(
            logits, self.key, running.astype(np.int32), np.full(running.size, generated, np.int32), self.sampling
        )
        tokens = np.asarray(tokens)
        for i, token, log_prob in zip(running.tolist(), tokens.tolist(), np.asarray(log_probs).tolist()):
            self.tokens[i].append(token)
            self.log_probs[i].append(log_prob)
        ended = np.array([self._is_over(i) for i in running.tolist()])
        self._retire(ended)
        if self.running.size:
            self.decoder.tree.append(self.leaves[self.running], tokens[~ended])

    def dispatch(self, ahead):
        """Plans and starts a block, `ahead` steps after what the tree knows; None where no sequence can be running."""
        begin = time.perf_counter()
        if not self.running.size or len(self.tokens[self.running[0]]) + ahead >= self.max_new_tokens:
            return None
        decoder, now, planning = self.decoder, self.planned, 0.0
        if now is None or now.steps_left < self.block_steps:
            now = self._plan_ahead(ahead)
            planning = time.perf_counter() - begin
        dispatched = time.perf_counter()
        block, self.rows, decoder.k_pages, decoder.v_pages = sample_block(
            decoder._flattened.now(),
            decoder.k_pages,
            decoder.v_pages,
            now.plan,
            self.rows,
            now.limits,
            self.key,
            horizon=self.block_steps,
            sampling=self.sampling,
            eos=self.eos,
            implementation=decoder.implementation,
        )
        left = now.steps_left - self.block_steps
        plan = _advanced(now.plan, self.block_steps) if left else now.plan
        self.planned = _Planned(plan, now.limits, _grown(now.tree, self.block_steps), left)
        return _InFlight(self.rows_of, now.tree, block, planning, dispatched)

    def land(self, flying):
        """Waits for a block and puts its tokens into the tree."""
        decoder, block = self.decoder, flying.block
        tokens, log_probs = np.asarray(block.tokens), np.asarray(block.log_probs)
        if taken := int(block.steps):
            decoder._record(flying.tree, taken, flying.planned, flying.dispatched, block)
        by_sequence = {int(sequence): row for row, sequence in enumerate(flying.sequences)}
        running = self.running
        rows = [by_sequence[i] for i in running.tolist()]
        steps = self.block_steps
        grown, log_probs = tokens[rows].reshape(-1, steps), log_probs[rows].reshape(-1, steps)
        counts = (grown >= 0).sum(axis=1)
        for i, count, new, scores in zip(running.tolist(), counts.tolist(), grown, log_probs):
            self.tokens[i] += new[:count].tolist()
            self.log_probs[i] += scores[:count].tolist()
        ended = np.array([count < steps or self._is_over(i) for i, count in zip(running.tolist(), counts)], bool)
        decoder.tree.commit()  # of the tokens that were pending when the block began
        self._retire(ended)
        # All but the last token of each, which has no K/V yet: those of one length in one call.
        for count in np.unique(counts):
            if count > 1:
                decoder.tree.append(self.leaves[running[counts == count]], grown[counts == count, : count - 1])
        leaves, grown = self.leaves[self.running], grown[~ended]
        decoder.tree.commit()
        if leaves.size:
            decoder.tree.append(leaves, grown[:, -1])

    def finish(self):
        """Appends the last tokens, and gathers what was generated."""
        if self.last:
            self.decoder.tree.append(self.leaves[list(self.last)], np.array(list(self.last.values())))
        return [
            Generated(np.array(tokens, np.int32), np.array(log_probs, np.float32), tokens[-1] in self.eos)
            for tokens, log_probs in zip(self.tokens, self.log_probs)
        ]

    def _is_over(self, i):
        return len(self.tokens[i]) >= self.max_new_tokens or self.tokens[i][-1] in self.eos

    def _retire(self, ended):
        # Their last token waits outside of the tree: it has no K/V, and the next blocks shall not compute it.
        self.last |= {int(i): self.tokens[i][-1] for i in self.running[ended]}
        self.running = self.running[~ended]

    def _plan_ahead(self, ahead):
        """A plan for those still running, `ahead` steps after what the tree knows; the device's rows in its order."""
        tree = _grown(self.decoder.tree.snapshot(horizon=ahead + self.plan_steps), ahead)
        sequences = self.running[np.argsort(self.decoder.tree.query_rows(self.leaves[self.running]))]
        # The buckets of the plan before, as long as they do: a tree that shrinks compiles nothing new.
        try:
            plan = self.decoder.plan(tree, self.plan_steps, buckets=self.buckets)
        except ValueError:
            plan = self.decoder.plan(tree, self.plan_steps)
        self.buckets = plan.buckets
        place = np.zeros(self.leaves.size, np.int32)
        place[self.rows_of] = np.arange(self.rows_of.size)
        index = np.zeros(plan.query_capacity, np.int32)
        index[: sequences.size] = place[sequences]
        self.rows = _take(self.rows, index, np.arange(index.size) < sequences.size)  # padding has ended
        self.rows_of = sequences
        return _Planned(plan, jnp.full(index.size, self.max_new_tokens, jnp.int32), tree, self.plan_steps)


def _grown(snapshot: TokenTree, ahead: int) -> TokenTree:
    """The same forest when its decoding leaves have `ahead` more tokens."""
    kv_len = snapshot.kv_len + ahead * snapshot.q_len
    return TokenTree(
        snapshot.parent, kv_len, snapshot.q_len, snapshot.page_indptr, snapshot.page_indices, snapshot.first_slot
    )


_sample = jax.jit(sample_tokens, static_argnames="sampling")


@partial(jax.jit, static_argnames="steps")
def _advanced(plan: TreePlan, steps: int) -> TreePlan:
    return jax.lax.fori_loop(0, steps, lambda _, plan: plan.advance(), plan)


@jax.jit
def _take(rows: Rows, index: jax.Array, real: jax.Array) -> Rows:
    taken = jax.tree.map(lambda x: x[index], rows)
    return taken._replace(done=taken.done | ~real)
