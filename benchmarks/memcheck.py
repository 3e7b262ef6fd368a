"""Launches of every kind on small pools, for a memory checker; each result is compared with float64 NumPy.

    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck python -m benchmarks.memcheck

JAX takes one piece of the GPU's memory and cuts it up by itself, so that a checker would see no array's end: hence the
allocator. Pools have no page to spare, tokens end in the middle of a page, and `q` has rows of padding. Arrays come
from the host and nothing but the kernels is compiled, as compiling takes minutes under the checker.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np

import tree_attention_jax as ta
from tree_attention_jax.reference import dense_tree_attention

PADDING = 3


@dataclass(frozen=True)
class Case:
    """A tree by its levels, and how to run it; ``scattered``: neighbouring leaves have different parents, so that the
    queries of a tile do not lie side by side in ``q``."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int
    strategy: str = "auto"
    page_size: int = 16
    scattered: bool = False

    def tree(self) -> ta.TokenTree:
        tree = ta.TokenTree.from_levels(self.nodes, self.tokens)
        if not self.scattered:
            return tree
        _, inner, leaves = self.nodes
        parent = np.concatenate([[-1], np.zeros(inner, np.int64), 1 + np.arange(leaves) % inner])
        return ta.TokenTree(parent, tree.kv_len, tree.q_len)


CASES = (
    Case((1, 4, 64), (100, 37, 9), (32, 8), 128),
    Case((1, 4, 64), (100, 37, 9), (32, 8), 128, "per_node"),
    Case((1, 3, 100), (200, 30, 21), (8, 8), 64, "flatten"),
    Case((1, 40), (300, 21), (16, 1), 128, "flatten"),
    Case((1, 40), (300, 21), (16, 1), 256, "per_node", page_size=8),
    Case((1, 5, 150), (250, 20, 5), (4, 4), 128, "flatten", scattered=True),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", default="pallas_mosaic,pallas_triton", help="comma-separated")
    args = parser.parse_args(argv)
    worst = 0.0
    for case in CASES:
        for name in args.implementations.split(","):
            try:
                worst = max(worst, difference(case, name))
            except NotImplementedError as error:
                print(f"{name} cannot run {case}: {error}")
    print(f"largest difference from NumPy's results: {worst:.3f}")
    return 0 if worst < 0.05 else 1


def difference(case: Case, implementation: str) -> float:
    """Largest absolute difference of an implementation in bfloat16."""
    tree = case.tree().with_pages(case.page_size)
    options = dict(strategy=case.strategy, dtype="bfloat16", buckets=ta.Buckets(queries=tree.num_queries + PADDING))
    plan = ta.plan_tree(tree, case.page_size, *case.heads, case.head_dim, **options)
    pages = int(tree.page_table(case.page_size)[1].max()) + 1
    rng = np.random.default_rng(1)
    pool = (pages, case.page_size, case.heads[1], case.head_dim)
    shapes = (tree.num_queries + PADDING, case.heads[0], case.head_dim), pool, pool
    q, k, v = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes)
    on_device = (jax.device_put(x) for x in (q, k, v))
    found = np.asarray(ta.tree_attention(*on_device, plan, implementation=implementation)).astype(np.float32)
    wanted = np.zeros_like(found)
    wanted[: tree.num_queries] = dense_tree_attention(q[: tree.num_queries], k, v, tree, case.page_size)
    tiles = ", ".join(launch.tile.name() for launch in plan.shape.launches)
    worst = float(np.abs(found - wanted).max())
    print(f"{implementation} {case.nodes} {case.heads} {case.head_dim} {tiles}: {worst:.4f}", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
