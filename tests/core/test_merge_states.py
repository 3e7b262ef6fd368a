"""merge_states against a joint softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import assert_close, assert_lse_close

import tree_attention_jax as ta


def state(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) in float64 of logits [..., T] over values [..., T, D]; no tokens: (0, -inf)."""
    if logits.shape[-1] == 0:
        return np.zeros((*logits.shape[:-1], values.shape[-1])), np.full(logits.shape[:-1], -np.inf)
    peak = logits.max(-1, keepdims=True)
    weight = np.exp(logits - peak)
    total = weight.sum(-1)
    return np.einsum("...t,...td->...d", weight, values) / total[..., None], peak[..., 0] + np.log(total)


def tokens(count: int, scale: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return scale * rng.normal(size=(5, 3, count)), rng.normal(size=(5, 3, count, 8))


@pytest.mark.parametrize("split", [0, 1, 7, 12])
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4], ids=lambda s: f"logits{s:g}")
def test_equals_the_joint_softmax(split: int, scale: float):
    logits, values = tokens(12, scale)
    parts = state(logits[..., :split], values[..., :split, :]), state(logits[..., split:], values[..., split:, :])
    out, lse = ta.merge_states(*(jnp.asarray(x, jnp.float32) for part in parts for x in part))
    want, want_lse = state(logits, values)
    # An LSE of 1e4 is itself rounded to 2^-10, which is what the weights can be off by.
    np.testing.assert_allclose(out, want, atol=1e-5 * max(scale, 1))
    assert_lse_close(lse, want_lse, np.float32)


def test_many_states_in_any_order():
    logits, values = tokens(20)
    want, want_lse = state(logits, values)
    parts = [state(logits[..., i : i + 4], values[..., i : i + 4, :]) for i in range(0, 20, 4)]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        out, lse = (jnp.asarray(x, jnp.float32) for x in parts[order[0]])
        for i in order[1:]:
            out, lse = ta.merge_states(out, lse, *(jnp.asarray(x, jnp.float32) for x in parts[i]))
        assert_close(out, want, np.float32)
        assert_lse_close(lse, want_lse, np.float32)


@pytest.mark.parametrize("garbage", [0.0, np.nan, np.inf])
def test_an_empty_operand_may_hold_anything(garbage: float):
    out, lse = (jnp.asarray(x, jnp.float32) for x in state(*tokens(6)))
    nothing = jnp.full_like(out, garbage), jnp.full_like(lse, -jnp.inf)
    for merged in (ta.merge_states(out, lse, *nothing), ta.merge_states(*nothing, out, lse)):
        np.testing.assert_array_equal(merged[0], out)
        np.testing.assert_allclose(merged[1], lse, rtol=1e-6)
    for x, empty in zip(ta.merge_states(*nothing, *nothing), (0, -np.inf)):
        np.testing.assert_array_equal(x, empty)


def test_some_rows_empty_on_either_side():
    out, lse = (np.asarray(x, np.float32) for x in state(*tokens(6)))
    a, b = lse.copy(), lse.copy()
    a[0], b[1], a[2], b[2] = -np.inf, -np.inf, -np.inf, -np.inf
    merged, merged_lse = ta.merge_states(*map(jnp.asarray, (out, a, out, b)))
    np.testing.assert_allclose(merged[:2], out[:2], rtol=1e-6)
    assert (merged[2] == 0).all()
    assert (merged_lse[2] == -jnp.inf).all()
    np.testing.assert_allclose(merged_lse[3:], lse[3:] + np.log(2), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=["bf16", "fp16", "fp32"])
def test_keeps_the_type_of_the_first_operand(dtype):
    out, lse = state(*tokens(6))
    low = jnp.asarray(out, dtype)
    merged, merged_lse = ta.merge_states(low, jnp.asarray(lse), jnp.asarray(out, jnp.float32), jnp.asarray(lse))
    assert merged.dtype == dtype
    assert merged_lse.dtype == jnp.float32
    assert_close(merged, out, dtype)


def test_batch_axes_jit_and_vmap():
    out, lse = (jnp.asarray(x, jnp.float32) for x in state(*tokens(6)))
    want = ta.merge_states(out, lse, out[::-1], lse[::-1])
    for call in (jax.jit(ta.merge_states), jax.vmap(ta.merge_states)):
        for have, wanted in zip(call(out, lse, out[::-1], lse[::-1]), want):
            np.testing.assert_allclose(have, wanted, rtol=1e-6)


def test_gradients_stay_finite():
    """Also beside empty rows, where a careless where() differentiates to NaN."""
    out, lse = (jnp.asarray(x, jnp.float32) for x in state(*tokens(6)))
    lse = lse.at[0].set(-jnp.inf)

    def total(out, lse):
        return ta.merge_states(out, lse, out[::-1], lse[::-1])[0].sum()

    for gradient in jax.grad(total, argnums=(0, 1))(out, lse):
        assert np.isfinite(gradient[1:4]).all()
