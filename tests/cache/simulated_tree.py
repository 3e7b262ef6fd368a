"""A `SequenceTree` next to its brute-force twin, with K/V simulated by path hashes.

The K/V of a token depends on the whole path up to it, so a slot's simulated content is a hash of that path. `step`
writes what a model would write; `check` reads every live and every cached token back through the page tables.
"""

import numpy as np

from tree_attention_jax.cache import PagePool, RadixCache, SequenceTree


def path_hashes(tokens):
    hashes, h = [], 0
    for token in tokens:
        h = hash((h, int(token)))
        hashes.append(h)
    return np.array(hashes, np.int64)


class SimulatedTree:
    def __init__(self, capacity, page_size, cached, **kwargs):
        self.pool = PagePool(capacity)
        self.cache = RadixCache(self.pool, page_size) if cached else None
        self.tree = SequenceTree(self.pool, page_size, self.cache, **kwargs)
        self.kv = np.zeros(capacity * page_size, np.int64)
        self.twin = {}  # leaf -> its tokens; what the tree should say
        self.drafts = {}  # leaf -> {draft node: (the node above, its token)}

    def add_request(self, tokens, **kwargs):
        leaf = self.tree.add_request(tokens, **kwargs)
        self.twin[leaf] = list(tokens)
        return leaf

    def append(self, leaves, tokens):
        self.tree.append(leaves, tokens)
        for leaf, more in zip(leaves, tokens):
            self.twin[leaf] += list(np.atleast_1d(more))

    def fork(self, leaf, k):
        children = self.tree.fork(leaf, k).tolist()
        tokens = self.twin.pop(leaf)
        self.twin.update({child: list(tokens) for child in children})
        return children

    def branch(self, leaves, parents):
        new = self.tree.branch(leaves, parents).tolist()
        tokens = {leaf: self.twin.pop(leaf) for leaf in leaves}
        self.twin.update({leaf: list(tokens[leaves[parent]]) for leaf, parent in zip(new, parents)})

    def drop(self, leaf, finish):
        tokens = self.twin.pop(leaf)
        self.drafts.pop(leaf, None)
        if finish:
            assert self.tree.finish(leaf).tolist() == tokens
        else:
            self.tree.prune(leaf)

    def draft(self, leaf, parents, tokens):
        nodes = self.tree.draft(leaf, parents, tokens).tolist()
        above = [leaf if p < 0 else nodes[p] for p in parents]
        self.drafts[leaf] = dict(zip(nodes, zip(above, tokens)))
        return nodes

    def accept(self, leaf, path):
        moves = self.tree.accept([leaf, *path])
        self.kv[moves.dst] = self.kv[moves.src]
        draft = self.drafts.pop(leaf)
        self.twin[leaf] += [draft[node][1] for node in path]

    def step(self, horizon=0, max_q_len=None):
        """What a model does in one step: the K/V of the queries goes to the slots that the snapshot names."""
        snapshot = self.tree.snapshot(horizon, max_q_len)
        snapshot.check_pages(self.tree.page_size)
        q = self.tree.pending_tokens(max_q_len)
        assert q.size == snapshot.num_queries
        slots = snapshot.token_slots(self.tree.page_size)
        hashes = np.zeros(snapshot.num_nodes + 1, np.int64)
        at = taken = 0
        for n in range(snapshot.num_nodes):
            kv_len, q_len = int(snapshot.kv_len[n]), int(snapshot.q_len[n])
            h = int(hashes[snapshot.parent[n]])
            old = self.kv[slots[at : at + kv_len - q_len]]
            h = int(old[-1]) if old.size else h
            for i in range(q_len):
                h = hash((h, int(q[taken + i])))
                self.kv[slots[at + kv_len - q_len + i]] = h
            hashes[n] = h
            at, taken = at + kv_len, taken + q_len
        self.tree.commit(max_q_len)
        return snapshot

    def check(self):
        assert sorted(self.tree.leaves().tolist()) == sorted(self.twin)
        assert self.tree.num_leaves == len(self.twin)
        forest = self.tree._forest
        for leaf, tokens in self.twin.items():
            assert self.tree.tokens(leaf).tolist() == tokens
            row = int(forest.table.rows(np.array([leaf]))[0])
            self.check_path(row, path_hashes(tokens))
        for leaf, nodes in self.drafts.items():
            for node in nodes:
                self.check_path(int(forest.table.rows(np.array([node]))[0]), path_hashes(self.draft_tokens(leaf, node)))
        if self.cache is not None:
            rows = np.array(list(self.cache._index.values()), np.int64)
            for row in rows[forest.num_children[rows] == 0].tolist():
                tokens = np.concatenate([forest.tokens[r] for r in forest.path(row)])
                self.check_path(row, path_hashes(tokens))

    def draft_tokens(self, leaf, node):
        tokens = []
        while node != leaf:
            node, token = self.drafts[leaf][node]
            tokens.append(token)
        return self.twin[leaf] + tokens[::-1]

    def check_path(self, row, hashes):
        forest, page_size, done = self.tree._forest, self.tree.page_size, 0
        for r in forest.path(row):
            filled = int(forest.filled[r])
            at = int(forest.first_slot[r]) + np.arange(filled)
            slots = forest.pages[r].astype(np.int64)[at // page_size] * page_size + at % page_size
            assert np.array_equal(self.kv[slots], hashes[done : done + filled]), "K/V of another token"
            done += int(forest.tokens.count[r])
