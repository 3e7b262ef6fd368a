"""What a call may change about the logits, on a forest whose windows and distances cross levels."""

import numpy as np
import pytest
from forests import (
    IMPLEMENTATIONS,
    Heads,
    assert_matches_oracle,
    attend,
    check_against_oracle,
    lay_out,
    plan_for,
    poisoned_inputs,
)

import tree_attention_jax as ta
from pallas_kernels import layout as lo

HEADS = Heads(6, 2)
PAGE_SIZE = 16
SLOPES = 2.0 ** -np.arange(1, 7)
SINKS = np.array([0.0, 3.0, -5.0, 1.0, 60.0, -60.0])

OPTIONS = {
    "scale": {"scale": 0.3},
    "negative-scale": {"scale": -0.2},
    "soft-cap": {"logits_soft_cap": 1.5},
    "window": {"sliding_window": 29},
    "window-of-one": {"sliding_window": 1},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"attention_sinks": SINKS},
    "scales": {"k_scale": 1.7, "v_scale": 0.4},
    "scales-per-head": {"k_scale": np.array([0.5, 2.0]), "v_scale": np.array([3.0, 0.25])},
    "window-alibi": {"sliding_window": 29, "alibi_slopes": SLOPES},
    "all": {
        "scale": 0.2,
        "logits_soft_cap": 2.0,
        "sliding_window": 29,
        "alibi_slopes": SLOPES,
        "attention_sinks": SINKS,
        "k_scale": 1.2,
        "v_scale": np.array([3.0, 0.25]),
    },
}


def forest() -> ta.TokenTree:
    """Three levels of 63, 13 and 7 tokens with queries in all of them: a window of 29 crosses two edges."""
    tree = ta.TokenTree([-1, 0, 0, 1, 1], [63, 13, 20, 7, 33], [3, 0, 1, 7, 20])
    return lay_out(tree, PAGE_SIZE, sharing=True)


# What needs a kernel of its own on Pallas' slow interpreter and is in "all" too.
SLOW = ("scale", "negative-scale", "window-of-one", "window-alibi")


@pytest.mark.parametrize(
    ("implementation", "name"),
    [("xla", name) for name in OPTIONS]
    + [pytest.param("pallas_triton", name, marks=pytest.mark.slow if name in SLOW else ()) for name in OPTIONS],
)
def test_option(implementation: str, name: str):
    check_against_oracle(forest(), PAGE_SIZE, HEADS, implementation=implementation, **OPTIONS[name])


@pytest.mark.parametrize(
    ("implementation", "window"),
    [
        ("xla", 1),
        ("xla", 29),
        ("pallas_triton", 29),
        *(pytest.param(name, w, marks=pytest.mark.slow) for name in IMPLEMENTATIONS for w in (8, 200)),
    ],
)
def test_window_given_to_the_planner_too(implementation: str, window: int):
    plan = {"sliding_window": window}
    check_against_oracle(forest(), PAGE_SIZE, HEADS, implementation=implementation, plan=plan, sliding_window=window)


def test_a_narrower_window_than_planned_is_exact():
    check_against_oracle(forest(), PAGE_SIZE, HEADS, plan={"sliding_window": 29}, sliding_window=5)


def test_planning_with_the_window_leaves_work_out():
    def slots(window: int | None) -> int:
        plan = plan_for(forest(), PAGE_SIZE, HEADS, strategy="per_node", sliding_window=window)
        total = 0
        for launch, count in zip(plan.shape.launches, plan.host.num_items):
            records = plan.host.buffer[launch.items_at : launch.items_at + count * lo.ITEM_SIZE]
            for field, masked in ((lo.PLAIN_COUNT, False), (lo.MASKED_COUNT, True)):
                total += records[field :: lo.ITEM_SIZE].sum() * launch.tile.entry_tokens(masked)
        return total

    assert slots(8) < slots(None)


def test_huge_and_tiny_sinks_stay_finite():
    """A sink far above all logits leaves nothing of the output, one far below changes nothing."""
    tree = forest()
    inputs = poisoned_inputs(tree, PAGE_SIZE, HEADS)
    plan = plan_for(tree, PAGE_SIZE, HEADS)
    plain, plain_lse = attend(*inputs.on_device(), plan)
    out, lse = attend(*inputs.on_device(), plan, attention_sinks=np.array([1e4, -1e4] * 3))
    assert (np.asarray(out[:, ::2]) == 0).all()
    np.testing.assert_allclose(lse[:, ::2], 1e4)
    np.testing.assert_array_equal(out[:, 1::2], plain[:, 1::2])
    np.testing.assert_array_equal(lse[:, 1::2], plain_lse[:, 1::2])


def test_sinks_leave_padding_rows_empty():
    tree = forest()
    inputs = poisoned_inputs(tree, PAGE_SIZE, HEADS, padding=5)
    plan = plan_for(tree, PAGE_SIZE, HEADS)
    out, lse = attend(*inputs.on_device(), plan, attention_sinks=SINKS)
    assert_matches_oracle(out, lse, tree, PAGE_SIZE, inputs, attention_sinks=SINKS)


def test_lse_is_returned_on_demand():
    tree = forest()
    inputs = poisoned_inputs(tree, PAGE_SIZE, HEADS)
    plan = plan_for(tree, PAGE_SIZE, HEADS)
    out = ta.tree_attention(*inputs.on_device(), plan)
    both = ta.tree_attention(*inputs.on_device(), plan, return_lse=True)
    assert isinstance(both, tuple)
    np.testing.assert_array_equal(out, both[0])
    assert both[1].shape == out.shape[:2]
