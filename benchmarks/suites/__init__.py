"""Trees and head settings to measure, by suite name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.suites.searches import random_search, standing
from tree_attention_jax import TokenTree

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Cell:
    """One tree under one head setting.

    Its name says the tree: ``"1,4_256,32"`` is nodes a level, then tokens a node; ``"16x2048+draft64"`` is 16 requests
    with a prompt of 2,048 tokens and a draft of 64 nodes each; ``"4xprefill2048"`` is 4 prompts of 2,048 new tokens,
    and ``"8xprefill512+3584"`` 8 chunks of 512 that follow 3,584 cached ones; ``"search600x30"`` is a random search
    tree of 600 nodes of 30 tokens on average; ``"sorting@800"`` is a recorded one at that decode step.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int = 128
    page_size: int = 16

    @property
    def heads(self) -> tuple[int, int]:
        return self.num_q_heads, self.num_kv_heads

    @property
    def label(self) -> str:
        """Name and heads, and what is not as usual."""
        width = "" if self.head_dim == 128 else f" d{self.head_dim}"
        pages = "" if self.page_size == 16 else f" p{self.page_size}"
        return f"{self.name} {self.num_q_heads}/{self.num_kv_heads}{width}{pages}"

    def tree(self) -> TokenTree:
        if "+draft" in self.name:
            requests, rest = self.name.split("x")
            prompt, nodes = rest.split("+draft")
            return TokenTree.from_paths(
                draft_paths(int(nodes)), [int(prompt)] * int(requests), page_size=self.page_size
            )
        if "prefill" in self.name:
            requests, lengths = self.name.split("prefill")
            new, *cached = map(int, lengths.split("+"))
            count = int(requests.removesuffix("x") or 1)
            return TokenTree([-1] * count, [new + sum(cached)] * count, [new] * count)
        if "@" in self.name:
            trace, step = self.name.split("@")
            return standing(trace, int(step))
        if self.name.startswith("search"):
            return random_search(*map(int, self.name.removeprefix("search").split("x")))
        levels, tokens = self.name.split("_")
        return TokenTree.from_levels([int(x) for x in levels.split(",")], [int(x) for x in tokens.split(",")])


def cells(suite: str) -> Iterator[Cell]:
    """The cells of a suite of ``trees.json``.

    ``fasttree``: the 15 trees x 3 head settings of FastTree's kernel benchmark. ``pat``: PAT's 20 x 4. ``decode``: the
    forests of ``decoding.py`` after some steps. ``verify``: draft trees below prompts. ``prefill``: prompts, and
    chunks of them. ``long``: nothing shared.
    ``shared``: a node shared by 1,024 queries. ``heads``: head dims and page sizes. ``odd``: trees without
    powers of two, as searches leave them.
    """
    suites = _suites()
    if suite not in suites:
        raise ValueError(f"suite is {suite!r}: known are {', '.join(suites)}")
    data = suites[suite]
    for tree in data["trees"]:
        for heads in data["heads"]:
            for head_dim in data.get("head_dims", [128]):
                for page_size in data.get("page_sizes", [16]):
                    yield Cell(tree, *heads, head_dim, page_size)


def suite_names() -> list[str]:
    return list(_suites())


def result_name(suite: str) -> str:
    """What the results of a suite are called: ``decode`` is also the name of whole decoding steps."""
    return "decode_kernels" if suite == "decode" else suite


def draft_paths(nodes: int) -> list[list[int]]:
    """A draft of so many nodes as choice lists, breadth first, without the root (see ``drafts.json``)."""
    drafts = json.loads((FOLDER / "drafts.json").read_text())["children"]
    if str(nodes) not in drafts:
        raise ValueError(f"draft of {nodes} nodes: known are {', '.join(drafts)}")
    paths: list[list[int]] = [[]]
    for node, children in enumerate(drafts[str(nodes)]):
        paths += [[*paths[node], choice] for choice in range(children)]
    return paths[1:]


@cache
def _suites() -> dict[str, Any]:
    found = json.loads((FOLDER / "trees.json").read_text())
    return {name: suite for name, suite in found.items() if isinstance(suite, dict)}
