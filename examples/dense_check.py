"""Are a search's logits right? The same tokens through plain dense attention, in float32, tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tree_attention_jax.models import Llama, dense_forward

# Of the largest logit. Two right ways to compute SmolLM2 in float32 differ by a tenth of it.
FLOAT32_TOLERANCE = 3e-5
# A lower precision may be off by twice as much as dense attention is in that precision, as in FlashAttention's tests:
# both round, at other places. SmolLM2 in bfloat16: 0.47 against 0.44, where logits reach 32.
LOWER_PRECISION_FACTOR = 2.0


class Verdict(NamedTuple):
    """Largest difference of any logit from float32's, and the largest that rounding explains."""

    difference: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN


def check_logits(
    model: Llama,
    prompt: Sequence[int],
    sequences: Sequence[tuple[Sequence[int], np.ndarray]],
    on_sequence: Callable[[], None] = lambda: None,
) -> Verdict:
    """Compares with dense attention the logits that the tokens of some sequences were chosen from.

    sequences: of each, its n generated tokens, and the float32 logits [n, vocab] before each of them.
    on_sequence: called after each one, for a progress bar.
    """
    in_float32 = model.dtype == jnp.float32
    exact_model = model if in_float32 else widened(model)
    longest = max(len(tokens) for tokens, _ in sequences)
    token_ids = np.zeros(len(prompt) + longest, np.int32)
    differences, explained = [], []
    for tokens, logits in sequences:
        # One length, one program: what lies past a sequence's end is in no token's past.
        token_ids[: len(prompt) + len(tokens)] = [*prompt, *tokens]
        rows = slice(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        exact = np.asarray(dense_forward(exact_model, jnp.array(token_ids)))[rows]
        differences.append(np.abs(logits - exact).max())
        if in_float32:
            explained.append(FLOAT32_TOLERANCE * np.abs(exact).max())
        else:
            dense = np.asarray(dense_forward(model, jnp.array(token_ids)))[rows]
            explained.append(LOWER_PRECISION_FACTOR * np.abs(dense - exact).max())
        on_sequence()
    return Verdict(float(np.max(differences)), float(np.max(explained)))


def widened(model: Llama) -> Llama:
    """The same weights in float32."""
    shapes = nnx.eval_shape(lambda: Llama(model.config, dtype="float32", rngs=nnx.Rngs(0)))
    return nnx.merge(nnx.graphdef(shapes), jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model)))
