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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

import tree_attention_jax as ta
from tree_attention_jax.models import Llama, LlamaConfig, allocate_pages, dense_forward, kv_bytes_per_token
from tree_attention_jax.models.smollm2 import find_smollm2

PAGE_SIZE = 16
BEAM_WIDTH = 4
TEMPERATURE = 0.9
DEFAULT_PROMPT = "Tell me, in one sentence, why the sea is blue."
RANDOM_CONFIG = LlamaConfig(128, 128, 384, num_layers=2, num_q_heads=6, num_kv_heads=2, head_dim=64)
# The largest logit difference that rounding explains, where logits reach 40. Two right ways to compute SmolLM2 differ
# by 1e-4 in float32, and by 1 in bfloat16, whose residual stream keeps 8 bits through 30 layers.
TOLERANCE = {"float32": 2e-3, "bfloat16": 3.0}


@dataclass(eq=False)
class Node:
    """A run of tokens whose K/V is cached once, from slot `first_slot` of its first page on."""

    parent: Node | None
    tokens: list[int]
    pages: list[int]
    first_slot: int = 0

    @property
    def end_slot(self) -> int:
        """The first free slot of the last page; 0 where there is none."""
        return (self.first_slot + len(self.tokens)) % PAGE_SIZE


class KVTree:
    """Which tokens are cached where. Forking copies nothing: a branch's history is a chain of nodes."""

    def __init__(self, prompt: Sequence[int], num_pages: int):
        self.num_pages = num_pages
        self.root = Node(None, list(prompt), list(range(-(-len(prompt) // PAGE_SIZE))))
        self.nodes = [self.root]  # parents before children

    def extend(self, choices: Sequence[tuple[Node, int]]) -> list[Node]:
        """Appends each chosen token to its node and returns, one a choice, the node that then ends with it.

        Equal choices share a node; a node chosen with several tokens forks; nodes that lead to no choice are
        dropped and their pages free again.
        """
        distinct = list(dict.fromkeys(choices))
        fan_out = Counter(node for node, _ in distinct)
        self.keep(fan_out)
        grown = {}
        for node, token in distinct:
            # The prompt's node always forks: the next search starts from it.
            leaf = self._fork(node) if fan_out[node] > 1 or node is self.root else node
            if leaf.end_slot == 0:
                leaf.pages.append(self._free_page())
            leaf.tokens.append(token)
            grown[node, token] = leaf
        return [grown[choice] for choice in choices]

    def keep(self, leaves: Iterable[Node]) -> None:
        """Drops every node but the root, `leaves` and their ancestors."""
        kept = {self.root}
        for leaf in leaves:
            node: Node | None = leaf
            while node is not None and node not in kept:
                kept.add(node)
                node = node.parent
        self.nodes = [node for node in self.nodes if node in kept]

    def leaves(self) -> list[Node]:
        inner = {node.parent for node in self.nodes}
        return [node for node in self.nodes if node not in inner]

    def snapshot(self, q_len: Sequence[int] | None = None) -> ta.TokenTree:
        """The tree as attention takes it; `q_len` None makes each leaf's last token a query."""
        index: dict[Node | None, int] = {None: -1} | {node: i for i, node in enumerate(self.nodes)}
        return ta.TokenTree(
            parent=[index[node.parent] for node in self.nodes],
            kv_len=[len(node.tokens) for node in self.nodes],
            q_len=q_len,
            page_indptr=np.cumsum([0] + [len(node.pages) for node in self.nodes]),
            page_indices=np.concatenate([node.pages for node in self.nodes]),
            first_slot=[node.first_slot for node in self.nodes],
        )

    def _fork(self, parent: Node) -> Node:
        """An empty child. The first goes on in its parent's last page, so that a chain fills its pages."""
        tail = parent.end_slot
        tail_is_free = tail > 0 and not any(n.parent is parent and n.first_slot == tail for n in self.nodes)
        child = Node(parent, [], [parent.pages[-1]], tail) if tail_is_free else Node(parent, [], [])
        self.nodes.append(child)
        return child

    def _free_page(self) -> int:
        return min(set(range(self.num_pages)) - {page for node in self.nodes for page in node.pages})


class Decoder:
    """A model, the tree it decodes, and its pages, which every step updates in place."""

    def __init__(self, model: Llama, prompt: Sequence[int], width: int, steps: int, implementation: str | None):
        # The worst case: a page for every generated token.
        num_pages = -(-len(prompt) // PAGE_SIZE) + width * steps
        self.model = model
        self.tree = KVTree(prompt, num_pages)
        self.k_pages, self.v_pages = allocate_pages(model.config, num_pages, PAGE_SIZE, model.dtype)

        def step(model, k_pages, v_pages, token_ids, plan, rows):
            return model(token_ids, k_pages, v_pages, plan, logit_rows=rows, implementation=implementation)

        # The model compiles one layer for all. As one program a step costs a GPU fewer launches; a CPU has nothing
        # to gain from it and would compile for longer than it searches.
        on_gpu = jax.default_backend() == "gpu"
        self._step = jax.jit(step, donate_argnames=("k_pages", "v_pages")) if on_gpu else step

    def prefill(self) -> np.ndarray:
        """Computes the prompt's K/V. Returns the logits after its last token, [vocab]."""
        prompt = self.tree.root.tokens
        return self._run(self.tree.snapshot([len(prompt)]), prompt, np.array([len(prompt) - 1]))[0]

    def decode(self) -> dict[Node, np.ndarray]:
        """Computes the K/V of every leaf's last token. Returns the logits after it, [vocab] a leaf."""
        leaves = self.tree.leaves()
        logits = self._run(self.tree.snapshot(), [leaf.tokens[-1] for leaf in leaves], None)
        return dict(zip(leaves, logits, strict=False))  # rows past the last leaf are padding

    def _run(self, tree: ta.TokenTree, tokens: Sequence[int], rows: np.ndarray | None) -> np.ndarray:
        config = self.model.config
        plan = ta.plan_tree(
            tree,
            page_size=PAGE_SIZE,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.model.dtype.name,
        )
        # As many rows as the plan's query bucket, so that 5 leaves and 8 run the same program.
        token_ids = np.zeros(plan.query_capacity, np.int32)
        token_ids[: len(tokens)] = tokens
        logits, self.k_pages, self.v_pages = self._step(self.model, self.k_pages, self.v_pages, token_ids, plan, rows)
        return np.asarray(logits)


@dataclass(frozen=True, eq=False)
class Branch:
    """One sequence: the node that ends it, its generated tokens and the logits each was chosen from."""

    node: Node
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
    """A search's decoding steps: their time, and the tokens of K/V they read, as a tree and if kept apart."""

    seconds: list[float] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    tree_tokens: int = 0
    separate_tokens: int = 0


def search(
    decoder: Decoder,
    first_logits: np.ndarray,
    policy: Policy,
    num_starts: int,
    steps: int,
    stop_ids: frozenset[int],
    on_step: Callable[[], None],
) -> tuple[list[Branch], Tally]:
    """Grows branches from the prompt until each has stopped or has `steps` tokens; best first."""
    tree, tally = decoder.tree, Tally()
    live, done, logits = [Branch(tree.root)] * num_starts, [], {tree.root: first_logits}
    for step in range(steps):
        log_probs = np.stack([log_softmax(logits[branch.node]) for branch in live])
        chosen = []
        for index, token in policy(live, log_probs):
            old = live[index]
            log_prob = old.log_prob + float(log_probs[index, token])
            chosen.append(Branch(old.node, (*old.tokens, token), (*old.logits, logits[old.node]), log_prob))
        done += [branch for branch in chosen if branch.tokens[-1] in stop_ids]
        live = [branch for branch in chosen if branch.tokens[-1] not in stop_ids]
        on_step()
        if not live or step == steps - 1:  # nobody asks what follows the last token
            break
        start = time.perf_counter()
        nodes = tree.extend([(branch.node, branch.tokens[-1]) for branch in live])
        live = [replace(branch, node=node) for branch, node in zip(live, nodes, strict=True)]
        logits = decoder.decode()
        tally.seconds.append(time.perf_counter() - start)
        tally.sequences.append(len(live))
        tally.tree_tokens += sum(len(node.tokens) for node in tree.nodes)
        tally.separate_tokens += sum(len(tree.root.tokens) + len(branch.tokens) for branch in live)
    tree.keep([])
    return sorted(done + live, key=lambda branch: branch.score, reverse=True), tally


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def dense_difference(
    model: Llama, prompt: Sequence[int], branches: Sequence[Branch], on_step: Callable[[], None]
) -> float:
    """Largest difference between the logits the branches were chosen from and those of dense attention."""
    token_ids = np.zeros(len(prompt) + max(len(branch.tokens) for branch in branches), np.int32)
    differences = []
    for branch in branches:
        # One length, one program: what lies past a sequence's end is in no token's past.
        end = len(prompt) + len(branch.tokens)
        token_ids[:end] = [*prompt, *branch.tokens]
        expected = np.asarray(dense_forward(model, jnp.array(token_ids)))[len(prompt) - 1 : end - 1]
        differences.append(np.abs(np.stack(branch.logits) - expected).max())
        on_step()
    return float(np.max(differences))


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


def show_tallies(console: Console, tallies: dict[str, Tally], bytes_per_token: int) -> None:
    table = Table("search", title="K/V read while decoding, all layers")
    for column in ("steps", "tokens/s", "one tree", "separate sequences", "ratio"):
        table.add_column(column, justify="right")
    for name, tally in tallies.items():
        if not tally.seconds:
            continue
        speed = np.median(np.array(tally.sequences) / tally.seconds)  # the first steps also compile
        tree, separate = (tokens * bytes_per_token / 1e6 for tokens in (tally.tree_tokens, tally.separate_tokens))
        cells = f"{speed:.1f}", f"{tree:.1f} MB", f"{separate:.1f} MB", f"{separate / tree:.2f}x"
        table.add_row(name, str(len(tally.seconds)), *cells)
    console.print(table)


class CharTokenizer:
    """ASCII codes: enough to prompt a random model and to print what it says."""

    stop_ids: frozenset[int] = frozenset()

    def prompt(self, text: str) -> list[int]:
        return [min(ord(character), 127) for character in text]

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(map(chr, token_ids))


def load(args: argparse.Namespace) -> tuple[Llama, Any]:
    """(model, tokenizer)."""
    if args.random:
        return Llama(RANDOM_CONFIG, dtype="float32", rngs=nnx.Rngs(args.seed)), CharTokenizer()
    from tree_attention_jax.models.gguf_file import GGUFFile  # here: --random needs no `gguf`
    from tree_attention_jax.models.gguf_weights import load_gguf
    from tree_attention_jax.models.tokenizer import GGUFTokenizer

    file = GGUFFile(args.model or find_smollm2())
    return load_gguf(file), GGUFTokenizer(file)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
        return int(text)

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what to continue or, for a chat model, answer")
    parser.add_argument("--width", type=positive, default=8, help="sampled branches")
    parser.add_argument("--steps", type=positive, default=24, help="tokens a sequence")
    parser.add_argument("--implementation", help="of tree_attention; default: the best that works here")
    parser.add_argument("--model", type=Path, metavar="PATH.gguf", help="other weights, Llama architecture")
    parser.add_argument("--random", action="store_true", help="a tiny random model, nothing to download")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling and of --random")
    args = parser.parse_args(argv)
    if not args.prompt:
        parser.error("--prompt is empty")
    return args


def run(args: argparse.Namespace, model: Llama, tokenizer: Any, console: Console) -> bool:
    """The whole demonstration. True where tree attention and dense attention agree."""
    prompt = tokenizer.prompt(args.prompt)
    decoder = Decoder(model, prompt, max(args.width, BEAM_WIDTH), args.steps, args.implementation)
    searches: dict[str, tuple[Policy, int, int]] = {  # policy, branches to start with, branches to keep
        f"{args.width} samples": (partial(sample, np.random.default_rng(args.seed)), args.width, args.width),
        f"beam of {BEAM_WIDTH}": (beam, 1, BEAM_WIDTH),
    }
    found, tallies = {}, {}
    with Progress(console=console) as progress:
        task = progress.add_task(f"prefill of {len(prompt)} tokens", total=1)
        first_logits = decoder.prefill()
        progress.advance(task)
        for name, (policy, starts, keep) in searches.items():
            task = progress.add_task(name, total=args.steps)
            on_step = partial(progress.advance, task)
            branches, tallies[name] = search(
                decoder, first_logits, policy, starts, args.steps, tokenizer.stop_ids, on_step
            )
            found[name] = branches[:keep]
            progress.update(task, completed=args.steps)
        branches = [branch for kept in found.values() for branch in kept]
        task = progress.add_task("dense attention", total=len(branches))
        difference = dense_difference(model, prompt, branches, partial(progress.advance, task))
    for name, branches in found.items():
        tree = Tree(Text(f"{name} after a prompt of {len(prompt)} tokens, prefilled once", style="bold"))
        show_branches(tree, branches, 0, tokenizer.decode)
        best = branches[0]
        console.print(tree, Text(f"best ({best.log_prob:.2f}, {best.score:.2f} a token):", style="green"))
        console.print(Text(tokenizer.decode(best.tokens).strip()), "")
    show_tallies(console, tallies, kv_bytes_per_token(model.config, model.dtype))
    tolerance = TOLERANCE[model.dtype.name]
    agrees = difference <= tolerance  # False for NaN
    console.print(
        f"largest logit difference against dense attention: {difference:.2e}, "
        f"{'within' if agrees else 'ABOVE'} the tolerance of {tolerance:g}"
    )
    return agrees


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where dense attention disagrees, 2 where there is no model to run."""
    args = parse_args(argv)
    console = Console()
    try:
        with console.status("loading weights"):
            model, tokenizer = load(args)
    except (FileNotFoundError, ImportError, ValueError, NotImplementedError) as error:
        print(
            f"{error}\nOther ways: --model PATH.gguf for your own weights, --random for none.",
            file=sys.stderr,
        )
        return 2
    return 0 if run(args, model, tokenizer, console) else 1


if __name__ == "__main__":
    sys.exit(main())
