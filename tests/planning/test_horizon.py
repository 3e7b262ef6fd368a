"""Plans that serve several decode steps: ``advance()`` must equal planning anew at every step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import (
    Heads,
    assert_close,
    assert_lse_close,
    every_strategy_slowly,
    lay_out,
    num_pages,
    plan_for,
    quick_compiler_options,
)
from random_forests import grown

import tree_attention_jax as ta

HEADS = Heads(4, 2, 16)

advance = jax.jit(ta.TreePlan.advance, compiler_options=quick_compiler_options())


def forest(page_size: int, horizon: int, seed: int = 0) -> ta.TokenTree:
    """Two roots, inner nodes without queries, leaves of 1 to 35 tokens; one leaf is empty and stays so."""
    tree = ta.TokenTree([-1, 0, 0, 1, 1, -1, 5, 0], [33, 17, 5, 1, 20, 35, 3, 0])
    return lay_out(tree, page_size, seed, sharing=page_size > 1, reserve=horizon)


def tokens_of_step(tree: ta.TokenTree, seed: int = 7):
    """q, k_new and v_new of any step: functions of the step, traceable and not."""
    rng = np.random.default_rng(seed)
    rows = tree.num_queries
    table = {
        "q": rng.normal(size=(8, rows, HEADS.q, HEADS.dim)),
        "k": rng.normal(size=(8, rows, HEADS.kv, HEADS.dim)),
        "v": rng.normal(size=(8, rows, HEADS.kv, HEADS.dim)),
    }
    return {name: jnp.asarray(x, jnp.float32) for name, x in table.items()}


def decode(plan, k_pages, v_pages, table, steps: int, implementation: str):
    """``steps`` decode steps in one loop on the device: append, attend, advance."""
    rows, outs = table["q"].shape[1], jnp.zeros((steps, *table["q"].shape[1:]))

    def step(i, carry):
        plan, k_pages, v_pages, outs, lses, positions = carry
        at = i % 8
        k_pages, v_pages = ta.append_kv(
            k_pages, v_pages, table["k"][at], table["v"][at], plan, implementation=implementation
        )
        out, lse = ta.tree_attention(
            table["q"][at], k_pages, v_pages, plan, implementation=implementation, return_lse=True
        )
        positions = positions.at[i].set(plan.positions[:rows])
        return plan.advance(), k_pages, v_pages, outs.at[i].set(out), lses.at[i].set(lse), positions

    carry = (plan, k_pages, v_pages, outs, jnp.zeros(outs.shape[:-1]), jnp.zeros((steps, rows), jnp.int32))
    return jax.lax.fori_loop(0, steps, step, carry)


def check_decoding(
    tree: ta.TokenTree, page_size: int, horizon: int, implementation: str = "xla", **plan_options
) -> None:
    rng = np.random.default_rng(0)
    shape = (num_pages(tree, page_size), page_size, HEADS.kv, HEADS.dim)
    k_pages, v_pages = (np.full(shape, np.nan, np.float32) for _ in range(2))
    for pages in (k_pages, v_pages):
        slots = tree.token_slots(page_size)
        pages.reshape(-1, *shape[2:])[slots] = rng.normal(size=(len(slots), *shape[2:]))
    table = tokens_of_step(tree)
    plan = plan_for(tree, page_size, HEADS, horizon=horizon, **plan_options)
    run = jax.jit(decode, static_argnums=(4, 5), donate_argnums=(1, 2), compiler_options=quick_compiler_options())
    # The plan's own step, and one more for each of the horizon.
    steps = horizon + 1
    _, k_end, v_end, outs, lses, positions = run(
        plan, jnp.array(k_pages, copy=True), jnp.array(v_pages, copy=True), table, steps, implementation
    )
    for i in range(steps):
        now = grown(tree, i)
        np.testing.assert_array_equal(positions[i], now.query_positions())
        # Later tokens are in the final pages already; nobody's tree owns them yet.
        want, want_lse = ta.reference.dense_tree_attention(
            table["q"][i % 8], k_end, v_end, now, page_size, return_lse=True
        )
        assert_close(outs[i], want, np.float32)
        assert_lse_close(lses[i], want_lse, np.float32)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_decoding_on_the_device_equals_the_oracle(page_size: int):
    check_decoding(forest(page_size, 9, seed=page_size), page_size, 9)


@every_strategy_slowly
def test_every_strategy_decodes_on_the_device(strategy: str):
    check_decoding(forest(4, 6), 4, 6, strategy=strategy)


def test_decoding_in_pallas():
    tree = ta.TokenTree([-1, 0, 0], [17, 3, 14])
    check_decoding(lay_out(tree, 4, reserve=5), 4, 5, implementation="pallas_triton")


def test_a_long_horizon_fills_many_pages():
    tree = ta.TokenTree([-1, 0, 0], [17, 3, 14])
    check_decoding(lay_out(tree, 4, reserve=70), 4, 70)


def test_splitting_keeps_the_tail():
    """A leaf cut into several items grows in its last one."""
    tree = ta.TokenTree([-1, 0], [20, 700])
    check_decoding(lay_out(tree, 16, reserve=20), 16, 20, strategy="node_chunk", chunk=128)


@every_strategy_slowly
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_advancing_equals_planning_anew(page_size: int, strategy: str):
    """Positions, slots and cover of every step; no kernel runs."""
    horizon = 18
    tree = forest(page_size, horizon)
    plan = plan_for(tree, page_size, HEADS, horizon=horizon, strategy=strategy)
    for step in range(1, horizon + 1):
        plan = advance(plan)
        now = grown(tree, step)
        anew = plan_for(now, page_size, HEADS, strategy=strategy)
        rows = tree.num_queries
        np.testing.assert_array_equal(plan.positions[:rows], now.query_positions())
        np.testing.assert_array_equal(plan.slots[:rows], anew.slots[:rows])
        plan.check(now)


def test_the_shape_does_not_change_on_the_way():
    tree = forest(4, 3)
    plan = plan_for(tree, 4, HEADS, horizon=3)
    assert plan.advance().shape == plan.shape
    assert jax.tree.structure(plan.advance()) == jax.tree.structure(plan)


def test_idle_rows_do_not_advance():
    tree = forest(4, 3)
    plan = plan_for(tree, 4, HEADS, horizon=3).advance()
    rows = tree.num_queries
    assert (plan.positions[rows:] == 0).all()
    assert (plan.slots[rows:] == -1).all()


@pytest.mark.parametrize("window", [3, 20])
def test_a_window_moves_along(window: int):
    """What an early step sees and a late one does not is masked by the kernel, not left out of the plan."""
    tree = forest(4, 6)
    plan = plan_for(tree, 4, HEADS, horizon=6, sliding_window=window)
    for step in range(1, 7):
        plan = advance(plan)
        plan.check(grown(tree, step))


HORIZONS_REFUSED = {
    "no reserved pages": (
        ta.TokenTree([-1, 0], [5, 14]),
        r"horizon is 3 but the pages of node 1 have room for 2 more tokens.*with_pages\(page_size, reserve=3\)",
    ),
    "several queries": (
        ta.TokenTree([-1, 0], [5, 4], [0, 2]).with_pages(16, 9),
        "horizon is 3 but node 1 has 2 queries",
    ),
    "an inner query": (ta.TokenTree([-1, 0], [5, 4], [1, 1]).with_pages(16, 9), "horizon is 3 but node 0 has children"),
    "taken slots": (
        ta.TokenTree([-1, 0, 0], [5, 2, 2], None, [0, 1, 2, 3], [0, 1, 1], [0, 0, 2]),
        r"horizon is 3, but the slots it needs are taken: .*slot 2 of page 1",
    ),
}


@pytest.mark.parametrize(("tree", "message"), HORIZONS_REFUSED.values(), ids=HORIZONS_REFUSED)
def test_horizon_refused(tree: ta.TokenTree, message: str):
    with pytest.raises(ValueError, match=message):
        plan_for(tree, 16, HEADS, horizon=3)


def test_advance_refuses_a_plan_without_horizon():
    plan = plan_for(ta.TokenTree([-1], [5]), 16, HEADS)
    with pytest.raises(ValueError, match="advance: this plan has horizon 0"):
        plan.advance()
    with pytest.raises(ValueError, match="advance: this plan has horizon 0"):
        jax.jit(lambda plan: plan.advance().buffer)(plan)
