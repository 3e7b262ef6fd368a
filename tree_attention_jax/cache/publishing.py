"""Handing the nodes of a live sequence over to the prefix cache, while it lives or when it ends.

Nothing is copied: the node itself becomes matchable. Where the cache got the same tokens from somebody else
meanwhile, the live sequence goes on from the cached ones and gives up its own.
"""

from tree_attention_jax.cache.node_table import NO_NODE
from tree_attention_jax.cache.radix_cache import common_prefix


def publish(cache, leaf, extra_key):
    """Makes all tokens with K/V on the path to row `leaf` matchable. The leaf keeps its row and its pending tokens."""
    forest = cache.forest
    path = forest.path(leaf)
    above = NO_NODE
    for row in path:
        if forest.kept[row]:
            above = row
            continue
        whole = forest.filled[row] == forest.tokens.count[row]
        if forest.filled[row] == 0:
            break
        if row == leaf or not whole:
            row = forest.split(row, int(forest.filled[row]))
        above = _attach(cache, row, above, extra_key)
        if not whole:
            break


def _attach(cache, row, above, extra_key):
    # Makes `row` the cached child of row `above`, and returns the row where its tokens end in the cache.
    forest = cache.forest
    while True:
        twin = cache.find_child(above, forest.tokens[row][0], extra_key)
        if twin is None:
            cache.adopt(int(row), extra_key)
            return int(row)
        same = common_prefix(forest.tokens[twin], forest.tokens[row])
        if same < forest.tokens.count[twin]:
            twin = cache.split(twin, same)
        forest.move_under(row, twin)
        above = twin
        if same == forest.tokens.count[row]:
            return _dissolve(forest, row, twin)
        forest.drop_front(row, same)


def _dissolve(forest, row, twin):
    # Everything `row` holds is in `twin`: its children go there, and with the last of them goes `row`.
    for child in forest.children(row):
        forest.move_under(child, twin)
    return int(twin)
