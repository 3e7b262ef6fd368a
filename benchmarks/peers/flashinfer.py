"""FlashInfer (Ye et al., MLSys 2025): its decode, multi-level cascade and prefill wrappers, from PyPI.

Planned once, outside the timing; K/V pages are ours, through DLPack, in the largest page size that its page lists can
express. Its kernels are compiled on first use, which takes minutes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers import Inputs, Peer, Ready, Unsuitable, _torch
from benchmarks.peers._sequences import PageLists, cascade_levels, is_prefill, page_lists, query_slots, requests

WORKSPACE_BYTES = 512 * 2**20


def peers() -> list[Peer]:
    return [FlashInferDecode(), FlashInferCascade(), FlashInferMask(), FlashInferPrefill()]


def _load() -> tuple[Any, Any]:
    torch = _torch.load_torch()
    try:
        import flashinfer
    except Exception as error:  # it loads compiled libraries, which fail in their own ways
        raise Unsuitable(f"flashinfer cannot be imported ({error!r}): pip install flashinfer-python") from None
    return torch, flashinfer


def _workspace(torch: Any) -> Any:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _layers(inputs: Inputs, page_size: int) -> tuple[Any, list[tuple[Any, Any]]]:
    """(q, [(k, v)]), K/V as [pages, page_size, H, D]."""
    shape = (-1, page_size, inputs.cell.num_kv_heads, inputs.cell.head_dim)
    pools = zip(inputs.data.k, inputs.data.v)
    return _torch.share(inputs.data.q), [
        (_torch.share(k).reshape(shape), _torch.share(v).reshape(shape)) for k, v in pools
    ]


def _ready(wrapper: Any, inputs: Inputs, page_size: int, note: str) -> Ready:
    q, layers = _layers(inputs, page_size)
    return _torch.ready(lambda i: wrapper.run(q, layers[i]), inputs, note)


class FlashInferDecode:
    """Each query a sequence of its own. With tensor cores where query heads share a KV head, as it advises."""

    name = "FlashInfer decode"
    uses_torch = True

    def prepare(self, inputs: Inputs) -> Ready:
        if is_prefill(inputs.tree):
            raise Unsuitable("a query is a sequence: a prefill would read its tokens once a query")
        pages = page_lists(query_slots(inputs.tree, inputs.cell.page_size), inputs.cell.page_size)
        torch, flashinfer = _load()
        cell = inputs.cell
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(torch), "NHD", use_tensor_cores=cell.num_q_heads > cell.num_kv_heads
        )
        wrapper.plan(
            _torch.index(pages.indptr),
            _torch.index(pages.indices),
            _torch.index(pages.last_page_len),
            *cell.heads,
            cell.head_dim,
            pages.page_size,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return _ready(wrapper, inputs, pages.page_size, f"pages of {pages.page_size}")


class FlashInferCascade:
    """One prefill call a level, merged in place."""

    name = "FlashInfer cascade"
    uses_torch = True

    def prepare(self, inputs: Inputs) -> Ready:
        levels = cascade_levels(inputs.tree, inputs.cell.page_size)
        if len(levels) == 1:
            raise Unsuitable("nothing is shared: a cascade of one level is a decode")
        torch, flashinfer = _load()
        cell, page_size = inputs.cell, levels[0][1].page_size
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(levels), _workspace(torch), "NHD")
        wrapper.plan(
            [_torch.index(indptr) for indptr, _ in levels],
            [_torch.index(pages.indptr) for _, pages in levels],
            [_torch.index(pages.indices) for _, pages in levels],
            [_torch.index(pages.last_page_len) for _, pages in levels],
            *cell.heads,
            cell.head_dim,
            page_size,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return _ready(wrapper, inputs, page_size, f"{len(levels)} levels, pages of {page_size}")


class FlashInferMask:
    """One sequence a request, its whole tree under a mask: how serving engines verify a draft."""

    name = "FlashInfer mask"
    uses_torch = True

    def prepare(self, inputs: Inputs) -> Ready:
        if (inputs.tree.q_len == inputs.tree.is_leaf()).all():
            raise Unsuitable("only leaves query: a mask over all their tokens is for draft trees")
        if is_prefill(inputs.tree):
            raise Unsuitable("sequences need no mask but the causal one")
        cell = inputs.cell
        batch = requests(inputs.tree, cell.page_size)
        if (np.diff(np.concatenate(batch.queries)) != 1).any():
            raise Unsuitable("the queries of a request must lie side by side")
        pages: PageLists = page_lists(batch.slots, cell.page_size)
        torch, flashinfer = _load()
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(torch), "NHD")
        wrapper.plan(
            _torch.index(np.cumsum([0, *(len(queries) for queries in batch.queries)])),
            _torch.index(pages.indptr),
            _torch.index(pages.indices),
            _torch.index(pages.last_page_len),
            *cell.heads,
            cell.head_dim,
            pages.page_size,
            custom_mask=_torch.index(np.concatenate([mask.reshape(-1) for mask in batch.masks]), "bool"),
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return _ready(wrapper, inputs, pages.page_size, f"pages of {pages.page_size}")


class FlashInferPrefill:
    """Sequences that share nothing, under a causal mask: its everyday prefill, of whole prompts or of chunks."""

    name = "FlashInfer prefill"
    uses_torch = True

    def prepare(self, inputs: Inputs) -> Ready:
        tree, cell = inputs.tree, inputs.cell
        if not is_prefill(tree):
            raise Unsuitable("a prefill is of sequences that share nothing")
        slots = np.split(tree.token_slots(cell.page_size), np.cumsum(tree.kv_len)[:-1])
        pages = page_lists(slots, cell.page_size)
        torch, flashinfer = _load()
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(torch), "NHD")
        wrapper.plan(
            _torch.index(np.cumsum([0, *tree.q_len])),
            _torch.index(pages.indptr),
            _torch.index(pages.indices),
            _torch.index(pages.last_page_len),
            *cell.heads,
            cell.head_dim,
            pages.page_size,
            causal=True,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return _ready(wrapper, inputs, pages.page_size, f"pages of {pages.page_size}")
