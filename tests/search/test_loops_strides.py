"""A while loop in strides does what the plain one does, and looks at its condition less often."""

import jax
import jax.numpy as jnp
import pytest

from tree_attention_jax.search.loops import strides
from tree_attention_jax.search.loops.strides import while_in_strides


@pytest.mark.parametrize(("most", "stride"), [(16, 8), (12, 6), (11, 1), (7, 7), (4, 4), (1, 1), (0, 1)])
@pytest.mark.parametrize("end", [0, 1, 5, 100])
def test_it_stops_at_the_end_of_the_stride_in_which_the_condition_fails(monkeypatch, most, stride, end):
    monkeypatch.setattr(strides, "launched_ahead", lambda: 8)
    calls, kept = jax.jit(
        lambda: while_in_strides(
            lambda carry: carry[0] < min(end, most),
            lambda carry: (carry[0] + 1, jnp.where(carry[0] < end, carry[1] + 1, carry[1])),
            (jnp.int32(0), jnp.int32(0)),
            most,
        )
    )()
    wanted = min(end, most)
    assert int(kept) == wanted
    assert int(calls) == (most if stride == most > 1 else -(-wanted // stride) * stride) <= most


def test_without_a_limit_strides_are_whole(monkeypatch):
    monkeypatch.setattr(strides, "launched_ahead", lambda: 8)
    assert int(while_in_strides(lambda i: i < 11, lambda i: i + 1, jnp.int32(0))) == 16


def test_a_cpu_looks_after_each_step():
    if jax.default_backend() != "cpu":
        pytest.skip("for CPUs")
    text = str(jax.make_jaxpr(lambda: while_in_strides(lambda i: i < 3, lambda i: i + 1, jnp.int32(0), 16))())
    assert text.count("while[") == 1


def test_a_stride_has_a_known_number_of_steps(monkeypatch):
    """What XLA launches ahead is a loop with constant bounds: a `scan` in JAX's own language."""
    monkeypatch.setattr(strides, "launched_ahead", lambda: 8)
    text = str(jax.make_jaxpr(lambda: while_in_strides(lambda i: i < 3, lambda i: i + 1, jnp.int32(0), 16))())
    assert text.count("while[") == 1
    assert "scan[" in text
    assert "length=8" in text
