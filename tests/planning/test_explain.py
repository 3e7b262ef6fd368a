"""``plan.explain()`` and ``plan.draw()`` against counts made one pair at a time."""

import sys

import numpy as np
import pytest
from forests import lay_out

import tree_attention_jax as ta
from pallas_kernels import layout as lo
from tree_attention_jax.planning.explain import summarize
from tree_attention_jax.planning.picture import _rectangles

TREE = lay_out(ta.TokenTree([-1, 0, 0, 1, 1, 2, -1], [63, 13, 20, 7, 33, 1, 40], [0, 2, 0, 7, 20, 1, 3]), 16, 0, True)
HEADS = [(8, 8), (12, 4), (9, 3), (32, 1)]
STRATEGIES = ["per_query", "per_node", "flatten", "greedy", "pack", "auto"]


def visible(tree: ta.TokenTree) -> np.ndarray:
    """bool [rows, tokens], rows and tokens depth first, straight from the definition."""
    node_of, index_of, of_node = [], [], {}
    for node in tree.layout.order.tolist():
        of_node[node] = slice(len(node_of), len(node_of) + int(tree.kv_len[node]))
        node_of += [node] * int(tree.kv_len[node])
        index_of += range(int(tree.kv_len[node]))
    seen = np.zeros((tree.num_queries, len(node_of)), bool)
    first_query = np.cumsum(tree.q_len) - tree.q_len
    for row, query in enumerate(tree.layout.row_query.tolist()):
        node = int(tree.query_nodes()[query])
        own = int(tree.kv_len[node] - tree.q_len[node] + query - first_query[node]) + 1
        seen[row, of_node[node].start : of_node[node].start + own] = True
        while (node := int(tree.parent[node])) >= 0:
            seen[row, of_node[node]] = True
    return seen


