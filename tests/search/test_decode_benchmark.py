"""The decoding benchmark runs on a tiny model, and its forests, replays and baselines are what it says."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

pytest.importorskip("flax")

from decoding import PAGE_SIZE, dense_log_probs, greedy, tiny_model

from benchmarks import decode
from benchmarks.plain_decoder import PlainDecoder
from benchmarks.suites.decoding import DRAFTS, FORESTS, GROUPS, Forest, named, replay, thoughts, workload
from tree_attention_jax.cache import PagePool, SequenceTree
from tree_attention_jax.search import Sampling

pytestmark = pytest.mark.usefixtures("compile_unoptimised")
PROMPT = [5, 1, 7, 7, 2, 9, 3, 3, 1, 0, 4]


def rows_of(path):
    return {(row["workload"], row["strategy"]): row for row in json.loads(path.read_text())["rows"]}


def test_tiny_run_writes_its_rows_and_goes_on_with_the_rest(tmp_path, capsys):
    path = tmp_path / "out.json"
    options = ["--tiny", "--new-tokens", "3", "--horizon", "1", "--json", str(path)]
    assert decode.main(["--workload", "C", *options, "--strategies", "per_query"]) == 0
    before = rows_of(path)["C", "per_query"]
    assert before["sequences"] == 8
    assert before["steps"] == 2
    assert before["kv_gb_saved"] == 0 < before["kv_gb_read"]
    assert 0 < before["plan_share"] < 1
    assert {"device", "jax", "date"} <= set(before["environment"])
    assert decode.main(["--workload", "C,draft32", *options, "--strategies", "jax", "--resume"]) == 0
    rows = rows_of(path)
    assert rows["C", "per_query"] == before
    assert list(rows) == [("C", "per_query"), ("C", "jax"), ("draft32", "jax")]
    for row in rows.values():
        assert row["tokens_per_s"] > 0
        assert row["attention_share"] > 0
        assert row["device_idle_share"] is None, "that takes a GPU"
    assert rows["C", "jax"]["kv_gb_read"] == before["kv_gb_read"]
    assert rows["draft32", "jax"]["kv_gb_saved"] > 0, "a mask reads the prompt once"
    capsys.readouterr()
    assert decode.main(["--workload", "C", *options, "--strategies", "auto", "--resume", "--minutes", "1e-9"]) == 0
    assert "--resume goes on with C, tiny, auto" in capsys.readouterr().out


def test_what_a_strategy_cannot_do_is_said_in_its_row(tmp_path):
    path = tmp_path / "out.json"
    options = ["--tiny", "--new-tokens", "3", "--strategies", "jax_contiguous", "--json", str(path)]
    assert decode.main(["--workload", "draft32", *options]) == 0
    assert "neither fork nor draft" in rows_of(path)["draft32", "jax_contiguous"]["error"]


def test_unknown_names_are_named(capsys):
    for option, name in ("--workload", "E"), ("--model", "gpt"), ("--strategies", "fast"):
        with pytest.raises(SystemExit):
            decode.main(["--tiny", option, name])
        assert f"is {name!r}: known are" in capsys.readouterr().err


def test_groups_have_the_papers_sizes():
    assert list(named("fasttree,bestof64")) == ["A", "B", "C", "D", "bestof64"]
    deft = named("deft")
    assert [deft[f"fewshot{n}"].forest.sequences for n in (20, 30, 50)] == [20, 30, 50]
    assert [one.draft_nodes for one in deft.values() if one.kind == "draft"] == [32, 64, 128, 256]
    assert [name for name, one in deft.items() if one.kind == "replay"] == ["tot-sorting", "tot-docmerge"]
    assert set(GROUPS["deft"]) | set(GROUPS["fasttree"]) | {"bestof64"} == set(FORESTS) | set(DRAFTS) | {
        name for name in deft if name.startswith("tot-")
    }


@pytest.mark.parametrize("name", FORESTS)
def test_forests_have_their_shape(name):
    forest = workload(name).scaled().forest
    pool = PagePool(200)
    tree = SequenceTree(pool, 16)
    leaves = forest.build(tree)
    assert len(leaves) == forest.sequences == tree.num_leaves
    assert tree.pending_tokens().size == 0
    assert {tree.length(int(leaf)) for leaf in leaves} == {sum(forest.tokens)}
    assert int(tree.snapshot().kv_len.sum()) == forest.total_tokens
    assert workload(name).scaled().longest(7) == sum(forest.tokens) + 7


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


# ---------------------------------------------------------------------- JAX's own attention


def plain(mode, longest=32, num_pages=64):
    return PlainDecoder(tiny_model(1), num_pages, PAGE_SIZE, longest=longest, mode=mode)


def test_gathered_paths_give_the_tokens_of_dense_attention():
    decoder = plain("paths")
    leaf, logits = decoder.prefill(PROMPT)
    np.testing.assert_allclose(jax.nn.log_softmax(logits), dense_log_probs(tiny_model(1), PROMPT)[-1], atol=2e-4)
    leaves = decoder.tree.fork(leaf, 3)
    found = decoder.generate(leaves, logits, 9, sampling=Sampling(0.0), eos=(7, 3), horizon=4)
    wanted = greedy(tiny_model(1), PROMPT, 9)
    stops = [i for i, token in enumerate(wanted) if token in (7, 3)]
    wanted = wanted[: stops[0] + 1] if stops else wanted
    assert [one.tokens.tolist() for one in found] == [wanted] * 3


def test_a_row_for_each_sequence_gives_the_same_tokens():
    """Without anything to share: each prompt is a request of its own, with all its pages from the start."""
    prompts = [PROMPT, PROMPT[::-1], PROMPT[1:] + [8]]
    decoder = plain("contiguous", longest=24, num_pages=18)
    for prompt in prompts:
        decoder.tree.add_request(prompt, reserve=24 - len(prompt))
    leaves = decoder.tree.leaves()
    logits = decoder.forward(leaves)
    found = decoder.generate(leaves, logits, 8, sampling=Sampling(0.0), horizon=4)
    assert [one.tokens.tolist() for one in found] == [greedy(tiny_model(1), prompt, 8) for prompt in prompts]


def test_a_masked_draft_has_the_logits_of_dense_attention():
    decoder = plain("mask")
    leaf, _ = decoder.prefill(PROMPT)
    decoder.tree.append(leaf, 6)
    parents, tokens = [-1, -1, 0, 2, 1], [3, 9, 2, 2, 0]
    nodes, logits = decoder.verify(leaf, parents, tokens)
    paths = [[6], [6, 3], [6, 9], [6, 3, 2], [6, 3, 2, 2], [6, 9, 0]]
    for row, path in zip(logits, paths, strict=True):
        wanted = dense_log_probs(tiny_model(1), [*PROMPT, *path])[-1]
        np.testing.assert_allclose(jax.nn.log_softmax(row), wanted, rtol=0, atol=2e-4)
    decoder.accept(leaf, nodes[[0, 2]])
    decoder.tree.append(leaf, 8)
    wanted = dense_log_probs(tiny_model(1), [*PROMPT, 6, 3, 2, 8])[-1]
    np.testing.assert_allclose(jax.nn.log_softmax(decoder.forward([leaf])[0]), wanted, rtol=0, atol=2e-4)


def test_plans_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="mode is 'dense'"):
        plain("dense")
    for mode, message in ("paths", "a path of 11 tokens; longest is 8"), ("mask", "11 tokens; longest is 8"):
        with pytest.raises(ValueError, match=message):
            plain(mode, longest=8).prefill(PROMPT)
    decoder = plain("contiguous", longest=16)
    leaves = [decoder.tree.add_request(PROMPT[:3]), decoder.tree.add_request(PROMPT)]
    decoder.tree.commit()
    decoder.tree.append(leaves, [1, 2])
    with pytest.raises(ValueError, match="sequence 1 does not lie in slots 16"):
        decoder.forward(leaves)
