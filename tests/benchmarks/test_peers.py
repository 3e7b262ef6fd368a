"""Peers from PyTorch: what can be checked without it, and that each says why it cannot run."""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import tree_attention_jax as ta
from benchmarks import harness
from benchmarks.peers import Inputs, Unsuitable, _checkout, deft, fasttree, find_peers, need_torch
from benchmarks.peers._sequences import padded, query_slots
from benchmarks.suites import Cell

CELL = Cell("1,2,4_32,8,5", 4, 2, head_dim=16)


def inputs_of(cell: Cell) -> Inputs:
    tree = cell.tree()
    return Inputs(cell, tree, harness.make_data(tree, cell.heads, cell.head_dim, cell.page_size, jnp.float32, 1))


def checkout_of(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.fixture
def without(monkeypatch):
    """Modules as if they were not installed."""

    def hide(*names: str) -> None:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


def test_names_and_paths(tmp_path):
    found = find_peers(f"flashinfer, jax,fasttree={tmp_path},deft={tmp_path}")
    assert [peer.name for peer in found] == [
        "FlashInfer decode",
        "FlashInfer cascade",
        "FlashInfer mask",
        "FlashInfer prefill",
        "JAX cuDNN",
        "JAX paged",
        "FastTree",
        "DeFT",
    ]
    assert need_torch(found)
    assert not need_torch(find_peers("jax"))
    assert find_peers("") == []


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("flashinfr", "peer is 'flashinfr': known are flashinfer, jax, fasttree, deft"),
        ("fasttree", "needs a checkout of its repository: fasttree=PATH"),
        ("deft=/nowhere/at/all", "there is no folder /nowhere/at/all"),
        ("jax=/tmp", "takes no path"),
    ],
)
def test_wrong_names_and_paths_say_what_is_right(spec, told):
    with pytest.raises(ValueError, match=told):
        find_peers(spec)


def test_without_pytorch_each_says_so(without, tmp_path):
    without("torch")
    for peer in find_peers(f"flashinfer,fasttree={tmp_path},deft={tmp_path}"):
        if peer.name not in ("FlashInfer mask", "FlashInfer prefill"):  # whose trees are others, which is said first
            with pytest.raises(Unsuitable, match="PyTorch cannot be imported"):
                peer.prepare(inputs_of(CELL))


def test_a_folder_that_is_no_checkout(tmp_path):
    with pytest.raises(Unsuitable, match=r"there is no .*kernel_bench/fasttree.py.*: is .* a checkout of it"):
        _checkout.load(tmp_path, fasttree.FOLDERS, "fasttree")


def test_a_checkout_whose_imports_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    checkout_of(tmp_path, {"kernel_bench/breaking_peer.py": "import a_package_that_nobody_has\n"})
    with pytest.raises(Unsuitable, match=r"breaking_peer.py cannot be imported: ModuleNotFoundError"):
        _checkout.load(tmp_path, fasttree.FOLDERS, "breaking_peer")


def test_deft_is_told_apart_from_its_re_implementation(tmp_path):
    own = checkout_of(tmp_path / "own", {"DeFT/deft/layers/attention/tree_attention.py": ""})
    other = checkout_of(tmp_path / "other", {"kernel_bench/DeFT.py": ""})
    assert [type(deft.peers(path)[0]) for path in (own, other)] == [deft.DeftItself, deft.DeftOfArtifact]


def test_nodes_as_fasttree_reads_them():
    nodes = fasttree.nodes_of(CELL.tree())
    assert [node.parent for node in nodes] == [-1, 0, 0, 1, 1, 2, 2]
    assert [node.num_children for node in nodes] == [2, 2, 2, 0, 0, 0, 0]
    assert [node.requests for node in nodes] == [[0, 1, 2, 3], [0, 1], [2, 3], [0], [1], [2], [3]]
    assert sum(node.seqlen for node in nodes) == 32 + 16 + 20


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (Cell("2,4_16,8", 4, 2).tree(), "one root"),
        (Cell("1x16+draft16", 4, 2).tree(), "one query a leaf"),
        (ta.TokenTree([-1, 0], [4, 4], [0, 3]), "one query a leaf"),
    ],
)
def test_what_fasttree_cannot_take(tree, reason):
    with pytest.raises(Unsuitable, match=reason):
        fasttree.nodes_of(tree)


def test_tokens_are_copied_only_where_pages_have_holes():
    assert fasttree.compact_slots(Cell("1,2_32,16", 4, 2).tree(), 16) is None
    tree = Cell("1,2_8,16", 4, 2).tree()
    np.testing.assert_array_equal(fasttree.compact_slots(tree, 16), tree.token_slots(16))


def test_deft_s_entries_in_our_cache():
    """Place + request * longest, as its planner writes them, are the slots of the request's path."""
    slots = query_slots(CELL.tree(), 16)
    table, lengths = padded(slots)
    request, place = 2, np.arange(lengths[2])
    entries = np.append(place + request * table.shape[1], -1)
    np.testing.assert_array_equal(deft.in_our_cache(entries, table), np.append(slots[request], -1))


def test_the_tree_that_deft_walks():
    cache = deft.as_tree_cache(inputs_of(CELL))
    assert sorted(cache.leaves) == [3, 4, 5, 6]
    assert [leaf.id for leaf in cache.root.refs] == [3, 4, 5, 6]
    assert [leaf.id for leaf in cache.nodes[2].refs] == [5, 6]
    found, waiting = [], [cache.root]
    while waiting:
        node = waiting.pop(0)
        found += node.kv_indices
        waiting += node.children.values()
    np.testing.assert_array_equal(sorted(found), sorted(CELL.tree().token_slots(16)))
