"""Best of n: sample n answers to one prompt in blocks that run on the device, keep the likeliest one.

python examples/best_of_n.py -n 16 --steps 32 --horizon 16
python examples/best_of_n.py --random             # a tiny random model, nothing to download
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
from tree_attention_jax.search import Sampling


def demonstrate(args: argparse.Namespace, model: Llama, tokenizer: Any) -> None:
    prompt = tokenizer.prompt(args.prompt)
    tokens = len(prompt) + args.n * (args.steps + 2 * args.horizon)
    decoder = common.make_decoder(args, model, tokens, args.n)
    leaf, logits = decoder.prefill(prompt)
    prefills = len(decoder.statistics)
    answers = decoder.generate(
        decoder.tree.fork(leaf, args.n),
        logits,
        args.steps,
        sampling=Sampling(args.temperature, args.top_p),
        eos=sorted(tokenizer.stop_ids),
        horizon=args.horizon,
        seed=args.seed,
    )
    answers.sort(key=lambda answer: -answer.log_probs.mean())
    notes = [(answer.tokens, f"{answer.log_probs.mean():8.3f}") for answer in answers]
    title = f"{args.n} samples after {len(prompt)} tokens, best first (mean log-probability a token)"
    common.show_sequences(title, tokenizer, notes)
    common.show_statistics(decoder.statistics[prefills:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__, "Tell me, in one sentence, why the sea is blue.", steps=32)
    parser.add_argument("-n", type=common.positive, default=8, help="answers")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--horizon", type=common.positive, default=16, help="steps on the device between two plans")
    return common.run(parser.parse_args(argv), demonstrate)


if __name__ == "__main__":
    sys.exit(main())
