"""Deciding how a tree grows: branch controllers on the host, the tree on the device, and a decoder for both."""

from tree_attention_jax.search.beam_search import BeamSearch
from tree_attention_jax.search.best_of_n import BestOfN
from tree_attention_jax.search.controller import BranchController, Decision, Hypothesis
from tree_attention_jax.search.decoder import TreeDecoder
from tree_attention_jax.search.loops.sampling import Sampling
from tree_attention_jax.search.mcts import MonteCarloTreeSearch
from tree_attention_jax.search.speculative_verify import SpeculativeVerify, Verdict
from tree_attention_jax.search.step_statistics import StepStatistics
from tree_attention_jax.search.tree_of_thoughts import TreeOfThoughts, breadth_first
from tree_attention_jax.search.tree_state import TreeState

__all__ = [
    "BeamSearch",
    "BestOfN",
    "BranchController",
    "Decision",
    "Hypothesis",
    "MonteCarloTreeSearch",
    "Sampling",
    "SpeculativeVerify",
    "StepStatistics",
    "TreeDecoder",
    "TreeOfThoughts",
    "TreeState",
    "Verdict",
    "breadth_first",
]
