"""The Mosaic kernel lowers for CUDA on any machine: what the simulator takes and Mosaic does not fails here."""

from __future__ import annotations

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import pytest
from forests import Heads, lay_out, plan_for, poisoned_inputs
from test_cuda_lowering import DTYPES, OPTIONS, an_nvidia_gpu

import tree_attention_jax as ta
from pallas_kernels.mosaic_geometry import NEEDS_JAX
from pallas_kernels.options import Options

Shape = jax.ShapeDtypeStruct
BF16 = jnp.bfloat16
PREFILL = ta.TokenTree([-1, 0], [30, 200], [0, 200])
TREES = {
    "shared": ta.TokenTree.from_levels([1, 64], [1000, 33]),  # a narrow and a wide launch without masks
    "prefill": PREFILL,  # a wide launch with them
    "ragged": ta.TokenTree([-1, 0, 0, 0], [1000, 33, 60, 20], [0, 33, 1, 1]),  # a masked launch of 64 rows
    "short": ta.TokenTree.from_levels([1, 64], [1000, 3]),  # entries of one token
}


def joined_levels() -> ta.TokenTree:
    """Levels worth joining in wide masked tiles."""
    return ta.TokenTree.from_levels([1, 4, 16, 512], [500, 130, 33, 21])


def drafts() -> ta.TokenTree:
    """Draft trees of one-token nodes below prompts."""
    return ta.TokenTree.from_paths([[i] for i in range(8)] + [[i, j] for i in range(8) for j in range(7)], [2048] * 16)


def lower(tree: ta.TokenTree, heads: Heads, dtype, options: Options, page_size: int = 16):
    """The Mosaic kernels alone, and the plan that they run."""
    from pallas_kernels import attend_mosaic

    lowered, plan = lower_with(attend_mosaic.launch_all, tree, heads, dtype, options, page_size)
    assert lowered.as_text().count("@mosaic_gpu_v2") == len(plan.shape.launches) + (plan.shape.partial_rows > 0)
    return lowered, plan


def lower_with(launch_all, tree: ta.TokenTree, heads: Heads, dtype, options: Options, page_size: int = 16):
    plan = plan_for(tree, page_size, heads, gpu="NVIDIA H200", strategy="per_node")
    return lower_plan(launch_all, plan, tree, heads, dtype, options), plan


def lower_plan(launch_all, plan: ta.TreePlan, tree: ta.TokenTree, heads: Heads, dtype, options: Options):
    pool = 1280
    arguments = (
        Shape((tree.num_queries, heads.q, heads.dim), dtype),
        Shape((pool, heads.kv, heads.dim), dtype),
        Shape((pool, heads.kv, heads.value_dim), dtype),
        Shape(plan.buffer.shape, jnp.int32),
        Shape((2, heads.q), jnp.float32) if options.uses_heads else None,
    )
    call = functools.partial(launch_all, shape=plan.shape, options=options)
    with an_nvidia_gpu():
        return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",))


def wide_launches(plan: ta.TreePlan, heads: Heads, dtype, queries: int = 64) -> tuple[int, ...]:
    from pallas_kernels import attend_mixed

    q, pages = Shape((queries, heads.q, heads.dim), dtype), Shape((1280, heads.kv, heads.dim), dtype)
    return attend_mixed.wide_launches(q, pages, pages, plan.shape)


