"""The decoding benchmark runs on a tiny model, and its forests and replays are the ones it says."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("flax")

from benchmarks import decode
from benchmarks.suites.decoding import WORKLOADS, Forest, replay, scaled, thoughts
from tree_attention_jax.cache import PagePool, SequenceTree

pytestmark = pytest.mark.usefixtures("compile_unoptimised")


def test_tiny_run_writes_its_rows(tmp_path, capsys):
    path = tmp_path / "out.json"
    options = ["--tiny", "--new-tokens", "3", "--horizon", "1", "--strategies", "per_query", "--json", str(path)]
    assert decode.main(["--workload", "C,draft", *options]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["workload"], row["strategy"]) for row in rows] == [("C", "per_query"), ("draft", "per_query")]
    assert rows[0]["sequences"] == 8
    assert rows[0]["steps"] == 2
    assert all(row["tokens_per_s"] > 0 and row["plan_ms_per_step"] > 0 for row in rows)
    assert rows[0]["kv_gb_saved"] >= 0
    assert "per_query's tokens a second" in capsys.readouterr().out


def test_an_unknown_workload_is_named():
    with pytest.raises(SystemExit, match="'E'"):
        decode.main(["--tiny", "--workload", "E"])


@pytest.mark.parametrize("name", WORKLOADS)
def test_forests_have_their_shape(name):
    forest = scaled(WORKLOADS[name])
    pool = PagePool(200)
    tree = SequenceTree(pool, 16)
    leaves = forest.build(tree)
    assert len(leaves) == forest.sequences == tree.num_leaves
    assert tree.pending_tokens().size == 0
    assert {tree.length(int(leaf)) for leaf in leaves} == {sum(forest.tokens)}
    assert int(tree.snapshot().kv_len.sum()) == forest.total_tokens


def test_a_replay_grows_and_prunes_as_recorded():
    trace = [[-1, 5, 0], [0, 3, 1], [0, 2, 1], [1, 1, 4], [1, 2, 4]]
    pool = PagePool(50)
    tree = SequenceTree(pool, 4)
    [root] = Forest((1,), (5,)).build(tree)
    counts = []
    for active in replay(tree, int(root), trace):
        assert tree.pending_tokens().size == active.size
        tree.commit()
        counts.append(active.size)
    assert counts == [2, 2, 1, 2, 1]
    assert tree.num_leaves == 0
    assert pool.num_free == pool.capacity
    for name in ("sorting", "docmerge"):
        recorded = thoughts(name)
        assert recorded[0][0] == -1
        assert all(parent < node for node, (parent, _, _) in enumerate(recorded))
        assert np.array(recorded)[:, 1].min() >= 1
    with pytest.raises(ValueError, match="'chess'"):
        thoughts("chess")
