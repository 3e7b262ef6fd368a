"""What the examples share: a model with its tokenizer, their options, a decoder, and how they print what they did."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flax import nnx
from rich.console import Console

from tree_attention_jax.models import Llama, LlamaConfig
from tree_attention_jax.search import StepStatistics, TreeDecoder

PAGE_SIZE = 16
RANDOM_CONFIG = LlamaConfig(128, 128, 384, num_layers=1, num_q_heads=6, num_kv_heads=2, head_dim=64)
console = Console()


class CharTokenizer:
    """ASCII codes: enough to prompt a random model and to print what it says."""

    stop_ids: frozenset[int] = frozenset()

    def prompt(self, text: str) -> list[int]:
        return [min(ord(character), 127) for character in text]

    encode = prompt

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(map(chr, token_ids))


def positive(text: str) -> int:
    """An argparse type."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def not_empty(text: str) -> str:
    """An argparse type."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def parser(doc: str | None, prompt: str, steps: int | None) -> argparse.ArgumentParser:
    """The options that all examples have."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument("--prompt", type=not_empty, default=prompt, help="what to continue or, for a chat model, answer")
    if steps is not None:
        made.add_argument("--steps", type=positive, default=steps, help="tokens a sequence")
    made.add_argument("--implementation", help="of tree_attention; default: the best that works here")
    made.add_argument("--model", type=Path, metavar="PATH.gguf", help="other weights, Llama architecture")
    made.add_argument("--random", action="store_true", help="a tiny random model, nothing to download")
    made.add_argument("--seed", type=int, default=0, help="of the sampling and of --random")
    return made


def load(args: argparse.Namespace, random_config: LlamaConfig = RANDOM_CONFIG) -> tuple[Llama, Any]:
    """(model, tokenizer)."""
    if args.random:
        return Llama(random_config, dtype="float32", rngs=nnx.Rngs(args.seed)), CharTokenizer()
    from tree_attention_jax.models.gguf_file import GGUFFile  # here: --random needs no `gguf`
    from tree_attention_jax.models.gguf_weights import load_gguf
    from tree_attention_jax.models.smollm2 import find_smollm2
    from tree_attention_jax.models.tokenizer import GGUFTokenizer

    file = GGUFFile(args.model or find_smollm2())
    return load_gguf(file), GGUFTokenizer(file)


def run(
    args: argparse.Namespace,
    demonstrate: Callable[[argparse.Namespace, Llama, Any], bool | None],
    random_config: LlamaConfig = RANDOM_CONFIG,
) -> int:
    """Loads the model and runs the example.

    Exit code: 0; 1 where the example returned False, for a result that is wrong; 2 where there is nothing to run.
    """
    try:
        with console.status("loading weights"):
            model, tokenizer = load(args, random_config)
    except (FileNotFoundError, ImportError, ValueError, NotImplementedError) as error:
        print(f"{error}\nOther ways: --model PATH.gguf for your own weights, --random for none.", file=sys.stderr)
        return 2
    return 1 if demonstrate(args, model, tokenizer) is False else 0


def make_decoder(args: argparse.Namespace, model: Llama, num_tokens: int, num_leaves: int) -> TreeDecoder:
    """A decoder with pages for `num_tokens`, and one half-filled page a leaf on top."""
    num_pages = -(-num_tokens // PAGE_SIZE) + 2 * num_leaves + 1
    return TreeDecoder(model, num_pages, PAGE_SIZE, implementation=args.implementation)


def show_sequences(title: str, tokenizer: Any, sequences: Iterable[tuple[Sequence[int], str]]) -> None:
    """Texts with a note each."""
    console.print(title, style="bold")
    for tokens, note in sequences:
        ends = len(tokens) > 0 and int(tokens[-1]) in tokenizer.stop_ids
        text = tokenizer.decode(int(token) for token in tokens[: len(tokens) - ends])
        console.print(f"  {note}  ", style="green", end="")
        console.print(repr(text)[1:-1], markup=False, highlight=False)


def show_statistics(steps: Sequence[StepStatistics]) -> None:
    """One line on what decoding read, and what sharing saved."""
    total = StepStatistics.total(list(steps))
    apart = total.kv_bytes_read + total.kv_bytes_saved
    console.print(
        f"{total.steps} steps, {total.queries} tokens; K/V read {total.kv_bytes_read / 1e6:.1f} MB, "
        f"{apart / 1e6:.1f} MB as separate sequences ({apart / max(total.kv_bytes_read, 1):.1f}x); "
        f"planning {1e3 * total.plan_seconds:.0f} ms, device {1e3 * total.device_seconds:.0f} ms"
    )
