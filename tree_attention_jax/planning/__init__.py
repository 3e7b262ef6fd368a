"""From a forest to work items: ``topology -> tiling -> items -> one packed buffer``.

==================  ============================================================================
``tiling.py``       rectangles over rows x token runs: what a strategy returns
``strategies/``     one file a published method, and ``auto``
``lowering.py``     rectangles -> row tiles x entries -> items, split for parallelism
``packing.py``      items -> the int32 buffer of :mod:`pallas_kernels.layout`, padded to buckets
``plan.py``         :class:`TreePlan` and :func:`plan_tree`
``check.py``        proof that a plan covers every visible (query, token) pair exactly once
==================  ============================================================================
"""

from tree_attention_jax.planning.buckets import Buckets
from tree_attention_jax.planning.model import modelled_time
from tree_attention_jax.planning.plan import TreePlan, plan_tree
from tree_attention_jax.planning.profile import profile_for

__all__ = ["Buckets", "TreePlan", "modelled_time", "plan_tree", "profile_for"]
