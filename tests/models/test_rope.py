"""RoPE against formulas written out literally."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from tree_attention_jax.models.rope import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    apply_rope,
    rope_cos_sin,
    rope_frequencies,
)


def test_plain_frequencies():
    np.testing.assert_allclose(rope_frequencies(8, 10_000.0), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_scaling_squeezes_positions():
    x = np.random.default_rng(0).normal(size=(3, 2, 64)).astype(np.float32)
    scaled = rope_cos_sin(jnp.array([0, 40, 400]), rope_frequencies(64, 1e4, LinearScaling(4.0)))
    plain = rope_cos_sin(jnp.array([0, 10, 100]), rope_frequencies(64, 1e4))
    np.testing.assert_allclose(apply_rope(x, *scaled), apply_rope(x, *plain), atol=1e-5)


def test_llama3_scaling_formula():
    factor, low, high, context = 8.0, 1.0, 4.0, 8192
    found = rope_frequencies(128, 500_000.0, Llama3Scaling(factor, low, high, context))
    expected = []
    for pair in range(64):
        frequency = 500_000.0 ** (-2 * pair / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            expected.append(frequency)
        elif wavelength > context / low:
            expected.append(frequency / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    plain = rope_frequencies(128, 500_000.0)
    blended = (found < plain * 0.999) & (found > plain / factor * 1.001)
    assert blended.any()
    assert (found == plain).any()
    assert np.isclose(found, plain / factor).any()


def test_frequency_factors_divide():
    factors = (1.0, 2.0, 4.0, 8.0)
    found = rope_frequencies(8, 10_000.0, FrequencyFactors(factors))
    np.testing.assert_allclose(found, rope_frequencies(8, 10_000.0) / factors, rtol=1e-6)


def test_frequency_factors_of_another_head_dim():
    with pytest.raises(ValueError, match="3 frequency factors for 4 frequencies"):
        rope_frequencies(8, 10_000.0, FrequencyFactors((1.0, 1.0, 1.0)))


def test_rotation_is_complex_multiplication_and_relative():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 3, 80))
    frequencies = rope_frequencies(80, 10_000.0)
    positions = np.array([5, 63])
    turned = np.exp(1j * positions[:, None, None] * frequencies) * (x[..., :40] + 1j * x[..., 40:])
    found = apply_rope(jnp.asarray(x, jnp.float32), *rope_cos_sin(jnp.asarray(positions), frequencies))
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], -1), atol=1e-4)


def test_keeps_dtype_and_computes_in_float32():
    x = jnp.ones((1, 1, 64), jnp.bfloat16)
    cos, sin = rope_cos_sin(jnp.array([257]), rope_frequencies(64, 10_000.0))
    assert cos.dtype == jnp.float32
    found = apply_rope(x, cos, sin)
    assert found.dtype == jnp.bfloat16
    # In bfloat16, 257 is 256: the angle would be a radian off.
    np.testing.assert_allclose(float(found[0, 0, 0]), math.cos(257) - math.sin(257), atol=1e-2)
