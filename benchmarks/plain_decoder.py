"""The decoder as one writes it without this library: the same model, cache and loops, attention by JAX's own function.

`jax.nn.dot_product_attention` wants the keys of each sequence side by side. There are three ways to give it that:

    paths        gather each query's K/V out of the shared pages, layer by layer
    contiguous   keep a copy of its own for each sequence, prompt included: nothing to gather, much more memory
    mask         all tokens of one forest once, and a mask that says who sees whom: the usual way to verify a draft tree

All of them compute the same attention, so `TreeDecoder`'s loops give the same tokens with them as with a `TreePlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tree_attention_jax.models import Llama, LlamaConfig
from tree_attention_jax.search import TreeDecoder
from tree_attention_jax.topology import TokenTree

NOWHERE = np.iinfo(np.int32).max  # past the end of any cache: a write there is dropped
MODES = ("paths", "contiguous", "mask")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PathPlan:
    """Which slots of the cache each query reads, with the interface of a `TreePlan`. R queries, S tokens at most.

    Attributes:
        positions: int32 [R], of each query, which is the last token that it sees.
        slots: int32 [R, S], of each token of its sequence; what lies past the position is for tokens to come.
        count: int32 [], real queries; the others are padding.
        contiguous: sequence i has slots i * S up to (i + 1) * S.
    """

    positions: jax.Array
    slots: jax.Array
    count: jax.Array
    horizon: int = field(metadata=dict(static=True))
    contiguous: bool = field(metadata=dict(static=True))

    buckets = None

    @property
    def query_capacity(self) -> int:
        return self.slots.shape[0]

    @property
    def new_slots(self) -> jax.Array:
        """int32 [R]: where each query's own K/V goes."""
        own = jnp.take_along_axis(self.slots, self.positions[:, None], axis=1)[:, 0]
        return jnp.where(jnp.arange(own.size) < self.count, own, NOWHERE)

    def advance(self) -> PathPlan:
        """One decode step later."""
        return replace(self, positions=self.positions + 1)

    def attend(self, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, implementation: str | None) -> jax.Array:
        """q [R, Hq, D] over pages [num_pages, page_size, Hkv, D]: [R, Hq, D]."""
        k, v = (self._sequences(pages) for pages in (k_pages, v_pages))
        out = jax.nn.dot_product_attention(
            q[:, None], k, v, key_value_seq_lengths=self.positions + 1, implementation=implementation
        )
        return out[:, 0]

    def _sequences(self, pages: jax.Array) -> jax.Array:
        pool = pages.reshape(-1, *pages.shape[2:])
        if not self.contiguous:
            return pool[self.slots]
        return pool[: self.slots.size].reshape(*self.slots.shape, *pool.shape[1:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MaskPlan:
    """All tokens of a forest once, and who sees whom. R queries, S tokens at most.

    Attributes:
        positions: int32 [R]. new_slots: int32 [R], where each query's own K/V goes.
        slots: int32 [S], of every token. seen: bool [R, S].
    """

    positions: jax.Array
    new_slots: jax.Array
    slots: jax.Array
    seen: jax.Array

    buckets = None
    horizon = 0

    @property
    def query_capacity(self) -> int:
        return self.seen.shape[0]

    def attend(self, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, implementation: str | None) -> jax.Array:
        """As `PathPlan.attend`."""
        k, v = (pages.reshape(-1, *pages.shape[2:])[self.slots][None] for pages in (k_pages, v_pages))
        mask = self.seen[None, None]
        return jax.nn.dot_product_attention(q[None], k, v, mask=mask, implementation=implementation)[0]


def path_plan(tree: TokenTree, page_size: int, longest: int, horizon: int = 0, contiguous: bool = False) -> PathPlan:
    """Each query's path through a forest with a page table.

    longest: S. Sequences with a horizon need their exact number of rows only; a step of a search, whose number
        changes, gets a power of two.

    Raises:
        ValueError: a path longer than `longest`; or `contiguous`, and a sequence that does not lie where it should.
    """
    rows = tree.num_queries if horizon or contiguous else _power_of_two(tree.num_queries)
    positions, slots = np.zeros(rows, np.int32), np.zeros((rows, longest), np.int32)
    positions[: tree.num_queries] = tree.query_positions()
    for row, path in enumerate(_paths(tree, page_size, horizon)):
        if path.size > longest:
            raise ValueError(f"query {row} reads a path of {path.size} tokens; longest is {longest}")
        slots[row, : path.size] = path
        if contiguous:
            if not np.array_equal(path, row * longest + np.arange(path.size)):
                raise ValueError(f"sequence {row} does not lie in slots {row * longest} and following")
            slots[row] = row * longest + np.arange(longest)
    count = jnp.int32(tree.num_queries)
    return PathPlan(jnp.asarray(positions), jnp.asarray(slots), count, horizon, contiguous)


def mask_plan(tree: TokenTree, page_size: int, longest: int) -> MaskPlan:
    """The tokens of a forest, `longest` (S) at most, and who sees them; ValueError if there are more."""
    tokens = tree.token_slots(page_size)
    if tokens.size > longest:
        raise ValueError(f"the forest has {tokens.size} tokens; longest is {longest}")
    rows = _power_of_two(tree.num_queries)
    positions, new_slots = np.zeros(rows, np.int32), np.full(rows, NOWHERE, np.int32)
    slots, seen = np.zeros(longest, np.int32), np.zeros((rows, longest), bool)
    positions[: tree.num_queries] = tree.query_positions()
    slots[: tokens.size] = tokens
    order = np.argsort(tokens)
    for row, path in enumerate(_paths(tree, page_size, 0)):
        path = path[: positions[row] + 1]
        new_slots[row] = path[-1]
        seen[row, order[np.searchsorted(tokens, path, sorter=order)]] = True
    seen[tree.num_queries :, 0] = True  # padding has to see something, or its softmax is NaN
    return MaskPlan(*map(jnp.asarray, (positions, new_slots, slots, seen)))


def _paths(tree: TokenTree, page_size: int, horizon: int) -> list[np.ndarray]:
    """The slots from the root to the end of each query's node, int64, with `horizon` tokens to come."""
    grown = tree.kv_len + horizon * (tree.q_len > 0)
    tree_then = TokenTree(tree.parent, grown, tree.q_len, *tree.page_table(page_size), tree.first_slot)
    own = np.split(tree_then.token_slots(page_size), np.cumsum(grown)[:-1])
    paths: list[np.ndarray] = []
    for node, parent in enumerate(tree.parent):
        paths.append(own[node] if parent < 0 else np.concatenate([paths[parent], own[node]]))
    return [paths[node] for node in tree.query_nodes()]


def _power_of_two(n: int) -> int:
    return max(8, 1 << max(0, n - 1).bit_length())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlainLlama:
    """A `Llama` whose attention is that of a plan above; called like one.

    implementation: of `jax.nn.dot_product_attention`.
    """

    llama: Llama
    implementation: str | None = field(metadata=dict(static=True))

    @property
    def config(self) -> LlamaConfig:
        return self.llama.config

    @property
    def dtype(self) -> Any:
        return self.llama.dtype

    def __call__(
        self,
        token_ids: jax.Array,
        k_pages: Sequence[jax.Array],
        v_pages: Sequence[jax.Array],
        plan: PathPlan | MaskPlan,
        *,
        logit_rows: jax.Array | None = None,
        implementation: Any = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """As `Llama.__call__`; `implementation`, which is that of `tree_attention`, means nothing here."""
        if self.config.sliding_window is not None:
            raise NotImplementedError("the decoder on JAX's own attention has no sliding window")
        x, rope = self.llama.embed(token_ids), self.llama.rope(plan.positions)
        new_k, new_v = [], []
        for layer, k_layer, v_layer in zip(self.llama.layers, k_pages, v_pages, strict=True):
            x, k_layer, v_layer = _plain_layer(
                layer, x, rope, k_layer, v_layer, plan, implementation=self.implementation
            )
            new_k.append(k_layer)
            new_v.append(v_layer)
        return self.llama.logits(x if logit_rows is None else x[logit_rows]), tuple(new_k), tuple(new_v)


@partial(jax.jit, static_argnames="implementation", donate_argnames=("k_pages", "v_pages"))
def _plain_layer(layer, x, rope, k_pages, v_pages, plan, *, implementation):
    q, k, v = layer.project_qkv(x, rope)
    k_pages, v_pages = _put(k_pages, plan.new_slots, k), _put(v_pages, plan.new_slots, v)
    return layer.finish(x, plan.attend(q, k_pages, v_pages, implementation)), k_pages, v_pages


def _put(pages: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    pool = pages.reshape(-1, *pages.shape[2:])
    return pool.at[slots].set(values.astype(pool.dtype), mode="drop").reshape(pages.shape)


class PlainDecoder(TreeDecoder):
    """A `TreeDecoder` on JAX's own attention."""

    def __init__(
        self,
        model: Llama,
        num_pages: int,
        page_size: int,
        *,
        longest: int,
        mode: str = "paths",
        attention: str | None = None,
        **options: Any,
    ):
        """
        Args:
            longest: tokens of the longest sequence ("mask": of the whole forest) there will be: as in any decoder
                under `jax.jit`, the cache that attention sees has a fixed length, of which some is not filled yet.
                A multiple of the page size.
            mode: "paths"; "contiguous", which needs every sequence to be a request of its own with all its pages
                reserved from the start; or "mask".
            attention: the implementation of `jax.nn.dot_product_attention`.
        """
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}: it must be one of {', '.join(MODES)}")
        super().__init__(PlainLlama(model, attention), num_pages, page_size, **options)
        self.longest, self.mode = longest, mode

    def plan(self, tree: TokenTree, horizon: int = 0, **options: Any) -> Any:
        if self.mode == "mask" and not horizon:
            return mask_plan(tree, self.page_size, self.longest)
        in_rows = self.mode == "contiguous" and bool((tree.q_len == 1).all())  # not so for a prefill
        return path_plan(tree, self.page_size, self.longest, horizon, in_rows)
