"""`TreeDecoder.generate`: blocks of steps on the device, and the host one block ahead with its plans.

Until a block's tokens are there, the host does not know them, nor who ended. But it knows how the tree looks after the
block: every leaf is `horizon` tokens longer. That is all a plan needs, so block N + 1 is planned and dispatched while
block N runs. A sequence that ended in N idles through N + 1 and is gone in N + 2.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tree_attention_jax.planning import Buckets
from tree_attention_jax.search.controller import as_token_set
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
    tree: TokenTree
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
        following = run.dispatch(ahead=horizon)
        run.land(flying)
        # Nothing but idling sequences in the next block: it ends at once, and brings nothing.
        flying = following
    return run.finish()


class _Run:
    """The state of one `generate`."""

    def __init__(self, decoder, leaves, max_new_tokens, sampling, eos, horizon, seed):
        self.decoder, self.leaves, self.horizon = decoder, leaves, horizon
        self.max_new_tokens, self.sampling = max_new_tokens, sampling
        self.eos = tuple(int(token) for token in eos)
        self.key = jax.random.key(seed)
        self.tokens: list[list[int]] = [[] for _ in leaves]
        self.log_probs: list[list[float]] = [[] for _ in leaves]
        self.last: dict[int, int] = {}  # ended sequence -> its last token, which is not in the tree yet
        self.running = np.arange(leaves.size)
        self.rows: Rows | None = None  # on the device, after the last block dispatched
        self.rows_of = np.zeros(0, np.int64)  # row -> sequence, there
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
        decoder = self.decoder
        snapshot = decoder.tree.snapshot(horizon=ahead + self.horizon)
        tree = _grown(snapshot, ahead)
        order = np.argsort(decoder.tree.query_rows(self.leaves[self.running]))
        sequences = self.running[order]
        plan = self._plan(tree)
        rows = self._reordered(sequences, plan.query_capacity)
        limits = jnp.full(plan.query_capacity, self.max_new_tokens, jnp.int32)
        dispatched = time.perf_counter()
        block, self.rows, decoder.k_pages, decoder.v_pages = sample_block(
            decoder.model,
            decoder.k_pages,
            decoder.v_pages,
            plan,
            rows,
            limits,
            self.key,
            horizon=self.horizon,
            sampling=self.sampling,
            eos=self.eos,
            implementation=decoder.implementation,
        )
        self.rows_of = sequences
        return _InFlight(sequences, tree, block, dispatched - begin, dispatched)

    def land(self, flying):
        """Waits for a block and puts its tokens into the tree."""
        decoder, block = self.decoder, flying.block
        tokens, log_probs = np.asarray(block.tokens), np.asarray(block.log_probs)
        if steps := int(block.steps):
            decoder._record(flying.tree, steps, flying.planned, flying.dispatched, block)
        by_sequence = {int(sequence): row for row, sequence in enumerate(flying.sequences)}
        running = self.running
        rows = [by_sequence[i] for i in running.tolist()]
        grown, log_probs = tokens[rows].reshape(-1, self.horizon), log_probs[rows].reshape(-1, self.horizon)
        counts = (grown >= 0).sum(axis=1)
        for i, count, new, scores in zip(running.tolist(), counts.tolist(), grown, log_probs):
            self.tokens[i] += new[:count].tolist()
            self.log_probs[i] += scores[:count].tolist()
        ended = np.array([count < self.horizon or self._is_over(i) for i, count in zip(running.tolist(), counts)], bool)
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

    def _plan(self, tree):
        # The buckets of the block before, as long as they do: a tree that shrinks compiles nothing new.
        try:
            plan = self.decoder.plan(tree, self.horizon, buckets=self.buckets)
        except ValueError:
            plan = self.decoder.plan(tree, self.horizon)
        self.buckets = plan.buckets
        return plan

    def _reordered(self, sequences, capacity):
        # The device's rows in the next plan's order; padding has ended.
        place = np.zeros(self.leaves.size, np.int32)
        place[self.rows_of] = np.arange(self.rows_of.size)
        index = np.zeros(capacity, np.int32)
        index[: sequences.size] = place[sequences]
        return _take(self.rows, index, np.arange(capacity) < sequences.size)


def _grown(snapshot: TokenTree, ahead: int) -> TokenTree:
    """The same forest when its decoding leaves have `ahead` more tokens."""
    kv_len = snapshot.kv_len + ahead * snapshot.q_len
    return TokenTree(
        snapshot.parent, kv_len, snapshot.q_len, snapshot.page_indptr, snapshot.page_indices, snapshot.first_slot
    )


_sample = jax.jit(sample_tokens, static_argnames="sampling")


@jax.jit
def _take(rows: Rows, index: jax.Array, real: jax.Array) -> Rows:
    taken = jax.tree.map(lambda x: x[index], rows)
    return taken._replace(done=taken.done | ~real)
