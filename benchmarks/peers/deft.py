"""DeFT-Flatten (Yao et al., ICLR 2025), from a checkout of FastTree's artifact (``kernel_bench/DeFT.py``, which knows
grouped query heads) or of DeFT itself (``DeFT/deft``).

The first casts to float16, so it gets K and V rounded to that; the second sums in the type of its output, so that is
float32. Both take the token's place in our cache.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.peers import Inputs, Peer, Ready, _checkout, _torch
from benchmarks.peers._sequences import padded, query_slots
from benchmarks.peers.fasttree import FOLDERS, nodes_of

BLOCK_TOKENS = 128
MASK_BITS = 64


def peers(checkout: Path) -> list[Peer]:
    own = any(
        (checkout / folder / "deft/layers/attention/tree_attention.py").is_file() for folder in DeftItself.FOLDERS
    )
    return [DeftItself(checkout) if own else DeftOfArtifact(checkout)]


class DeftOfArtifact:
    """64 rows a tile, as the artifact's benchmark calls it."""

    name = "DeFT"
    uses_torch = True

    def __init__(self, checkout: Path):
        self.checkout = checkout

    def prepare(self, inputs: Inputs) -> Ready:
        nodes, cell, data = nodes_of(inputs.tree), inputs.cell, inputs.data
        torch = _torch.load_torch()
        module = _checkout.load(self.checkout, FOLDERS, "DeFT")
        table, _ = padded(query_slots(inputs.tree, cell.page_size))
        module.cur_length = 0  # left over from the tree before
        planned = list(
            module.DeFT_preparation(
                nodes, SimpleNamespace(shape=table.shape), BLOCK_TOKENS, MASK_BITS, cell.num_q_heads, cell.head_dim
            )
        )
        planned[0] = _torch.index(in_our_cache(planned[0].cpu().numpy(), table))
        q, *_ = halves = [_torch.share(x).half() for x in (data.q, *data.k, *data.v)]
        ks, vs = halves[1 : data.layers + 1], halves[data.layers + 1 :]
        layers = [(_torch.tokens(k), _torch.tokens(v)) for k, v in zip(ks, vs)]
        out = [torch.empty_like(q) for _ in layers]
        group = cell.num_q_heads // cell.num_kv_heads
        tile = max(1, 64 // group)

        def attend(i: int) -> Any:
            module.DeFT_decode(q, *layers[i], out[i], *planned, tile, 32, cell.head_dim**-0.5, MASK_BITS)
            return out[i]

        return _torch.ready(
            attend, inputs, f"the re-implementation in FastTree's artifact, float16, {tile} queries a tile"
        )


def in_our_cache(entries: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Its entries, place + request * longest, as slots of our cache; -1 stays."""
    return np.where(entries >= 0, table.reshape(-1)[np.maximum(entries, 0)], -1)


class DeftItself:
    """DeFT's kernels with the blocks of its own planner; K/V is read once a query head."""

    FOLDERS = ("DeFT", ".")
    name = "DeFT"
    uses_torch = True

    def __init__(self, checkout: Path):
        self.checkout = checkout

    def prepare(self, inputs: Inputs) -> Ready:
        data = inputs.data
        torch = _torch.load_torch()
        planner = _checkout.load(self.checkout, self.FOLDERS, "deft.tree_decoding.tree_cache")
        kernels = _checkout.load(self.checkout, self.FOLDERS, "deft.layers.attention.tree_attention")
        plan = planner.TreeMetadata.from_tree_cache(as_tree_cache(inputs))
        q = _torch.share(data.q)
        layers = [tuple(_torch.tokens(_torch.share(x)) for x in pair) for pair in zip(data.k, data.v)]
        out = [torch.empty(q.shape, dtype=torch.float32, device=q.device) for _ in layers]

        def attend(i: int) -> Any:
            kernels.tree_attention_subtree_fwd(
                q,
                *layers[i],
                out[i].zero_(),
                plan.block_len,
                plan.block_q,
                plan.block_q_cnts,
                plan.block_q_offset,
                plan.block_bitmasks,
                plan.block_kv,
                plan.block_lens,
            )
            return out[i]

        return _torch.ready(attend, inputs, "DeFT's own kernels, blocks of 128 tokens, 32 queries a block")


def as_tree_cache(inputs: Inputs) -> Any:
    """A forest of one root as DeFT's planner walks it."""
    nodes = nodes_of(inputs.tree)
    slots = np.split(inputs.tree.token_slots(inputs.cell.page_size), np.cumsum(inputs.tree.kv_len)[:-1])
    found = [
        SimpleNamespace(id=node.id, children={}, kv_indices=own.tolist(), token_ids=own, refs=[], paused=False)
        for node, own in zip(nodes, slots)
    ]
    leaves = {node.id: found[node.id] for node in nodes if not node.num_children}
    for node in nodes[1:]:
        found[node.parent].children[node.id] = found[node.id]
    by_request = [leaves[leaf] for leaf in sorted(leaves)]
    for node in nodes:
        found[node.id].refs.extend(by_request[request] for request in node.requests)
    return SimpleNamespace(leaves=leaves, nodes=dict(enumerate(found)), root=found[0], use_paged_memory=True)
