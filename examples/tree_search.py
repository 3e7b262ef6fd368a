"""Explores a tree of continuations of one prompt with a real language model, and checks every logit.

The prompt is prefilled once. Then sampled branches and a beam search grow from it. Sequences share the K/V of
all tokens they have in common, and a step reads it once for all of them. At the end the same tokens go
through plain dense attention; the exit code is 1 if any logit differs by more than rounding explains.

    python examples/tree_search.py --prompt "Name a colour." --width 8 --steps 24
    python examples/tree_search.py --random          # a tiny random model, nothing to download
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

sys.path.insert(0, str(Path(__file__).parent))
import common
from dense_check import check_logits

from tree_attention_jax.models import Llama
from tree_attention_jax.search import StepStatistics, TreeDecoder

BEAM_WIDTH = 4
TEMPERATURE = 0.9
RANDOM_CONFIG = replace(common.RANDOM_CONFIG, num_layers=2)  # the second layer's K/V show what the first attended to


@dataclass(frozen=True, eq=False)
class Branch:
    """One sequence: the leaf that ends it, its generated tokens and the logits each was chosen from."""

    leaf: int
    tokens: tuple[int, ...] = ()
    logits: tuple[np.ndarray, ...] = ()
    log_prob: float = 0.0

    @property
    def score(self) -> float:
        """Mean log-probability a token; by the sum, the shortest sequence would win."""
        return self.log_prob / max(1, len(self.tokens))


# (branches, log-probabilities of their next tokens [branches, vocab]) -> pairs (branch, token)
Policy = Callable[[Sequence[Branch], np.ndarray], Iterable[tuple[int, int]]]


def sample(rng: np.random.Generator, branches: Sequence[Branch], log_probs: np.ndarray):
    """A policy: one token a branch, drawn at TEMPERATURE (the Gumbel trick)."""
    return enumerate((log_probs / TEMPERATURE + rng.gumbel(size=log_probs.shape)).argmax(axis=1).tolist())


def beam(branches: Sequence[Branch], log_probs: np.ndarray):
    """A policy: the BEAM_WIDTH likeliest continuations of all branches together."""
    totals = np.array([branch.log_prob for branch in branches])[:, None] + log_probs
    return [divmod(int(i), log_probs.shape[1]) for i in np.argsort(-totals, axis=None)[:BEAM_WIDTH]]


@dataclass
class Tally:
    """A search's decoding steps: how long each took for how many sequences, and what they read."""

    seconds: list[float] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    statistics: list[StepStatistics] = field(default_factory=list)


def search(
    decoder: TreeDecoder,
    leaf: int,
    first_logits: np.ndarray,
    policy: Policy,
    num_starts: int,
    steps: int,
    stop_ids: frozenset[int],
    on_step: Callable[[], None],
) -> tuple[list[Branch], Tally]:
    """Grows branches from a prefilled leaf, which is gone then, until each has stopped or has `steps` tokens; best
    first."""
    tree, tally, before = decoder.tree, Tally(), len(decoder.statistics)
    leaves, logits = [leaf], {leaf: first_logits}
    live, done = [Branch(leaf)] * num_starts, []
    for step in range(steps):
        log_probs = np.stack([log_softmax(logits[branch.leaf]) for branch in live])
        chosen = []
        for index, token in policy(live, log_probs):
            old = live[index]
            log_prob = old.log_prob + float(log_probs[index, token])
            chosen.append(Branch(old.leaf, (*old.tokens, token), (*old.logits, logits[old.leaf]), log_prob))
        done += [branch for branch in chosen if branch.tokens[-1] in stop_ids]
        live = [branch for branch in chosen if branch.tokens[-1] not in stop_ids]
        on_step()
        if not live or step == steps - 1:  # nobody asks what follows the last token
            break
        start = time.perf_counter()
        # Equal choices go on as one leaf; a leaf chosen with several tokens forks, one chosen with none is pruned.
        choices = list(dict.fromkeys((branch.leaf, branch.tokens[-1]) for branch in live))
        leaves = tree.branch(leaves, [leaves.index(above) for above, _ in choices]).tolist()
        tree.append(leaves, [token for _, token in choices])
        logits = dict(zip(leaves, np.asarray(decoder.forward(leaves)), strict=True))
        grown = dict(zip(choices, leaves, strict=True))
        live = [replace(branch, leaf=grown[branch.leaf, branch.tokens[-1]]) for branch in live]
        tally.seconds.append(time.perf_counter() - start)
        tally.sequences.append(len(live))
    tree.prune(leaves)
    tally.statistics = decoder.statistics[before:]
    return sorted(done + live, key=lambda branch: branch.score, reverse=True), tally


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def show_branches(parent: Tree, branches: Sequence[Branch], start: int, decode: Callable) -> None:
    """Adds the branches' tokens from `start` on below `parent`, each shared run of tokens once."""
    by_token: dict[int, list[Branch]] = {}
    for branch in branches:
        by_token.setdefault(branch.tokens[start], []).append(branch)
    for group in by_token.values():
        tokens = group[0].tokens
        end = start + 1
        while end < len(tokens) and all(branch.tokens[: end + 1] == tokens[: end + 1] for branch in group):
            end += 1
        label = Text(repr(decode(tokens[start:end]))[1:-1])
        if len(group) > 1:
            label.append(f"  {len(group)} sequences", style="cyan")
        ended = [branch for branch in group if len(branch.tokens) == end]
        if ended:
            label.append(f"  {ended[0].log_prob:.2f}", style="green")
        show_branches(parent.add(label), [branch for branch in group if len(branch.tokens) > end], end, decode)


