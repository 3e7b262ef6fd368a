"""Forests on poisoned caches, and the comparison with the oracle: what every test of the op shares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tree_attention_jax as ta
from tree_attention_jax.planning.plan import make_problem, plan_of
from tree_attention_jax.planning.strategies import STRATEGIES
from tree_attention_jax.planning.strategies._common import make_tiling
from tree_attention_jax.planning.tiles import tile_class

IMPLEMENTATIONS = ("xla", "pallas_triton")
# Between them: unmasked and masked items, one launch and several.
FAST_STRATEGIES = ("auto", "flatten")

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
# The other strategies make plans of the same kinds; where each plan compiles a program they leave the fast part.
every_strategy_slowly = pytest.mark.parametrize(
    "strategy", [pytest.param(s, marks=() if s in FAST_STRATEGIES else pytest.mark.slow) for s in STRATEGIES]
)


@dataclass(frozen=True)
class Heads:
    """Head counts and widths of one attention."""

    q: int
    kv: int
    dim: int = 64
    v_dim: int | None = None

    @property
    def value_dim(self) -> int:
        return self.dim if self.v_dim is None else self.v_dim

    def __str__(self) -> str:
        return f"H{self.q}x{self.kv}-D{self.dim}" + ("" if self.v_dim is None else f"x{self.v_dim}")


@dataclass(frozen=True)
class Case:
    """A forest on one kind of cache, with the id that tests show."""

    name: str
    tree: Callable[[], ta.TokenTree]
    heads: Heads
    page_size: int = 16
    padding: int = 0  # rows of q beyond the tree's queries

    def __str__(self) -> str:
        return f"{self.name}-{self.heads}-P{self.page_size}"


# ---------------------------------------------------------------------- page tables


def lay_out(tree: ta.TokenTree, page_size: int, seed: int = 0, sharing: bool = False, reserve: int = 0) -> ta.TokenTree:
    """The same forest on pages in random order.

    ``sharing``: nodes lie side by side in common pages, in random order too, with a few free slots between them.
    """
    rng = np.random.default_rng(seed)
    room = tree.kv_len + np.where(tree.is_leaf() & (tree.q_len > 0), reserve, 0).astype(np.int64)
    order = rng.permutation(tree.num_nodes)
    size = room + rng.integers(0, 3, tree.num_nodes) if sharing else -(-room // page_size) * page_size
    begin = np.empty(tree.num_nodes, np.int64)
    begin[order] = np.cumsum(size[order]) - size[order]
    first, end = begin // page_size, -(-(begin + room) // page_size)
    end = np.where(room > 0, end, first)
    pages = rng.permutation(int(end.max(initial=0)) + 3)
    indices = np.concatenate([pages[a:b] for a, b in zip(first, end)]) if tree.num_nodes else pages[:0]
    indptr = np.concatenate(([0], np.cumsum(end - first)))
    return ta.TokenTree(tree.parent, tree.kv_len, tree.q_len, indptr, indices, begin % page_size)


def num_pages(tree: ta.TokenTree, page_size: int) -> int:
    """Pages of a cache for this tree, two more than it needs."""
    return int(tree.page_table(page_size)[1].max(initial=-1)) + 3


# ---------------------------------------------------------------------- caches


@dataclass(frozen=True)
class Inputs:
    """What the op takes, in NumPy; free slots of the pages and padding rows of q are poison."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray

    def on_device(self) -> tuple[Any, Any, Any]:
        return jnp.asarray(self.q), jnp.asarray(self.k_pages), jnp.asarray(self.v_pages)


def poisoned_inputs(
    tree: ta.TokenTree,
    page_size: int,
    heads: Heads,
    dtype: Any = np.float32,
    kv_dtype: Any = None,
    seed: int = 0,
    poison: tuple[float, ...] = (np.nan, np.inf, -np.inf),
    padding: int = 0,
    pages: int | None = None,
) -> Inputs:
    """Random queries, keys and values; every slot that no node owns, and every padding row, holds poison."""
    rng = np.random.default_rng(seed)
    slots = tree.token_slots(page_size)
    pages = num_pages(tree, page_size) if pages is None else pages
    kv_dtype = dtype if kv_dtype is None else kv_dtype

    def pool(width: int) -> np.ndarray:
        shape = (pages * page_size, heads.kv, width)
        if np.issubdtype(kv_dtype, np.integer):
            full = np.full(shape, 127, np.int8)
            full[slots] = rng.integers(-100, 101, (len(slots), *shape[1:]))
        else:
            full = rng.choice(np.array(poison, np.float32), shape)
            full[slots] = rng.normal(size=(len(slots), *shape[1:]))
        return full.astype(kv_dtype).reshape(pages, page_size, *shape[1:])

    q = np.full((tree.num_queries + padding, heads.q, heads.dim), np.nan, np.float32)
    q[: tree.num_queries] = rng.normal(size=(tree.num_queries, *q.shape[1:]))
    return Inputs(q.astype(dtype), pool(heads.dim), pool(heads.value_dim))


# ---------------------------------------------------------------------- against the oracle


def plan_for(tree: ta.TokenTree, page_size: int, heads: Heads, **plan_options: Any) -> ta.TreePlan:
    return ta.plan_tree(
        tree,
        page_size=page_size,
        num_q_heads=heads.q,
        num_kv_heads=heads.kv,
        head_dim=heads.dim,
        v_head_dim=heads.v_dim,
        **plan_options,
    )


