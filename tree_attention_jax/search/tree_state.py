"""A decoding tree on the device: fixed-size arrays, and jit-able operations on them.

For loops wholly under `jax.jit` (beam search whose re-parenting is data, tree search with `mctx`), where no host can
keep a `SequenceTree`. A node is one token. A *leaf* is just a node's number, or -1 for the empty path: what all paths
share, a prompt planned on the host, is no part of this tree.

    state, leaves = append(state, leaves, tokens)       # K/V of the new tokens: scatter to state.slot[leaves]
    slots, lengths = path_pages(state, leaves, depth)   # attend over these, join with the prompt by merge_states
    state, leaves = fork(state, leaves, parents)        # beam j goes on from beam parents[j]; the dead are freed

Everything is integer arithmetic in fixed shapes: it works under `vmap` (a batch of trees), `scan` and `while_loop`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

ROOT = -1
FREE = -2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TreeState:
    """Nodes by number, all int32 [capacity] unless said otherwise."""

    parent: jax.Array  # node above, ROOT (-1) for none; FREE (-2): the node is not in use
    token: jax.Array
    depth: jax.Array  # tokens above it in this tree
    slot: jax.Array  # where its K/V lies: page * page_size + slot in page; fixed at creation
    refs: jax.Array  # children and leaves that need it
    free: jax.Array  # a stack of free nodes, the first `num_free` entries
    num_free: jax.Array  # int32 []
    overflow: jax.Array  # bool []: an append found no free node and was dropped

    @classmethod
    def create(cls, capacity: int | None = None, slots: jax.Array | np.ndarray | None = None) -> TreeState:
        """An empty tree of `capacity` nodes, whose K/V lies in `slots` int [capacity] (default 0, 1, 2, ...)."""
        if (capacity is None) == (slots is None):
            raise ValueError("give capacity, or slots for nodes to use")
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        slots = jnp.arange(capacity, dtype=jnp.int32) if slots is None else jnp.asarray(slots, jnp.int32)
        if slots.ndim != 1 or not slots.size:
            raise ValueError(f"slots must be one-dimensional and not empty, got shape {slots.shape}")
        n = slots.size
        zeros = jnp.zeros(n, jnp.int32)
        free = jnp.arange(n - 1, -1, -1, dtype=jnp.int32)  # node 0 comes out first
        return cls(
            parent=jnp.full(n, FREE, jnp.int32),
            token=zeros,
            depth=zeros,
            slot=slots,
            refs=zeros,
            free=free,
            num_free=jnp.int32(n),
            overflow=jnp.bool_(False),
        )

    @property
    def capacity(self) -> int:
        return self.parent.shape[-1]


def append(
    state: TreeState, leaves: jax.Array, tokens: jax.Array, active: jax.Array | None = None
) -> tuple[TreeState, jax.Array]:
    """Each leaf grows by a token: (state, the new leaves).

    Args:
        leaves: int32 [B], nodes or -1; several may be the same node.
        tokens: int32 [B].
        active: bool [B]; a leaf that is not (a finished sequence) stays as it is. Default: all.

    A leaf for which no node is free stays as it is too, and `state.overflow` tells.
    """
    active = jnp.ones(leaves.shape, bool) if active is None else active
    rank = jnp.cumsum(active) - 1
    fits = active & (rank < state.num_free)
    # A number past the end is dropped by scatters; so rows that don't append write nowhere.
    nodes = jnp.where(fits, state.free[jnp.maximum(state.num_free - 1 - rank, 0)], state.capacity)
    above = jnp.where(leaves < 0, -1, state.depth[jnp.maximum(leaves, 0)])
    state = replace(
        state,
        parent=state.parent.at[nodes].set(leaves, mode="drop"),
        token=state.token.at[nodes].set(tokens, mode="drop"),
        depth=state.depth.at[nodes].set(above + 1, mode="drop"),
        refs=state.refs.at[nodes].set(1, mode="drop"),  # the leaf's own reference now is its child's
        num_free=state.num_free - fits.sum(dtype=jnp.int32),
        overflow=state.overflow | (active & ~fits).any(),
    )
    return state, jnp.where(fits, nodes, leaves).astype(jnp.int32)


def fork(state: TreeState, leaves: jax.Array, parents: jax.Array) -> tuple[TreeState, jax.Array]:
    """New leaf j goes on from `leaves[parents[j]]`: (state, new leaves int32 [M]). Copies nothing.

    Args:
        leaves: int32 [B], all leaves there are.
        parents: int32 [M], indices into `leaves`; repeated ones fork. A leaf that does not occur dies: its nodes are
            free again, as far up as no other leaf needs them.
    """
    new = leaves[parents]
    refs = state.refs.at[_scatterable(new, state)].add(1, mode="drop")
    refs = refs.at[_scatterable(leaves, state)].add(-1, mode="drop")
    return _free_unneeded(replace(state, refs=refs)), new


def path_pages(state: TreeState, leaves: jax.Array, max_depth: int) -> tuple[jax.Array, jax.Array]:
    """The K/V slots of each leaf's path: (int32 [B, max_depth], root first and then 0; lengths int32 [B]).

    With the pools viewed as pages of one slot, [num_pages * page_size, 1, ...], these are block tables. A path longer
    than `max_depth` (static) shows its last `max_depth` tokens.
    """
    return _along_paths(state, leaves, max_depth, state.slot)


def path_tokens(state: TreeState, leaves: jax.Array, max_depth: int) -> tuple[jax.Array, jax.Array]:
    """The tokens of each leaf's path, laid out as by `path_pages`."""
    return _along_paths(state, leaves, max_depth, state.token)


