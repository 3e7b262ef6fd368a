"""Every cell that a benchmark may run is a valid forest of the size that its name says."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.suites import Cell, cells, draft_paths, suite_names

COUNTS = {
    "fasttree": 45,
    "pat": 80,
    "decode": 6,
    "verify": 7,
    "prefill": 9,
    "long": 2,
    "shared": 6,
    "heads": 27,
    "odd": 24,
}


def test_all_suites_are_known():
    assert {name: len(list(cells(name))) for name in suite_names()} == COUNTS


@pytest.mark.parametrize("suite", COUNTS)
def test_trees_are_valid(suite):
    seen = set()
    for cell in cells(suite):
        tree = cell.tree()
        tree.check_pages(cell.page_size)
        assert tree.num_queries > 0
        assert cell.num_q_heads % cell.num_kv_heads == 0
        assert cell.label not in seen
        seen.add(cell.label)


def test_levels_are_counts_then_tokens():
    tree = Cell("1,4,16,512_1024,256,128,32", 32, 8).tree()
    assert tree.num_nodes == 533
    assert tree.num_queries == 512
    assert tree.kv_len.sum() == 1024 + 4 * 256 + 16 * 128 + 512 * 32


@pytest.mark.parametrize("nodes", [16, 32, 64, 128, 256])
def test_drafts_have_their_nodes(nodes):
    assert len(draft_paths(nodes)) == nodes - 1  # the root has no path
    tree = Cell(f"3x40+draft{nodes}", 32, 8).tree()
    assert tree.num_queries == 3 * nodes
    assert tree.kv_len.sum() == 3 * (40 + nodes)


def test_search_trees_hang_together():
    tree = Cell("search600x30", 32, 8).tree()
    assert tree.num_nodes == 600
    assert tree.kv_len[1:].mean() == pytest.approx(30, rel=0.15)
    assert 100 < tree.num_queries < 500


def test_recorded_tree_stands_with_what_still_grows():
    prompt, children = 1104, [1068, 897, 900, 1050]  # of the first level, those of 799 tokens or more, begun at step 1
    tree = Cell("sorting@800", 32, 8).tree()
    assert tree.kv_len[0] == prompt
    first_level = tree.kv_len[tree.parent == 0]
    assert sorted(first_level[first_level == 799]) == [799] * len(children)
    with pytest.raises(ValueError, match="nothing grows"):
        Cell("sorting@100000", 32, 8).tree()


def test_odd_trees_are_in_no_other_suite():
    others = {cell.name for suite in COUNTS if suite != "odd" for cell in cells(suite)}
    assert not others & {cell.name for cell in cells("odd")}


def test_likely_drafts_are_part_of_the_recorded_one():
    recorded = {tuple(path) for path in draft_paths(64)}
    for nodes in (16, 32):
        assert {tuple(path) for path in draft_paths(nodes)} <= recorded


def test_verification_takes_as_many_flops_as_the_issue_counts():
    cell = next(iter(cells("verify")))
    assert cell.tree().num_queries == 1024
    assert harness.attention_flops(cell.tree(), cell.heads) == pytest.approx(35e9, rel=0.03)


def test_floor_is_bytes_or_flops():
    tree = Cell("256_4096", 32, 8).tree()
    assert harness.floor_us(tree, (32, 8)) == pytest.approx(256 * 4096 * 4096 / 4.27e6)
    shared = Cell("1,1024_2048,1", 32, 8).tree()
    seen = int((shared.query_positions() + 1).sum())
    assert seen == 1024 * 2049
    assert harness.floor_us(shared, (32, 8)) == pytest.approx(4 * seen * 32 * 128 / 790e6)


def test_labels_name_what_is_unusual():
    assert Cell("1,2_3,4", 8, 2).label == "1,2_3,4 8/2"
    assert Cell("1,2_3,4", 8, 2, 64, 1).label == "1,2_3,4 8/2 d64 p1"


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="suite is 'fastree': known are fasttree"):
        next(cells("fastree"))
    with pytest.raises(ValueError, match="draft of 48 nodes: known are 16"):
        draft_paths(48)


@pytest.mark.parametrize("suite", ["fasttree", "verify", "heads"])
def test_pools_of_the_longest_rotation_fit(suite):
    """Layers times pool stays far below a GPU's memory."""
    for cell in cells(suite):
        pages = int(cell.tree().page_table(cell.page_size)[1].max()) + 1
        pool = (pages, cell.page_size, cell.num_kv_heads, cell.head_dim)
        assert harness.layers_for(pool, "bfloat16") * 2 * np.prod(pool) * 2 < 40e9
