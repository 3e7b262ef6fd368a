"""Public bug reports from this field, each the smallest shape that shows it; the right value is the oracle's.

A test is named after the report; reports of the same kind share one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import (
    IMPLEMENTATIONS,
    Heads,
    assert_close,
    assert_lse_close,
    assert_matches_oracle,
    attend,
    check_against_oracle,
    every_strategy_slowly,
    lay_out,
    plan_for,
    poisoned_inputs,
    quick_compiler_options,
)

import tree_attention_jax as ta
from pallas_kernels.layout import MAX_SLOTS
from tree_attention_jax.planning.strategies import STRATEGIES

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_plan = pytest.mark.parametrize(
    ("implementation", "strategy"), [*(("xla", strategy) for strategy in STRATEGIES), ("pallas_triton", "auto")]
)


def test_flashinfer_4051_merging_two_empty_states():
    empty = jnp.full((3, 2, 64), jnp.nan), jnp.full((3, 2), -jnp.inf)
    out, lse = ta.merge_states(*empty, *empty)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()


@every_implementation
def test_flashinfer_4450_logits_below_a_finite_minus_infinity(implementation: str):
    """Two keys whose logits are near -6.7e4 (below float16's range): the answer is still their softmax."""
    tree = ta.TokenTree([-1], [2], [1])
    q = np.full((1, 1, 64), -1.0, np.float32)
    k = np.full((1, 16, 1, 64), np.nan, np.float32)
    k[0, 0], k[0, 1] = 6.7e4 / 8, (6.7e4 + 1) / 8
    v = np.full((1, 16, 1, 64), np.nan, np.float32)
    v[0, :2] = np.array([1.0, 2.0])[:, None, None]
    plan = plan_for(tree, 16, Heads(1, 1))
    out, lse = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), plan, implementation)
    want, want_lse = ta.reference.dense_tree_attention(q, k, v, tree, 16, return_lse=True)
    assert -6.71e4 < want_lse.item() < -6.69e4
    # The logits themselves are rounded to float32: 2^-8 at this size.
    np.testing.assert_allclose(out, want, atol=1e-2)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@every_plan
def test_vllm_27491_rows_that_see_nothing_of_a_block(implementation: str, strategy: str):
    """Causal rows in a block of which they see no key: the first rows of a chunk against its last tokens."""
    tree = ta.TokenTree([-1, 0], [16, 100], [0, 100])
    check_against_oracle(tree, 16, Heads(1, 1), implementation=implementation, plan={"strategy": strategy})


@every_implementation
def test_flashinfer_2113_sglang_40903_lse_is_a_natural_log(implementation: str):
    """Prefix of 3072 tokens and suffix of 64, attended apart and merged by the caller."""
    heads = Heads(4, 1)
    joint = ta.TokenTree([-1, 0], [3072, 64], [0, 1])
    prefix = ta.TokenTree([-1], [3072], [1])
    suffix = ta.TokenTree([-1], [64], [1], [0, 4], np.arange(192, 196))
    inputs = poisoned_inputs(joint, 16, heads)
    states = [attend(*inputs.on_device(), plan_for(part, 16, heads), implementation) for part in (prefix, suffix)]
    out, lse = ta.merge_states(*states[0], *states[1])
    assert_matches_oracle(out, lse, joint, 16, inputs)


@every_plan
def test_flashinfer_pr_363_empty_request_in_a_batch(implementation: str, strategy: str):
    tree = ta.TokenTree([-1, -1], [0, 9])
    assert tree.num_queries == 1
    check_against_oracle(tree, 16, Heads(32, 32), implementation=implementation, plan={"strategy": strategy})


@every_implementation
def test_flashinfer_725_sequences_shorter_than_a_page(implementation: str):
    tree = lay_out(ta.TokenTree([-1, -1], [1, 1]), 2)
    check_against_oracle(tree, 2, Heads(32, 8), implementation=implementation)


@every_implementation
def test_sglang_pr_1779_padding_rows_of_length_zero(implementation: str):
    """A batch padded with sequences of length 0, and q padded to the bucket with NaN rows."""
    tree = ta.TokenTree([-1] * 8, [5, 63, 17, 0, 0, 0, 0, 0])
    plan = plan_for(tree, 16, Heads(4, 2))
    padding = plan.query_capacity - tree.num_queries
    check_against_oracle(tree, 16, Heads(4, 2), implementation=implementation, padding=padding)


