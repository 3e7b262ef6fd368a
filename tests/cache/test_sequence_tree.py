import jax.numpy as jnp
import numpy as np
import pytest
from forest_invariants import check_forest
from freezing import freeze
from simulated_tree import SimulatedTree, path_hashes

from tree_attention_jax.cache import Moves, OutOfPages, PagePool, RadixCache, SequenceTree, move_slots


def in_use(tree):
    return tree.pool.capacity - tree.pool.num_free


def test_prompt_then_decoding_in_one_node():
    tree = SequenceTree(PagePool(8), 4)
    leaf = tree.add_request([5, 6, 7])
    step = tree.snapshot()
    assert (step.kv_len.tolist(), step.q_len.tolist()) == ([3], [3])
    assert tree.pending_tokens().tolist() == [5, 6, 7]
    tree.commit()
    tree.append(leaf, 8)
    tree.append(leaf, 9)
    step = tree.snapshot()
    assert (step.kv_len.tolist(), step.q_len.tolist()) == ([5], [2])
    assert tree.tokens(leaf).tolist() == [5, 6, 7, 8, 9]
    assert tree.length(leaf) == 5
    assert in_use(tree) == 2


def test_the_first_branch_goes_on_in_its_parents_page_and_the_others_start_their_own():
    tree = SequenceTree(PagePool(8), 4)
    leaves = tree.fork(tree.add_request([1, 2, 3]), 3)
    assert in_use(tree) == 1
    tree.append(leaves, [4, 5, 6])
    step = tree.snapshot()
    assert step.parent.tolist() == [-1, 0, 0, 0]
    assert step.first_slot.tolist() == [0, 3, 0, 0]
    assert step.page_indices.tolist() == [0, 0, 1, 2]


def test_pruning_frees_what_nobody_else_needs_and_joins_what_is_left():
    tree = SequenceTree(PagePool(8), 4)
    a, b = tree.fork(tree.add_request([1, 2, 3]), 2)
    tree.append([a, b], [[4, 5], [6, 7]])
    c, d = tree.fork(b, 2)
    tree.append([c, d], [8, 9])
    tree.prune([c, d])
    assert tree.num_nodes == 1, "the fork's other branch is one node again"
    assert tree.tokens(a).tolist() == [1, 2, 3, 4, 5]
    assert in_use(tree) == 2
    tree.prune(a)
    assert in_use(tree) == 0
    assert tree.num_nodes == 0
    assert tree.num_leaves == 0


def test_branch_is_fork_and_prune_in_one_call():
    tree = SequenceTree(PagePool(32), 4)
    leaves = tree.fork(tree.add_request([1, 2, 3]), 4)
    tree.append(leaves, [10, 11, 12, 13])
    new = tree.branch(leaves, [3, 1, 3, 0])
    assert [tree.tokens(leaf)[-1] for leaf in new] == [13, 11, 13, 10]
    assert [new[1], new[3]] == [leaves[1], leaves[0]], "who is continued once stays"
    assert tree.num_nodes == 6
    assert in_use(tree) == 3
    assert tree.branch(new, []).size == 0
    assert in_use(tree) == 0


def test_a_pruned_branch_gives_back_the_rest_of_its_parents_page():
    tree = SequenceTree(PagePool(8), 4)
    a, b, c = tree.fork(tree.add_request([1, 2, 3]), 3)
    tree.append(a, [4])
    tree.prune(a)
    tree.append(b, [5])
    assert in_use(tree) == 1
    tree.append(c, [6])
    assert in_use(tree) == 2


def test_many_requests_have_their_own_roots():
    tree = SequenceTree(PagePool(8), 4)
    a, b = tree.add_request([1, 2]), tree.add_request([1, 2, 3])
    c, d = tree.fork(a, 2)
    assert tree.snapshot().parent.tolist() == [-1, -1, 0, 0]
    assert [tree.request_of(leaf) for leaf in (b, c, d)] == [1, 0, 0]
    assert tree.leaves(0).tolist() == [c, d]
    assert tree.leaves(1).tolist() == [b]


