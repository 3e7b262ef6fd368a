"""`FlatModel` and `Flattened`: the same model in fewer pieces, and never an old one."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from decoding import greedy, make_decoder, tiny_model
from flax import nnx

from tree_attention_jax.search.flat_model import FlatModel, Flattened
from tree_attention_jax.search.loops import Sampling

PROMPT = [5, 1, 7, 7, 2, 9]

pytestmark = pytest.mark.usefixtures("compile_unoptimised")


def test_it_has_the_models_arrays_and_makes_the_model_again():
    model = tiny_model()
    flat = Flattened(model).now()
    assert isinstance(flat, FlatModel)
    assert all(a is b for a, b in zip(jax.tree.leaves(flat), jax.tree.leaves(model), strict=True))
    again = jax.jit(lambda flat: flat.model())(flat)
    assert again.config == model.config
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_models_alike_share_a_program():
    traced = []

    @jax.jit
    def count(flat):
        traced.append(flat.model().config)
        return flat.arrays[0] + 1

    for model in (tiny_model(), copy.deepcopy(tiny_model())):
        count(Flattened(model).now())
    assert len(traced) == 1
    count(Flattened(tiny_model(num_layers=1)).now())
    assert len(traced) == 2


def test_it_has_the_weights_of_the_moment_and_keeps_none():
    model = copy.deepcopy(tiny_model())
    flattened = Flattened(model)
    first = flattened.now()
    old = weakref.ref(model.layers[1].o_proj.kernel.get_raw_value())
    model.layers[1].o_proj.kernel[...] = 2 * model.layers[1].o_proj.kernel[...]
    second = flattened.now()
    assert sum(a is not b for a, b in zip(first.arrays, second.arrays, strict=True)) == 1
    del first
    gc.collect()
    assert old() is None
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))
    assert not any(x.any() for x in flattened.now().arrays)


def test_a_decoder_generates_with_the_weights_of_the_moment():
    model = copy.deepcopy(tiny_model())
    decoder = make_decoder()
    decoder.model = model

    def generated():
        leaf, logits = decoder.prefill(PROMPT)
        return decoder.generate([leaf], logits, 5, sampling=Sampling(0.0), horizon=4)[0].tokens.tolist()

    before = generated()
    assert before == greedy(model, PROMPT, 5)
    model.embedding[...] = jnp.roll(model.embedding[...], 1, axis=0)
    after = generated()
    assert after == greedy(model, PROMPT, 5)
    assert after != before


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scaled:
    """A model with an array that is in no variable, so that nobody can see whether it is another one by now."""

    model: nnx.Module
    scale: jax.Array


class Several(nnx.Module):
    """A variable that holds two arrays."""

    def __init__(self):
        self.pair = nnx.Param({"a": jnp.ones(2), "b": jnp.zeros(3)})


@pytest.mark.parametrize("model", [Scaled(tiny_model(), jnp.float32(2)), jnp.sin, Several()], ids=type)
def test_what_cannot_be_watched_stays_as_it_is(model):
    flattened = Flattened(model)
    flattened.now()
    assert flattened.now() is model
