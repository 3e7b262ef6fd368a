"""A model, its paged K/V and the live trees over it: what a search loop on the host drives.

decoder = TreeDecoder(model, num_pages=512)
leaf, logits = decoder.prefill(prompt)
[found] = decoder.search([leaf], logits, [BeamSearch(width=4, max_length=32, eos=2)])

leaves = decoder.tree.fork(leaf, 64)                 # or: sample 64 continuations, in blocks of 16 steps that
decoder.generate(leaves, logits, 256, horizon=16)    # run on the device while the host plans the next block
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from tree_attention_jax.cache import PagePool, RadixCache, SequenceTree, move_slots
from tree_attention_jax.cache._checks import as_tokens, check_range
from tree_attention_jax.planning import Buckets, TreePlan, plan_tree
from tree_attention_jax.search.controller import Decision, Hypothesis
from tree_attention_jax.search.flat_model import Flattened
from tree_attention_jax.search.loops.sampling import Sampling
from tree_attention_jax.search.step_statistics import StepStatistics, kv_tokens
from tree_attention_jax.topology import TokenTree

if TYPE_CHECKING:
    from tree_attention_jax.search.generation import Generated

__all__ = ["TreeDecoder"]

FEWEST_QUERIES = 16


class TreeDecoder:
    """Decodes the trees of any number of requests with one model.

    Attributes:
        model: as given. Weights may change between two calls; after putting other variables or modules into it, set
            it again.
        tree: the live trees; fork, append to and prune its leaves between two calls as you like.
        k_pages, v_pages: one array a layer, [num_pages, page_size, num_kv_heads, head_dim]. Every call donates them
            and puts new ones here.
        statistics: a record for each call of the model or block, oldest first.
    """

    def __init__(
        self,
        model: Any,
        num_pages: int,
        page_size: int = 16,
        *,
        prefix_cache: bool = False,
        max_leaves: int | None = None,
        prefill_chunk: int = 2048,
        strategy: str = "auto",
        implementation: str | Sequence[str] | None = None,
        on_step: Callable[[StepStatistics], None] | None = None,
    ):
        """
        Args:
            model: a `models.Llama`, or anything called like one, with its `config` and `dtype`.
            num_pages, page_size: of the K/V cache.
            prefix_cache: keep prompts in a `RadixCache`, so that later ones that begin alike share their K/V.
            max_leaves: most leaves at a time (None: no limit).
            prefill_chunk: most tokens a call of the model takes; longer prompts go in several.
            strategy: of `plan_tree`. implementation: of `tree_attention`.
            on_step: called with each record of `statistics`, for a progress bar, say.
        """
        from tree_attention_jax.models.paged_cache import allocate_pages  # models need Flax, searches alone do not

        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        self.page_size, self.prefill_chunk = page_size, prefill_chunk
        self.model = model
        self.strategy, self.on_step = strategy, on_step
        self.implementation = (
            implementation if implementation is None or isinstance(implementation, str) else (tuple(implementation))
        )
        pool = PagePool(num_pages)
        cache = RadixCache(pool, page_size) if prefix_cache else None
        self.tree = SequenceTree(pool, page_size, cache, max_leaves, model.config.vocab_size)
        self.k_pages, self.v_pages = allocate_pages(model.config, num_pages, page_size, model.dtype)
        self.statistics: list[StepStatistics] = []
        self._last_ready = 0.0

    @property
    def model(self) -> Any:
        return self._flattened.model

    @model.setter
    def model(self, model: Any) -> None:
        self._flattened = Flattened(model)

    # ------------------------------------------------------------------ one call of the model

    def prefill(self, prompt: Any, extra_key: Hashable = None) -> tuple[int, jax.Array]:
        """Starts a request on `prompt` [n]: (its leaf, the logits after the prompt, float32 [V]).

        What a prefix cache holds of the prompt (within namespace `extra_key`) is not computed again.
        """
        leaf = self.tree.add_request(prompt, extra_key)
        try:
            logits = self.forward([leaf])[0]
        except BaseException:
            self.tree.prune([leaf])  # an aborted prefill leaves nothing behind
            raise
        self.tree.publish(leaf)
        return leaf, logits

    def forward(self, nodes: Any) -> jax.Array:
        """Computes the K/V of all tokens that have none yet, in chunks, and the logits after `nodes`: float32 [n, V].

        nodes: leaves or draft nodes, each with at least one such token.
        """
        nodes = np.atleast_1d(np.asarray(nodes, np.int64))
        waiting = self.tree.query_rows(nodes) < 0
        if waiting.any():
            raise ValueError(f"nodes[{int(np.argmax(waiting))}] has no token left to compute: nothing follows from it")
        found: list[tuple[np.ndarray, jax.Array]] = []  # which of `nodes`, and their logits
        previous: tuple | None = None
        while len(tokens := self.tree.pending_tokens()):
            begin = time.perf_counter()
            chunk = self._chunk(len(tokens))
            tree = self.tree.snapshot(max_q_len=chunk)
            rows = self.tree.query_rows(nodes, chunk)
            complete = self.tree.pending_tokens(chunk)
            plan = self.plan(tree)
            planned = time.perf_counter() - begin
            self.tree.commit(chunk)
            # A node's last query ends it where nothing of the node is pending any more.
            ends = np.flatnonzero((rows >= 0) & (self.tree.query_rows(nodes) < 0))
            logits = self._dispatch(plan, complete, rows[ends])
            found.append((ends, logits[: ends.size]))
            if previous is not None:
                self._record(*previous)
            previous = (tree, 1, planned, time.perf_counter(), logits)
        assert previous is not None
        self._record(*previous)
        order = np.argsort(np.concatenate([at for at, _ in found]), kind="stable")
        return found[0][1] if len(found) == 1 else jnp.concatenate([logits for _, logits in found])[order]

    def plan(self, tree: TokenTree, horizon: int = 0, buckets: Buckets | None = None) -> TreePlan:
        """A plan for the model's heads and this cache.

        buckets: default: a power of two of queries, and the rest by the plan's size. The whole model runs on as many
            rows as there is room for queries, so that room should not grow with the tree.
        """
        config = self.model.config
        buckets = buckets or Buckets(queries=max(FEWEST_QUERIES, 1 << max(0, tree.num_queries - 1).bit_length()))
        return plan_tree(
            tree,
            page_size=self.page_size,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=jnp.dtype(self.model.dtype).name,
            strategy=self.strategy,
            sliding_window=config.sliding_window,
            horizon=horizon,
            buckets=buckets,
        )

    # ------------------------------------------------------------------ search

    def search(
        self,
        leaves: Sequence[int],
        logits: jax.Array,
        controllers: Sequence[Any],
        top_k: int | None = None,
    ) -> list[list[Hypothesis]]:
        """Lets a controller grow each of some requests, all in the same calls of the model, until all are done.

        Args:
            leaves: a prefilled leaf of each request; they are pruned at the end.
            logits: [V] or [n, V], after those leaves.
            controllers: a `BeamSearch` or `BestOfN` each, or what else decides from log-probabilities and has
                `results`.
            top_k: show the controllers the likeliest tokens only, which saves sending the rest to the host. A
                beam search of width w over g groups finds the same with w / g * (1 + number of eos tokens).

        Raises:
            ValueError: the controllers ask for more leaves than `max_leaves`, or for tokens or leaves that there are
                not. OutOfPages: there is no page for their tokens. The tree is then as the steps before have left it
                (`tree.leaves()`), and as good as ever.
        """
        if len(leaves) != len(controllers):
            raise ValueError(f"leaves has {len(leaves)} entries and controllers {len(controllers)}")
        live = [np.array([leaf], np.int64) for leaf in leaves]
        scores = _log_probs(jnp.atleast_2d(logits), top_k=top_k)
        running = list(range(len(leaves)))
        while running:
            scores = jax.tree.map(np.asarray, scores)
            ends = np.cumsum([live[i].size for i in running])
            decisions = {
                i: controllers[i].decide(*(x[end - live[i].size : end] for x in scores))
                for i, end in zip(running, ends)
            }
            growth = self._check_decisions(live, decisions)
            wanted = sum(decision.parents.size for decision in decisions.values() if not decision.done)
            if self.tree.pool.num_free + self.tree.pool.num_evictable < wanted:  # a page for each would do in any case
                _grow(copy.deepcopy(self.tree), live, decisions, growth)  # or raises
            grown = _grow(self.tree, live, decisions, growth)
            running = list(grown)
            for i, new in grown.items():
                live[i] = new
            if running:
                scores = _log_probs(self.forward(np.concatenate(list(grown.values()))), top_k=top_k)
        return [controller.results() for controller in controllers]

    def generate(
        self,
        leaves: Any,
        logits: jax.Array,
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        eos: Any = None,
        horizon: int = 16,
        seed: int = 0,
    ) -> list[Generated]:
        """Samples a continuation of each leaf, with a plan every `horizon` steps and no host in between.

        While the device runs, the host plans ahead. Controllers that decide at every step cannot use this; those that
        decide between thoughts (`TreeOfThoughts`) or at the end (best of n) can.

        Args:
            leaves: int [L], without pending tokens. They stay, longer by what they generated; the last token of
                each is pending. No other leaf may have pending tokens.
            logits: [V] or [L, V], after those leaves.
            max_new_tokens: of each leaf, the one that ends it included.
            sampling: default: temperature 1.
            eos: token id or ids that end a sequence.
            horizon: steps between two plans; it does not change the tokens. Those steps are one program over all
                layers, which a CPU compiles for long, or on a GPU some calls of one of at most 8 steps: when all
                sequences have ended, up to two such blocks run in vain. 1: a call of the model a step.
            seed: of the random numbers. Leaf i of `leaves` gets the same ones in any company.

        Returns:
            What each leaf generated. An exception leaves whole blocks in the tree.
        """
        from tree_attention_jax.search.generation import generate

        return generate(self, leaves, logits, max_new_tokens, sampling or Sampling(), eos, horizon, seed)

    # ------------------------------------------------------------------ drafts

    def verify(self, leaf: int, parents: Any, tokens: Any) -> tuple[np.ndarray, jax.Array]:
        """Hangs a draft tree under a leaf and runs the model over it: (node handles int64 [T], logits [T + 1, V]).

        leaf: its last token must be pending: row 0 of the logits follows from it, row i + 1 from draft node i.
        parents, tokens: as for `SequenceTree.draft`. Decide with `SpeculativeVerify.verify`, then `accept`.
        """
        if self.tree.query_rows([leaf])[0] < 0:
            raise ValueError(f"leaf {leaf} has no pending token: append the target's own last token first")
        nodes = self.tree.draft(leaf, parents, tokens)
        return nodes, self.forward([leaf, *nodes])

    def accept(self, leaf: int, nodes: Any) -> None:
        """Keeps draft nodes `nodes` (a path from the leaf down, maybe empty) as tokens of the leaf; frees the rest."""
        moves = self.tree.accept([leaf, *np.asarray(nodes, np.int64).tolist()])
        if moves.src.size:
            padded = moves.pad(1 << (moves.src.size - 1).bit_length())
            self.k_pages, self.v_pages = move_slots(self.k_pages, self.v_pages, *padded)

    # ------------------------------------------------------------------ inside

    def _check_decisions(self, live: list[np.ndarray], decisions: dict[int, Decision]) -> dict[int, int]:
        """How many leaves more each controller wants; raises before any tree has changed if it cannot have them."""
        growth = {}
        for i, decision in decisions.items():
            growth[i] = -live[i].size
            if not decision.done:
                growth[i] += decision.parents.size
                check_range(f"controllers[{i}]: parents", decision.parents, 0, live[i].size, "row of its scores")
                as_tokens(f"controllers[{i}]: tokens", decision.tokens, self.tree.vocab_size)
        most, wanted = self.tree.max_leaves, self.tree.num_leaves + sum(growth.values())
        if most is not None and wanted > most:
            at = max(growth, key=growth.__getitem__)
            raise ValueError(
                f"controllers[{at}] asks for {decisions[at].parents.size} leaves: {wanted} in all, of at most {most}"
            )
        return growth

    def _chunk(self, pending: int) -> int | None:
        if pending <= self.prefill_chunk:
            return None
        longest = self.tree.snapshot().q_len
        return max(1, self.prefill_chunk // int((longest > 0).sum()))

    def _dispatch(self, plan: TreePlan, tokens: np.ndarray, rows: np.ndarray) -> jax.Array:
        """Starts a call of the model: as many tokens as the plan's bucket, a power of two of rows, for few shapes."""
        token_ids = np.zeros(plan.query_capacity, np.int32)
        token_ids[: tokens.size] = tokens
        logit_rows = np.zeros(1 << max(0, int(rows.size) - 1).bit_length(), np.int32)
        logit_rows[: rows.size] = rows
        # The model compiles one layer for all. As one program a step costs a GPU fewer launches; a CPU would compile
        # for longer than it saves.
        on_gpu = jax.default_backend() == "gpu"
        step, model = (_whole_step, self._flattened.now()) if on_gpu else (_step, self.model)
        logits, self.k_pages, self.v_pages = step(
            model, token_ids, self.k_pages, self.v_pages, plan, logit_rows, implementation=self.implementation
        )
        return logits

    def _record(self, tree: TokenTree, steps: Any, planned: float, dispatched: float, result: Any) -> None:
        """Waits for a call or block on `tree` and writes its record."""
        jax.block_until_ready(result)
        now = time.perf_counter()
        once, apart = kv_tokens(tree)
        steps, queries = int(steps), tree.num_queries
        grown = queries * steps * (steps - 1) // 2
        width = self._bytes_per_token
        record = StepStatistics(
            steps=steps,
            queries=queries * steps,
            kv_bytes_read=(once * steps + grown) * width,
            kv_bytes_saved=(apart - once) * steps * width,
            plan_seconds=planned,
            device_seconds=now - max(dispatched, self._last_ready),
        )
        self._last_ready = now
        self.statistics.append(record)
        if self.on_step is not None:
            self.on_step(record)

    @property
    def _bytes_per_token(self) -> int:
        from tree_attention_jax.models.paged_cache import kv_bytes_per_token

        return kv_bytes_per_token(self.model.config, self.model.dtype)