def test_a_snapshot_with_a_horizon_has_the_pages_of_tokens_to_come():
    tree = SequenceTree(PagePool(16), 4)
    leaves = tree.fork(tree.add_request([1, 2, 3]), 2)
    tree.append(leaves, [4, 5])
    step = tree.snapshot(horizon=4)
    assert np.diff(step.page_indptr).tolist() == [1, 2, 2]
    before = in_use(tree)
    tree.append(leaves, np.zeros((2, 4), int))
    assert in_use(tree) == before
    a, b = tree.fork(leaves[0], 2)
    assert in_use(tree) == before, "a page half full stays with the inner node"
    tree.prune([a, b])


def test_a_fork_returns_pages_reserved_ahead():
    tree = SequenceTree(PagePool(16), 4)
    leaf = tree.add_request([1, 2, 3], reserve=9)
    assert in_use(tree) == 3
    tree.fork(leaf, 2)
    assert in_use(tree) == 1


def test_chunked_prefill_holds_back_what_hangs_below():
    tree = SequenceTree(PagePool(16), 4)
    leaf = tree.add_request(np.arange(10))
    other = tree.add_request([1])
    children = tree.fork(leaf, 2)
    tree.append(children, [10, 11])
    seen = []
    for _ in range(3):
        step = tree.snapshot(max_q_len=4)
        seen.append((step.kv_len.tolist(), step.q_len.tolist(), tree.pending_tokens(4).tolist()))
        assert tree.query_rows([other], 4).tolist() == ([4] if len(seen) == 1 else [-1])
        tree.commit(max_q_len=4)
    assert seen[0] == ([4, 1, 0, 0], [4, 1, 0, 0], [0, 1, 2, 3, 1])
    assert seen[1] == ([8, 1, 0, 0], [4, 0, 0, 0], [4, 5, 6, 7])
    assert seen[2] == ([10, 1, 1, 1], [2, 0, 1, 1], [8, 9, 10, 11])
    assert tree.pending_tokens().size == 0


def test_requests_share_live_nodes_through_the_cache():
    pool = PagePool(16)
    tree = SequenceTree(pool, 4, RadixCache(pool, 4))
    a = tree.add_request(np.arange(10))
    tree.commit()
    tree.publish(a)
    b = tree.add_request([*range(7), 99])
    step = tree.snapshot()
    assert step.kv_len.tolist() == [7, 3, 0, 1]
    assert step.parent.tolist() == [-1, 0, 1, 0]
    assert tree.pending_tokens().tolist() == [99]
    assert in_use(tree) == 3 + 1
    tree.prune(b)
    assert tree.tokens(a).tolist() == list(range(10))


def test_a_prompt_is_never_wholly_cached():
    pool = PagePool(16)
    tree = SequenceTree(pool, 4, RadixCache(pool, 4))
    tree.finish(committed(tree, [1, 2, 3, 4]))
    leaf = tree.add_request([1, 2, 3, 4])
    assert tree.pending_tokens().tolist() == [4]
    assert tree.tokens(leaf).tolist() == [1, 2, 3, 4]


def committed(tree, tokens, **kwargs):
    leaf = tree.add_request(tokens, **kwargs)
    tree.commit()
    return leaf


def test_an_aborted_prefill_is_never_matched():
    pool = PagePool(16)
    tree = SequenceTree(pool, 4, RadixCache(pool, 4))
    tree.prune(tree.add_request(np.arange(8)))
    assert pool.num_free == 16
    leaf = tree.add_request(np.arange(8))
    assert tree.pending_tokens().size == 8
    tree.commit(max_q_len=5)
    tree.finish(leaf)  # given up after a chunk of 5
    tree.add_request(np.arange(8))
    assert tree.pending_tokens().tolist() == [5, 6, 7]


