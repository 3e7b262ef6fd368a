"""What JAX brings along, and users would call instead: cuDNN attention, and the paged attention of Pallas' examples.

Neither knows trees. cuDNN wants the K/V of each sequence side by side: gathered beforehand, outside the timing, which
flatters it. Pallas' paged attention wants KV heads first: transposed beforehand likewise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.peers import Inputs, Peer, Ready, Unsuitable
from benchmarks.peers._sequences import is_prefill, padded, page_lists, query_slots, requests

# Copies of K/V in all layers together: beside the data of the cell and PyTorch's.
MOST_BYTES = 24e9


def peers() -> list[Peer]:
    return [JaxAttention("cudnn"), JaxPaged()]


class JaxAttention:
    """``jax.nn.dot_product_attention``: a sequence a query; a draft tree is one sequence under a mask."""

    uses_torch = False

    def __init__(self, implementation: str):
        self.implementation = implementation
        self.name = {"cudnn": "JAX cuDNN", "xla": "JAX XLA"}[implementation]

    def prepare(self, inputs: Inputs) -> Ready:
        tree, cell, data = inputs.tree, inputs.cell, inputs.data
        prompts = is_prefill(tree) and bool((tree.q_len == tree.kv_len).all() and np.ptp(tree.kv_len) == 0)
        if prompts:
            slots, mask = tree.token_slots(cell.page_size).reshape(tree.num_nodes, -1), None
            queries, lengths = np.arange(slots.size).reshape(slots.shape), np.full(len(slots), slots.shape[1])
        elif (tree.q_len == tree.is_leaf()).all():
            slots, queries = padded(query_slots(tree, cell.page_size))[0], np.arange(tree.num_queries)[:, None]
            lengths = tree.query_positions() + 1
            mask = None
        else:
            batch = requests(tree, cell.page_size)
            if len({mask.shape for mask in batch.masks}) > 1:
                raise Unsuitable("requests of unlike sizes would need padding")
            slots, queries = np.stack(batch.slots), np.stack(batch.queries)
            lengths = np.full(len(slots), slots.shape[1])
            mask = jnp.asarray(np.stack(batch.masks))[:, None]
        layers = _affordable(slots.size, inputs)
        ks, vs = ([_gather(pages, jnp.asarray(slots)) for pages in side[:layers]] for side in (data.k, data.v))
        q = data.q[jnp.asarray(queries)]
        ragged = None if (lengths == slots.shape[1]).all() else jnp.asarray(lengths, jnp.int32)

        def attend(q: Any, k: Any, v: Any, mask: Any, lengths: Any) -> jax.Array:
            return jax.nn.dot_product_attention(
                q,
                k,
                v,
                mask=mask,
                is_causal=prompts,
                key_value_seq_lengths=lengths,
                implementation=self.implementation,
            )

        call, chained = _compiled(attend, q, ks, vs, mask, ragged)
        place = np.argsort(queries.reshape(-1))

        def output(out: list[jax.Array]) -> np.ndarray:
            return np.asarray(out[0], np.float32).reshape(-1, *out[0].shape[2:])[place]

        gathered = 2 * slots.size * cell.num_kv_heads * cell.head_dim * 2 / 1e9
        note = f"K/V gathered beforehand, {gathered:.2f} GB a layer"
        return Ready(call, jax.block_until_ready, output, layers, chained, note)


class JaxPaged:
    """``jax.experimental.pallas.ops.gpu.paged_attention``, a sequence a query."""

    name = "JAX paged"
    uses_torch = False

    def prepare(self, inputs: Inputs) -> Ready:
        tree, cell, data = inputs.tree, inputs.cell, inputs.data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
            except ImportError as error:
                raise Unsuitable(f"this JAX has no paged attention: {error}") from None
        pages = page_lists(query_slots(tree, cell.page_size), cell.page_size)
        if pages.page_size == 1:
            raise Unsuitable("sequences do not fill pages, and a page of one token is a load of its own")
        splits, block = _paged_options(pages.page_size, int(np.diff(pages.indptr).max()), tree.num_queries, cell)
        table = _block_table(pages.indptr, pages.indices, splits * block)
        layers = _affordable(data.k[0].size // (cell.num_kv_heads * cell.head_dim), inputs)
        shape = (-1, pages.page_size, cell.num_kv_heads, cell.head_dim)
        ks, vs = (
            [jnp.transpose(one.reshape(shape), (2, 0, 1, 3)) for one in side[:layers]] for side in (data.k, data.v)
        )
        attend = partial(
            paged_attention,
            pages_per_compute_block=block,
            k_splits=splits,
            num_warps=4,
            interpret=jax.default_backend() != "gpu",
        )
        q = (data.q * cell.head_dim**-0.5).astype(data.q.dtype)  # it does not scale
        call, chained = _compiled(attend, q, ks, vs, jnp.asarray(table), jnp.asarray(pages.lengths, jnp.int32))
        note = f"pages of {pages.page_size}, {splits} splits; KV heads first, transposed beforehand"

        def output(out: list[jax.Array]) -> np.ndarray:
            return np.asarray(out[0], np.float32)

        return Ready(call, jax.block_until_ready, output, layers, chained, note)


def _compiled(
    attend: Callable[..., Any], q: Any, ks: list[Any], vs: list[Any], *rest: Any
) -> tuple[Callable[[], Any], Callable[[int], Callable[[], Any]]]:
    """A call over all layers, and what makes the one to time as a whole."""
    compiled = harness.over_layers(attend).lower(q, ks, vs, *rest).compile()

    def chained(_: int) -> Callable[[], Any]:  # as often as `fed_back` says
        whole = harness.fed_back(attend, q, ks, vs, *rest).compile()
        return harness.feeding_back(whole, q, ks, vs, *rest)

    return lambda: compiled(q, ks, vs, *rest), chained


@jax.jit
def _gather(pages: jax.Array, slots: jax.Array) -> jax.Array:
    """[pages, page_size, H, D] at [B, S] -> [B, S, H, D]."""
    return pages.reshape(-1, *pages.shape[2:])[slots]


def _affordable(tokens: int, inputs: Inputs) -> int:
    """Layers of copied K/V: as many as keep the L2 cold, if memory has room for them."""
    layer = 2 * tokens * inputs.cell.num_kv_heads * inputs.cell.head_dim * inputs.data.k[0].dtype.itemsize
    cold = max(2, int(-(-harness.COLD_BYTES // layer)))
    layers = min(inputs.data.layers, cold, int(MOST_BYTES // layer))
    if layers == 0:
        raise Unsuitable(f"its copies of K/V would take {layer / 1e9:.1f} GB a layer")
    return layers


def _paged_options(page_size: int, pages: int, queries: int, cell: Any) -> tuple[int, int]:
    """(splits, pages a block): steps of 64 tokens, and enough programs for a GPU of about 132 SMs."""
    block = max(1, 64 // page_size)
    splits = 1
    while splits < 16 and queries * cell.num_kv_heads * splits < 512 and 2 * splits * block <= pages:
        splits *= 2
    return splits, block


def _block_table(indptr: np.ndarray, indices: np.ndarray, multiple: int) -> np.ndarray:
    """int32 [B, pages], padded with page 0 to a multiple."""
    counts = np.diff(indptr)
    width = -(-int(counts.max()) // multiple) * multiple
    table = np.zeros((len(counts), width), np.int32)
    for row, (begin, end) in enumerate(pairwise(indptr.tolist())):
        table[row, : end - begin] = indices[begin:end]
    return table