def _grow(
    tree: SequenceTree, live: list[np.ndarray], decisions: dict[int, Decision], growth: dict[int, int]
) -> dict[int, np.ndarray]:
    """Does what controllers have decided about their leaves: the leaves of those that go on, with tokens pending."""
    grown = {}
    for i in sorted(decisions, key=growth.__getitem__):  # who shrinks makes room for who grows
        if decisions[i].done:
            tree.prune(live[i])
        else:
            grown[i] = tree.branch(live[i], decisions[i].parents)
    grown = {i: grown[i] for i in sorted(grown)}
    if grown:
        tree.append(np.concatenate(list(grown.values())), np.concatenate([decisions[i].tokens for i in grown]))
    return grown


@partial(jax.jit, static_argnames="top_k")
def _log_probs(logits: jax.Array, *, top_k: int | None) -> tuple[jax.Array, ...]:
    """Log-probabilities [L, V]; or with `top_k` ([L, k], their tokens int32 [L, k])."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    return (log_probs,) if top_k is None else tuple(jax.lax.top_k(log_probs, min(top_k, logits.shape[-1])))


def _step(model, token_ids, k_pages, v_pages, plan, logit_rows, *, implementation):
    return model(token_ids, k_pages, v_pages, plan, logit_rows=logit_rows, implementation=implementation)


_whole_step = jax.jit(_step, static_argnames="implementation", donate_argnames=("k_pages", "v_pages"))