def test_namespaces_do_not_share():
    pool = PagePool(16)
    tree = SequenceTree(pool, 4, RadixCache(pool, 4))
    tree.finish(committed(tree, [1, 2, 3], extra_key="a"))
    tree.add_request([1, 2, 3], extra_key="b")
    assert tree.pending_tokens().size == 3


def test_running_out_evicts_from_the_cache_first():
    pool = PagePool(4)
    tree = SequenceTree(pool, 4, RadixCache(pool, 4))
    tree.finish(committed(tree, np.arange(12)))
    assert pool.num_evictable == 3
    leaf = tree.add_request(np.arange(50, 59))
    assert pool.num_evictable == 1
    before = freeze(tree, pool)
    with pytest.raises(OutOfPages) as error:
        tree.append(leaf, np.arange(8))
    assert (error.value.needed, error.value.free, error.value.evictable) == (2, 0, 1)
    assert freeze(tree, pool) == before


def test_a_shared_prefix_is_not_evicted_for_the_request_that_shares_it():
    pool = PagePool(4)
    tree = SequenceTree(pool, 4, RadixCache(pool, 4))
    tree.finish(committed(tree, np.arange(12)))
    before = freeze(tree, pool)
    with pytest.raises(OutOfPages) as error:
        tree.add_request([*range(12), 12, 13, 14, 15, 16])
    assert (error.value.needed, error.value.free, error.value.evictable) == (2, 1, 0)
    assert freeze(tree, pool) == before
    assert tree.length(tree.add_request([*range(12), 12, 13, 14])) == 15


def test_slots_after_a_duplicate_that_was_dropped_stay_with_its_branch():
    sim = SimulatedTree(32, 8, cached=True)
    sim.add_request([1, 2])
    sim.step()
    sim.drop(next(iter(sim.twin)), finish=True)
    a, b = sim.add_request([1, 2, 3, 9]), sim.add_request([1, 2, 3, 9, 7])
    (a, _) = sim.fork(a, 2)
    sim.append([a], [5])  # in the same page as [1, 2] and a's own [3, 9]
    sim.step()
    sim.tree.publish(b)
    sim.tree.publish(a)  # its [3, 9] is b's now; the slots after it are not
    sim.add_request([1, 2, 8, 8, 8, 8])
    sim.step()
    sim.check()
    check_forest(sim.tree._forest, sim.cache)


def test_two_requests_with_one_prompt_end_up_on_one_copy():
    sim = SimulatedTree(32, 4, cached=True)
    a, b = (sim.add_request(list(range(9))) for _ in range(2))
    b1, b2 = sim.fork(b, 2)
    sim.append([a, b1, b2], [[20], [21], [22]])
    sim.step()
    assert in_use(sim.tree) == 3 + 3 + 1
    sim.tree.publish(a)
    sim.tree.publish(b1)
    assert in_use(sim.tree) == 3 + 2, "the second copy of the prompt is free, its branches keep theirs"
    sim.check()
    check_forest(sim.tree._forest, sim.cache)


def test_accept_compacts_the_draft_on_the_device():
    page_size, depth = 4, 2
    sim = SimulatedTree(8, page_size, cached=False)
    leaf = sim.add_request([1, 2, 3, 4, 5])
    nodes = sim.draft(leaf, [-1, -1, 0, 1, 1, 4], [10, 11, 12, 13, 14, 15])
    step = sim.step()
    assert np.unique(step.page_indices).size == 3, "draft tokens lie side by side"
    pages = sim.kv.astype(np.int32).reshape(8, page_size, 1, 1)
    k = [jnp.asarray(pages + layer) for layer in range(depth)]
    v = [jnp.asarray(-pages - layer) for layer in range(depth)]
    moves = sim.tree.accept([leaf, nodes[1], nodes[4], nodes[5]])
    k, v = move_slots(k, v, *moves.pad(8))
    assert sim.tree.tokens(leaf).tolist() == [1, 2, 3, 4, 5, 11, 14, 15]
    step = sim.tree.snapshot()
    assert step.num_nodes == 1
    assert in_use(sim.tree) == 2
    assert sim.tree.pending_tokens().size == 0
    expected = path_hashes([1, 2, 3, 4, 5, 11, 14, 15]).astype(np.int32)
    for layer in range(depth):
        assert np.array_equal(k[layer].reshape(-1)[step.token_slots(page_size)], expected + layer)
        assert np.array_equal(v[layer].reshape(-1)[step.token_slots(page_size)], -expected - layer)


