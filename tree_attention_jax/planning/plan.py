"""The plan: everything attention needs to know about a forest, as one device buffer and a small static part."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout as lo
from tree_attention_jax.planning import packing
from tree_attention_jax.planning._larger_pages import in_larger_pages
from tree_attention_jax.planning.buckets import Buckets
from tree_attention_jax.planning.growth import grow
from tree_attention_jax.planning.lowering import lower
from tree_attention_jax.planning.problem import Heads, Problem
from tree_attention_jax.planning.profile import profile_for
from tree_attention_jax.planning.strategies import STRATEGIES
from tree_attention_jax.planning.tiling import Tiling
from tree_attention_jax.topology import TokenTree

__all__ = ["TreePlan", "plan_tree"]

ROUNDED_UP = Buckets()


@dataclass(frozen=True)
class HostView:
    """What the host knows of a plan. It does not travel through ``jax.jit``."""

    num_queries: int
    num_pages: int  # pages that the cache must have at least
    num_items: tuple[int, ...]
    num_partials: int
    strategy: str
    problem: Problem
    buffer: np.ndarray


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class TreePlan:
    """A grouping plan. Make it with :func:`plan_tree`; pass it through ``jax.jit`` like any array.

    Attributes:
        buffer: int32, the work items (:mod:`pallas_kernels.layout`); the only child of the pytree.
        shape: bucket sizes and head counts, hashable: two plans with equal shapes share a compiled program.
        horizon: decode steps for which :meth:`advance` stays exact.
        sliding_window: the window whose unseen tokens the plan leaves out, or None.
        host: counts kept on the host, None inside a trace.
    """

    buffer: jax.Array
    shape: lo.WorkShape
    horizon: int = 0
    sliding_window: int | None = None
    host: HostView | None = field(default=None, compare=False, repr=False)

    def tree_flatten(self) -> tuple[tuple[Any], tuple]:
        return (self.buffer,), (self.shape, self.horizon, self.sliding_window)

    @classmethod
    def tree_unflatten(cls, static: tuple, children: tuple) -> TreePlan:
        return cls(children[0], *static)

    @property
    def query_capacity(self) -> int:
        """Rows that ``q`` may have at most: the query bucket."""
        return self.shape.row_capacity

    @property
    def positions(self) -> jax.Array:
        """int32 [query_capacity]: absolute position of each query; 0 in the padding."""
        at = self.shape.positions_at
        return self.buffer[at : at + self.shape.row_capacity]

    @property
    def slots(self) -> jax.Array:
        """int32 [query_capacity]: cache slot (page * page_size + slot) of each query's own token; -1 in the padding."""
        at = self.shape.slots_at
        return self.buffer[at : at + self.shape.row_capacity]

    @property
    def buckets(self) -> Buckets:
        """This plan's capacities: pass them to :func:`plan_tree` to get a plan that runs the same program."""
        shape = self.shape
        return Buckets(
            queries=shape.row_capacity,
            items=tuple(launch.capacity for launch in shape.launches) or None,
            partials=shape.partial_rows or None,
            buffer=shape.buffer_size,
        )

    def advance(self) -> TreePlan:
        """The plan one decode step later: every decoding leaf has grown by one token, which is its new query.

        Runs inside ``jax.jit`` and loops without the host. Valid ``horizon`` times; the caller counts.

        Raises:
            ValueError: the plan was made with ``horizon=0``.
        """
        if self.horizon == 0:
            raise ValueError(
                "advance: this plan has horizon 0, so no pages are reserved for new tokens; plan with horizon="
            )
        return TreePlan(grow(self.buffer, self.shape), self.shape, self.horizon, self.sliding_window, None)

    def check(self, tree: TokenTree) -> None:
        """Prove that the items cover every visible (query, token) pair of ``tree`` exactly once, and nothing else.

        Raises:
            AssertionError: naming the first query or token that is missed, repeated or wrongly seen.
        """
        from tree_attention_jax.planning.check import check_cover

        check_cover(np.asarray(self.buffer), self.shape, tree, self.sliding_window)

    def explain(self) -> Any:
        """A ``rich`` table: items by tile class, padding, bytes and modelled time against the floor."""
        from tree_attention_jax.planning.explain import explain

        return explain(self)

    def draw(self, path: Any = None, **options: Any) -> Any:
        """A ``matplotlib`` figure of queries x tokens with the items on it (:func:`.picture.draw`), saved if asked."""
        from tree_attention_jax.planning.picture import draw

        return draw(self, path, **options)


