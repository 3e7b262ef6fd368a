"""Every argument that does not fit is refused before a kernel runs, by name and with both values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Heads, plan_for

import tree_attention_jax as ta
from tree_attention_jax import TokenTree

HEADS = Heads(4, 2, 64, 80)
QUERIES, PAGES, PAGE_SIZE = 3, 3, 16


@pytest.fixture(scope="module")
def plan() -> ta.TreePlan:
    return plan_for(TokenTree([-1], [40], [QUERIES]), PAGE_SIZE, HEADS)


def call(plan: ta.TreePlan, /, **changed):
    """``tree_attention`` on arguments that fit, but for those given."""
    arguments = {
        "q": np.zeros((QUERIES, 4, 64), np.float32),
        "k_pages": np.zeros((PAGES, PAGE_SIZE, 2, 64), np.float32),
        "v_pages": np.zeros((PAGES, PAGE_SIZE, 2, 80), np.float32),
        "plan": plan,
    } | changed
    return ta.tree_attention(**arguments)


def zeros(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


REFUSED = {
    "q one row short": ({"q": zeros(2, 4, 64)}, ValueError, "q has 2 rows but the plan has 3 queries"),
    "q beyond its bucket": ({"q": zeros(5000, 4, 64)}, ValueError, "q has 5000 rows but .* holds"),
    "q heads": ({"q": zeros(3, 3, 64)}, ValueError, r"q has shape \(3, 3, 64\) .* \(3, 4, 64\)"),
    "q width": ({"q": zeros(3, 4, 63)}, ValueError, r"q has shape \(3, 4, 63\) .* \(3, 4, 64\)"),
    "q without heads": ({"q": zeros(3, 256)}, ValueError, r"q has shape \(3, 256\)"),
    "q with a batch": ({"q": zeros(1, 3, 4, 64)}, ValueError, r"q has shape \(1, 3, 4, 64\)"),
    "q of integers": ({"q": zeros(3, 4, 64, dtype=np.int32)}, TypeError, "q has dtype int32"),
    "k page size": (
        {"k_pages": zeros(3, 15, 2, 64)},
        ValueError,
        r"k_pages has shape \(3, 15, 2, 64\) .* \(3, 16, 2, 64\)",
    ),
    "k heads": ({"k_pages": zeros(3, 16, 1, 64)}, ValueError, r"k_pages has shape \(3, 16, 1, 64\)"),
    "k width": ({"k_pages": zeros(3, 16, 2, 80)}, ValueError, r"k_pages has shape \(3, 16, 2, 80\)"),
    "k flat": ({"k_pages": zeros(48, 2, 64)}, ValueError, r"k_pages has shape \(48, 2, 64\)"),
    "k scalar": ({"k_pages": zeros()}, ValueError, r"k_pages has shape \(\)"),
    "v pages": (
        {"v_pages": zeros(2, 16, 2, 80)},
        ValueError,
        r"v_pages has shape \(2, 16, 2, 80\) .* \(3, 16, 2, 80\)",
    ),
    "v width": ({"v_pages": zeros(3, 16, 2, 64)}, ValueError, r"v_pages has shape \(3, 16, 2, 64\)"),
    "v heads first": ({"v_pages": zeros(3, 2, 16, 80)}, ValueError, r"v_pages has shape \(3, 2, 16, 80\)"),
    "too few pages": (
        {"k_pages": zeros(2, 16, 2, 64), "v_pages": zeros(2, 16, 2, 80)},
        ValueError,
        "k_pages has 2 pages but the plan reads page 2",
    ),
    "types differ": (
        {"v_pages": zeros(3, 16, 2, 80, dtype=np.float16)},
        TypeError,
        "k_pages .* float32 .* v_pages .* float16",
    ),
    "pages of int32": (
        {"k_pages": zeros(3, 16, 2, 64, dtype=np.int32), "v_pages": zeros(3, 16, 2, 80, dtype=np.int32)},
        TypeError,
        "k_pages has dtype int32",
    ),
    "plan is a tree": ({"plan": TokenTree([-1], [40], [3])}, TypeError, "plan is a TokenTree"),
    "scale NaN": ({"scale": float("nan")}, ValueError, "scale is nan"),
    "scale infinite": ({"scale": float("inf")}, ValueError, "scale is inf"),
    "scale a word": ({"scale": "big"}, TypeError, "scale must be a Python number"),
    "scale a vector": ({"scale": np.ones(4)}, TypeError, "scale must be a Python number"),
    "cap zero": ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap is 0.0"),
    "cap negative": ({"logits_soft_cap": -1}, ValueError, "logits_soft_cap is -1.0"),
    "cap NaN": ({"logits_soft_cap": float("nan")}, ValueError, "logits_soft_cap is nan"),
    "window zero": ({"sliding_window": 0}, ValueError, "sliding_window is 0"),
    "window negative": ({"sliding_window": -1}, ValueError, "sliding_window is -1"),
    "window a float": ({"sliding_window": 8.0}, TypeError, "sliding_window is 8.0"),
    "window a bool": ({"sliding_window": True}, TypeError, "sliding_window is True"),
    "sinks short": ({"attention_sinks": zeros(3)}, ValueError, r"attention_sinks has shape \(3,\): it must be \[4\]"),
    "sinks a scalar": ({"attention_sinks": 1.0}, ValueError, r"attention_sinks has shape \(\)"),
    "sinks a matrix": ({"attention_sinks": zeros(1, 4)}, ValueError, r"attention_sinks has shape \(1, 4\)"),
    "slopes per KV head": ({"alibi_slopes": zeros(2)}, ValueError, r"alibi_slopes has shape \(2,\): it must be \[4\]"),
    "k_scale per query head": ({"k_scale": zeros(4)}, ValueError, r"k_scale has shape \(4,\): .*\[2\]"),
    "v_scale a matrix": ({"v_scale": zeros(2, 1)}, ValueError, r"v_scale has shape \(2, 1\): .*\[2\]"),
    "k_scale NaN": ({"k_scale": float("nan")}, ValueError, "k_scale.* is nan"),
    "v_scale infinite": ({"v_scale": np.array([1.0, np.inf])}, ValueError, r"v_scale\[1\] is inf"),
    "sinks NaN": ({"attention_sinks": np.array([0, 0, np.nan, 0])}, ValueError, r"attention_sinks\[2\] is nan"),
    "slopes infinite": ({"alibi_slopes": np.array([0, -np.inf, 0, 0])}, ValueError, r"alibi_slopes\[1\] is -inf"),
    "unknown implementation": ({"implementation": "cudnn"}, ValueError, "implementation is 'cudnn'"),
    "unknown in a sequence": ({"implementation": ("xla", "cudnn")}, ValueError, "implementation is 'cudnn'"),
    "no implementation": ({"implementation": ()}, ValueError, "implementation is an empty sequence"),
}


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_attention_refuses(plan: ta.TreePlan, changed: dict, error: type, message: str):
    with pytest.raises(error, match=message):
        call(plan, **changed)


def test_what_fits_is_taken(plan: ta.TreePlan):
    assert call(plan).shape == (3, 4, 80)


def test_refused_at_trace_time_too(plan: ta.TreePlan):
    """Inside ``jit`` the host's counts are gone, but shapes and static arguments are still checked."""
    k, v = zeros(3, 16, 2, 64), zeros(3, 16, 2, 80)
    attend = jax.jit(ta.tree_attention, static_argnames=("sliding_window", "scale"))
    with pytest.raises(ValueError, match=r"q has shape \(3, 3, 64\)"):
        attend(zeros(3, 3, 64), k, v, plan)
    with pytest.raises(ValueError, match="sliding_window is 0"):
        attend(zeros(3, 4, 64), k, v, plan, sliding_window=0)
    with pytest.raises(TypeError, match="scale must be a Python number"):
        jax.jit(lambda scale: call(plan, scale=scale))(0.5)