def counted(plan: ta.TreePlan, index: int) -> dict[str, int]:
    """Items, tokens and matrix elements of a launch, walked as the kernel does, entry by entry."""
    buffer, shape = plan.host.buffer.tolist(), plan.shape
    launch, group = shape.launches[index], shape.group
    tile = launch.tile
    head_tiles = -(-group // tile.heads_per_tile(group))
    total = dict.fromkeys(("items", "queries", "tokens", "cells", "of_queries", "filled", "visible", "loads"), 0)
    for item in range(buffer[index]):
        at = launch.items_at + item * lo.ITEM_SIZE
        record = buffer[at : at + lo.ITEM_SIZE]
        if not record[lo.PLAIN_COUNT] + record[lo.MASKED_COUNT]:
            continue
        rows = record[lo.NUM_ROWS]
        total["items"] += 1
        total["queries"] += rows
        for begin, count, size in ((lo.PLAIN_BEGIN, lo.PLAIN_COUNT, 2), (lo.MASKED_BEGIN, lo.MASKED_COUNT, 4)):
            slots = -(-record[count] * tile.entry_tokens(size == 4) // tile.block_kv) * tile.block_kv
            total["cells"] += slots * tile.rows * head_tiles
            total["of_queries"] += slots * rows * group
            for entry in range(record[count]):
                place = record[begin] + entry * size
                filled = buffer[place] & lo.COUNT_MASK
                total["tokens"] += filled
                total["loads"] += filled * head_tiles
                total["filled"] += filled * rows * group
                for x in range(filled):
                    for row in range(record[lo.ROW], record[lo.ROW] + rows):
                        low, high = (0, 1 << 30) if size == 2 else (buffer[place + lo.LOW], buffer[place + lo.HIGH])
                        total["visible"] += group * ((~low + x if low < 0 else low) <= row < high)
    return total


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_counts(strategy: str, heads: tuple[int, int]):
    plan = ta.plan_tree(
        TREE, 16, *heads, head_dim=64, v_head_dim=32, dtype="float32", strategy=strategy, gpu="NVIDIA H200"
    )
    summary = summarize(plan)
    totals = [counted(plan, index) for index in range(len(plan.shape.launches))]
    totals = [total for total in totals if total["items"]]
    token_bytes = (64 + 32) * 4 * heads[1]
    for launch, total in zip(summary.launches, totals, strict=True):
        assert (launch.items, launch.queries, launch.tokens) == (total["items"], total["queries"], total["tokens"])
        assert launch.read_bytes == total["loads"] * token_bytes
        assert launch.idle_rows == pytest.approx(1 - total["of_queries"] / total["cells"])
        assert launch.idle_tokens == pytest.approx(1 - total["filled"] / total["of_queries"])
        assert launch.masked == pytest.approx(1 - total["visible"] / total["filled"])
    assert summary.unique_bytes == int(TREE.kv_len.sum()) * token_bytes
    seen = visible(TREE).sum() * heads[0] // heads[1]
    assert sum(total["visible"] for total in totals) == seen
    assert summary.useful == pytest.approx(seen / sum(total["cells"] for total in totals))
    assert summary.partials == plan.host.num_partials
    assert summary.partial_bytes == 2 * 4 * summary.partials * heads[0] * (32 + 1)
    assert summary.us == pytest.approx(ta.planning.modelled_time(plan))


def test_bytes_of_a_hand_worked_tree():
    # Root of 32 tokens over leaves of 16 and 8. K and V, 2 heads, dim 64, 2 bytes: 512 bytes a token.
    tree = ta.TokenTree([-1, 0, 0], [32, 16, 8])
    plans = {s: ta.plan_tree(tree, 16, 8, 2, 64, strategy=s, gpu="NVIDIA H200") for s in ("per_node", "per_query")}
    summaries = {s: summarize(plan) for s, plan in plans.items()}
    assert {s: x.read_bytes for s, x in summaries.items()} == {"per_node": 56 * 512, "per_query": 88 * 512}
    assert {s: x.unique_bytes for s, x in summaries.items()} == dict.fromkeys(plans, 56 * 512)
    assert {s: x.partials for s, x in summaries.items()} == {"per_node": 4, "per_query": 0}
    assert summaries["per_query"].reduce_us == 0 < summaries["per_node"].reduce_us
    assert summaries["per_node"].floor_us > 0


def test_items_that_see_nothing_do_not_count():
    tree = ta.TokenTree([-1, 0], [100, 40])  # the window ends inside the leaf
    (launch,) = summarize(ta.plan_tree(tree, strategy="per_node", sliding_window=10)).launches
    assert (launch.items, launch.queries) == (1, 1)


def test_no_floor_above_the_modelled_time():
    for levels, tokens in (([1, 256], [256, 32]), ([1, 1024], [2048, 32]), ([64], [4096])):
        tree = ta.TokenTree.from_levels(levels, tokens)
        for strategy in ("per_node", "auto"):
            summary = summarize(ta.plan_tree(tree, strategy=strategy, gpu="NVIDIA H200"))
            assert 0 < summary.floor_us <= summary.us


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_table_fits_a_terminal(strategy: str):
    console = pytest.importorskip("rich.console")
    with open("/dev/null", "w") as nowhere:
        screen = console.Console(width=80, record=True, file=nowhere)
        screen.print(ta.plan_tree(TREE, strategy=strategy).explain())
    text = screen.export_text()
    assert f"{strategy}: 33 queries over 7 nodes" in text
    assert "total" in text
    assert "…" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())


def test_empty_forest():
    pytest.importorskip("rich")
    plan = ta.plan_tree(ta.TokenTree([-1], [9], [0]))
    assert summarize(plan).launches == ()
    plan.explain()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rectangles_cover_what_is_visible_once(strategy: str):
    plan = ta.plan_tree(TREE, 16, 8, 2, strategy=strategy, gpu="NVIDIA H200")
    lengths = TREE.kv_len[TREE.layout.order]
    token_begin = np.empty(TREE.num_nodes, np.int64)
    token_begin[TREE.layout.order] = np.cumsum(lengths) - lengths
    seen = visible(TREE)
    count = np.zeros(seen.shape, int)
    for _, begin, end, low, high in zip(*(column.tolist() for column in _rectangles(plan, token_begin))):
        count[low:high, begin:end] += 1
    assert (count[seen] == 1).all()
    computed = sum(counted(plan, index)["filled"] for index in range(len(plan.shape.launches)))
    assert count.sum() * plan.shape.group == computed


def test_picture_is_saved(tmp_path):
    pytest.importorskip("matplotlib")
    figure = ta.plan_tree(TREE, strategy="flatten").draw(tmp_path / "plan.png", title="seven nodes")
    assert figure.axes[0].get_title(loc="left") == "seven nodes"
    assert figure.axes[0].get_ylim() == (33, 0)
    assert figure.axes[0].get_xlim() == (0, 177)
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    axes = figure.add_subplot()
    assert ta.plan_tree(ta.TokenTree([-1], [9], [0])).draw(ax=axes) is figure


@pytest.mark.parametrize(("method", "module"), [("explain", "rich"), ("draw", "matplotlib.figure")])
def test_missing_packages_are_named(method: str, module: str, monkeypatch):
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"tree-attention-jax\[explain\]"):
        getattr(ta.plan_tree(TREE), method)()


@pytest.mark.parametrize("method", ["explain", "draw"])
def test_a_plan_without_its_host_part_says_so(method: str):
    tree = ta.TokenTree([-1], [9]).with_pages(16, reserve=4)
    plan = ta.plan_tree(tree, horizon=4).advance()
    with pytest.raises(ValueError, match=rf"{method}: this plan has passed through"):
        getattr(plan, method)()