def kernels(lowered) -> list[str]:
    """The text of the Mosaic modules in a lowered program."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir

    program = lowered.compiler_ir("stablehlo")
    found = []

    def look(op):
        config = op.operation.attributes.get("mhlo.backend_config", None)
        if config is not None and "module" in ir.DictAttr(config):
            found.append(ir.StringAttr(ir.DictAttr(config)["module"]).value_bytes)
        return ir.WalkResult.ADVANCE

    program.operation.walk(look)
    context = program.context
    mgpu.dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    return [str(ir.Module.parse(code, context)) for code in found]


def moves_of_rows(text: str) -> list[str]:
    """Stretches of a kernel from the first 16 bytes that a thread loads from shared memory to the first it stores there
    again: L and S, and | for a barrier of the warpgroup."""
    vector = r"vector<(?:8x[b]?f16|4xf32)>"
    kinds = {rf'llvm\.load"[^\n]*{vector}': "L", rf'llvm\.store"[^\n]*{vector}': "S", r'asm_string = "bar\.sync': "|"}
    steps = [next((kind for seen, kind in kinds.items() if re.search(seen, line)), "") for line in text.splitlines()]
    return re.findall(r"L[L|]*S", "".join(steps))


def operations_of(lowered) -> list:
    """What the function of a lowered program does, in order."""
    [main] = (op for op in lowered.compiler_ir("stablehlo").body if op.operation.name == "func.func")
    return [op.operation for op in main.body.blocks[0]]


def calls_of(lowered) -> list[str]:
    """The kernels that a lowered program runs, in order: "mosaic", and those of Triton by name."""
    calls = [op.attributes for op in operations_of(lowered) if op.name == "stablehlo.custom_call"]
    return [
        "mosaic" if call["call_target_name"].value == "mosaic_gpu_v2" else call["mhlo.backend_config"]["name"].value
        for call in calls
    ]


def source(value, through: tuple[str, ...] = ()) -> str:
    """The name of the operation that a value comes from, or "argument"."""
    while getattr(value.owner, "name", None) in ("sdy.sharding_constraint", *through):
        value = value.owner.operands[0]
    return getattr(value.owner, "name", "argument")


if jax.__version_info__ < NEEDS_JAX:

    def test_an_older_jax_says_which_it_needs():
        heads = Heads(8, 2, 128)
        inputs = poisoned_inputs(TREES["ragged"], 16, heads, BF16)
        plan = plan_for(TREES["ragged"], 16, heads)
        with pytest.raises(NotImplementedError, match=r"pallas_mosaic: .* needs jax 0\.11\.2"):
            ta.tree_attention(*inputs.on_device(), plan, implementation="pallas_mosaic")

else:

    @pytest.mark.parametrize(
        ("tree", "heads", "dtype", "options", "page_size"),
        [
            ("shared", Heads(32, 8, 128), "bf16", "plain", 16),
            ("prefill", Heads(8, 2, 64), "fp16", "all", 8),
            pytest.param("prefill", Heads(8, 2, 256), "bf16", "window", 16, marks=pytest.mark.slow),
            pytest.param("shared", Heads(4, 4, 64), "bf16", "unfolded", 16, marks=pytest.mark.slow),
            pytest.param("prefill", Heads(8, 2, 128), "bf16", "plain", 64, marks=pytest.mark.slow),
            pytest.param("ragged", Heads(28, 4, 128), "bf16", "plain", 16, marks=pytest.mark.slow),
            pytest.param("ragged", Heads(128, 1, 128), "fp16", "window", 16, marks=pytest.mark.slow),
            pytest.param("ragged", Heads(8, 2, 128, 64), "bf16", "all", 16, marks=pytest.mark.slow),
            pytest.param("short", Heads(8, 2, 128), "bf16", "plain", 8, marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_lowers(tree: str, heads: Heads, dtype: str, options: str, page_size: int):
        lowered, plan = lower(TREES[tree], heads, DTYPES[dtype], OPTIONS[options], page_size)
        texts = kernels(lowered)
        assert len(texts) == len(plan.shape.launches) + (plan.shape.partial_rows > 0)
        for text in texts:
            assert ("wgmma.mma_async" in text) != ("tree_mosaic_reduce" in text)
            # Predicates from 6 on compare without signs, and a masked entry's bound may be negative.
            assert not re.search(r"arith\.cmpi\"[^\n]*predicate = [6-9]", text)
            if "wgmma.mma_async" in text:  # rows of outputs are put where they were loaded from: after all loads
                moves = moves_of_rows(text)
                assert len(moves) >= 3  # queries, partial and final rows
                assert all("|" in move for move in moves)

    @pytest.mark.parametrize("kind", ["mosaic", "mixed"])
    def test_no_slice_can_reach_a_call_that_continues_a_state(kind: str):
        """XLA would fuse it with the call, and forget what is aliased: zeros where an earlier launch has written."""
        launch_all = importlib.import_module(f"pallas_kernels.attend_{kind}").launch_all
        lowered, plan = lower_with(launch_all, TREES["shared"], Heads(8, 2, 64), BF16, OPTIONS["plain"])
        assert len(plan.shape.launches) > 1
        assert plan.shape.partial_rows
        operations = operations_of(lowered)
        continuing = [op for op in operations if len(op.attributes.get("output_operand_aliases", ()))]
        assert len(continuing) == len(plan.shape.launches)  # all launches but the first, and the reduction
        for op in continuing:
            assert {source(x) for x in op.operands} <= {"stablehlo.custom_call", "stablehlo.optimization_barrier"}
        cuts = ("stablehlo.slice", "stablehlo.reshape")  # an LSE of several, behind the barrier
        assert {source(x, cuts) for x in operations[-1].operands} == {"stablehlo.optimization_barrier"}

    def test_mixed_runs_wide_tiles_first_and_by_mosaic():
        from pallas_kernels import attend_mixed

        lowered, plan = lower_with(attend_mixed.launch_all, TREES["shared"], Heads(8, 2, 64), BF16, OPTIONS["plain"])
        narrow, wide = (launch.tile for launch in plan.shape.launches)
        assert narrow.rows < 64 <= wide.rows
        assert calls_of(lowered) == ["mosaic", f"tree_partial_{narrow.name()}", "tree_reduce"]

    @pytest.mark.parametrize(
        ("tree", "heads", "dtype", "wide"),
        [
            ("shared", Heads(8, 2, 64), BF16, (1,)),
            ("shared", Heads(8, 2, 64), jnp.float32, ()),
            ("shared", Heads(8, 2, 80), BF16, ()),
            ("ragged", Heads(8, 2, 64), BF16, ()),  # masks, in a tile that was chosen for Triton
        ],
        ids=["wide", "type", "head dim", "masked"],
    )
    def test_which_launches_mosaic_takes(tree: str, heads: Heads, dtype, wide: tuple[int, ...]):
        plan = plan_for(TREES[tree], 16, heads, gpu="NVIDIA H200", strategy="per_node")
        assert wide_launches(plan, heads, dtype) == wide
        assert wide_launches(plan, heads, dtype, queries=0) == ()

    @pytest.mark.parametrize(
        ("tree", "heads", "page_size", "mosaic"),
        [
            (joined_levels, Heads(32, 8, 128), 16, True),
            (joined_levels, Heads(32, 8, 256), 16, False),
            (joined_levels, Heads(32, 8, 128), 4, True),
            (lambda: lay_out(joined_levels(), 4), Heads(32, 8, 128), 4, False),
            (drafts, Heads(32, 8, 128), 16, False),
        ],
        ids=["masked", "head dim", "small pages", "small pages apart", "drafts"],
    )
    def test_which_masked_tiles_the_planner_chooses_for_mosaic(tree, heads: Heads, page_size: int, mosaic: bool):
        """On a Hopper GPU, where the kernel can run two warpgroups and copies what an entry holds."""
        plan = plan_for(tree(), page_size, heads, gpu="NVIDIA H200")
        masked = [index for index, launch in enumerate(plan.shape.launches) if launch.tile.masked]
        assert masked
        assert [plan.shape.launches[index].tile.mosaic for index in masked] == [mosaic] * len(masked)
        taken = wide_launches(plan, heads, BF16)
        assert set(masked) <= set(taken) if mosaic else not set(masked) & set(taken)
        for other in ({"gpu": "NVIDIA A100"}, {"gpu": "NVIDIA H200", "mosaic": False}):
            plan = plan_for(tree(), page_size, heads, **other)
            assert not any(launch.tile.mosaic for launch in plan.shape.launches)

    def test_a_block_of_decode_steps_may_begin_with_leaves_of_one_token():
        """They will grow, so their entries are long already."""
        tree = ta.TokenTree.from_levels([4, 512], [2000, 1]).with_pages(16, reserve=16)
        plan = plan_for(tree, 16, Heads(32, 8, 128), gpu="NVIDIA H200", horizon=16)
        assert [launch.tile.mosaic for launch in plan.shape.launches] == [True]
        plan.check(tree)

    def test_lowers_what_the_planner_chooses():
        from pallas_kernels import attend_mixed

        plan = plan_for(joined_levels(), 16, Heads(32, 8, 128), gpu="NVIDIA H200")
        lowered = lower_plan(attend_mixed.launch_all, plan, joined_levels(), Heads(32, 8, 128), BF16, OPTIONS["plain"])
        assert calls_of(lowered) == ["mosaic"]
        [text] = kernels(lowered)
        assert not re.search(r"arith\.cmpi\"[^\n]*predicate = [6-9]", text)

    @pytest.mark.slow
    def test_lowers_under_vmap():
        from pallas_kernels import attend_mosaic

        heads = Heads(8, 2, 64)
        plan = plan_for(PREFILL, 16, heads, gpu="NVIDIA H200", strategy="per_node")

        def call(q, k, v, buffer):
            return attend_mosaic.attend(q, k, v, buffer, None, shape=plan.shape, options=OPTIONS["plain"])

        arguments = (Shape((3, 200, 8, 64), BF16), *[Shape((3, 1280, 2, 64), BF16)] * 2)
        with an_nvidia_gpu():
            traced = jax.jit(jax.vmap(call, (0, 0, 0, None))).trace(*arguments, Shape(plan.buffer.shape, jnp.int32))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu_v2") == len(plan.shape.launches) + (plan.shape.partial_rows > 0)
