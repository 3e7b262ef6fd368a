"""Rotary position embedding, half-split convention: dimension i rotates with dimension i + head_dim // 2.

Frequencies are NumPy constants that depend on the configuration only; angles and the rotation are computed in
float32 whatever the model's dtype, because bfloat16 can't tell position 257 from 258.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor` (positions squeezed by it)."""

    factor: float

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: low frequencies are divided by `factor`, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_context_length * frequencies / (2 * math.pi)  # within the original context
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclass(frozen=True)
class FrequencyFactors:
    """One divisor a frequency, head_dim // 2 of them: what a GGUF file stores as `rope_freqs.weight`."""

    factors: tuple[float, ...]

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        if len(self.factors) != len(frequencies):
            raise ValueError(f"rope: {len(self.factors)} frequency factors for {len(frequencies)} frequencies")
        return frequencies / np.asarray(self.factors)


RopeScaling = LinearScaling | Llama3Scaling | FrequencyFactors


def rope_frequencies(head_dim: int, base: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians a token of each rotated pair, float32 [head_dim // 2]."""
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is not None:
        frequencies = scaling.scale(frequencies)
    return frequencies.astype(np.float32)


def rope_cos_sin(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of each position's angles, float32 [Q, head_dim // 2], from int positions [Q]."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [Q, heads, head_dim] by the angles of its rows [Q, head_dim // 2]; keeps x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
