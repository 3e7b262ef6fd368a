"""The live decoding trees of many requests: who shares which tokens, and in which pages their K/V lies.

Requests grow at their leaves. A leaf forks into branches that share everything up to the fork, and a branch that
is pruned takes along the ancestors nobody else needs. Nothing of this moves K/V or copies a page: the first branch
to append goes on in its parent's last page, the others start pages of their own.

A step of a decoding loop:

    plan = plan_tree(tree.snapshot(), ...)   a `TokenTree` of all requests
    q = model(tree.pending_tokens())         a row for each token that has no K/V yet, in the plan's query order
    ...                                      append_kv and tree_attention with that plan
    tree.commit()                            those tokens have K/V now
    tree.append(leaves, sampled)             and the next ones do not
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from tree_attention_jax.cache import drafts, publishing, reserving, snapshots
from tree_attention_jax.cache._checks import as_count, as_ints, as_tokens, check_range
from tree_attention_jax.cache.forest import Forest
from tree_attention_jax.cache.moves import Moves
from tree_attention_jax.cache.node_table import NO_NODE
from tree_attention_jax.cache.page_pool import PagePool
from tree_attention_jax.cache.radix_cache import RadixCache

if TYPE_CHECKING:
    from tree_attention_jax.topology import TokenTree


class SequenceTree:
    """Live trees over a `PagePool`, with or without a `RadixCache` behind them.

    Leaves and draft nodes are integer handles, never reused: one that is finished or pruned stays an error. Every
    method that raises (`ValueError`, `TypeError`, `OutOfPages`) has changed nothing.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        cache: RadixCache | None = None,
        max_leaves: int | None = None,
        vocab_size: int | None = None,
    ):
        """
        Args:
            pool: where pages come from.
            page_size: token slots in a page.
            cache: prefix cache on the same pool. Requests then start from what it holds, share its nodes while
                they live, leave their tokens in it when they finish, and evict from it when pages run out.
            max_leaves: most leaves at a time over all requests (None: no limit).
            vocab_size: token ids are below it (None: any int32).
        """
        self.page_size = as_count("page_size", page_size, minimum=1)
        self.max_leaves = None if max_leaves is None else as_count("max_leaves", max_leaves, minimum=1)
        if cache is not None:
            if cache.pool is not pool or cache.page_size != page_size:
                raise ValueError("cache must be on the same pool and have the same page_size")
            if cache.has_sequences:
                raise ValueError("cache already serves another SequenceTree")
            cache.has_sequences = True
        self.pool, self.cache, self.vocab_size = pool, cache, vocab_size
        self._forest = Forest(pool, self.page_size) if cache is None else cache.forest
        self._num_leaves = 0
        self._next_request = 0
        self._requests: dict[int, tuple[int, Hashable]] = {}  # request -> (its leaves, its extra_key)

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, tokens: Any, extra_key: Hashable = None, reserve: int = 0) -> int:
        """Starts a request on prompt `tokens` [n], n at least 1, and returns its leaf.

        What the cache holds of the prompt (within namespace `extra_key`) is shared, but never the last token:
        somebody must compute its logits. The rest is pending. Pages for it and `reserve` more are taken now.
        """
        tokens = as_tokens("tokens", tokens, self.vocab_size)
        reserve = as_count("reserve", reserve)
        if tokens.size == 0:
            raise ValueError("tokens is empty: a request needs at least one token")
        hash(extra_key)  # TypeError now rather than when the tokens are to be cached
        self._check_room(1)
        forest, parent, cached = self._forest, NO_NODE, 0
        reserving.check_request(forest, self.cache, tokens, extra_key, reserve)
        if self.cache is not None:
            match = self.cache.match_prefix(tokens[:-1], extra_key)
            parent, cached = int(forest.table.rows(np.array([match.node]))[0]), match.length
        row = forest.new_node(parent, request=self._next_request, is_leaf=True)
        forest.hold(row)
        self._reserve(np.array([row]), np.array([tokens.size - cached + reserve]))
        forest.tokens.push(row, tokens[cached:])
        self._requests[self._next_request] = 1, extra_key
        self._next_request += 1
        self._num_leaves += 1
        return forest.table.handle(row)

    def prune(self, leaves: Any) -> None:
        """Drops leaves, and the ancestors that no other leaf (and no cache) needs. Their tokens are not cached."""
        self._drop(self._leaf_rows("leaves", leaves))

    def finish(self, leaves: Any) -> np.ndarray | list[np.ndarray]:
        """Ends leaves and returns their tokens, root to leaf: int32 [n], or a list of them for a list of leaves.

        With a cache, the tokens that have K/V stay behind there, evictable.
        """
        rows = self._leaf_rows("leaves", leaves)
        tokens = [self._path_tokens(row) for row in rows]
        for row in rows:
            drafts.discard(self._forest, row)
            if self.cache is not None:
                publishing.publish(self.cache, row, self._requests[int(self._forest.request[row])][1])
        self._drop(rows)
        return tokens[0] if np.ndim(leaves) == 0 else tokens

    def publish(self, leaf: int) -> None:
        """Makes what `leaf` has K/V for matchable by other requests now, while it lives (after its prefill, say).

        Does nothing without a cache. Tokens that somebody else cached meanwhile are taken from there, and this
        leaf's copies of them are freed.
        """
        row = self._leaf_rows("leaf", leaf, drafted=False)[0]
        if self.cache is not None:
            publishing.publish(self.cache, row, self._requests[int(self._forest.request[row])][1])

    # ------------------------------------------------------------------ leaves grow, fork and accept

    def append(self, leaves: Any, tokens: Any) -> None:
        """Appends tokens that have no K/V yet.

        leaves: one leaf, with tokens [t] or a single one; or a sequence of L different leaves, with tokens [L] (one
        each) or [L, t].
        """
        rows = self._leaf_rows("leaves", leaves, drafted=False)
        tokens = np.asarray(tokens)
        if np.ndim(leaves) == 0:
            tokens = tokens.reshape(1, -1) if tokens.ndim < 2 else tokens
        elif tokens.ndim == 1:
            tokens = tokens[:, None]
        if tokens.ndim != 2 or tokens.shape[0] != rows.size:
            raise ValueError(f"tokens has shape {tokens.shape} for {rows.size} leaves")
        flat = as_tokens("tokens", tokens.reshape(-1), self.vocab_size)
        counts = np.full(rows.size, tokens.shape[1])
        self._reserve(rows, counts)
        self._forest.tokens.extend(rows, counts, flat)

    def reserve(self, leaves: Any, n: int) -> None:
        """Takes the pages that the next `n` tokens of each of `leaves` will need."""
        rows = self._leaf_rows("leaves", leaves, drafted=False)
        self._reserve(rows, np.full(rows.size, as_count("n", n)))

    def fork(self, leaf: int, k: int) -> np.ndarray:
        """Replaces a leaf by `k` leaves that share all its tokens: handles, int64 [k]. Takes no page.

        With `k` 1 the leaf itself is returned; otherwise it is an inner node from now on.
        """
        row = self._leaf_rows("leaf", leaf, drafted=False)[0]
        k = as_count("k", k, minimum=1)
        if k == 1:
            return np.array([leaf])
        self._check_room(k - 1)
        return self._forest.table.handles(self._fork(np.array([row]), np.array([k])))

    def branch(self, leaves: Any, parents: Any) -> np.ndarray:
        """A beam step in one call: the new leaf j continues `leaves[parents[j]]`, and what none continues is pruned.

        Like `fork` and `prune` one by one, but in a few NumPy calls for thousands of leaves. A leaf that exactly one
        new leaf continues keeps its handle. Returns the new leaves' handles, int64 [len(parents)].
        """
        rows = self._leaf_rows("leaves", leaves, drafted=False)
        parents = as_ints("parents", parents)
        check_range("parents", parents, 0, rows.size, "position in leaves")
        counts = np.bincount(parents, minlength=rows.size)
        self._check_room(parents.size - rows.size)
        new = np.repeat(rows, counts)
        many = counts > 1
        new[np.repeat(many, counts)] = self._fork(rows[many], counts[many])
        self._drop(rows[counts == 0])
        by_parent = np.empty(parents.size, np.int64)
        by_parent[np.argsort(parents, kind="stable")] = new
        return self._forest.table.handles(by_parent)

    def draft(self, leaf: int, parents: Any, tokens: Any) -> np.ndarray:
        """Hangs a draft tree under a leaf: `tokens` [T], node i under node `parents[i]` < i, or -1 for the leaf.

        The nodes hold one token each and lie side by side in the slots after the leaf's last token, so 64 of them
        fill 4 pages of 16. Returns their handles, int64 [T]. Until `accept`, the leaf can't grow or fork.
        """
        row = self._leaf_rows("leaf", leaf, drafted=False)[0]
        parents, tokens = as_ints("parents", parents), as_tokens("tokens", tokens, self.vocab_size)
        drafts.check(parents, tokens)
        self._reserve(np.array([row]), np.array([tokens.size]))
        return self._forest.table.handles(drafts.add(self._forest, row, parents, tokens))

    def accept(self, path: Any) -> Moves:
        """Keeps the draft tokens on `path`, frees the others, and says which K/V to move into place.

        path: handles from the leaf down: the leaf, then the accepted draft nodes. (The leaf may be left out where
        at least one node is accepted.) `accept([leaf])` rejects the whole draft.

        The leaf's tokens then are its own followed by the accepted ones. Apply the moves, `move_slots(k_pages,
        v_pages, *moves)`, before the next K/V is written: freed slots may be given out again by then. ValueError
        if the path is not a chain of this draft, or its K/V has not been computed and committed.
        """
        path = as_ints("path", path)
        rows = self._forest.table.rows(path)
        if (rows < 0).any():
            raise ValueError(f"path: {self._complaint(path[np.argmax(rows < 0)], NO_NODE)}")
        return drafts.accept(self._forest, *drafts.split_path(self._forest, rows))

    # ------------------------------------------------------------------ what a step needs

    def snapshot(self, horizon: int = 0, max_q_len: int | None = None) -> TokenTree:
        """All live nodes as a `TokenTree`, whose queries are the pending tokens.

        horizon: also reserve pages for this many more tokens of every leaf, as `plan_tree(horizon=)` needs.
        max_q_len: at most so many pending tokens of a node in this step (chunked prefill). What hangs under a node
            whose prefill is not through waits.
        """
        horizon = as_count("horizon", horizon)
        max_q_len = _as_chunk(max_q_len)
        if horizon:
            rows = snapshots.live_rows(self._forest)
            if self._forest.has_draft[rows].any():
                raise ValueError("horizon must be 0 while a draft waits to be accepted")
            rows = rows[self._forest.is_leaf[rows]]
            self._reserve(rows, np.full(rows.size, horizon))
        return snapshots.token_tree(self._forest, horizon, max_q_len)

    def pending_tokens(self, max_q_len: int | None = None) -> np.ndarray:
        """int32 [Q]: the token of each query of the snapshot with this `max_q_len`."""
        return snapshots.pending_tokens(self._forest, _as_chunk(max_q_len))

    def commit(self, max_q_len: int | None = None) -> None:
        """The queries of the snapshot with this `max_q_len` have their K/V in the pages now."""
        snapshots.commit(self._forest, _as_chunk(max_q_len))

    def nodes(self) -> np.ndarray:
        """int64 [N]: handles of the snapshot's nodes, in its order."""
        return self._forest.table.handles(snapshots.live_rows(self._forest))

    def query_rows(self, nodes: Any, max_q_len: int | None = None) -> np.ndarray:
        """int64 [n]: which query row is the last one of each of `nodes` (leaves, draft nodes); -1 if none is."""
        rows = self._forest.table.rows(as_ints("nodes", nodes))
        return snapshots.query_rows(self._forest, rows, _as_chunk(max_q_len))

    # ------------------------------------------------------------------ looking

    @property
    def num_leaves(self) -> int:
        return self._num_leaves

    @property
    def num_nodes(self) -> int:
        return snapshots.live_rows(self._forest).size

    def leaves(self, request: int | None = None) -> np.ndarray:
        """int64 [n]: handles of the live leaves, of one request or of all, oldest first."""
        rows = snapshots.live_rows(self._forest)
        rows = rows[self._forest.is_leaf[rows]]
        if request is not None:
            rows = rows[self._forest.request[rows] == request]
        return self._forest.table.handles(rows)

    def request_of(self, leaf: int) -> int:
        """The number of the request that a leaf belongs to, counting from 0 as they were added."""
        return int(self._forest.request[self._leaf_rows("leaf", leaf)[0]])

    def tokens(self, leaf: int) -> np.ndarray:
        """int32 [n]: all tokens from the root to a leaf."""
        return self._path_tokens(self._leaf_rows("leaf", leaf)[0])

    def length(self, leaf: int) -> int:
        """Tokens from the root to a leaf."""
        return int(self._forest.tokens.count[self._forest.path(self._leaf_rows("leaf", leaf)[0])].sum())

    def __repr__(self) -> str:
        return f"SequenceTree({len(self._requests)} requests, {self.num_leaves} leaves, {self.num_nodes} nodes)"

    # ------------------------------------------------------------------ inside

    def _reserve(self, rows, extra):
        reserving.reserve(self._forest, self.cache, rows, extra)

    def _fork(self, rows, counts):
        # Rows of counts[i] new leaves in the place of leaf rows[i], one leaf's after the other.
        forest = self._forest
        # A leaf without tokens would be an empty inner node: its branches hang under its parent instead.
        full = forest.tokens.count[rows] > 0
        under = np.repeat(np.where(full, rows, forest.parent[rows]), counts)
        new = forest.take(under.size)
        forest.hang(new, under, request=np.repeat(forest.request[rows], counts), is_leaf=True, locks=1)
        np.add.at(forest.pinned_children, under, 1)
        inner = rows[full]
        forest.is_leaf[inner] = forest.tail_taken[inner] = False
        used = -(-forest.end_slot(inner) // self.page_size)
        for row, pages in zip(inner[forest.pages.count[inner] > used], used[forest.pages.count[inner] > used]):
            forest.drop_pages_after(row, int(pages))
        for request, more in zip(forest.request[rows].tolist(), (counts - 1).tolist()):
            self._count_leaves(request, more)
        forest.release(rows)
        return new

    def _drop(self, rows):
        forest = self._forest
        for row in rows[forest.has_draft[rows]]:
            drafts.discard(forest, row)
        for request in forest.request[rows].tolist():
            self._count_leaves(request, -1)
        forest.is_leaf[rows] = False
        bereft = forest.release(rows)
        for row in bereft[forest.num_children[bereft] == 1].tolist():
            if forest.table.alive[row]:  # not joined as the child of another
                forest.join_only_child(row)

    def _count_leaves(self, request, more):
        count, extra_key = self._requests.pop(request)
        self._num_leaves += more
        if count + more:
            self._requests[request] = count + more, extra_key

    def _path_tokens(self, row):
        return np.concatenate([self._forest.tokens[r] for r in self._forest.path(row)])

    def _leaf_rows(self, name, leaves, drafted=True):
        """Rows of different live leaves; ValueError names the first handle that is not one."""
        handles = as_ints(name, leaves)
        rows = self._forest.table.rows(handles)
        bad = (rows < 0) | ~self._forest.is_leaf[rows] if self._forest.table.capacity else rows < 0
        if not drafted:
            bad |= self._forest.has_draft[rows]
        if bad.any():
            raise ValueError(f"{name}: {self._complaint(handles[np.argmax(bad)], rows[np.argmax(bad)])}")
        if np.unique(rows).size < rows.size:
            raise ValueError(f"{name} names a leaf twice")
        return rows

    def _complaint(self, handle, row):
        if row < 0:
            return f"{handle} is not live (finished, pruned or never made)"
        if self._forest.is_leaf[row]:
            return f"{handle} has a draft; accept or reject it first"
        return f"{handle} is {'a draft' if self._forest.is_draft[row] else 'an inner'} node, not a leaf"

    def _check_room(self, more):
        if self.max_leaves is not None and self._num_leaves + more > self.max_leaves:
            raise ValueError(f"{more} more leaves asked for, {self._num_leaves} of at most {self.max_leaves} in use")


def _as_chunk(max_q_len):
    return None if max_q_len is None else as_count("max_q_len", max_q_len, minimum=1)
