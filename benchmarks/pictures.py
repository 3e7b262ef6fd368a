"""The pictures in ``docs/pictures/``: one forest, tiled three ways.

    python -m benchmarks.pictures

A prompt with three branches: short drafts under the first, and a chunk of prefill; many short answers under the second;
a deeper search under the third.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import tree_attention_jax as ta

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
STRATEGIES = ("per_node", "flatten", "auto")


def forest() -> ta.TokenTree:
    parent, kv_len, q_len = [-1], [256], [0]

    def add(under: int, tokens: int, queries: int = 1) -> int:
        parent.append(under)
        kv_len.append(tokens)
        q_len.append(queries)
        return len(parent) - 1

    drafts = add(0, 96, 0)
    for tokens in (24, 8, 16):
        middle = add(drafts, tokens, 0)
        for leaf in (8, 16):
            add(middle, leaf)
    add(drafts, 64, 8)
    answers = add(0, 48, 0)
    for tokens in (24, 16, 40, 8, 32, 16, 24, 8):
        add(answers, tokens)
    search = add(0, 112, 0)
    for width, tokens in ((3, 32), (2, 64)):
        branch = add(search, tokens, 0)
        for leaf in range(width):
            twig = add(branch, 16, 0)
            add(twig, 16 + 8 * leaf)
            add(twig, 24)
    return ta.TokenTree(parent, kv_len, q_len)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    tree = forest()
    for strategy in STRATEGIES:
        plan = ta.plan_tree(tree, num_q_heads=32, num_kv_heads=32, strategy=strategy, gpu="NVIDIA H200")
        plan.check(tree)
        plan.draw(args.folder / f"{strategy}.png")
        print(args.folder / f"{strategy}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