@pytest.mark.parametrize(
    ("heads", "page_size", "message"),
    [
        (Heads(2, 2, 64, 80), 16, r"q has shape \(3, 4, 64\) .* \(3, 2, 64\)"),
        (Heads(4, 1, 64, 80), 16, r"k_pages has shape .* \(3, 16, 1, 64\)"),
        (Heads(4, 2, 32, 80), 16, r"q has shape .* \(3, 4, 32\)"),
        (Heads(4, 2, 64), 16, r"v_pages has shape .* \(3, 16, 2, 64\)"),
        (Heads(4, 2, 64, 80), 32, r"k_pages has shape .* \(3, 32, 2, 64\)"),
    ],
)
def test_a_plan_for_other_heads_or_pages(heads: Heads, page_size: int, message: str):
    other = plan_for(TokenTree([-1], [40], [QUERIES]), page_size, heads)
    with pytest.raises(ValueError, match=message):
        jax.jit(call)(other)


@pytest.mark.parametrize("window", [None, 9])
def test_a_plan_for_a_narrower_window(window: int | None):
    narrow = plan_for(TokenTree([-1], [40], [QUERIES]), PAGE_SIZE, HEADS, sliding_window=8)
    with pytest.raises(ValueError, match=f"sliding_window is {window} but the plan .* window of 8"):
        call(narrow, sliding_window=window)