def path_length(state: TreeState, leaves: jax.Array) -> jax.Array:
    """int32 [B]: tokens on each leaf's path."""
    return jnp.where(leaves < 0, 0, state.depth[jnp.maximum(leaves, 0)] + 1)


def on_paths(state: TreeState, nodes: jax.Array) -> jax.Array:
    """bool [capacity]: which nodes lie on a path to one of `nodes` int32 [n], negative ones aside."""
    marked = jnp.zeros(state.capacity + 1, jnp.int32).at[_scatterable(nodes, state)].set(1)
    for up in _jumps(state, state.capacity):
        marked = marked.at[up].max(marked)
    return marked[:-1] > 0


def _along_paths(state, leaves, max_depth, values):
    lengths = jnp.minimum(path_length(state, leaves), max_depth)
    above = _scatterable(leaves, state)[:, None]  # a leaf, and so many of its ancestors
    for up in _jumps(state, max_depth):
        above = jnp.concatenate([above, up[above]], axis=1)
    nth = lengths[:, None] - 1 - jnp.arange(max_depth)
    nodes = jnp.take_along_axis(above, jnp.maximum(nth, 0), axis=1)
    return jnp.where(nth >= 0, values[jnp.minimum(nodes, state.capacity - 1)], 0), lengths


def _free_unneeded(state):
    """Frees the nodes that no leaf goes through; a leaf is what has more references than children."""
    used = state.parent != FREE
    up = _scatterable(state.parent, state)
    children = jnp.zeros_like(state.refs).at[jnp.where(used, up, state.capacity)].add(1, mode="drop")
    numbers = jnp.arange(state.capacity, dtype=jnp.int32)
    dead = used & ~on_paths(state, jnp.where(used & (state.refs > children), numbers, ROOT))
    place = jnp.where(dead, state.num_free + jnp.cumsum(dead) - 1, state.capacity)
    refs = state.refs.at[jnp.where(dead, up, state.capacity)].add(-1, mode="drop")
    return replace(
        state,
        parent=jnp.where(dead, FREE, state.parent),
        refs=jnp.where(dead, 0, refs),
        free=state.free.at[place].set(numbers, mode="drop"),
        num_free=state.num_free + dead.sum(dtype=jnp.int32),
    )


def _jumps(state: TreeState, longest: int) -> Iterator[jax.Array]:
    """int32 [capacity + 1] each: ancestors 1, 2, 4, ... levels up; `capacity` above the roots, and above itself.

    As many as paths of `longest` nodes need. Doubling takes log2 as many passes as going up level by level. And how
    many is known beforehand: a loop that ends by data makes a GPU wait for the host (`loops/strides.py`).
    """
    up = jnp.append(_scatterable(state.parent, state), state.capacity)
    for _ in range(max(longest - 1, 0).bit_length()):
        yield up
        up = up[up]


def _scatterable(nodes, state):
    # Scatters wrap negative numbers around, and drop those past the end.
    return jnp.where(nodes < 0, state.capacity, nodes)