def halves_in_turns(
    tree: ta.TokenTree, page_size: int, heads: Heads, max_tokens: int = 0, **problem_options: Any
) -> ta.TreePlan:
    """A plan of the widest tiles, over the whole tree each, in whose masked runs two halves of the rows take turns.

    ``max_tokens``: of an item; 0: none is split.
    """
    problem = make_problem(tree, page_size, heads.q, heads.kv, heads.dim, heads.v_dim, **problem_options)
    rows, nodes = problem.layout.num_rows, np.arange(tree.num_nodes, dtype=np.int32)
    tile = tile_class(128, 32, 4, 5, problem.unit, mosaic=True)
    ends = [np.array(x, np.int32) for x in ([0], [rows], [0, len(nodes)])]
    tiling = make_tiling(problem, *ends, nodes, np.zeros_like(nodes), tree.kv_len, max_tokens, tiles=(tile,))
    return plan_of(problem, tiling)


def attend(q: Any, k_pages: Any, v_pages: Any, plan: ta.TreePlan, implementation: str = "xla", **options: Any) -> Any:
    """``tree_attention`` with its LSE, under a ``jit`` that compiles quickly; tests with equal plan shapes share it."""
    static = {name: value for name, value in options.items() if isinstance(value, int | float)}
    arrays = {name: value for name, value in options.items() if name not in static}
    return _jitted(implementation, tuple(static.items()))(q, k_pages, v_pages, plan, **arrays)


@functools.cache
def _jitted(implementation: str, static: tuple) -> Callable:
    call = functools.partial(ta.tree_attention, implementation=implementation, return_lse=True, **dict(static))
    return jax.jit(call, compiler_options=quick_compiler_options())


@functools.cache
def quick_compiler_options() -> dict[str, Any]:
    """What makes XLA's CPU compiler quickest: it takes most of a test's time. Not all versions know all of these."""
    if jax.default_backend() != "cpu":
        return {}
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_parallel_codegen_split_count": 1,
        "xla_cpu_use_fusion_emitters": False,
    }
    known = {}
    for name, value in options.items():
        try:
            jax.jit(jnp.negative, compiler_options={name: value})(0.0)
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known


def check_against_oracle(
    tree: ta.TokenTree,
    page_size: int,
    heads: Heads,
    *,
    implementation: str = "xla",
    dtype: Any = np.float32,
    kv_dtype: Any = None,
    padding: int = 0,
    seed: int = 0,
    pages: int | None = None,
    plan: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Plan, attend on a poisoned cache, and compare output and LSE with the oracle."""
    inputs = poisoned_inputs(tree, page_size, heads, dtype, kv_dtype, seed, padding=padding, pages=pages)
    planned = plan_for(tree, page_size, heads, **({} if plan is None else plan))
    out, lse = attend(*inputs.on_device(), planned, implementation, **options)
    assert_matches_oracle(out, lse, tree, page_size, inputs, **options)


def assert_matches_oracle(
    out: Any, lse: Any, tree: ta.TokenTree, page_size: int, inputs: Inputs, **options: Any
) -> None:
    """``out`` and ``lse`` against float64 attention over the same rounded inputs; padding rows must be 0 and -inf."""
    assert out.dtype == inputs.q.dtype
    assert lse.dtype == jnp.float32
    assert out.shape == (*inputs.q.shape[:2], inputs.v_pages.shape[-1])
    rows = tree.num_queries
    want, want_lse = ta.reference.dense_tree_attention(
        inputs.q[:rows], inputs.k_pages, inputs.v_pages, tree, page_size, return_lse=True, **options
    )
    dtype = out.dtype
    out, lse = np.asarray(out).astype(np.float64), np.asarray(lse, np.float64)
    assert_close(out[:rows], want, dtype)
    assert_lse_close(lse[:rows], want_lse, dtype)
    assert (out[rows:] == 0).all()
    assert (lse[rows:] == -np.inf).all()


def assert_close(have: Any, want: Any, dtype: Any) -> None:
    """float32: 1e-5 relative by norm and absolute; 16-bit types: 2e-2 relative by norm and 1e-2 absolute.

    The absolute bound is for values around 1; for larger ones it grows with them.
    """
    relative, absolute = (1e-5, 1e-5) if jnp.dtype(dtype).itemsize >= 4 else (2e-2, 1e-2)
    have, want = np.asarray(have).astype(np.float64), np.asarray(want).astype(np.float64)
    error = np.abs(have - want)
    assert np.isfinite(have).all(), f"{np.count_nonzero(~np.isfinite(have))} values are not finite"
    assert np.linalg.norm(error) <= relative * np.linalg.norm(want)
    assert error.max(initial=0) <= absolute * max(1.0, np.abs(want).max(initial=0))


def assert_lse_close(have: Any, want: Any, dtype: Any) -> None:
    """The LSE stays in float32 whatever the storage type; only the products under it are rounded."""
    bound = 1e-5 if jnp.dtype(dtype).itemsize >= 4 else 1e-3
    have, want = np.asarray(have, np.float64), np.asarray(want, np.float64)
    assert ((have == -np.inf) == (want == -np.inf)).all()
    seen = want > -np.inf
    error = np.abs(have - want)[seen] / np.maximum(1.0, np.abs(want[seen]))
    assert error.max(initial=0) <= bound
