"""Tree attention for JAX: decoding where many sequences share prefixes, every shared K/V byte read once."""

from tree_attention_jax import reference
from tree_attention_jax.attention import append_kv, tree_attention
from tree_attention_jax.planning import Buckets, TreePlan, plan_tree
from tree_attention_jax.states import merge_states
from tree_attention_jax.topology import TokenTree

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "TokenTree",
    "TreePlan",
    "append_kv",
    "merge_states",
    "plan_tree",
    "reference",
    "tree_attention",
]