# ---------------------------------------------------------------------- append_kv

APPEND_REFUSED = {
    "k_new one row short": ((zeros(2, 2, 64), zeros(2, 2, 80)), "k_new has 2 rows but the plan has 3"),
    "v_new one row short": ((zeros(3, 2, 64), zeros(2, 2, 80)), r"v_new has shape \(2, 2, 80\) .* \(3, 2, 80\)"),
    "too many rows": ((zeros(5000, 2, 64), zeros(5000, 2, 80)), "k_new has 5000 rows"),
    "heads": ((zeros(3, 4, 64), zeros(3, 2, 80)), r"k_new has shape \(3, 4, 64\) .* \(3, 2, 64\)"),
    "width": ((zeros(3, 2, 64), zeros(3, 2, 64)), r"v_new has shape \(3, 2, 64\) .* \(3, 2, 80\)"),
    "scalar": ((zeros(), zeros(3, 2, 80)), r"k_new has shape \(\)"),
}


@pytest.mark.parametrize(("new", "message"), APPEND_REFUSED.values(), ids=APPEND_REFUSED)
def test_append_refuses(plan: ta.TreePlan, new: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        ta.append_kv(zeros(3, 16, 2, 64), zeros(3, 16, 2, 80), *new, plan)


def test_append_refuses_pages_and_plans(plan: ta.TreePlan):
    new = zeros(3, 2, 64), zeros(3, 2, 80)
    with pytest.raises(ValueError, match=r"v_pages has shape \(3, 16, 2, 64\)"):
        ta.append_kv(zeros(3, 16, 2, 64), zeros(3, 16, 2, 64), *new, plan)
    with pytest.raises(ValueError, match="k_pages has 2 pages but the plan reads page 2"):
        ta.append_kv(zeros(2, 16, 2, 64), zeros(2, 16, 2, 80), *new, plan)
    with pytest.raises(TypeError, match="plan is a NoneType"):
        ta.append_kv(zeros(3, 16, 2, 64), zeros(3, 16, 2, 80), *new, None)
    with pytest.raises(ValueError, match="implementation is 'torch'"):
        ta.append_kv(zeros(3, 16, 2, 64), zeros(3, 16, 2, 80), *new, plan, implementation="torch")


def test_append_refuses_to_lose_the_scale(plan: ta.TreePlan):
    int8 = zeros(3, 16, 2, 64, dtype=np.int8), zeros(3, 16, 2, 80, dtype=np.int8)
    new = zeros(3, 2, 64), zeros(3, 2, 80)
    with pytest.raises(TypeError, match="k_new has dtype float32 but the pages hold int8"):
        ta.append_kv(*int8, *new, plan)
    floats = zeros(3, 16, 2, 64), zeros(3, 16, 2, 80)
    with pytest.raises(TypeError, match="v_new has dtype int8 but the pages hold float32"):
        ta.append_kv(*floats, new[0], new[1].astype(np.int8), plan)


# ---------------------------------------------------------------------- merge_states

MERGE_REFUSED = {
    "o_b short": (
        (zeros(3, 2, 8), zeros(3, 2), zeros(2, 2, 8), zeros(3, 2)),
        r"o_b has shape \(2, 2, 8\) but o_a has .*\(3, 2, 8\)",
    ),
    "lse_b short": (
        (zeros(3, 2, 8), zeros(3, 2), zeros(3, 2, 8), zeros(2, 2)),
        r"lse_b has shape \(2, 2\) but lse_a has .*\(3, 2\)",
    ),
    "lse without heads": (
        (zeros(3, 2, 8), zeros(3), zeros(3, 2, 8), zeros(3)),
        r"lse_a has shape \(3,\): .*\(3, 2, 8\)",
    ),
    "lse transposed": ((zeros(3, 2, 8), zeros(2, 3), zeros(3, 2, 8), zeros(2, 3)), r"lse_a has shape \(2, 3\)"),
}


@pytest.mark.parametrize(("states", "message"), MERGE_REFUSED.values(), ids=MERGE_REFUSED)
def test_merge_refuses(states: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        ta.merge_states(*map(jnp.asarray, states))


@pytest.mark.parametrize("name", ["o_a", "lse_b"])
def test_merge_refuses_integers(name: str):
    states = {"o_a": zeros(3, 2, 8), "lse_a": zeros(3, 2), "o_b": zeros(3, 2, 8), "lse_b": zeros(3, 2)}
    states[name] = states[name].astype(np.int32)
    with pytest.raises(TypeError, match=f"{name} has dtype int32"):
        ta.merge_states(**states)
