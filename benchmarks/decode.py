"""Whole decoding steps of a model with random weights, planning included, for each strategy of planning.

    python -m benchmarks.decode --workload bestof64 --model llama-3-8b --json out.json
    python -m benchmarks.decode --workload A --tiny          # seconds on a CPU, to see that it works

Workloads are those of FastTree (A-D) and DeFT (fewshot, tot, draft), and bestof64: 64 samples of a 4,000-token prompt.
A strategy runs its workload twice, and the second run counts: the first one compiles. Prompts are not prefilled (their
pages hold zeros), which changes no time of decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import tree_attention_jax as ta
from benchmarks import harness
from benchmarks.suites.decoding import WORKLOADS, Forest, replay, scaled, thoughts
from tree_attention_jax.models import CONFIGS, Llama, LlamaConfig
from tree_attention_jax.search import Sampling, StepStatistics, TreeDecoder

TINY = LlamaConfig(64, 64, 96, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
PAGE_SIZE = 16


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    config = TINY if args.tiny else CONFIGS[args.model]
    model = Llama(config, dtype="float32" if args.tiny else "bfloat16", rngs=nnx.Rngs(0))
    rows: list[dict[str, Any]] = []
    for name in args.workload.split(","):
        for strategy in args.strategies.split(","):
            rows.append({"workload": name, "model": "tiny" if args.tiny else args.model, "strategy": strategy})
            rows[-1] |= _measure(*_workload(name, args), model, strategy, args)
            print(json.dumps(rows[-1]), flush=True)
            if args.json:
                report = {"environment": harness.environment(), "page_size": PAGE_SIZE, "rows": rows}
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    _summary(rows)
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join([*WORKLOADS, "tot", "draft"])
    parser.add_argument("--workload", default="bestof64", help=f"comma-separated: {names}")
    parser.add_argument("--model", default="llama-3-8b", choices=[n for n in CONFIGS if "smol" not in n])
    parser.add_argument("--tiny", action="store_true", help="a tiny model and a hundredth of the tokens")
    parser.add_argument("--strategies", default="auto,per_query", help="of plan_tree, comma-separated")
    parser.add_argument("--new-tokens", type=int, default=256, help="of each sequence")
    parser.add_argument("--horizon", type=int, default=16, help="steps on the device between two plans")
    parser.add_argument("--width", type=int, default=20, help="sequences of fewshot (DeFT: 20, 30, 50)")
    parser.add_argument("--draft", type=int, default=64, help="nodes of a draft tree (DeFT: 32 to 256)")
    parser.add_argument("--trace", default="sorting", help="of tot: sorting or docmerge")
    parser.add_argument("--implementation", help="of tree_attention")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args(argv)


def _workload(name: str, args: argparse.Namespace) -> tuple[Forest, Callable[[TreeDecoder, np.ndarray], int], int]:
    """The prompts; what to do below them, f(decoder, leaves) -> steps; and the pages that takes at most."""
    if name == "tot":
        trace = thoughts(args.trace)
        if args.tiny:
            trace = [[parent, max(1, tokens // 100), max(1, -(-start // 100))] for parent, tokens, start in trace]
        pages = sum(-(-tokens // PAGE_SIZE) + 1 for _, tokens, _ in trace)
        return Forest((1,), (trace[0][1],)), partial(_replay, trace=trace, most_steps=4 * args.new_tokens), pages
    if name == "draft":
        forest = Forest((1,), (4000,))
        rounds = max(1, args.new_tokens // 3)
        decode = partial(_drafts, nodes=max(8, args.draft // 8) if args.tiny else args.draft, rounds=rounds)
    elif name in WORKLOADS:
        forest = WORKLOADS[name]
        if name == "fewshot":
            forest = Forest((1, args.width), forest.tokens)
        decode = partial(_generate, new_tokens=args.new_tokens, horizon=args.horizon)
    else:
        raise SystemExit(f"--workload is {name!r}: known are {', '.join([*WORKLOADS, 'tot', 'draft'])}")
    forest = scaled(forest) if args.tiny else forest
    grown = args.new_tokens + 2 * args.horizon + args.draft
    return forest, decode, forest.sequences * (-(-grown // PAGE_SIZE) + 2)


def _measure(
    forest: Forest, decode: Callable, pages: int, model: Llama, strategy: str, args: argparse.Namespace
) -> dict[str, Any]:
    pages += sum(n * (-(-tokens // PAGE_SIZE) + 1) for n, tokens in zip(forest.nodes, forest.tokens))
    decoder = TreeDecoder(model, pages, PAGE_SIZE, strategy=strategy, implementation=args.implementation)
    for _ in range(2):
        leaves = forest.build(decoder.tree)
        decoder.statistics.clear()
        begin = time.perf_counter()
        steps = decode(decoder, leaves)
        jax.block_until_ready(decoder.k_pages)
        seconds = time.perf_counter() - begin
        attention = _attention_seconds(decoder, args.implementation)
        decoder.tree.prune(decoder.tree.leaves())
    total = StepStatistics.total(decoder.statistics)
    attention = _share(attention, seconds / steps)
    return {
        "sequences": forest.sequences,
        "prompt_tokens": forest.total_tokens,
        "steps": steps,
        "seconds": round(seconds, 4),
        "steps_per_s": round(steps / seconds, 2),
        "tokens_per_s": round(total.queries / seconds, 1),
        "plan_ms_per_step": round(1e3 * total.plan_seconds / steps, 4),
        "device_ms_per_step": round(1e3 * total.device_seconds / steps, 4),
        "device_idle_share": round(max(0.0, 1 - total.device_seconds / seconds), 4),
        "attention_share": attention,
        "kv_gb_read": round(total.kv_bytes_read / 1e9, 4),
        "kv_gb_saved": round(total.kv_bytes_saved / 1e9, 4),
    }


def _generate(decoder: TreeDecoder, leaves: np.ndarray, *, new_tokens: int, horizon: int) -> int:
    logits = jnp.zeros(decoder.model.config.vocab_size)
    decoder.generate(leaves, logits, new_tokens, sampling=Sampling(), horizon=horizon)
    return new_tokens - 1


def _drafts(decoder: TreeDecoder, leaves: np.ndarray, *, nodes: int, rounds: int) -> int:
    """Rounds that verify a binary tree of `nodes` and accept 1 to 3 of them."""
    parents, tokens = np.arange(nodes) // 2 - 1, np.arange(nodes) % decoder.model.config.vocab_size
    leaf = int(leaves[0])
    for i in range(rounds):
        decoder.tree.append(leaf, 1)
        drafted, _ = decoder.verify(leaf, parents, tokens)
        decoder.accept(leaf, drafted[[0, 2, 6][: 1 + i % 3]])
    return rounds


def _replay(decoder: TreeDecoder, leaves: np.ndarray, *, trace: list, most_steps: int) -> int:
    """The tree of a recorded search, step by step: ragged growth, forks and prunes."""
    steps = 0
    for active in replay(decoder.tree, int(leaves[0]), trace):
        jax.block_until_ready(decoder.forward(active))
        steps += 1
        if steps == most_steps:
            break
    return steps


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None else round(part / whole, 4)


def _attention_seconds(decoder: TreeDecoder, implementation: str | None) -> float | None:
    """Attention alone over all layers, with the tree as it is at the end, called back to back; None without queries."""
    tree = decoder.tree.snapshot()
    if not tree.num_queries:
        return None
    plan, config = decoder.plan(tree), decoder.model.config
    q = jnp.ones((plan.query_capacity, config.num_q_heads, config.head_dim), decoder.model.dtype)
    attend = partial(ta.tree_attention, implementation=implementation)
    call = harness.over_layers(lambda q, k, v, plan: attend(q, k, v, plan))
    inputs = (q, list(decoder.k_pages), list(decoder.v_pages), plan)
    return harness.wall_time(call, inputs, 1, calls=5) / 1e6


def _summary(rows: list[dict[str, Any]]) -> None:
    by_workload: dict[str, dict[str, float]] = {}
    for row in rows:
        by_workload.setdefault(row["workload"], {})[row["strategy"]] = row["tokens_per_s"]
    for name, speeds in by_workload.items():
        if "per_query" in speeds:
            for strategy, speed in speeds.items():
                print(f"{name:10s} {strategy:10s} {speed / speeds['per_query']:.2f} x per_query's tokens a second")


if __name__ == "__main__":
    sys.exit(main())
