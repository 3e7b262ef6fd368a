"""Forests of prompts to decode below, and recorded searches to replay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tree_attention_jax.cache import SequenceTree


@dataclass(frozen=True)
class Forest:
    """A regular forest of prompts: nodes of each level, tokens of each of its nodes. Every leaf decodes.

    A level of 0 tokens forks only.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def sequences(self) -> int:
        return self.nodes[-1]

    @property
    def total_tokens(self) -> int:
        return sum(n * t for n, t in zip(self.nodes, self.tokens))

    def build(self, tree: SequenceTree) -> np.ndarray:
        """Adds it to a tree, marked as prefilled: the leaves' handles."""
        leaves = np.array([tree.add_request(np.ones(self.tokens[0], np.int32)) for _ in range(self.nodes[0])])
        tree.commit()
        for above, count, tokens in zip(self.nodes, self.nodes[1:], self.tokens[1:]):
            leaves = np.concatenate([tree.fork(int(leaf), count // above) for leaf in leaves])
            if tokens:
                tree.append(leaves, np.ones((leaves.size, tokens), np.int32))
                tree.commit()
        return leaves


# FastTree names its workloads by structure: 4 system prompts x 128 questions; 8 branches x 20 shots x 16 questions;
# 32 questions x 4 chains; 16 branches of 4 documents x 8 questions. The lengths are typical ones: 2,000 tokens for a
# system prompt, 100 for a shot, 1,000 for a document, 64 for a question.
WORKLOADS = {
    "A": Forest((4, 512), (2000, 64)),
    "B": Forest((8, 128), (2000, 64)),
    "C": Forest((1, 32, 128), (1000, 64, 0)),
    "D": Forest((16, 128), (4000, 64)),
    "fewshot": Forest((1, 20), (4000, 0)),
    "bestof64": Forest((1, 64), (4000, 0)),
}


def scaled(forest: Forest) -> Forest:
    """A hundredth of the tokens, and at most two roots and four sequences below each."""
    nodes = tuple(min(n, 2 * 2**level) for level, n in enumerate(forest.nodes))
    return Forest(nodes, tuple(-(-tokens // 100) for tokens in forest.tokens))


def thoughts(name: str) -> list[list[int]]:
    """A recorded tree-of-thoughts run: [parent, tokens, first decode step] of each node, node 0 the prompt."""
    trees = json.loads((Path(__file__).parent / "thoughts.json").read_text())["trees"]
    if name not in trees:
        raise ValueError(f"trace is {name!r}: known are {', '.join(trees)}")
    return trees[name]


def replay(tree: SequenceTree, root: int, trace: list[list[int]]) -> Iterator[np.ndarray]:
    """Grows a tree below a prefilled leaf as it grew in the record: yields the leaves of each step, one pending token
    each. The caller computes them before it asks for the next step."""
    children: dict[int, list[int]] = {}
    for node, (parent, _, _) in enumerate(trace):
        children.setdefault(parent, []).append(node)
    starts = {parent: min(trace[node][2] for node in below) for parent, below in children.items() if parent >= 0}
    handles, left = {0: root}, {0: 0}
    step = 0
    while starts or any(left.values()):
        step += 1
        for parent in [p for p, start in starts.items() if start <= step and left.get(p, 1) == 0]:
            below = children[parent]
            handles |= dict(zip(below, tree.fork(handles.pop(parent), len(below)).tolist()))
            left |= {node: trace[node][1] for node in below}
            del starts[parent]
        growing = [node for node in handles if left[node]]
        if not growing:
            continue
        active = np.array([handles[node] for node in growing])
        tree.append(active, np.ones(active.size, np.int32))
        yield active
        for node in growing:
            left[node] -= 1
            if not left[node] and node not in children:
                tree.prune(handles.pop(node))
