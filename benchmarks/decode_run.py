"""One workload under one strategy: the decoder it takes, what it does there, and what that cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tree_attention_jax as ta
from benchmarks import harness, traces
from benchmarks.plain_decoder import PlainDecoder
from benchmarks.suites.decoding import Workload, replay
from tree_attention_jax.models import Llama
from tree_attention_jax.search import Sampling, StepStatistics, TreeDecoder

PAGE_SIZE = 16
# Strategies on JAX's own attention: (mode of the `PlainDecoder`, implementation of `jax.nn.dot_product_attention`).
PLAIN = {"jax": ("paths", None), "jax_contiguous": ("contiguous", None), "jax_cudnn": ("contiguous", "cudnn")}
ATTENTION_LAYERS = 8  # enough to hide the launch of a call, and never in the L2 together


@dataclass(frozen=True)
class Run:
    """A workload, a strategy and the sizes that both share.

    lock: of all processes that name this file, one measures at a time, and none compiles meanwhile.
    """

    workload: Workload
    strategy: str
    new_tokens: int
    horizon: int
    implementation: str | None = None
    lock: Path | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence there will be, in whole pages; of a draft, all of its nodes."""
        ahead = 2 * self.horizon if self.workload.kind == "generate" else 8
        return -(-(self.workload.longest(self.new_tokens) + ahead) // PAGE_SIZE) * PAGE_SIZE

    @property
    def mode(self) -> str | None:
        """Of the `PlainDecoder`; None for our own."""
        if self.strategy not in PLAIN:
            return None
        return "mask" if self.workload.kind == "draft" and self.strategy == "jax" else PLAIN[self.strategy][0]

    @property
    def reads_apart(self) -> bool:
        """Whether it reads a shared token once for each query."""
        return self.strategy == "per_query" or self.mode in ("paths", "contiguous")

    def decoder(self, model: Llama) -> TreeDecoder:
        """A decoder of this strategy, with the pages that the workload needs at most."""
        if self.strategy not in PLAIN:
            options = dict(strategy=self.strategy, implementation=self.implementation)
            return TreeDecoder(model, self.num_pages, PAGE_SIZE, **options)
        if self.mode == "contiguous" and self.workload.kind != "generate":
            raise NotImplementedError(f"{self.strategy} keeps one row for each sequence: it can neither fork nor draft")
        options = dict(longest=self.longest, mode=self.mode, attention=PLAIN[self.strategy][1])
        return PlainDecoder(model, self.num_pages, PAGE_SIZE, **options)

    @property
    def num_pages(self) -> int:
        forest, trace = self.workload.forest, self.workload.trace
        if self.mode == "contiguous":
            return forest.sequences * self.longest // PAGE_SIZE
        if trace:
            return sum(-(-tokens // PAGE_SIZE) + 1 for _, tokens, _ in trace)
        prompts = sum(n * (-(-tokens // PAGE_SIZE) + 1) for n, tokens in zip(forest.nodes, forest.tokens))
        ends = self.longest - sum(forest.tokens)
        return prompts + forest.sequences * (-(-ends // PAGE_SIZE) + 1)

    def prompts(self, decoder: TreeDecoder) -> np.ndarray:
        """Adds the prompts, as if prefilled: their leaves."""
        forest = self.workload.forest
        if self.mode == "contiguous":
            return forest.apart().build(decoder.tree, reserve=self.longest - sum(forest.tokens))
        return forest.build(decoder.tree)

    def decode(self, decoder: TreeDecoder, leaves: np.ndarray, new_tokens: int) -> int:
        """Runs the workload, or its beginning, below the prompts; returns the number of steps. Waits for the device."""
        if self.workload.trace:
            steps = _replay(decoder, int(leaves[0]), self.workload.trace, 4 * new_tokens)
        elif self.workload.draft_nodes:
            steps = _drafts(decoder, int(leaves[0]), self.workload.draft_nodes, max(1, new_tokens // 3))
        else:
            logits = jnp.zeros(decoder.model.config.vocab_size)
            decoder.generate(leaves, logits, new_tokens, sampling=Sampling(), horizon=self.horizon)
            steps = new_tokens - 1
        jax.block_until_ready(decoder.k_pages)
        return steps

    def measure(self, model: Llama) -> dict[str, Any]:
        """Everything a row says of it."""
        decoder = self.decoder(model)
        trees = _remember_trees(decoder)
        with harness.locked(self.lock, alone=False):
            _, first_seconds = self.timed(decoder, self.tokens_at_first)
        trees.clear()
        with harness.locked(self.lock):
            steps, seconds = self.timed(decoder, self.new_tokens)
            total, middle = StepStatistics.total(decoder.statistics), trees[len(trees) // 2]
            ours = jax.default_backend() == "gpu" and self.mode is None
            idle = _unless_it_fails("idle time", lambda: self.idle_share(decoder)) if ours else None
        attention = _unless_it_fails("attention", lambda: self.attention_seconds(decoder, middle))
        read, saved = total.kv_bytes_read, total.kv_bytes_saved
        if self.reads_apart:
            read, saved = read + saved, 0
        return {
            "sequences": self.workload.forest.sequences,
            "prompt_tokens": self.workload.forest.total_tokens,
            "steps": steps,
            "seconds": round(seconds, 4),
            "first_seconds": round(first_seconds, 1),  # compilation included
            "steps_per_s": round(steps / seconds, 2),
            "tokens_per_s": round(total.queries / seconds, 1),
            "plan_ms_per_step": round(1e3 * total.plan_seconds / steps, 4),
            "plan_share": round(total.plan_seconds / seconds, 4),
            "device_ms_per_step": round(1e3 * total.device_seconds / steps, 4),
            "nothing_queued_share": round(max(0.0, 1 - total.device_seconds / seconds), 4),
            "device_idle_share": round(idle, 4) if idle is not None else None,
            "attention_ms_per_step": round(1e3 * attention, 4) if attention else None,
            "attention_at": "middle",
            "attention_share": round(attention * steps / seconds, 4) if attention else None,
            "kv_gb_read": round(read / 1e9, 4),
            "kv_gb_saved": round(saved / 1e9, 4),
        }

    @property
    def tokens_at_first(self) -> int:
        """Of the run that compiles. JAX's own attention always has the longest shapes: it meets all in a few blocks."""
        if self.mode in ("paths", "contiguous") and self.workload.kind == "generate":
            return min(self.new_tokens, 2 * self.horizon + (self.new_tokens - 1) % self.horizon + 1)
        return self.new_tokens

    def timed(self, decoder: TreeDecoder, new_tokens: int) -> tuple[int, float]:
        """Steps of a run of so many new tokens, and its seconds. Leaves no sequence behind."""
        leaves = self.prompts(decoder)
        decoder.statistics.clear()
        begin = time.perf_counter()
        steps = self.decode(decoder, leaves, new_tokens)
        seconds = time.perf_counter() - begin
        decoder.tree.prune(decoder.tree.leaves())
        return steps, seconds

    def idle_share(self, decoder: TreeDecoder) -> float:
        """Share of a step's time in which no kernel runs, over the first blocks of a run.

        Those blocks run twice: their time is taken without a profiler, and their kernels' time by it. Under a profiler
        XLA runs no CUDA graphs, so the gaps between kernels are longer than a run's.
        """
        few = min(self.new_tokens, 4 * self.horizon + 1)
        _, seconds = self.timed(decoder, few)
        return max(0.0, 1 - traces.record(lambda: self.timed(decoder, few)).busy_us() / 1e6 / seconds)

    def attention_seconds(self, decoder: TreeDecoder, tree: ta.TokenTree) -> float:
        """Attention alone over all layers of a step on ``tree``, called back to back."""
        plan, config = decoder.plan(tree), decoder.model.config
        q = jnp.ones((plan.query_capacity, config.num_q_heads, config.head_dim), decoder.model.dtype)
        if isinstance(decoder, PlainDecoder):
            own = decoder.model.implementation

            def attend(q: Any, k: Any, v: Any, plan: Any) -> jax.Array:
                return plan.attend(q, k, v, own)
        else:
            attend = partial(ta.tree_attention, implementation=self.implementation)
        layers = min(config.num_layers, ATTENTION_LAYERS)
        inputs = (q, list(decoder.k_pages[:layers]), list(decoder.v_pages[:layers]), plan)
        with harness.locked(self.lock, alone=False):
            run = harness.feeding_back(harness.fed_back(attend, *inputs).compile(), *inputs)
        in_call = layers * harness.turns(layers)
        with harness.locked(self.lock):
            us = harness.wall_time_of(run, jax.block_until_ready, in_call, calls=8)
        return us / 1e6 * config.num_layers


def _unless_it_fails(name: str, measure: Callable[[], float]) -> float | None:
    """What is measured besides, and must not cost the row: None, and a word on stderr, where it fails."""
    try:
        return measure()
    except RuntimeError as error:
        print(f"{name} not measured: {error}", file=sys.stderr)
        return None


def _drafts(decoder: TreeDecoder, leaf: int, nodes: int, rounds: int) -> int:
    """Rounds that verify a binary tree of `nodes` and accept 1 to 3 of them."""
    parents, tokens = np.arange(nodes) // 2 - 1, np.arange(nodes) % decoder.model.config.vocab_size
    for i in range(rounds):
        decoder.tree.append(leaf, 1)
        drafted, _ = decoder.verify(leaf, parents, tokens)
        decoder.accept(leaf, drafted[[0, 2, 6][: 1 + i % 3]])
    return rounds


def _replay(decoder: TreeDecoder, leaf: int, trace: Any, most_steps: int) -> int:
    """The tree of a recorded search, step by step: ragged growth, forks and prunes."""
    steps = 0
    for active in replay(decoder.tree, leaf, trace):
        jax.block_until_ready(decoder.forward(active))
        steps += 1
        if steps == most_steps:
            break
    return steps


def _remember_trees(decoder: TreeDecoder) -> list[Any]:
    """A list that gets every tree the decoder plans."""
    trees, plan = [], decoder.plan

    def remembering(tree, *args, **options):
        trees.append(tree)
        return plan(tree, *args, **options)

    decoder.plan = remembering  # type: ignore[method-assign]
    return trees
