"""What must hold of a pool, a forest and a cache after every operation, recounted from scratch."""

from collections import Counter

import numpy as np


def check_forest(forest, cache=None):
    pool, rows = forest.pool, forest.table.order()
    pool.check()
    assert pool.num_free + pool.num_evictable + pool.num_protected == pool.capacity
    assert sorted(rows) == sorted(np.flatnonzero(forest.table.alive))
    place = {int(row): i for i, row in enumerate(rows)}
    children = {row: [] for row in place}
    for row in place:
        parent = int(forest.parent[row])
        if parent >= 0:
            assert place[parent] < place[row], "a child comes before its parent"
            children[parent].append(row)
    for row in place:
        check_node(forest, row, children[row])
    assert set(forest.idle) == {row for row in place if not forest.is_pinned(row)}
    check_idle_order(forest)
    check_slots_disjoint(forest, place)
    check_page_owners(forest, place)
    if cache is not None:
        check_index(cache, place)


def check_node(forest, row, children):
    assert forest.num_children[row] == len(children)
    assert forest.child_xor[row] == np.bitwise_xor.reduce(children or [0])
    assert forest.pinned_children[row] == sum(bool(forest.is_pinned(c)) for c in children)
    assert forest.locks[row] >= 0
    goes_on = forest.continues(np.array(children, int), np.full(len(children), row)).any()
    in_draft = forest.has_draft[row] or forest.is_draft[row]
    assert forest.tail_taken[row] >= goes_on or in_draft, "somebody else could start where a child goes on"
    if not (forest.kept[row] or forest.is_leaf[row] or in_draft):
        assert forest.tail_taken[row] == goes_on, "nobody can use the rest of the page"
    assert forest.kept[row] or forest.is_pinned(row)
    assert 0 <= forest.filled[row] <= forest.tokens.count[row]
    assert 0 <= forest.first_slot[row] < forest.page_size
    slots = forest.pages.count[row] * forest.page_size
    assert forest.end_slot(row) <= slots or forest.tokens.count[row] == 0
    if not forest.is_leaf[row]:
        assert slots - forest.end_slot(row) < forest.page_size, "an inner node holds pages it does not need"
        assert forest.tokens.count[row] > 0
    if children and forest.filled[row] < forest.tokens.count[row]:
        assert not any(forest.filled[c] for c in children), "filled below what is not"


def check_idle_order(forest):
    seen = set()
    for row in forest.idle:
        seen.add(row)
        parent = int(forest.parent[row])
        assert parent not in seen, "an ancestor would be evicted before its descendant"


def check_slots_disjoint(forest, rows):
    owned = Counter()
    for row in rows:
        at = int(forest.first_slot[row]) + np.arange(forest.tokens.count[row])
        pages = forest.pages[row].astype(np.int64)
        owned.update((pages[at // forest.page_size] * forest.page_size + at % forest.page_size).tolist())
    assert all(n == 1 for n in owned.values()), "a slot has two owners"


def check_page_owners(forest, rows):
    """Nodes hold exactly one reference a page; tests add none of their own, so the pool counts the same."""
    refs = np.zeros(forest.pool.capacity, int)
    loose = np.zeros(forest.pool.capacity, int)
    for row in rows:
        refs[forest.pages[row]] += 1
        loose[forest.pages[row]] += row in forest.idle
    extra = getattr(forest, "test_references", 0)  # what a test holds besides the nodes
    assert np.array_equal(forest.pool._refs, refs + extra)
    assert np.array_equal(forest.pool._loose, loose)


def check_index(cache, rows):
    forest = cache.forest
    kept = {row for row in rows if forest.kept[row]}
    assert set(cache._index.values()) == kept
    assert len(cache._index) == len(kept)
    for (parent, token), row in cache._index.items():
        assert forest.tokens[row][0] == token
        assert forest.filled[row] == forest.tokens.count[row], "a token without K/V can be matched"
        assert forest.parent[row] == (parent if isinstance(parent, int) else -1)
        assert forest.parent[row] < 0 or forest.kept[forest.parent[row]]
    assert set(cache._root_keys) == {row for row in kept if forest.parent[row] < 0}