@pytest.mark.parametrize("short", ["q", "q heads", "k_pages", "v_pages", "page", "kv heads", "head dim", "pages"])
def test_flashinfer_3176_an_argument_one_row_short(short: str):
    tree = ta.TokenTree([-1], [40], [3])
    plan = plan_for(tree, 16, Heads(4, 2))
    q, k, v = np.zeros((3, 4, 64), np.float32), *np.zeros((2, 3, 16, 2, 64), np.float32)
    arguments = {
        "q": (q[:-1], k, v),
        "q heads": (q[:, :-1], k, v),
        "k_pages": (q, k[:-1], v),
        "v_pages": (q, k, v[:-1]),
        "page": (q, k[:, :-1], v[:, :-1]),
        "kv heads": (q, k[:, :, :-1], v[:, :, :-1]),
        "head dim": (q[..., :-1], k[..., :-1], v[..., :-1]),
        "pages": (q, k[:-1], v[:-1]),
    }[short]
    with pytest.raises(ValueError, match=r"(q|k_pages|v_pages) has"):
        ta.tree_attention(*map(jnp.asarray, arguments), plan)


@pytest.mark.parametrize("heads", [Heads(28, 4), Heads(24, 8), Heads(9, 3)], ids=str)
def test_flashinfer_996_258_groups_that_are_no_power_of_two(heads: Heads):
    tree = ta.TokenTree([-1, 0, 0], [63, 33, 5], [0, 3, 1])
    check_against_oracle(tree, 16, heads)


@pytest.mark.parametrize("dim", [96, 192, 80])
def test_sglang_1159_jax_26433_head_dims_that_are_no_power_of_two(dim: int):
    tree = ta.TokenTree([-1, 0, 0], [63, 33, 5], [0, 3, 1])
    check_against_oracle(tree, 16, Heads(4, 4, dim))


@pytest.mark.parametrize("kv_len", [192, 4092])
@every_implementation
def test_jax_27224_23819_lengths_that_are_no_multiple_of_the_block(implementation: str, kv_len: int):
    check_against_oracle(ta.TokenTree([-1], [kv_len], [1]), 16, Heads(2, 1), implementation=implementation)


@pytest.mark.parametrize("heads", [Heads(64, 1), Heads(128, 1), Heads(96, 1)], ids=str)
@every_implementation
def test_jax_pr_24602_groups_larger_than_the_row_block(implementation: str, heads: Heads):
    tree = ta.TokenTree([-1, 0], [33, 5], [0, 3])
    check_against_oracle(tree, 16, heads, implementation=implementation)


@every_plan
def test_vllm_pr_40737_axes_of_size_one(implementation: str, strategy: str):
    plan = {"strategy": strategy}
    check_against_oracle(ta.TokenTree([-1], [1], [1]), 1, Heads(1, 1), implementation=implementation, plan=plan)


@pytest.mark.slow
def test_fasttree_artifact_3_several_roots():
    check_against_oracle(ta.TokenTree.from_levels([4, 16], [4096, 256]), 16, Heads(32, 8))


@every_strategy_slowly
def test_fasttree_artifact_3_several_roots_by_strategy(strategy: str):
    check_against_oracle(ta.TokenTree.from_levels([4, 16], [63, 17]), 16, Heads(4, 1), plan={"strategy": strategy})


@every_strategy_slowly
def test_flashinfer_3125_more_work_than_a_grid_axis_has_room_for(strategy: str):
    """70,000 single-token leaves: more than 65,535 items. Every pair is covered, and the last row is not forgotten."""
    tree = ta.TokenTree.from_levels([1, 70_000], [5, 1])
    plan = plan_for(tree, 16, Heads(1, 1, 64), strategy=strategy)
    plan.check(tree)


@pytest.mark.slow
def test_flashinfer_3125_runs():
    tree = ta.TokenTree.from_levels([1, 70_000], [5, 1]).with_pages(1)
    check_against_oracle(tree, 1, Heads(1, 1, 16))


def test_flashinfer_3130_vllm_pr_47671_slots_beyond_32_bits():
    """Slot numbers end where the plan's integers do, element offsets do not (the GPU tests go there)."""
    last = MAX_SLOTS // 16 - 1
    plan = plan_for(ta.TokenTree([-1], [16], None, [0, 1], [last]), 16, Heads(1, 1))
    assert int(plan.slots[0]) == MAX_SLOTS - 1
    with pytest.raises(ValueError, match=rf"page_indices\[0\] is {last + 1}.*{last + 1} pages"):
        plan_for(ta.TokenTree([-1], [16], None, [0, 1], [last + 1]), 16, Heads(1, 1))


@pytest.mark.parametrize(
    "option", [{"sliding_window": 70}, {"alibi_slopes": 2.0 ** -np.arange(1, 5)}], ids=["window", "alibi"]
)
@every_strategy_slowly
def test_vllm_15710_17652_window_and_alibi_over_a_shared_prefix(strategy: str, option: dict):
    """Positions count from the root: a window of 70 crosses both edges of three levels of 40, 33 and 10 tokens."""
    tree = ta.TokenTree.from_levels([1, 2, 4], [40, 33, 10])
    check_against_oracle(tree, 16, Heads(4, 2), plan={"strategy": strategy}, **option)


