"""Speculative decoding by prompt lookup, wholly on the device: no second model, the same greedy tokens, fewer steps.

Worth it where the answer repeats the prompt: editing, summarising, answering from a text.

    python examples/speculative.py --draft 6 --steps 48
    python examples/speculative.py --random           # a tiny random model, nothing to download
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

from tree_attention_jax.models import Llama
from tree_attention_jax.search.loops import speculative_decode

PROMPT = "Repeat this sentence three times, word for word: The quick brown fox jumps over the lazy dog near the river."


def demonstrate(args: argparse.Namespace, model: Llama, tokenizer: Any) -> None:
    prompt, eos = tokenizer.prompt(args.prompt), sorted(tokenizer.stop_ids)
    decoder = common.make_decoder(args, model, len(prompt) + args.steps + 2 * (args.draft + 1), num_leaves=1)
    leaf, logits = decoder.prefill(prompt)
    begin = time.perf_counter()
    found = speculative_decode(
        decoder, leaf, logits, args.steps, draft_length=args.draft, max_ngram=args.ngram, eos=eos
    )
    seconds = time.perf_counter() - begin
    common.show_sequences(f"after {len(prompt)} tokens", tokenizer, [(found.tokens, "greedy")])
    common.console.print(
        f"{len(found.tokens)} tokens in {found.rounds} calls of the model, "
        f"{(len(found.tokens) - 1) / max(1, found.rounds):.2f} a call; {seconds:.1f} s, compilation included"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__, PROMPT, steps=48)
    parser.add_argument("--draft", type=common.positive, default=6, help="tokens a round drafts")
    parser.add_argument("--ngram", type=common.positive, default=3, help="how many last tokens to look up at most")
    return common.run(parser.parse_args(argv), demonstrate)


if __name__ == "__main__":
    sys.exit(main())