def test_rejecting_a_whole_draft_gives_its_pages_back():
    tree = SequenceTree(PagePool(8), 4)
    leaf = committed(tree, [1, 2, 3])
    tree.draft(leaf, np.arange(-1, 9), np.arange(10))
    assert in_use(tree) == 4
    tree.commit()
    assert tree.accept([leaf]).src.size == 0
    assert in_use(tree) == 1
    tree.append(leaf, 7)
    assert tree.tokens(leaf).tolist() == [1, 2, 3, 7]


def test_moves_of_several_requests_join():
    moves = Moves.concatenate([Moves(np.array([1], np.int32), np.array([2], np.int32))] * 2)
    assert moves.src.tolist() == [1, 1]
    assert Moves.concatenate([]).dst.size == 0
    with pytest.raises(ValueError, match="n is 1"):
        moves.pad(1)


def broken_calls():
    yield "prune twice", lambda t, x: t.prune([x.a, x.a]), ValueError, "names a leaf twice"
    yield "prune an inner node", lambda t, x: t.prune(x.inner), ValueError, "is an inner node, not a leaf"
    yield "prune a draft node", lambda t, x: t.prune(x.draft[0]), ValueError, "is a draft node"
    yield "prune what is gone", lambda t, x: t.prune([x.a, x.gone]), ValueError, "is not live"
    yield "fork a finished leaf", lambda t, x: t.fork(x.gone, 2), ValueError, "is not live"
    yield "fork an inner node", lambda t, x: t.fork(x.inner, 2), ValueError, "is an inner node"
    yield "fork into none", lambda t, x: t.fork(x.a, 0), ValueError, "k must be at least 1"
    yield "fork past the limit", lambda t, x: t.fork(x.a, 4), ValueError, "3 more leaves asked for, 3 of at most 5"
    yield "fork with a draft", lambda t, x: t.fork(x.b, 2), ValueError, "has a draft"
    yield "branch past the limit", lambda t, x: t.branch([x.a], [0] * 4), ValueError, "3 more leaves asked for"
    yield "branch from nowhere", lambda t, x: t.branch([x.a, x.c], [0, 2]), ValueError, r"parents\[1\] is 2"
    yield "finish twice", lambda t, x: t.finish(x.gone), ValueError, "is not live"
    yield "append to a draft", lambda t, x: t.append(x.b, 1), ValueError, "has a draft"
    yield "append nonsense", lambda t, x: t.append(x.a, -1), ValueError, r"tokens\[0\] is -1"
    yield "append past the vocabulary", lambda t, x: t.append(x.a, [1, 100]), ValueError, r"tokens\[1\] is 100"
    yield "append floats", lambda t, x: t.append(x.a, 1.5), TypeError, "tokens must be integers"
    yield "append a ragged batch", lambda t, x: t.append([x.a, x.c], [1, 2, 3]), ValueError, "for 2 leaves"
    yield "append too much", lambda t, x: t.append(x.a, np.zeros(99, int)), OutOfPages, "25 pages needed"
    yield "append too much to all", lambda t, x: t.append([x.a, x.c], np.zeros((2, 24), int)), OutOfPages, "needed"
    yield "reserve too much", lambda t, x: t.reserve(x.a, 99), OutOfPages, "25 pages needed"
    yield "an empty request", lambda t, x: t.add_request([]), ValueError, "at least one token"
    yield "a request too long", lambda t, x: t.add_request(np.zeros(99, int)), OutOfPages, "25 pages needed"
    yield "a cached request too long", lambda t, x: t.add_request([1, 2, 9] * 30), OutOfPages, "pages needed"
    yield "draft out of order", lambda t, x: t.draft(x.a, [-1, 1], [1, 2]), ValueError, r"parents\[1\] is 1"
    yield "draft out of range", lambda t, x: t.draft(x.a, [-2], [1]), ValueError, r"parents\[0\] is -2"
    yield "draft of nothing", lambda t, x: t.draft(x.a, [], []), ValueError, "one a node"
    yield "draft too much", lambda t, x: t.draft(x.a, [-1] * 90, [1] * 90), OutOfPages, "needed"
    yield "a second draft", lambda t, x: t.draft(x.b, [-1], [1]), ValueError, "has a draft"
    yield "accept a leaf's path", lambda t, x: t.accept([x.a]), ValueError, "no leaf with a draft"
    yield "accept no chain", lambda t, x: t.accept([x.b, x.draft[1]]), ValueError, "no draft node under the one before"
    yield "accept siblings", lambda t, x: t.accept([x.b, x.draft[0], x.draft[2]]), ValueError, "no draft node under"
    yield "accept from the middle", lambda t, x: t.accept([x.draft[1]]), ValueError, "no leaf with a draft"
    yield "accept nothing", lambda t, x: t.accept([]), ValueError, "path is empty"
    yield "accept another's node", lambda t, x: t.accept([x.b, x.c]), ValueError, "no draft node under"
    yield "accept before the model ran", lambda t, x: t.accept([x.b, x.draft[0]]), ValueError, "run the model"
    yield "horizon with a draft", lambda t, x: t.snapshot(horizon=1), ValueError, "while a draft waits"
    yield "negative horizon", lambda t, x: t.snapshot(horizon=-1), ValueError, "horizon must be at least 0"
    yield "chunks of nothing", lambda t, x: t.snapshot(max_q_len=0), ValueError, "max_q_len must be at least 1"
    yield "commit of nothing", lambda t, x: t.commit(max_q_len=0), ValueError, "max_q_len must be at least 1"
    yield "an unhashable namespace", lambda t, x: t.add_request([1], extra_key=[]), TypeError, "unhashable"
    yield "no namespace", lambda t, x: t.add_request([1, 2], extra_key={}), TypeError, "unhashable"


