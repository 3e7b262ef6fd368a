"""Beam search, by the host or wholly on the device, over one prompt that is prefilled once.

python examples/beam_search.py --width 4 --steps 24
python examples/beam_search.py --on-device        # re-parenting is device data: one program, no host in it
python examples/beam_search.py --random           # a tiny random model, nothing to download
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
from tree_attention_jax.search import BeamSearch
from tree_attention_jax.search.loops import beam_search


def demonstrate(args: argparse.Namespace, model: Llama, tokenizer: Any) -> None:
    prompt, eos = tokenizer.prompt(args.prompt), sorted(tokenizer.stop_ids)
    decoder = common.make_decoder(args, model, len(prompt) + args.width * args.steps, 2 * args.width)
    leaf, logits = decoder.prefill(prompt)
    prefills = len(decoder.statistics)
    if args.on_device:
        options = dict(eos=eos, length_penalty=args.length_penalty)
        found = beam_search(decoder, leaf, logits, args.width, args.steps, **options)
    else:
        controller = BeamSearch(args.width, args.steps, eos, args.length_penalty)
        # Of each leaf, no more than this many tokens can matter.
        [found] = decoder.search([leaf], logits, [controller], top_k=args.width * (1 + len(eos)))
    notes = [(h.tokens, f"{h.score:8.3f}") for h in found]
    common.show_sequences(f"beams of width {args.width} after {len(prompt)} tokens, best first", tokenizer, notes)
    if not args.on_device:
        common.show_statistics(decoder.statistics[prefills:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__, "Tell me, in one sentence, why the sea is blue.", steps=24)
    parser.add_argument("--width", type=common.positive, default=4, help="beams")
    parser.add_argument("--on-device", action="store_true", help="the whole search as one program")
    parser.add_argument("--length-penalty", type=float, default=0.6, help="above 0 favours long sequences")
    return common.run(parser.parse_args(argv), demonstrate)


if __name__ == "__main__":
    sys.exit(main())
