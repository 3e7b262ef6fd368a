"""FastTree (Pan et al., MLSys 2025): planner and kernels of its artifact (``kernel_bench/fasttree.py`` of a checkout).

Its benchmark launches with the tiles it was given; we launch with those that its planner settled on: otherwise one of
its own cells leaves partials unwritten.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import Inputs, Peer, Ready, Unsuitable, _checkout, _torch
from tree_attention_jax import TokenTree

FOLDERS = ("kernel_bench", ".")
KV_TILES = [32, 32]
KV_SPLITS = [1024, 128]
THRESHOLDS = ([132, 528], [132, 132])


def peers(checkout: Path) -> list[Peer]:
    return [FastTree(checkout)]


@dataclass
class Node:
    """A node as the artifact's planners read it."""

    parent: int
    id: int
    seqlen: int
    num_children: int = 0
    requests: list[int] = field(default_factory=list)


def nodes_of(tree: TokenTree) -> list[Node]:
    """The artifact's form of a tree: one root, and every leaf a request, numbered in node order.

    Raises:
        Unsuitable: what that form cannot say.
    """
    if (tree.q_len != tree.is_leaf()).any():
        raise Unsuitable("it takes one query a leaf and none elsewhere")
    if (tree.parent[1:] < 0).any():
        raise Unsuitable("it takes one root")
    nodes = [Node(int(parent), i, int(tokens)) for i, (parent, tokens) in enumerate(zip(tree.parent, tree.kv_len))]
    for node in nodes[1:]:
        nodes[node.parent].num_children += 1
    for request, leaf in enumerate(tree.query_nodes()):
        above = int(leaf)
        while above >= 0:
            nodes[above].requests.append(request)
            above = nodes[above].parent
    return nodes


def compact_slots(tree: TokenTree, page_size: int) -> np.ndarray | None:
    """Slots of all tokens in node order, or None where they are 0, 1, 2, ...: the artifact wants no holes."""
    slots = tree.token_slots(page_size)
    return None if (slots == np.arange(len(slots))).all() else slots


class FastTree:
    name = "FastTree"
    uses_torch = True

    def __init__(self, checkout: Path):
        self.checkout = checkout

    def prepare(self, inputs: Inputs) -> Ready:
        nodes, cell, data = nodes_of(inputs.tree), inputs.cell, inputs.data
        torch = _torch.load_torch()
        module = _checkout.load(self.checkout, FOLDERS, "fasttree")
        group = cell.num_q_heads // cell.num_kv_heads
        params = module.FastTreeParams()
        params.set_values(0.66, 0.33, 0.1)
        params.set_q_tile_sizes([max(1, 64 // group), max(1, 16 // group)])
        params.set_kv_tile_sizes(list(KV_TILES))
        params.set_kv_group_num(group)
        first = np.concatenate([[0], np.cumsum(inputs.tree.kv_len)]).tolist()
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its plan
            planned, _ = module.fasttree_preparation(
                nodes, first, inputs.tree.num_queries, *cell.heads, cell.head_dim, KV_SPLITS, *THRESHOLDS, params
            )
        q = _torch.share(data.q)
        slots = compact_slots(inputs.tree, cell.page_size)
        layers = [tuple(_torch.tokens(_torch.share(x), slots) for x in pair) for pair in zip(data.k, data.v)]
        out = [torch.empty_like(q) for _ in layers]

        def attend(i: int) -> Any:
            tiles = params.TSQs, params.TSKs
            module.fasttree_decode(q, *layers[i], out[i], *planned, *tiles, cell.head_dim**-0.5)
            return out[i]

        return _torch.ready(attend, inputs, f"tiles of {params.TSQs} queries")
