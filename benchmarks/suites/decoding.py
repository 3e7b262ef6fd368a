"""Forests of prompts to decode below, and recorded searches to replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.suites.searches import thoughts
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

    def apart(self) -> Forest:
        """The same sequences with nothing shared."""
        return Forest((self.sequences,), (sum(self.tokens),))

    def build(self, tree: SequenceTree, reserve: int = 0) -> np.ndarray:
        """Adds it to a tree, marked as prefilled: the leaves' handles.

        reserve: tokens that a prompt without forks takes pages for, next to its own.
        """
        prompt = np.ones(self.tokens[0], np.int32)
        leaves = np.array([tree.add_request(prompt, reserve=reserve) for _ in range(self.nodes[0])])
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
FORESTS = {
    "A": Forest((4, 512), (2000, 64)),
    "B": Forest((8, 128), (2000, 64)),
    "C": Forest((1, 32, 128), (1000, 64, 0)),
    "D": Forest((16, 128), (4000, 64)),
    "bestof64": Forest((1, 64), (4000, 0)),
    "fewshot20": Forest((1, 20), (4000, 0)),  # DeFT's few-shot prompt and widths
    "fewshot30": Forest((1, 30), (4000, 0)),
    "fewshot50": Forest((1, 50), (4000, 0)),
}
DRAFTS = {f"draft{nodes}": nodes for nodes in (32, 64, 128, 256)}
TRACES = {"tot-sorting": "sorting", "tot-docmerge": "docmerge"}
GROUPS = {
    "fasttree": ["A", "B", "C", "D"],
    "deft": ["fewshot20", "fewshot30", "fewshot50", *DRAFTS, *TRACES],
}


@dataclass(frozen=True)
class Workload:
    """Prompts, and what to decode below them: a continuation of each leaf; or rounds of `draft_nodes` drafted tokens
    below the one leaf; or the tree of a recorded search, below the one leaf too."""

    forest: Forest
    draft_nodes: int = 0
    trace: tuple[tuple[int, int, int], ...] = ()

    @property
    def kind(self) -> str:
        return "draft" if self.draft_nodes else "replay" if self.trace else "generate"

    def scaled(self) -> Workload:
        """A hundredth of the tokens, and at most two roots and four sequences below each: to see that it works."""
        trace = tuple((parent, max(1, n // 100), max(1, -(-start // 100))) for parent, n, start in self.trace)
        forest = Forest((1,), (trace[0][1],)) if trace else scaled(self.forest)
        return Workload(forest, max(8, self.draft_nodes // 8) if self.draft_nodes else 0, trace)

    def longest(self, new_tokens: int) -> int:
        """Tokens from the root to the end of the longest sequence there will be, drafts included."""
        if not self.trace:
            return sum(self.forest.tokens) + new_tokens + self.draft_nodes
        ends: list[int] = []
        for parent, tokens, _ in self.trace:
            ends.append(tokens + (ends[parent] if parent >= 0 else 0))
        return max(ends)


def workload(name: str) -> Workload:
    """A workload by its name; ValueError names those there are."""
    if name in FORESTS:
        return Workload(FORESTS[name])
    if name in DRAFTS:
        return Workload(Forest((1,), (4000,)), draft_nodes=DRAFTS[name])
    if name in TRACES:
        trace = tuple(map(tuple, thoughts(TRACES[name])))
        return Workload(Forest((1,), (trace[0][1],)), trace=trace)
    raise ValueError(f"workload is {name!r}: known are {', '.join([*FORESTS, *DRAFTS, *TRACES, *GROUPS])}")


def named(names: str) -> dict[str, Workload]:
    """Workloads by comma-separated names, which may be those of groups."""
    listed = [one for name in names.split(",") for one in GROUPS.get(name, [name])]
    return {name: workload(name) for name in listed}


def scaled(forest: Forest) -> Forest:
    """A hundredth of the tokens, and at most two roots and four sequences below each."""
    nodes = tuple(min(n, 2 * 2**level) for level, n in enumerate(forest.nodes))
    return Forest(nodes, tuple(-(-tokens // 100) for tokens in forest.tokens))


def replay(tree: SequenceTree, root: int, trace: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
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