def show_tallies(tallies: dict[str, Tally]) -> None:
    table = Table("search", title="K/V read while decoding, all layers")
    for column in ("steps", "tokens/s", "one tree", "separate sequences", "ratio"):
        table.add_column(column, justify="right")
    for name, tally in tallies.items():
        if not tally.seconds:
            continue
        speed = np.median(np.array(tally.sequences) / tally.seconds)  # the first steps also compile
        total = StepStatistics.total(tally.statistics)
        tree, separate = total.kv_bytes_read / 1e6, (total.kv_bytes_read + total.kv_bytes_saved) / 1e6
        cells = f"{speed:.1f}", f"{tree:.1f} MB", f"{separate:.1f} MB", f"{separate / tree:.2f}x"
        table.add_row(name, str(len(tally.seconds)), *cells)
    common.console.print(table)


def demonstrate(args: argparse.Namespace, model: Llama, tokenizer: Any) -> bool:
    """The whole demonstration. True where tree attention and dense attention agree."""
    prompt, widest = tokenizer.prompt(args.prompt), max(args.width, BEAM_WIDTH)
    decoder = common.make_decoder(args, model, len(prompt) + widest * args.steps, widest)
    searches: dict[str, tuple[Policy, int, int]] = {  # policy, branches to start with, branches to keep
        f"{args.width} samples": (partial(sample, np.random.default_rng(args.seed)), args.width, args.width),
        f"beam of {BEAM_WIDTH}": (beam, 1, BEAM_WIDTH),
    }
    found, tallies = {}, {}
    with Progress(console=common.console) as progress:
        task = progress.add_task(f"prefill of {len(prompt)} tokens", total=1)
        leaf, logits = decoder.prefill(prompt)
        leaves, first_logits = decoder.tree.fork(leaf, len(searches)).tolist(), np.asarray(logits)
        progress.advance(task)
        for leaf, (name, (policy, starts, keep)) in zip(leaves, searches.items(), strict=True):
            task = progress.add_task(name, total=args.steps)
            on_step = partial(progress.advance, task)
            branches, tallies[name] = search(
                decoder, leaf, first_logits, policy, starts, args.steps, tokenizer.stop_ids, on_step
            )
            found[name] = branches[:keep]
            progress.update(task, completed=args.steps)
        sequences = [(branch.tokens, np.stack(branch.logits)) for kept in found.values() for branch in kept]
        task = progress.add_task("dense attention", total=len(sequences))
        verdict = check_logits(model, prompt, sequences, partial(progress.advance, task))
    for name, branches in found.items():
        tree = Tree(Text(f"{name} after a prompt of {len(prompt)} tokens, prefilled once", style="bold"))
        show_branches(tree, branches, 0, tokenizer.decode)
        best = branches[0]
        common.console.print(tree, Text(f"best ({best.log_prob:.2f}, {best.score:.2f} a token):", style="green"))
        common.console.print(Text(tokenizer.decode(best.tokens).strip()), "")
    show_tallies(tallies)
    common.console.print(
        f"largest logit difference against dense attention: {verdict.difference:.2e}, "
        f"{'within' if verdict.agrees else 'ABOVE'} the tolerance of {verdict.tolerance:.2e} ({model.dtype.name})"
    )
    return verdict.agrees


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where dense attention disagrees, 2 where there is no model to run."""
    parser = common.parser(__doc__, "Tell me, in one sentence, why the sea is blue.", steps=24)
    parser.add_argument("--width", type=common.positive, default=8, help="sampled branches")
    return common.run(parser.parse_args(argv), demonstrate, RANDOM_CONFIG)


if __name__ == "__main__":
    sys.exit(main())
