"""In a Mosaic tile's masked runs two halves of its rows take turns, a part of a step at a time."""

import numpy as np
import pytest
from forests import Heads, halves_in_turns, lay_out
from hypothesis import given
from hypothesis import strategies as st
from random_forests import forests, grown, quick

import tree_attention_jax as ta
from pallas_kernels import layout as lo
from tree_attention_jax.planning import interleaving


def halves(plan: ta.TreePlan) -> list[str]:
    """Who sees each masked entry of the first item: 0 the first half of the tile's rows, 1 the second, b both; and the
    entries of a part together."""
    buffer, [launch] = plan.host.buffer, plan.shape.launches
    record = buffer[launch.items_at :][: lo.ITEM_SIZE]
    middle = record[lo.ROW] + launch.tile.queries_per_tile(plan.shape.group) // 2
    begin, count = record[lo.MASKED_BEGIN], record[lo.MASKED_COUNT]
    entries = buffer[begin : begin + count * lo.MASKED_SIZE].reshape(-1, lo.MASKED_SIZE)
    names = "".join(
        "0" if high <= middle else "1" if low >= middle else "b" for low, high in entries[:, [lo.LOW, lo.HIGH]]
    )
    size = 64 // launch.tile.masked_unit
    return [names[i : i + size] for i in range(0, len(names), size)]


@pytest.mark.parametrize(
    ("levels", "tokens", "turns"),
    [
        ([1, 2, 32], [40, 80, 16], ["0000", "1111"] * 5 + ["0", "1"]),
        ([1, 4, 32], [40, 16, 16], ["0000", "1111"] * 4 + ["00", "11"]),
        ([1, 32], [40, 160], ["0000", "1111"] * 40),
    ],
    ids=["two", "four", "long"],
)
def test_parts_of_both_halves_alternate(levels: list[int], tokens: list[int], turns: list[str]):
    found = halves(halves_in_turns(ta.TokenTree.from_levels(levels, tokens), 16, Heads(4, 1)))
    assert "".join(found) == "".join(turns)


@pytest.mark.parametrize(("tokens", "begin"), [(48, ["bbb0", "0000", "1111"]), (130, ["bbbb", "bbbb", "b000", "0000"])])
def test_what_both_halves_see_comes_first(tokens: int, begin: list[str]):
    """A node spans the middle of the tile: its first 24 of 32 queries. The first half goes on in its last part."""
    tree = ta.TokenTree([-1, 0, *[1] * 24, *[0] * 8], [40, tokens, *[16] * 32])
    found = halves(halves_in_turns(tree, 16, Heads(4, 1)))
    assert found[: len(begin)] == begin
    assert "b" not in "".join(found).lstrip("b")


@pytest.mark.parametrize("limit", [32, 96, 160])
def test_a_long_list_is_cut_between_parts(limit: int):
    """Where it was not, both halves would see a bit of each part of the second piece."""
    tree = ta.TokenTree.from_levels([1, 2, 32], [40, 80, 20])
    plan = halves_in_turns(tree, 16, Heads(4, 1), max_tokens=limit)
    plan.check(tree)
    [launch], buffer = plan.shape.launches, plan.host.buffer
    records = buffer[launch.items_at :][: buffer[0] * lo.ITEM_SIZE].reshape(-1, lo.ITEM_SIZE)
    begin = np.sort(records[records[:, lo.MASKED_COUNT] > 0, lo.MASKED_BEGIN])
    assert len(begin) > 3
    assert not np.any((begin - begin[0]) // lo.MASKED_SIZE * launch.tile.masked_unit % 64)


def test_queries_side_by_side_are_told():
    """Depth-first order is node order in the first tree, not in the second."""
    straight = halves_in_turns(ta.TokenTree.from_levels([1, 2, 4], [16, 16, 16]), 16, Heads(4, 1))
    crossed = halves_in_turns(ta.TokenTree([-1, 0, 0, 1, 2, 1, 2], [16] * 7), 16, Heads(4, 1))
    for plan, query in ((straight, 0), (crossed, -1)):
        [launch] = plan.shape.launches
        assert plan.host.buffer[launch.items_at + lo.QUERY] == query


@quick
@given(case=forests(), horizon=st.integers(0, 3), data=st.data())
def test_cover(case, horizon: int, data):
    tree, page_size = case
    heads = data.draw(st.sampled_from([Heads(1, 1), Heads(4, 4), Heads(16, 1), Heads(96, 1)]))
    growing = horizon and bool(np.all(tree.is_leaf() | (tree.q_len == 0)) and np.all(tree.q_len <= 1))
    if growing:
        tree = lay_out(tree, page_size, reserve=horizon)
    plan = halves_in_turns(tree, page_size, heads, horizon=horizon if growing else 0)
    plan.check(tree)
    for step in range(1, horizon + 1 if growing else 1):
        plan = plan.advance()
        plan.check(grown(tree, step))


@pytest.mark.parametrize("heads", [Heads(4, 1), Heads(8, 8), Heads(32, 4)], ids=str)
def test_tiles_that_are_alike_take_the_turns_of_one(heads: Heads, monkeypatch: pytest.MonkeyPatch):
    """The order worked out for one tile of a regular tree is the one worked out for all tiles together."""
    rng, shortcuts, trees = np.random.default_rng(7), 0, []
    while len(trees) < 40:
        sizes = np.cumprod(rng.choice([1, 1, 2, 4, 8], int(rng.integers(2, 5))))
        trees.append(ta.TokenTree.from_levels(sizes, rng.integers(1, rng.choice([20, 300]), len(sizes))))
    trees.append(ta.TokenTree([-1, -1, *[0] * 9, *[1] * 9], [40, 60, *[90] * 18]))  # tiles that are not alike
    found = [halves_in_turns(tree, 16, heads).host.buffer for tree in trees]
    of_one = interleaving._pieces_of_each

    def none_alike(*columns) -> int:
        nonlocal shortcuts
        shortcuts += of_one(*columns) > 0
        return 0

    monkeypatch.setattr(interleaving, "_pieces_of_each", none_alike)
    for tree, buffer in zip(trees, found):
        np.testing.assert_array_equal(halves_in_turns(tree, 16, heads).host.buffer, buffer)
    assert 10 < shortcuts < len(trees)
