"""The kernels cross-lower for CUDA on any machine: what Pallas' interpreter takes and Triton does not fails here."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from forests import Heads, plan_for

import tree_attention_jax as ta
from pallas_kernels.options import Options
from tree_attention_jax import backends

Shape = jax.ShapeDtypeStruct

PLAIN = ta.TokenTree.from_levels([1, 9], [1000, 33])
# Ragged queries make masked launches; rows and lengths vary, so that every tile class is in use.
MASKED = ta.TokenTree([-1, 0, 0, 0], [1000, 33, 60, 20], [0, 33, 1, 1])
OPTIONS = {
    "plain": Options(scale=0.1),
    "all": Options(scale=0.1, logits_soft_cap=30.0, sliding_window=128, alibi=True),
    "window": Options(scale=0.1, sliding_window=128),
    "unfolded": Options(scale=-0.1),
}
HEADS = [Heads(8, 2, dim) for dim in (64, 80, 96, 128, 192, 256)]
SHAPES = [Heads(28, 4), Heads(9, 3, 80), Heads(128, 1), Heads(96, 1), Heads(4, 4, 192, 128), Heads(7, 1, 64, 96)]
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


def an_nvidia_gpu() -> contextlib.AbstractContextManager:
    """JAX 0.11 asks for the device that a Triton kernel is lowered for."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device))


def lower_for_cuda(call, *arguments) -> str:
    with an_nvidia_gpu():
        return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def lower_attention(tree, heads: Heads, dtype, options: Options, kv_dtype=None, page_size: int = 16, **plan) -> str:
    plan = plan_for(tree, page_size, heads, gpu="NVIDIA H200", **plan)
    call = functools.partial(backends._attend_triton, shape=plan.shape, options=options, interpret=False)
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    text = lower_for_cuda(
        call,
        Shape((tree.num_queries, heads.q, heads.dim), dtype),
        Shape((1280 // page_size, page_size, heads.kv, heads.dim), kv_dtype),
        Shape((1280 // page_size, page_size, heads.kv, heads.value_dim), kv_dtype),
        Shape(plan.buffer.shape, jnp.int32),
        Shape((2, heads.q), jnp.float32) if options.uses_heads else None,
    )
    # One call a launch; the reduction has a module of its own.
    assert text.count("tree_partial") >= len(plan.shape.launches)
    assert ("tree_reduce" in text) == (plan.shape.partial_rows > 0)
    return text


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("tree", [PLAIN, MASKED], ids=["unmasked", "masked"])
def test_head_dims_and_dtypes(tree: ta.TokenTree, heads: Heads, dtype):
    lower_attention(tree, heads, dtype, OPTIONS["plain"], strategy="per_node")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dim", [96, 128])
def test_options(dim: int, dtype, options: Options):
    lower_attention(MASKED, Heads(8, 2, dim), dtype, options)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_groups_and_value_widths(heads: Heads):
    lower_attention(MASKED, heads, jnp.bfloat16, OPTIONS["all"])


@pytest.mark.parametrize("page_size", [1, 2, 10, 64, 256])
def test_page_sizes(page_size: int):
    lower_attention(MASKED, Heads(8, 2), jnp.bfloat16, OPTIONS["plain"], page_size=page_size)


@pytest.mark.parametrize(
    "kv_dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8], ids=["fp8-e4m3", "fp8-e5m2", "int8"]
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["q-bf16", "q-fp32"])
def test_quantised_caches(dtype, kv_dtype):
    lower_attention(MASKED, Heads(8, 2, 128), dtype, OPTIONS["plain"], kv_dtype)


@pytest.mark.parametrize("dtype", [*DTYPES.values(), jnp.float8_e4m3fn, jnp.int8], ids=[*DTYPES, "fp8", "int8"])
@pytest.mark.parametrize("heads", [Heads(8, 2, 64), Heads(9, 3, 80), Heads(4, 4, 192, 128), Heads(1, 1, 96)], ids=str)
def test_append(heads: Heads, dtype):
    pages = [Shape((80, 16, heads.kv, width), dtype) for width in (heads.dim, heads.value_dim)]
    new = [
        Shape((35, heads.kv, width), jnp.int8 if dtype == jnp.int8 else jnp.bfloat16)
        for width in (heads.dim, heads.value_dim)
    ]
    call = functools.partial(backends._append_triton, interpret=False)
    assert "tree_append" in lower_for_cuda(call, *pages, *new, Shape((35,), jnp.int32))
