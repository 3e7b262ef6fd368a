"""Tree of thoughts: sort digits one thought at a time, with a program as the judge.

A thought is the next few tokens. Each round, the best `--keep` partial answers fork into `--branch` sampled
continuations; the judge counts how many digits of an answer are right so far. All answers share the K/V of the
prompt and of the thoughts they have in common.

    python examples/tree_of_thoughts.py --keep 2 --branch 4
    python examples/tree_of_thoughts.py --random      # a tiny random model, nothing to download
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

from tree_attention_jax.models import Llama
from tree_attention_jax.search import Sampling, TreeOfThoughts

EXAMPLES = """Input: 4 1 3
Sorted: 1 3 4
Input: 9 2 7 5
Sorted: 2 5 7 9
Input: 6 0 8 5 1
Sorted: 0 1 5 6 8
"""


def judge(digits: str, text: str) -> float:
    """Digits of an answer that are right before the first wrong one, minus those after; one less if it ends early."""
    wanted = sorted(digits.replace(" ", ""))
    got = [character for character in text.split("\n")[0] if character.isdigit()]
    right = 0
    while right < min(len(got), len(wanted)) and got[right] == wanted[right]:
        right += 1
    ended_early = "\n" in text and right < len(wanted)
    return right - (len(got) - right) - ended_early


def demonstrate(args: argparse.Namespace, model: Llama, tokenizer: Any) -> None:
    digits = args.prompt
    prompt = tokenizer.encode(f"{EXAMPLES}Input: {digits}\nSorted:")
    width = args.keep * args.branch
    depth = len(digits.replace(" ", ""))
    room = len(prompt) + depth * width * (args.thought_tokens + 2 * args.horizon)
    decoder = common.make_decoder(args, model, room, depth * width)
    root, logits = decoder.prefill(prompt)
    prefills = len(decoder.statistics)

    def evaluate(leaves: Sequence[int]) -> list[float]:
        return [judge(digits, tokenizer.decode(decoder.tree.tokens(leaf)[len(prompt) :])) for leaf in leaves]

    controller = TreeOfThoughts(args.keep, args.branch, depth, evaluate, good_enough=depth)
    leaves = [root]
    logits = logits[None]
    while not (decision := controller.decide(leaves)).done:
        leaves = decoder.tree.branch(leaves, decision.parents).tolist()
        sampling = Sampling(args.temperature)
        seed = args.seed + len(decoder.statistics)
        thoughts = logits[decision.parents]
        decoder.generate(leaves, thoughts, args.thought_tokens, sampling=sampling, horizon=args.horizon, seed=seed)
        logits = decoder.forward(leaves)
    best = [leaves[i] for i in decision.parents]
    notes = [
        (decoder.tree.tokens(leaf)[len(prompt) :], f"{value:4.0f}") for leaf, value in zip(best, controller.values)
    ]
    common.show_sequences(f"{digits!r} sorted, best first; {depth} is perfect", tokenizer, notes)
    common.show_statistics(decoder.statistics[prefills:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__, "7 3 9 1 4", steps=None)
    parser.add_argument("--keep", type=common.positive, default=2, help="answers that survive a round")
    parser.add_argument("--branch", type=common.positive, default=4, help="continuations of each")
    parser.add_argument("--thought-tokens", type=common.positive, default=2, help="tokens a thought")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--horizon", type=common.positive, default=1, help="steps on the device between two plans")
    args = parser.parse_args(argv)
    if not args.prompt.replace(" ", "").isdigit():
        parser.error(f"--prompt must be digits to sort, got {args.prompt!r}")
    return common.run(args, demonstrate)


if __name__ == "__main__":
    sys.exit(main())