@pytest.mark.parametrize(("call", "error", "message"), [pytest.param(*c, id=i) for i, *c in broken_calls()])
def test_misuse_changes_nothing(call, error, message):
    pool = PagePool(12)
    tree = SequenceTree(pool, 4, RadixCache(pool, 4), max_leaves=5, vocab_size=100)

    class Handles:
        gone = committed(tree, [1, 2, 9, 4, 5, 6])
        inner = committed(tree, [1, 2, 3])

    tree.finish(Handles.gone)
    Handles.a, Handles.b, Handles.c = tree.fork(Handles.inner, 3).tolist()
    tree.append(Handles.b, 3)
    tree.commit()
    Handles.draft = tree.draft(Handles.b, [-1, 0, -1], [1, 2, 3]).tolist()
    before = freeze(tree, pool)
    with pytest.raises(error, match=message):
        call(tree, Handles)
    assert freeze(tree, pool) == before
    check_forest(tree._forest, tree.cache)


def test_a_cache_serves_one_tree_on_one_pool():
    pool = PagePool(4)
    cache = RadixCache(pool, 4)
    with pytest.raises(ValueError, match="same pool"):
        SequenceTree(PagePool(4), 4, cache)
    with pytest.raises(ValueError, match="same page_size"):
        SequenceTree(pool, 2, cache)
    SequenceTree(pool, 4, cache)
    with pytest.raises(ValueError, match="another SequenceTree"):
        SequenceTree(pool, 4, cache)