def plan_tree(
    tree: TokenTree,
    page_size: int = 16,
    num_q_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    dtype: Any = "bfloat16",
    strategy: str = "auto",
    horizon: int = 0,
    sliding_window: int | None = None,
    buckets: Buckets | None = None,
    *,
    gpu: str | None = None,
    mosaic: bool = True,
    **strategy_options: Any,
) -> TreePlan:
    """Plan attention over a forest: pure NumPy on the host, and one transfer.

    Args:
        tree: the forest; its page table must cover ``horizon`` more tokens in every decoding leaf.
        page_size: tokens a page. Fewer than 8 are read as pages of 16 where those of each node lie side by side; then
            Mosaic's kernels need a cache of a multiple of 16 slots.
        num_q_heads, num_kv_heads: a multiple of each other (GQA).
        head_dim, v_head_dim: widths of K and V (``None``: the same).
        dtype: of the cache; it only informs the choice of tiles.
        strategy: one of ``tree_attention_jax.planning.strategies.STRATEGIES``.
        horizon: decode steps that :meth:`TreePlan.advance` may take. Needs every query to be the one new token of a
            leaf.
        sliding_window: leave out tokens no query sees under this window; give the same to ``tree_attention``.
        buckets: explicit capacities; ``None`` rounds up.
        gpu: device kind to plan for; ``None``: the local one.
        mosaic: also choose among the tiles of Mosaic GPU's kernels, where the GPU, this version of JAX and the cache
            have them. ``False`` for what ``implementation="pallas_triton"`` shall run: it takes them too, but slowly.
        strategy_options: of the strategy (see its file).

    Returns:
        A plan for any number of layers and calls.

    Raises:
        ValueError: an argument out of range, a page table too short (also for the horizon), an unknown strategy, a
            bucket that is too small. The message names the argument and the value.
    """
    problem = make_problem(
        tree, page_size, num_q_heads, num_kv_heads, head_dim, v_head_dim, dtype, horizon, sliding_window, gpu, mosaic
    )
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}: it must be one of {', '.join(map(repr, STRATEGIES))}")
    return plan_of(problem, STRATEGIES[strategy](problem, **strategy_options), strategy, buckets)


def plan_of(problem: Problem, tiling: Tiling, strategy: str = "", buckets: Buckets | None = None) -> TreePlan:
    """The plan that runs a tiling."""
    packed = packing.pack(problem, lower(problem, tiling), buckets or ROUNDED_UP)
    host = HostView(
        num_queries=problem.layout.num_rows,
        num_pages=problem.num_pages,
        num_items=packed.num_items,
        num_partials=packed.num_partials,
        strategy=strategy,
        problem=problem,
        buffer=packed.buffer,
    )
    return TreePlan(jnp.asarray(packed.buffer), packed.shape, problem.horizon, problem.sliding_window, host)


def make_problem(
    tree: TokenTree,
    page_size: int = 16,
    num_q_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    dtype: Any = "bfloat16",
    horizon: int = 0,
    sliding_window: int | None = None,
    gpu: str | None = None,
    mosaic: bool = True,
) -> Problem:
    """Check the arguments of :func:`plan_tree` and gather them."""
    if not isinstance(tree, TokenTree):
        raise TypeError(f"tree is a {type(tree).__name__}: it must be a TokenTree")
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    for name, value in (
        ("page_size", page_size),
        ("num_q_heads", num_q_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("v_head_dim", v_head_dim),
    ):
        _require_integer(name, value, 1)
    _require_integer("horizon", horizon, 0)
    if sliding_window is not None:
        _require_integer("sliding_window", sliding_window, 1)
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads is {num_q_heads}: it must be a multiple of num_kv_heads, which is {num_kv_heads}"
        )
    tree.check_pages(page_size)
    if horizon:
        _check_horizon(tree, page_size, horizon)
    layout, num_pages, cache_page_size = tree.layout, _num_pages(tree, page_size), page_size
    tree, page_size = in_larger_pages(tree, page_size)
    return Problem(
        tree=tree,
        layout=layout,
        page_size=page_size,
        cache_page_size=cache_page_size,
        num_pages=num_pages,
        heads=_heads(num_q_heads, num_kv_heads, head_dim, v_head_dim, dtype),
        horizon=horizon,
        sliding_window=sliding_window,
        profile=profile_for(gpu),
        mosaic=mosaic,
    )


def _num_pages(tree: TokenTree, page_size: int) -> int:
    """Pages that the cache must have at least."""
    indices = tree.page_indices
    if indices is None:
        return int(tree.page_offsets(page_size)[-1])
    return int(indices.max()) + 1 if len(indices) else 0


@functools.lru_cache(maxsize=64)
def _heads(num_q_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int, dtype: Any) -> Heads:
    return Heads(num_q_heads, num_kv_heads, head_dim, v_head_dim, jnp.dtype(dtype).itemsize)


_INTEGERS = (int, np.integer)


def _require_integer(name: str, value: Any, least: int) -> None:
    if type(value) is int and value >= least:
        return
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        raise TypeError(f"{name} is {value!r}: it must be an integer")
    if value < least:
        raise ValueError(f"{name} is {value}: it must be at least {least}")


def _check_horizon(tree: TokenTree, page_size: int, horizon: int) -> None:
    grows = tree.is_leaf() & (tree.q_len == 1)
    other = (tree.q_len > 0) & ~grows
    if other.any():
        node = int(np.argmax(other))
        what = f"{tree.q_len[node]} queries" if grows[node] or tree.q_len[node] > 1 else "children"
        raise ValueError(f"horizon is {horizon} but node {node} has {what}: only leaves with one query decode on")
    indptr, indices = tree.page_table(page_size)
    room = np.diff(indptr) * page_size - tree.first_slot - tree.kv_len
    short = grows & (room < horizon)
    if short.any():
        node = int(np.argmax(short))
        raise ValueError(
            f"horizon is {horizon} but the pages of node {node} have room for {room[node]} more tokens: reserve pages "
            f"in the page table (TokenTree.with_pages(page_size, reserve={horizon}) lays out such a table)"
        )
    try:  # reserved slots must belong to nobody else
        grown = tree.kv_len + np.where(grows, horizon, 0)
        TokenTree(tree.parent, grown, tree.q_len, indptr, indices, tree.first_slot).check_pages(page_size)
    except ValueError as error:
        raise ValueError(f"horizon is {horizon}, but the slots it needs are taken: {error}") from None
