"""``plan.check`` must fail on a wrong plan: corrupt the buffer in every way a planner could get it wrong."""

import dataclasses

import numpy as np
import pytest
from forests import Heads, lay_out, plan_for

import tree_attention_jax as ta
from pallas_kernels import layout as lo

# Nodes with old tokens, causal new tokens and several row tiles: plain and masked entries, partials and final rows.
TREE = ta.TokenTree([-1, 0, 0, 1, 1, -1], [63, 33, 20, 7, 40, 9], [0, 3, 20, 1, 40, 9])
PAGE_SIZE, HEADS = 8, Heads(4, 1)


def plan(strategy: str = "node_chunk") -> ta.TreePlan:
    return plan_for(TREE, PAGE_SIZE, HEADS, strategy=strategy)


def corrupted(change, strategy: str = "node_chunk") -> ta.TreePlan:
    """A plan whose buffer ``change`` has edited in place."""
    original = plan(strategy)
    buffer = np.array(original.buffer)
    change(buffer, original.shape)
    return dataclasses.replace(original, buffer=buffer)


def records(buffer: np.ndarray, shape: lo.WorkShape):
    """A view of each item's record that has rows and tokens, with whether it walks masked entries."""
    for index, launch in enumerate(shape.launches):
        for item in range(buffer[index]):
            at = launch.items_at + item * lo.ITEM_SIZE
            record = buffer[at : at + lo.ITEM_SIZE]
            if record[lo.PLAIN_COUNT] + record[lo.MASKED_COUNT] > 0:
                yield record


def first(buffer, shape, field) -> np.ndarray:
    return next(record for record in records(buffer, shape) if record[field] > 0)


def drop_item(buffer, shape):
    first(buffer, shape, lo.PLAIN_COUNT)[lo.NUM_ROWS] = 0


def drop_last_item(buffer, shape):
    launch = max(range(len(shape.launches)), key=lambda i: buffer[i])
    list(records(buffer, shape))  # the launch has items
    buffer[launch] -= 1


def duplicate_item(buffer, shape):
    one, two, *_ = records(buffer, shape)
    two[:] = one


def drop_plain_entry(buffer, shape):
    first(buffer, shape, lo.PLAIN_COUNT)[lo.PLAIN_COUNT] -= 1


def drop_masked_entry(buffer, shape):
    first(buffer, shape, lo.MASKED_COUNT)[lo.MASKED_COUNT] -= 1


def shorten_entry(buffer, shape):
    buffer[first(buffer, shape, lo.PLAIN_COUNT)[lo.PLAIN_BEGIN] + lo.WORD] -= 1


def lengthen_entry(buffer, shape):
    """Into the next slot: a token seen twice, another node's, or nobody's."""
    record = max(records(buffer, shape), key=lambda r: r[lo.PLAIN_COUNT])
    at = record[lo.PLAIN_BEGIN] + (record[lo.PLAIN_COUNT] - 1) * lo.PLAIN_SIZE
    buffer[at + lo.WORD] += 1


def shift_slot(buffer, shape):
    buffer[first(buffer, shape, lo.PLAIN_COUNT)[lo.PLAIN_BEGIN] + lo.WORD] += 1 << lo.SLOT_SHIFT


def slot_of_nobody(buffer, shape):
    buffer[first(buffer, shape, lo.PLAIN_COUNT)[lo.PLAIN_BEGIN] + lo.WORD] = (10_000 << lo.SLOT_SHIFT) + 1


def shift_position(buffer, shape):
    buffer[first(buffer, shape, lo.PLAIN_COUNT)[lo.PLAIN_BEGIN] + lo.POSITION] += 1


def widen_interval_low(buffer, shape):
    """A causal low is stored inverted, so both kinds move a row towards 0."""
    at = first(buffer, shape, lo.MASKED_COUNT)[lo.MASKED_BEGIN] + lo.LOW
    buffer[at] += 1 if buffer[at] < 0 else -1


def narrow_interval_low(buffer, shape):
    at = first(buffer, shape, lo.MASKED_COUNT)[lo.MASKED_BEGIN] + lo.LOW
    buffer[at] += -1 if buffer[at] < 0 else 1


def narrow_interval_high(buffer, shape):
    for record in records(buffer, shape):
        for entry in range(record[lo.MASKED_COUNT]):
            at = record[lo.MASKED_BEGIN] + entry * lo.MASKED_SIZE
            buffer[at + lo.HIGH] = min(buffer[at + lo.HIGH], record[lo.ROW] + record[lo.NUM_ROWS]) - 1


