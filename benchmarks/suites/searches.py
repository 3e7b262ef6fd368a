"""Trees as searches leave them: no two branches alike."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np

from tree_attention_jax import TokenTree

PROMPT = 1000


def random_search(nodes: int, tokens: int) -> TokenTree:
    """Mostly the newest nodes fork, as a search goes deeper there. Lengths are geometric, the root is a prompt."""
    rng = np.random.default_rng(nodes)
    back = rng.integers(0, 8, nodes) * rng.integers(1, 20, nodes)
    parent = np.maximum(0, np.arange(nodes) - 1 - back)
    parent[0] = -1
    kv_len = rng.geometric(1 / tokens, nodes)
    kv_len[0] = PROMPT
    return TokenTree(parent, kv_len)


def standing(trace: str, step: int) -> TokenTree:
    """A recorded tree-of-thoughts run at a decode step: the leaves that still grow, and what is above them."""
    nodes = np.array(thoughts(trace))
    parent, tokens, start = nodes[:, 0], nodes[:, 1], nodes[:, 2]
    kept = (start < step) & (step <= start + tokens)
    kept[0] = False
    if not kept.any():
        raise ValueError(f"{trace} at step {step}: nothing grows then")
    for node in range(len(nodes) - 1, 0, -1):
        kept[parent[node]] |= kept[node]
    place = np.cumsum(kept) - 1
    kv_len = np.where(parent < 0, tokens, np.minimum(tokens, step - start))
    return TokenTree(np.where(parent < 0, -1, place[parent])[kept], kv_len[kept])


@cache
def _traces() -> dict[str, list[list[int]]]:
    return json.loads((Path(__file__).parent / "thoughts.json").read_text())["trees"]


def thoughts(name: str) -> list[list[int]]:
    """A recorded tree-of-thoughts run: [parent, tokens, first decode step] of each node, node 0 the prompt."""
    if name not in _traces():
        raise ValueError(f"trace is {name!r}: known are {', '.join(_traces())}")
    return _traces()[name]
