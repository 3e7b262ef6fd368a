"""Monte Carlo tree search over tokens with DeepMind's mctx: text that avoids a letter, planned ahead.

The whole decoding, all searches in it, is one program on the device. A word without the letter often begins like one
with it: greedy decoding under a ban paints itself into a corner, a search looks a few tokens ahead.

    python examples/mcts_mctx.py --letter e --steps 8 --simulations 16
    python examples/mcts_mctx.py --random             # a tiny random model, nothing to download
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common
import jax
import jax.numpy as jnp
import numpy as np

from tree_attention_jax.models import Llama
from tree_attention_jax.search import Sampling
from tree_attention_jax.search.loops import mcts_decode


def evaluate(counts: jax.Array, tokens: jax.Array, lengths: jax.Array, log_probs: jax.Array) -> jax.Array:
    """Minus the letters a token so far, and a little for a model that knows how to go on."""
    seen = jnp.arange(tokens.shape[1]) < lengths[:, None]
    letters = jnp.where(seen, counts[tokens], 0.0).sum(axis=1) / jnp.maximum(lengths, 1)
    return 0.05 * log_probs.max(axis=-1) - letters


def demonstrate(args: argparse.Namespace, model: Llama, tokenizer: Any) -> None:
    vocab = model.config.vocab_size
    counts = np.array([tokenizer.decode([token]).lower().count(args.letter) for token in range(vocab)], np.float32)
    prompt, eos = tokenizer.prompt(args.prompt), sorted(tokenizer.stop_ids)
    decoder = common.make_decoder(args, model, len(prompt) + 3 * args.steps + args.simulations, num_leaves=3)
    leaf, logits = decoder.prefill(prompt)
    [found] = mcts_decode(
        decoder,
        [leaf],
        logits,
        partial(evaluate, jnp.asarray(counts)),
        steps=args.steps,
        num_simulations=args.simulations,
        num_actions=args.actions,
        max_depth=args.depth,
        eos=eos,
        policy=args.policy,
        seed=args.seed,
    )
    [greedy] = decoder.generate([leaf], logits, args.steps, sampling=Sampling(temperature=0.0), eos=eos, horizon=1)
    notes = [
        (x.tokens, f"{name}, {counts[x.tokens].sum():.0f} x {args.letter!r}")
        for name, x in (("greedy", greedy), ("search", found))
    ]
    common.show_sequences(f"without the letter {args.letter!r}, after {len(prompt)} tokens", tokenizer, notes)
    common.console.print(
        f"{args.steps} searches of {args.simulations} simulations, {args.actions} actions; "
        f"values of their roots {np.round(found.values, 2).tolist()}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__, "Describe the ocean in one sentence.", steps=6)
    parser.add_argument("--letter", default="e", help="what the text should not contain")
    parser.add_argument("--simulations", type=common.positive, default=8, help="of each search")
    parser.add_argument("--actions", type=common.positive, default=8, help="likeliest tokens to choose from")
    parser.add_argument("--depth", type=common.positive, default=4, help="tokens to look ahead")
    parser.add_argument("--policy", choices=["gumbel", "muzero"], default="gumbel")
    return common.run(parser.parse_args(argv), demonstrate)


if __name__ == "__main__":
    sys.exit(main())
