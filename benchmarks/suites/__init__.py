"""Trees and head settings to measure, by suite name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tree_attention_jax import TokenTree


@dataclass(frozen=True)
class Cell:
    """One tree under one head setting."""

    name: str
    num_q_heads: int
    num_kv_heads: int

    @property
    def label(self) -> str:
        return f"{self.name} {self.num_q_heads}/{self.num_kv_heads}"

    def tree(self) -> TokenTree:
        """``"1,4_256,32"``: nodes a level, then tokens a node."""
        nodes, tokens = self.name.split("_")
        return TokenTree.from_levels([int(x) for x in nodes.split(",")], [int(x) for x in tokens.split(",")])


def cells(suite: str) -> Iterator[Cell]:
    """``fasttree``: the 15 trees x 3 head settings of FastTree's kernel benchmark; ``pat``: PAT's 20 x 4."""
    data = json.loads((Path(__file__).parent / "trees.json").read_text())
    if suite not in data:
        raise ValueError(f"suite is {suite!r}: known are {', '.join(k for k in data if isinstance(data[k], dict))}")
    for tree in data[suite]["trees"]:
        for heads in data[suite]["heads"]:
            yield Cell(tree, *heads)
