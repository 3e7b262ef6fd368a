"""Search loops wholly under `jax.jit`: no host between two steps. Each has a twin that `TreeDecoder` drives.

    sample_block        parallel sampling over a plan that advances on the device
    beam_search         beams whose re-parenting is device data
    speculative_decode  rounds of prompt-lookup draft, verification and acceptance
    mcts_decode         Monte Carlo tree search through `mctx`

The last three read the prompt by a plan made once (`Workspace`) and what grew since along slots that the device
keeps (`TreeState`), joined by `merge_states`.
"""

from tree_attention_jax.search.loops.sampling import Rows, Sampling, first_tokens, sample_block, sample_tokens

__all__ = [
    "Rows",
    "Sampling",
    "first_tokens",
    "sample_block",
    "sample_tokens",
]
