"""The Mosaic kernel in JAX's simulator of a GPU, with its race detector, against the oracle.

The simulator has no tensor cores, so the two matrix products are replaced; copies, barriers, masks, softmax and what is
written are the kernel's own. A case takes seconds to compile, so cases are few and small. All of them run where CI has
the newest jax (`make test-mosaic`): older ones have no such simulator.
"""

from __future__ import annotations

import functools
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Case, Heads, assert_matches_oracle, halves_in_turns, lay_out, plan_for, poisoned_inputs
from random_forests import grown

import tree_attention_jax as ta
from pallas_kernels.mosaic_geometry import NEEDS_JAX
from pallas_kernels.options import Options
from tree_attention_jax import TokenTree, backends

BF16, FP16 = jnp.bfloat16, jnp.float16
OPTIONS = {
    "logits_soft_cap": 1.5,
    "sliding_window": 20,
    "alibi_slopes": 2.0 ** -np.arange(1, 5),
    "k_scale": np.array([1.2, 0.7]),
}


def ragged() -> TokenTree:
    """Inner nodes with queries, a chunk of prefill, leaves that decode, a leaf without queries, an empty one."""
    return TokenTree([-1, 0, 0, 1, 1, 2, -1, 6], [23, 13, 20, 7, 33, 1, 0, 6], [0, 3, 0, 7, 12, 1, 0, 6])


def prefill() -> TokenTree:
    """A prompt and 32 new tokens that attend to it and, causally, to each other."""
    return TokenTree([-1, 0], [100, 32], [0, 32])


def drafts() -> TokenTree:
    paths = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2, 0], [2, 1]]
    return TokenTree.from_paths(paths, [40], page_size=16)


# On a cache in order: narrow tiles, two warpgroups, and their reduction. All steps of the wide tile are full but the
# last, behind whose entries others' full ones are listed. Then masked entries of one token, shorter than a copy, and
# padding rows of q; entries that begin and end within a page.
SHARED = Case("shared", lambda: TokenTree.from_levels([1, 8], [400, 137]), Heads(16, 1, 64))
DRAFTS = Case("drafts", drafts, Heads(4, 2, 64), padding=3)
# Pages of a token side by side, planned as pages of 16, some of which two nodes share; 94 of them with two more slots.
SMALL = Case("small", lambda: TokenTree.from_levels([1, 8], [398, 138]), Heads(16, 1, 64), page_size=1)
RAGGED = Case("ragged", lambda: lay_out(ragged(), 8, sharing=True), Heads(4, 2, 128), page_size=8, padding=3)
# Two warpgroups with masks; one head a group; a group that does not divide a warpgroup; two passes a tile.
PREFILL = Case("prefill", lambda: lay_out(prefill(), 16, sharing=True), Heads(4, 1, 64))
SINGLE = Case("single", lambda: lay_out(TokenTree.from_levels([1, 3], [20, 17]), 16), Heads(2, 2, 64))
UNEVEN = Case("uneven", lambda: lay_out(TokenTree.from_levels([1, 2], [20, 17]), 16), Heads(6, 2, 64))
# Parts that both halves of the rows see, one does, and none; the queries side by side, so that one copy moves them all.
HALVES = Case("halves", lambda: TokenTree.from_levels([1, 2, 8, 32], [23, 70, 17, 32]), Heads(4, 1, 64))
# The same of leaves that are no neighbours in q, so that a list says where each query is; two passes a program.
SCATTERED = Case("scattered", lambda: TokenTree([-1, 0, 0, *[1, 2] * 40], [23, 17, 9, *[20] * 80]), Heads(2, 1, 64))
PASSES = Case("passes", lambda: lay_out(prefill(), 16), Heads(4, 1, 256))


