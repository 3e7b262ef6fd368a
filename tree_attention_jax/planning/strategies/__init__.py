"""Every published method as a tiling of one region (``docs/design.md``), by name."""

from collections.abc import Callable

from tree_attention_jax.planning.strategies.auto import auto
from tree_attention_jax.planning.strategies.cascade import cascade
from tree_attention_jax.planning.strategies.flatten import flatten
from tree_attention_jax.planning.strategies.greedy import greedy
from tree_attention_jax.planning.strategies.node_chunk import node_chunk
from tree_attention_jax.planning.strategies.pack import pack
from tree_attention_jax.planning.strategies.per_node import per_node
from tree_attention_jax.planning.strategies.per_query import per_query
from tree_attention_jax.planning.tiling import Tiling

STRATEGIES: dict[str, Callable[..., Tiling]] = {
    "auto": auto,
    "per_query": per_query,
    "per_node": per_node,
    "node_chunk": node_chunk,
    "flatten": flatten,
    "greedy": greedy,
    "cascade": cascade,
    "pack": pack,
}