def forget_causality(buffer, shape):
    for record in records(buffer, shape):
        for entry in range(record[lo.MASKED_COUNT]):
            at = record[lo.MASKED_BEGIN] + entry * lo.MASKED_SIZE + lo.LOW
            buffer[at] = ~buffer[at] if buffer[at] < 0 else buffer[at]


def leave_out_halves(buffer, shape):
    for record in records(buffer, shape):
        for entry in range(record[lo.MASKED_COUNT]):
            buffer[record[lo.MASKED_BEGIN] + entry * lo.MASKED_SIZE + lo.WORD] &= ~(3 << lo.HALVES_SHIFT)


def shift_rows(buffer, shape):
    first(buffer, shape, lo.PLAIN_COUNT)[lo.ROW] += 1


def one_row_less(buffer, shape):
    max(records(buffer, shape), key=lambda r: r[lo.NUM_ROWS])[lo.NUM_ROWS] -= 1


def swap_rows(buffer, shape):
    at = shape.rows_at
    buffer[[at, at + 1]] = buffer[[at + 1, at]]


def partial_as_final(buffer, shape):
    next(r for r in records(buffer, shape) if r[lo.PARTIAL] >= 0)[lo.PARTIAL] = -1


def final_as_partial(buffer, shape):
    next(r for r in records(buffer, shape) if r[lo.PARTIAL] < 0)[lo.PARTIAL] = 0


def partial_elsewhere(buffer, shape):
    next(r for r in records(buffer, shape) if r[lo.PARTIAL] > 0)[lo.PARTIAL] -= 1


def partial_outside(buffer, shape):
    next(r for r in records(buffer, shape) if r[lo.PARTIAL] >= 0)[lo.PARTIAL] = shape.partial_rows - 1


def reduce_one_less(buffer, shape):
    """The first query with partials forgets its last one."""
    ends = buffer[shape.reduce_at : shape.reduce_at + shape.row_capacity + 1]
    query = int(np.argmax(np.diff(ends) > 0))
    ends[query + 1 :] -= 1


def reduce_another(buffer, shape):
    ends = buffer[shape.reduce_at : shape.reduce_at + shape.row_capacity + 1]
    one, other = np.flatnonzero(np.diff(ends) > 0)[:2]
    buffer[ends[one]] = buffer[ends[other]]


MUTATIONS = [
    drop_item,
    drop_last_item,
    duplicate_item,
    drop_plain_entry,
    drop_masked_entry,
    shorten_entry,
    lengthen_entry,
    shift_slot,
    slot_of_nobody,
    shift_position,
    widen_interval_low,
    narrow_interval_low,
    narrow_interval_high,
    forget_causality,
    leave_out_halves,
    shift_rows,
    one_row_less,
    swap_rows,
    partial_as_final,
    final_as_partial,
    partial_elsewhere,
    partial_outside,
    reduce_one_less,
    reduce_another,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
def test_a_corrupt_plan_is_found(mutation):
    with pytest.raises(AssertionError):
        corrupted(mutation).check(TREE)


def test_the_same_plan_untouched_passes():
    corrupted(lambda buffer, shape: None).check(TREE)


@pytest.mark.parametrize(
    "other",
    [
        ta.TokenTree([-1, 0, 0, 1, 1, -1], [64, 33, 20, 7, 40, 9], [0, 3, 20, 1, 40, 9]),
        ta.TokenTree([-1, 0, 0, 1, 2, -1], [63, 33, 20, 7, 40, 9], [0, 3, 20, 1, 40, 9]),
        ta.TokenTree([-1, 0, 0, 1, 1, -1], [63, 33, 20, 7, 40, 9], [0, 2, 20, 2, 40, 9]),
        ta.TokenTree([-1, 0, 0, 1, 1, -1], [63, 33, 20, 7, 40, 9], [0, 3, 20, 1, 40, 8]),
        lay_out(TREE, PAGE_SIZE),
    ],
    ids=["one-token-more", "another-parent", "other-queries", "one-query-less", "other-pages"],
)
def test_a_plan_of_another_tree_is_found(other: ta.TokenTree):
    with pytest.raises(AssertionError):
        plan().check(other)


def test_a_window_leaves_out_nothing_that_is_seen():
    narrow = plan_for(TREE, PAGE_SIZE, HEADS, sliding_window=8)
    narrow.check(TREE)
    with pytest.raises(AssertionError, match="misses token"):
        dataclasses.replace(narrow, sliding_window=30).check(TREE)
    with pytest.raises(AssertionError, match="misses token"):
        dataclasses.replace(narrow, sliding_window=None).check(TREE)