def simulate(case: Case, strategy: str, dtype=BF16, kind: str = "mosaic", steps: int = 0, **options) -> None:
    """Attend in the simulator, and compare with the oracle; ``steps`` decode steps after the plan was made."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    launch_all = importlib.import_module(f"pallas_kernels.attend_{kind}").launch_all
    tree = case.tree()
    plan = (
        halves_in_turns(tree, case.page_size, case.heads, horizon=steps)
        if strategy == "halves in turns"
        else plan_for(tree, case.page_size, case.heads, strategy=strategy, horizon=steps)
    )
    for _ in range(steps):
        plan = plan.advance()
    tree = grown(tree, steps) if steps else tree
    inputs = poisoned_inputs(tree, case.page_size, case.heads, dtype, padding=case.padding)
    q, k, v = inputs.on_device()
    per_head = None
    if options:
        factors = np.repeat(options["k_scale"], case.heads.q // case.heads.kv)
        per_head = jnp.stack([jnp.asarray(options["alibi_slopes"]), jnp.asarray(factors)]).astype(jnp.float32)
    out, lse = launch_all(
        q,
        k.reshape(-1, *k.shape[2:]),
        v.reshape(-1, *v.shape[2:]),
        plan.buffer,
        per_head,
        shape=plan.shape,
        options=Options(
            scale=case.heads.dim**-0.5,
            logits_soft_cap=options.get("logits_soft_cap"),
            sliding_window=options.get("sliding_window"),
            alibi="alibi_slopes" in options,
            scaled_keys="k_scale" in options,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    assert_matches_oracle(out, lse, tree, case.page_size, inputs, **options)


if jax.__version_info__ < NEEDS_JAX:

    @pytest.mark.parametrize("name", ["pallas_mosaic", "pallas_mixed"])
    def test_an_older_jax_says_which_it_needs(name: str):
        tree = SHARED.tree()
        inputs = poisoned_inputs(tree, 16, SHARED.heads, BF16)
        with pytest.raises(NotImplementedError, match=rf"{name}: .* needs jax 0\.11\.2.*'xla' anywhere"):
            ta.tree_attention(*inputs.on_device(), plan_for(tree, 16, SHARED.heads), implementation=name)

else:

    @pytest.mark.parametrize(
        ("case", "strategy"),
        [
            (SHARED, "per_node"),
            (DRAFTS, "flatten"),
            pytest.param(HALVES, "halves in turns", marks=pytest.mark.slow),
            pytest.param(SCATTERED, "halves in turns", marks=pytest.mark.slow),
            pytest.param(SCATTERED, "flatten", marks=pytest.mark.slow),
            pytest.param(SMALL, "per_node", marks=pytest.mark.slow),
            pytest.param(RAGGED, "flatten", marks=pytest.mark.slow),
            pytest.param(PREFILL, "per_node", marks=pytest.mark.slow),
            pytest.param(SINGLE, "per_node", marks=pytest.mark.slow),
            pytest.param(UNEVEN, "auto", marks=pytest.mark.slow),
            pytest.param(PASSES, "per_node", marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_matches_the_oracle_without_races(case: Case, strategy: str, capfd):
        simulate(case, strategy)
        assert "RACE" not in capfd.readouterr().out

    @pytest.mark.slow
    def test_grown_halves(capfd):
        """Leaves have moved on to entries that were reserved for them, behind those that take turns."""
        tree = functools.partial(lay_out, TokenTree.from_levels([1, 2, 8, 32], [23, 70, 17, 30]), 16, reserve=5)
        simulate(Case("grown", tree, Heads(4, 1, 64)), "halves in turns", steps=4)
        assert "RACE" not in capfd.readouterr().out

    @pytest.mark.slow
    def test_mixed_matches_the_oracle_without_races(capfd):
        """Mosaic's wide launch hands its state on to Triton's narrow one, which sees to the padding, and reduction."""
        simulate(Case("mixed", SHARED.tree, SHARED.heads, padding=3), "per_node", kind="mixed")
        assert "RACE" not in capfd.readouterr().out

    def test_mixed_is_triton_where_no_launch_is_wide(monkeypatch):
        monkeypatch.setattr(backends, "_require_hopper", lambda: None)
        tree, heads = TokenTree.from_levels([1, 3], [40, 9]), Heads(4, 1, 64)
        inputs, plan = poisoned_inputs(tree, 16, heads, BF16).on_device(), plan_for(tree, 16, heads)
        mixed, triton = (ta.tree_attention(*inputs, plan, implementation=f"pallas_{x}") for x in ("mixed", "triton"))
        np.testing.assert_array_equal(np.asarray(mixed, np.float32), np.asarray(triton, np.float32))

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(4))
    def test_random_trees(seed: int, capfd):
        """Up to 50 nodes of up to 60 tokens in wide tiles: parts that one half sees, both, or none; ragged queries."""
        rng = np.random.default_rng(seed)
        nodes, reach = int(rng.integers(20, 50)), int(rng.integers(1, 12))
        parent = [-1, *(int(rng.integers(max(0, i - reach), i)) for i in range(1, nodes))]
        kv_len = rng.integers(1, 60, nodes)
        q_len = np.minimum(kv_len, rng.integers(0, 5, nodes)) if seed % 2 else None
        tree = TokenTree(parent, kv_len, q_len)
        heads, page_size = (
            [Heads(4, 1, 64), Heads(2, 1, 64), Heads(6, 2, 64), Heads(16, 1, 128)][seed],
            [16, 8][seed % 2],
        )
        case = Case("random", lambda: lay_out(tree, page_size, sharing=True), heads, page_size=page_size, padding=2)
        simulate(case, ["halves in turns", "flatten"][seed % 2])
        assert "RACE" not in capfd.readouterr().out

    @pytest.mark.slow
    def test_options(capfd):
        case = Case("options", lambda: lay_out(ragged(), 16, sharing=True), Heads(4, 2, 64))
        simulate(case, "flatten", FP16, **OPTIONS)
        assert "RACE" not in capfd.readouterr().out

    @pytest.mark.parametrize(
        ("heads", "page_size", "dtype", "reason"),
        [
            (Heads(4, 1, 64), 16, jnp.float32, "dtypes float32"),
            (Heads(4, 1, 80), 16, BF16, "head_dim is 80"),
            (Heads(4, 1, 64, 96), 16, BF16, "v_head_dim is 96"),
            (Heads(4, 1, 64), 1, BF16, "a pool of 69 slots"),
            (Heads(4, 1, 64), 16, BF16, "is for Hopper GPUs, this is NVIDIA A100"),
        ],
        ids=["type", "head dim", "value dim", "pool", "device"],
    )
    def test_what_it_cannot_do(heads: Heads, page_size: int, dtype, reason: str, monkeypatch):
        tree = TokenTree.from_levels([1, 3], [40, 9])
        inputs = poisoned_inputs(tree, page_size, heads, dtype)
        plan = plan_for(tree, page_size, heads)  # before that, as it asks for the local GPU
        older = types.SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")
        monkeypatch.setattr(jax, "devices", lambda: [older])
        with pytest.raises(NotImplementedError, match=f"pallas_mosaic: .*{reason}.*'xla' anywhere"):
            ta.tree_attention(*inputs.on_device(), plan, implementation="pallas_mosaic")
        with pytest.raises(NotImplementedError, match=r"pallas_mixed: .*is for Hopper GPUs.*'xla' anywhere"):
            ta.tree_attention(*inputs.on_device(), plan, implementation="pallas_mixed")

    def test_it_is_part_of_the_default(monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert backends.resolve(None) == ("pallas_mixed", "pallas_triton", "pallas_mosaic", "xla")
