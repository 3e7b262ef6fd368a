"""JAX's own attention as a peer: what is prepared for it, run on the CPU, against the oracle."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from benchmarks import harness
from benchmarks.peers import Inputs, Unsuitable, jax_own
from benchmarks.peers.jax_own import JaxAttention, JaxPaged
from benchmarks.suites import Cell

# Whole calls of JAX's own kernels, which compile for long.
pytestmark = pytest.mark.slow


def inputs_of(cell: Cell, layers: int = 2) -> Inputs:
    tree = cell.tree()
    return Inputs(cell, tree, harness.make_data(tree, cell.heads, cell.head_dim, cell.page_size, jnp.float32, layers))


def error_of(ready, inputs: Inputs) -> float:
    out = ready.run()
    ready.wait(out)
    assert len(out) == ready.layers
    return harness.sampled_error(ready.output(out), inputs.data, inputs.tree, inputs.cell.page_size)


@pytest.mark.parametrize("name", ["1,2,4_32,16,8", "3,6_5,7", "2x32+draft16", "2xprefill32", "2xprefill8+24"])
def test_attention_over_gathered_keys(name):
    inputs = inputs_of(Cell(name, 4, 2, head_dim=16))
    assert error_of(JaxAttention("xla").prepare(inputs), inputs) < 1e-5


def test_attention_over_sequences_of_unlike_lengths():
    cell = Cell("1,2,4_32,16,8", 4, 2, head_dim=16)
    tree = dataclasses.replace(cell, name="1,2_20,3").tree()
    parts = inputs_of(cell)
    longer = type(tree)([-1, 0, 0], [20, 3, 9])
    data = harness.make_data(longer, cell.heads, cell.head_dim, 16, jnp.float32, 2)
    inputs = dataclasses.replace(parts, tree=longer, data=data)
    assert error_of(JaxAttention("xla").prepare(inputs), inputs) < 1e-5


def test_copies_larger_than_memory_are_not_made(monkeypatch):
    monkeypatch.setattr(jax_own, "MOST_BYTES", 1000)
    with pytest.raises(Unsuitable, match="GB a layer"):
        JaxAttention("xla").prepare(inputs_of(Cell("1,2,4_32,16,8", 4, 2, head_dim=16)))


def test_requests_of_unlike_sizes_say_why():
    cell = Cell("2x32+draft16", 4, 2, head_dim=16)
    tree = type(cell.tree())([-1, 0, -1], [8, 2, 4], [0, 2, 1])
    inputs = Inputs(cell, tree, harness.make_data(tree, cell.heads, cell.head_dim, 16, jnp.float32, 1))
    with pytest.raises(Unsuitable, match="unlike sizes"):
        JaxAttention("xla").prepare(inputs)


def test_what_cudnn_refuses_is_an_exception_for_the_program_to_record():
    with pytest.raises((NotImplementedError, RuntimeError)):
        JaxAttention("cudnn").prepare(inputs_of(Cell("1,2_16,8", 4, 2, head_dim=16))).run()


@pytest.mark.parametrize(("name", "pages"), [("1,2,4_32,16,16", 16), ("1,2_64,40", 16), ("1,2_8,24", 8)])
def test_paged_attention(name, pages):
    inputs = inputs_of(Cell(name, 4, 2, head_dim=16))
    ready = JaxPaged().prepare(inputs)
    assert f"pages of {pages}" in ready.note
    assert error_of(ready, inputs) < 1e-5


def test_paged_attention_wants_whole_pages():
    with pytest.raises(Unsuitable, match="do not fill pages"):
        JaxPaged().prepare(inputs_of(Cell("2x32+draft16", 4, 2, head_dim=16)))


@pytest.mark.parametrize(("pages", "queries", "splits"), [(400, 10, 8), (400, 1024, 1), (3, 1, 1)])
def test_paged_attention_is_split_to_fill_a_gpu(pages, queries, splits):
    cell = Cell("1_1", 32, 8)
    assert jax_own._paged_options(16, pages, queries, cell) == (splits, 4)
