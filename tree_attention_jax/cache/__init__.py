"""Paged K/V memory on the host: the pool, the prefix cache, and the live trees."""

from tree_attention_jax.cache.moves import Moves, move_slots
from tree_attention_jax.cache.page_pool import OutOfPages, PagePool
from tree_attention_jax.cache.radix_cache import CachedRun, CacheStatistics, Match, RadixCache
from tree_attention_jax.cache.sequence_tree import SequenceTree

__all__ = [
    "CacheStatistics",
    "CachedRun",
    "Match",
    "Moves",
    "OutOfPages",
    "PagePool",
    "RadixCache",
    "SequenceTree",
    "move_slots",
]
