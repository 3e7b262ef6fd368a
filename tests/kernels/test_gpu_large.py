"""What only shows at size: more items than a grid axis holds, offsets past 2^31 elements, thousands of nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Heads, assert_close, assert_lse_close, attend, lay_out, plan_for

import tree_attention_jax as ta
from tree_attention_jax import TokenTree

pytestmark = pytest.mark.gpu


def paths_to(tree: TokenTree, nodes: np.ndarray, page_size: int) -> tuple[TokenTree, np.ndarray]:
    """The forest of the given query nodes and their ancestors, and the rows of its queries: the oracle is slow."""
    keep, frontier = np.zeros(tree.num_nodes, bool), nodes
    while len(frontier):
        keep[frontier] = True
        frontier = np.unique(tree.parent[frontier])
        frontier = frontier[frontier >= 0]
    kept = np.flatnonzero(keep)
    new_index = np.cumsum(keep) - 1
    parent = np.where(tree.parent[kept] < 0, -1, new_index[tree.parent[kept]])
    q_len = np.where(np.isin(kept, nodes), tree.q_len[kept], 0)
    indptr, indices = tree.page_table(page_size)
    pages = [indices[indptr[i] : indptr[i + 1]] for i in kept]
    small = TokenTree(
        parent,
        tree.kv_len[kept],
        q_len,
        np.concatenate(([0], np.cumsum([len(p) for p in pages]))),
        np.concatenate(pages),
        tree.first_slot[kept],
    )
    return small, np.flatnonzero(np.isin(tree.query_nodes(), nodes))


def random_pages(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def check_sample(tree: TokenTree, page_size: int, heads: Heads, sample: np.ndarray, strategy: str = "auto") -> None:
    """Pools made on the device; the oracle looks at the slots of the sampled queries' paths only."""
    pages = int(tree.page_table(page_size)[1].max()) + 1
    k, v = (random_pages(i, pages, page_size, heads.kv, heads.dim) for i in range(2))
    q = random_pages(2, tree.num_queries, heads.q, heads.dim)
    plan = plan_for(tree, page_size, heads, strategy=strategy)
    out, lse = attend(q, k, v, plan, "pallas_triton")
    small, rows = paths_to(tree, sample, page_size)
    # Gather the few slots that the sample sees into pages of one token.
    slots = jnp.asarray(small.token_slots(page_size))
    page, slot = slots // page_size, slots % page_size
    gathered = [np.asarray(pool[page, slot])[:, None] for pool in (k, v)]
    compact = TokenTree(small.parent, small.kv_len, small.q_len).with_pages(1)
    want, want_lse = ta.reference.dense_tree_attention(np.asarray(q[rows]), *gathered, compact, 1, return_lse=True)
    assert_close(np.asarray(out[rows]), want, jnp.bfloat16)
    assert_lse_close(lse[rows], want_lse, jnp.bfloat16)


@pytest.mark.parametrize("strategy", ["auto", "per_node", "per_query"])
@pytest.mark.parametrize("heads", [Heads(1, 1), Heads(4, 2)], ids=str)
def test_more_items_than_a_grid_axis_holds(heads: Heads, strategy: str):
    """70,000 single-token leaves, the last ones among those compared."""
    tree = TokenTree.from_levels([1, 70_000], [33, 1]).with_pages(1)
    sample = np.concatenate([[1, 2], np.arange(65_530, 65_545), [69_998, 69_999, 70_000]])
    check_sample(tree, 1, heads, sample, strategy)


@pytest.mark.parametrize("page_size", [16, 256])
def test_offsets_past_two_to_the_31(page_size: int):
    """A pool of more than 2^31 elements whose last pages are in use, by nodes that read from both ends."""
    heads = Heads(8, 2, 256)
    pages = 2**31 // (page_size * heads.kv * heads.dim) + 64
    root = np.concatenate([[0], np.arange(pages - 20, pages - 10), [pages // 2]])
    leaves = np.array([[1, pages - 1], [pages - 2, 2], [pages // 2 + 1, pages - 3]])
    tree = TokenTree(
        [-1, 0, 0, 0],
        [12 * page_size - 3, 2 * page_size, page_size + 1, page_size + 5],
        [0, 1, 1, 1],
        [0, 12, 14, 16, 18],
        np.concatenate([root, *leaves]),
    )
    check_sample(tree, page_size, heads, np.arange(1, 4))


def test_append_past_two_to_the_31():
    """The new token's slot lies beyond 2^31 elements; its neighbours keep what they hold."""
    heads, page_size = Heads(8, 2, 256), 16
    pages = 2**31 // (page_size * heads.kv * heads.dim) + 64
    tree = TokenTree([-1], [10], [3], [0, 1], [pages - 1])
    plan = plan_for(tree, page_size, heads)
    k = jnp.zeros((pages, page_size, heads.kv, heads.dim), jnp.bfloat16)
    v = jnp.zeros_like(k)
    new = random_pages(0, 2, 3, heads.kv, heads.dim)
    step = jax.jit(
        lambda k, v, new, plan: ta.append_kv(k, v, *new, plan, implementation="pallas_triton"), donate_argnums=(0, 1)
    )
    for pool, added in zip(step(k, v, new, plan), new):
        np.testing.assert_array_equal(pool[-1, 7:10].astype(jnp.float32), added.astype(jnp.float32))
        # Everything else is still 0: the count of other values is the new tokens'.
        assert int(jnp.count_nonzero(pool)) == int(jnp.count_nonzero(added))


def test_a_deep_tree_of_thousands_of_nodes():
    tree = lay_out(TokenTree.from_levels([1, 4, 16, 64, 256, 1024], [256, 8, 256, 64, 32, 63]), 16)
    check_sample(tree, 16, Heads(32, 8, 128), np.array([341, 342, 700, 1000, 1363, 1364]))


def test_a_long_context():
    tree = lay_out(TokenTree.from_levels([1, 10], [40_000, 400]), 16)
    check_sample(tree, 16, Heads(16, 1, 128), np.array([1, 5, 10]))
