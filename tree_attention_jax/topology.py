"""Token forests: which node hangs under which, how many tokens it owns, and in which pages they lie.

A forest is the whole input of planning. Every node owns a run of ``kv_len`` tokens whose K and V are
cached once; its last ``q_len`` tokens are this step's queries. A query sees every token of every proper
ancestor of its node, and its own node's tokens up to and including itself. Decoding, prefill, chunked
prefill, draft verification and batches of unrelated requests are all forests, so nothing else in this
package knows those words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_kernels.layout import MAX_SLOTS
from tree_attention_jax._arrays import all_of, any_of, as_int_vector, ceil_div, exclusive_cumsum, ragged_arange
from tree_attention_jax._layout import Layout

__all__ = ["TokenTree"]


class TokenTree:
    """An immutable forest of token runs.

    Args:
        parent: int [N]. ``parent[i] < i``; ``-1`` for a root.
        kv_len: int [N], tokens cached by each node, the new ones included. 0 is allowed (an empty request).
        q_len: int [N], how many of the node's last tokens are queries (0 <= q_len <= kv_len). ``None``: 1 for
            every leaf that has tokens, 0 elsewhere, which is one decoding step.
        page_indptr: int [N + 1], CSR offsets into ``page_indices``, as in FlashInfer's paged KV layout.
        page_indices: int [page_indptr[-1]], page ids. Give both or neither; ``None`` lays every node on pages
            of its own, consecutive in node order.
        first_slot: int [N], the slot of its first page at which a node begins (default 0). Nodes may share a
            page slot by slot, so a radix split in the middle of a page moves no K/V.

    Queries are numbered in node order, and in token order within a node.

    Raises:
        ValueError: naming the argument, the node and the value. What depends on the page size (a table too
            short, a slot owned twice) is raised by :meth:`check_pages`, which ``plan_tree`` calls.
    """

    __slots__ = (
        "_checked",
        "_layout",
        "_offsets",
        "above",
        "first_slot",
        "kv_len",
        "num_children",
        "page_indices",
        "page_indptr",
        "parent",
        "q_len",
    )

    parent: np.ndarray
    kv_len: np.ndarray
    q_len: np.ndarray
    page_indptr: np.ndarray | None
    page_indices: np.ndarray | None
    first_slot: np.ndarray
    above: np.ndarray  # intp [N + 1]: parent + 1, behind a 0
    num_children: np.ndarray  # int [N + 1]: of the forest, which are its roots; then of each node

    def __init__(
        self,
        parent: Any,
        kv_len: Any,
        q_len: Any = None,
        page_indptr: Any = None,
        page_indices: Any = None,
        first_slot: Any = None,
    ):
        self.parent = as_int_vector("parent", parent)
        num_nodes = len(self.parent)
        self.above = np.zeros(num_nodes + 1, np.intp)
        np.add(self.parent, 1, out=self.above[1:])
        above = self.above[1:]
        _check_parent(self.parent, above)
        self.kv_len = as_int_vector("kv_len", kv_len, num_nodes)
        self.num_children = np.bincount(above, minlength=num_nodes + 1)
        if q_len is None:
            self.q_len = (self.is_leaf() & (self.kv_len > 0)).astype(np.int32)
        else:
            self.q_len = as_int_vector("q_len", q_len, num_nodes)
        if (page_indptr is None) != (page_indices is None):
            given, missing = ("page_indptr", "page_indices")[:: 1 if page_indices is None else -1]
            raise ValueError(f"{given} was given without {missing}: give both, or neither")
        if page_indptr is None:
            self.page_indptr = self.page_indices = None
            if first_slot is not None:
                raise ValueError("first_slot was given without a page table: it needs page_indptr and page_indices")
        else:
            self.page_indptr = as_int_vector("page_indptr", page_indptr, num_nodes + 1)
            self.page_indices = as_int_vector("page_indices", page_indices)
        if first_slot is None:
            self.first_slot = np.zeros(num_nodes, np.int32)
        else:
            self.first_slot = as_int_vector("first_slot", first_slot, num_nodes)
        self._checked: set[int] = set()
        self._offsets: dict[int, np.ndarray] = {}
        self._layout: Layout | None = None
        self._validate()
        for array in (self.parent, self.kv_len, self.q_len, self.first_slot, self.page_indptr, self.page_indices):
            if array is not None:
                array.setflags(write=False)

    # ------------------------------------------------------------------ constructors

    @classmethod
    def from_levels(cls, nodes_per_level: Sequence[int], tokens_per_node: Sequence[int]) -> TokenTree:
        """A regular forest: child ``j`` of a level hangs under node ``j * len(previous) // len(level)``.

        ``from_levels([1, 4, 16], [256, 64, 32])`` is a root of 256 tokens, 4 children of 64 and 16 leaves of
        32, each leaf decoding one token. A first level above 1 gives that many roots.
        """
        sizes = as_int_vector("nodes_per_level", nodes_per_level)
        tokens = as_int_vector("tokens_per_node", tokens_per_node, len(sizes))
        if len(sizes) == 0:
            raise ValueError("nodes_per_level is empty: a forest has at least one level")
        if any_of(sizes < 1):
            level = int(np.argmax(sizes < 1))
            raise ValueError(f"nodes_per_level[{level}] is {sizes[level]}: every level has at least one node")
        parents, begin, above = [np.full(sizes[0], -1, np.int64)], 0, int(sizes[0])
        for size in sizes[1:].tolist():
            parent = np.arange(0, size * above, above, dtype=np.int64)
            parent //= size
            parent += begin
            parents.append(parent)
            begin, above = begin + above, size
        return cls(np.concatenate(parents), tokens.repeat(sizes))

    @classmethod
    def from_block_tables(cls, block_tables: Any, kv_lens: Any, q_lens: Any, page_size: int = 16) -> TokenTree:
        """A batch as serving engines hold it; sequences that begin with the same pages share nodes.

        Args:
            block_tables: int [B, max_pages]; entries past a sequence's last page are ignored.
            kv_lens: int [B], tokens of each sequence, its ``q_lens`` new ones included.
            q_lens: int [B], new tokens of each sequence (any mix: 1 to decode, many to prefill, 0 for idle).
            page_size: tokens a page.

        Returns:
            A tree whose query order is the batch order (``cu_seqlens_q`` of the packed q).

        Raises:
            ValueError: two sequences would write the same slot, or a sequence that continues another one's
                new tokens comes before it in the batch.
        """
        from tree_attention_jax._block_tables import tree_arrays_from_block_tables

        return cls(*tree_arrays_from_block_tables(block_tables, kv_lens, q_lens, page_size))

    @classmethod
    def from_paths(cls, paths: Any, prompt_len: Any, *, page_size: int | None = None, root: bool = True) -> TokenTree:
        """Draft trees for speculative verification, each under its own prompt.

        Args:
            paths: Medusa/EAGLE choice lists: ``[0]`` is the best first token, ``[0, 2]`` the third-best token
                after it. One list of paths for every request, or one list of paths a request. Each prefix of
                a path must be listed before it.
            prompt_len: int, or int [B]: tokens cached before the draft. 0 leaves the prompt out.
            page_size: if given, draft tokens of a request lie side by side in the prompt's last page and the
                pages after it (64 one-token nodes fill 4 pages of 16); ``None`` gives each node its own page.
            root: the drafts hang under one more query token: the one the target model sampled last and
                whose K/V is not cached yet, as in Medusa and EAGLE.

        Returns:
            A tree in which each draft node holds one token that is a query. Queries of a request are in the
            order root first, then ``paths`` as listed.
        """
        from tree_attention_jax._draft_paths import tree_arrays_from_paths

        return cls(*tree_arrays_from_paths(paths, prompt_len, page_size, root))

    # ------------------------------------------------------------------ queries

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def num_queries(self) -> int:
        """Rows that ``q`` must have: the sum of ``q_len``."""
        return int(self.q_len.sum())

    def query_nodes(self) -> np.ndarray:
        """int32 [num_queries]: the node of each query, in query order."""
        return self.layout.query_node.astype(np.int32)

    def query_positions(self) -> np.ndarray:
        """int32 [num_queries]: absolute positions (tokens of all proper ancestors + index in the node)."""
        return self.layout.query_position.copy()

    @property
    def layout(self) -> Layout:
        """Depth-first numbering of nodes and queries (computed once): see :mod:`tree_attention_jax._layout`."""
        if self._layout is None:
            self._layout = Layout.of(self)
        return self._layout

    # ------------------------------------------------------------------ pages

    def page_table(self, page_size: int) -> tuple[np.ndarray, np.ndarray]:
        """``(page_indptr, page_indices)``, filled in for a tree that was made without a table."""
        if self.page_indptr is not None and self.page_indices is not None:
            return self.page_indptr, self.page_indices
        indptr = self.page_offsets(page_size)
        return indptr, np.arange(indptr[-1], dtype=np.int32)

    def page_offsets(self, page_size: int) -> np.ndarray:
        """The first array of :meth:`page_table`. In a table filled in, a page's place there is its id."""
        if self.page_indptr is not None:
            return self.page_indptr
        if page_size not in self._offsets:
            self._offsets[page_size] = exclusive_cumsum(ceil_div(self.kv_len, page_size))
        return self._offsets[page_size]

    def with_pages(self, page_size: int, reserve: int = 0) -> TokenTree:
        """The same tree on consecutive pages of its own, with room for ``reserve`` more tokens in every leaf.

        This is the explicit form of a tree made without a page table; a plan with a ``horizon`` needs it.
        """
        for name, value, least in (("page_size", page_size, 1), ("reserve", reserve, 0)):
            if not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name} is {value!r}: it must be an integer of at least {least}")
        room = self.kv_len + np.where(self.is_leaf() & (self.q_len > 0), reserve, 0)
        indptr = exclusive_cumsum(-(-room // page_size))
        return TokenTree(self.parent, self.kv_len, self.q_len, indptr, np.arange(indptr[-1], dtype=np.int32))

    def token_slots(self, page_size: int) -> np.ndarray:
        """int64 [kv_len.sum()]: ``page * page_size + slot`` of every token, in node and token order."""
        indptr, indices = self.page_table(page_size)
        node = np.repeat(np.arange(self.num_nodes), self.kv_len)
        place = self.first_slot[node] + ragged_arange(self.kv_len)
        return indices[indptr[node] + place // page_size].astype(np.int64) * page_size + place % page_size

    def is_leaf(self) -> np.ndarray:
        """bool [N]: nodes without children."""
        return self.num_children[1:] == 0

    def check_pages(self, page_size: int) -> None:
        """Validate what depends on the page size. The result is kept, so a second call costs nothing.

        Raises:
            ValueError: a page table shorter than its node's tokens, a ``first_slot`` outside the page, or a
                slot that two nodes own; the message names node and value.
        """
        if page_size in self._checked:
            return
        if self.page_indptr is not None:
            self._check_table(page_size)
        self._checked.add(page_size)

    def _check_table(self, page_size: int) -> None:
        outside = self.first_slot >= page_size
        if outside.any():
            node = int(np.argmax(outside))
            raise ValueError(f"first_slot[{node}] is {self.first_slot[node]}: pages have {page_size} slots")
        assert self.page_indptr is not None
        assert self.page_indices is not None
        have = np.diff(self.page_indptr)
        need = -(-(self.first_slot + self.kv_len) // page_size)
        short = (have < need) & (self.kv_len > 0)
        if short.any():
            node = int(np.argmax(short))
            raise ValueError(
                f"page table too short: node {node} has {have[node]} pages for {self.kv_len[node]} tokens from slot "
                f"{self.first_slot[node]}, which need {need[node]} pages of {page_size}"
            )
        listed = self.page_indices
        if len(listed) and int(listed.max()) >= MAX_SLOTS // page_size:
            raise ValueError(
                f"page_indices[{int(listed.argmax())}] is {listed.max()}: with {page_size} slots a page a pool may "
                f"have {MAX_SLOTS // page_size} pages"
            )
        if len(listed) < 2 or (listed[1:] > listed[:-1]).all():
            return  # increasing, so no page is listed twice
        self._check_slots_disjoint(page_size)

    def _check_slots_disjoint(self, page_size: int) -> None:
        indptr, indices = self.page_table(page_size)
        used = np.where(self.kv_len > 0, -(-(self.first_slot + self.kv_len) // page_size), 0)
        node = np.repeat(np.arange(self.num_nodes), used)
        which = ragged_arange(used)
        page = indices[indptr[node] + which].astype(np.int64)
        begin = page * page_size + np.where(which == 0, self.first_slot[node], 0)
        last = np.minimum((self.first_slot + self.kv_len)[node] - which * page_size, page_size)
        end = page * page_size + last
        order = np.argsort(begin, kind="stable")
        begin, end, node = begin[order], end[order], node[order]
        clash = begin[1:] < end[:-1]
        if clash.any():
            at = int(np.argmax(clash))
            slot = int(begin[at + 1])
            raise ValueError(
                f"page_indices: slot {slot % page_size} of page {slot // page_size} is owned twice, "
                f"by node {node[at]} and node {node[at + 1]}"
            )

    # ------------------------------------------------------------------ validation

    def _validate(self) -> None:
        kv_len, q_len = self.kv_len, self.q_len
        if not all_of((q_len >= 0) & (q_len <= kv_len)):
            _reject(kv_len < 0, lambda i: f"kv_len[{i}] is {kv_len[i]}: it must not be negative")
            _reject(q_len < 0, lambda i: f"q_len[{i}] is {q_len[i]}: it must not be negative")
            _reject(
                q_len > kv_len,
                lambda i: (
                    f"q_len[{i}] is {q_len[i]} but kv_len[{i}] is {kv_len[i]}: queries are the last tokens of "
                    f"their node, so q_len must not exceed kv_len"
                ),
            )
        if self.page_indptr is not None:
            _reject(self.first_slot < 0, lambda i: f"first_slot[{i}] is {self.first_slot[i]}: it must not be negative")
        if int(np.add.reduce(kv_len, dtype=np.int64)) >= 2**31:
            raise ValueError(f"kv_len sums to {int(kv_len.sum(dtype=np.int64))}: a forest holds less than 2**31 tokens")
        if self.page_indptr is None or self.page_indices is None:
            return
        indptr, indices = self.page_indptr, self.page_indices
        if indptr[0] != 0:
            raise ValueError(f"page_indptr[0] is {indptr[0]}: it must be 0")
        _reject(
            np.diff(indptr) < 0,
            lambda i: f"page_indptr[{i + 1}] is {indptr[i + 1]}, below page_indptr[{i}] which is {indptr[i]}",
        )
        if indptr[-1] != len(indices):
            raise ValueError(f"page_indptr ends at {indptr[-1]} but page_indices has {len(indices)} entries")
        _reject(indices < 0, lambda i: f"page_indices[{i}] is {indices[i]}: a page id must not be negative")

    def __repr__(self) -> str:
        roots = int((self.parent < 0).sum())
        return (
            f"TokenTree({self.num_nodes} nodes, {roots} root{'s' if roots != 1 else ''}, "
            f"{int(self.kv_len.sum())} tokens, {self.num_queries} queries)"
        )


def _reject(bad: np.ndarray, describe: Any) -> None:
    if bad.any():
        raise ValueError(describe(int(np.argmax(bad))))


def _check_parent(parent: np.ndarray, above: np.ndarray) -> None:
    # Without a sign, ``above`` = parent + 1 is huge where the parent is below -1.
    if all_of(above.view(np.uintp) <= np.arange(len(parent), dtype=np.uintp)):
        return
    nodes = np.arange(len(parent))
    _reject(parent < -1, lambda i: f"parent[{i}] is {parent[i]}: a parent is a node index, or -1 for a root")
    _reject(parent == nodes, lambda i: f"parent[{i}] is {i}: a node cannot be its own parent")
    _reject(
        parent > nodes,
        lambda i: (
            f"parent[{i}] is {parent[i]}: parents come before their children "
            f"(parent[i] < i), which also rules out cycles"
        ),
    )
