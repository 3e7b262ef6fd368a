"""Search loops wholly under `jax.jit`: no host between two steps. Each has a twin that `TreeDecoder` drives.

    sample_block        parallel sampling over a plan that advances on the device
    beam_search         beams whose re-parenting is device data
    speculative_decode  rounds of prompt-lookup draft, verification and acceptance
    mcts_decode         Monte Carlo tree search through `mctx`

The last three read the prompt by a plan made once (`Workspace`) and what grew since along slots that the device
keeps (`TreeState`), joined by `merge_states`.
"""

from tree_attention_jax.search.loops.beam import BeamRules, beam_loop, beam_search
from tree_attention_jax.search.loops.mcts import MctsRules, Searched, keep_paths, mcts_decode, mcts_loop
from tree_attention_jax.search.loops.paths import forward_on_paths, path_attention
from tree_attention_jax.search.loops.sampling import Rows, Sampling, first_tokens, sample_block, sample_tokens
from tree_attention_jax.search.loops.speculation import Speculated, speculative_decode, speculative_loop
from tree_attention_jax.search.loops.workspace import Workspace

__all__ = [
    "BeamRules",
    "MctsRules",
    "Rows",
    "Sampling",
    "Searched",
    "Speculated",
    "Workspace",
    "beam_loop",
    "beam_search",
    "first_tokens",
    "forward_on_paths",
    "keep_paths",
    "mcts_decode",
    "mcts_loop",
    "path_attention",
    "sample_block",
    "sample_tokens",
    "speculative_decode",
    "speculative_loop",
]