@every_plan
def test_cudnn_frontend_624_tails_of_pages_hold_nan(implementation: str, strategy: str):
    """0 x NaN: a masked probability must not meet an uninitialised V. Every node ends in the middle of a page."""
    tree = ta.TokenTree.from_levels([1, 2, 4], [17, 3, 5])
    check_against_oracle(tree, 16, Heads(2, 1), implementation=implementation, plan={"strategy": strategy})


def test_vllm_pr_22003_operands_that_are_slices_and_transposes():
    tree = ta.TokenTree.from_levels([1, 4], [33, 5])
    heads = Heads(4, 2)
    inputs = poisoned_inputs(tree, 16, heads)

    def strided(q_heads_first, kv, plan):
        k, v = kv[..., ::2, :], kv[..., 1::2, :]
        out, lse = ta.tree_attention(q_heads_first.transpose(1, 0, 2), k, v, plan, return_lse=True)
        # The same state twice, as a transpose and as every other row of its repetition.
        transposed = out.transpose(1, 0, 2).transpose(1, 0, 2), lse.T.T
        sliced = jnp.repeat(out, 2, axis=0)[::2], jnp.repeat(lse, 2, axis=0)[::2]
        return (out, lse), ta.merge_states(*transposed, *sliced)

    interleaved = np.stack([inputs.k_pages, inputs.v_pages], axis=-2).reshape(*inputs.k_pages.shape[:2], 4, 64)
    run = jax.jit(strided, compiler_options=quick_compiler_options())
    state, merged = run(inputs.q.transpose(1, 0, 2), interleaved, plan_for(tree, 16, heads))
    assert_matches_oracle(*state, tree, 16, inputs)
    assert_close(merged[0], state[0], np.float32)
    assert_lse_close(merged[1], np.asarray(state[1]) + np.log(2), np.float32)


@every_strategy_slowly
def test_tgi_pr_2711_slots_that_are_not_contiguous(strategy: str):
    tree = lay_out(ta.TokenTree([-1, 0, 0], [100, 33, 60], [0, 20, 1]), 16, seed=5)
    assert (np.diff(tree.page_indices) != 1).any()
    check_against_oracle(tree, 16, Heads(4, 2), plan={"strategy": strategy})


@every_implementation
def test_trt_llm_10323_draft_trees_of_depth_one(implementation: str):
    tree = ta.TokenTree.from_paths([[0], [1], [2], [3]], 20, page_size=16)
    assert tree.num_queries == 5
    check_against_oracle(tree, 16, Heads(4, 2), implementation=implementation)


@every_implementation
def test_flashinfer_1005_sglang_6309_mask_of_26_draft_tokens(implementation: str):
    """26 draft tokens grown by top-k 6: no multiple of any mask word, and the last rows end in the middle of a tile."""
    paths = [[i] for i in range(6)] + [[i, j] for i in range(3) for j in range(6)] + [[0, 0, 0], [0, 0, 1]]
    tree = ta.TokenTree.from_paths(paths, [60], page_size=16, root=False)
    assert tree.num_queries == 26
    check_against_oracle(tree, 16, Heads(6, 1), implementation=implementation)


def test_eagle_336_rejected_drafts_are_gone_in_the_next_step():
    """64 draft nodes, 5 accepted: the next step's tree owns the accepted slots only, and the rest turns to NaN."""
    rng = np.random.default_rng(0)
    paths: list[list[int]] = [[0]]
    while len(paths) < 64:
        above = paths[rng.integers(len(paths))] if len(paths) > 4 else paths[-1]
        child = [*above, sum(p[:-1] == above for p in paths)]
        paths.append(child)
    heads = Heads(4, 2)
    draft = ta.TokenTree.from_paths(paths, 60, page_size=16, root=False)
    check_against_oracle(draft, 16, heads)
    accepted = [0]  # the prompt
    for depth in range(1, 6):
        accepted.append(1 + paths.index([0] * depth))
    slots = draft.token_slots(16)
    begin = np.cumsum(draft.kv_len) - draft.kv_len
    # The next step: the prompt, then the accepted tokens where they lie, a chain of one-token nodes, the last a query.
    chain = ta.TokenTree(
        np.arange(-1, 5),
        draft.kv_len[accepted],
        [0, 0, 0, 0, 0, 1],
        np.concatenate(([0], np.cumsum([4, 1, 1, 1, 1, 1]))),
        np.concatenate([draft.page_table(16)[1][:4], slots[begin[accepted[1:]]] // 16]),
        np.concatenate([[0], slots[begin[accepted[1:]]] % 16]),
    )
    check_against_oracle(chain, 16, heads)
