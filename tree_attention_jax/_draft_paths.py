"""Draft trees as Medusa (Cai et al., 2024) and EAGLE (Li et al., 2024) write them: a list of choice paths."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from tree_attention_jax._arrays import ceil_div, exclusive_cumsum


def tree_arrays_from_paths(paths: Any, prompt_len: Any, page_size: int | None, root: bool) -> tuple:
    """Arguments for ``TokenTree``. See :meth:`TokenTree.from_paths`."""
    if page_size is not None and (not isinstance(page_size, int | np.integer) or page_size < 1):
        raise ValueError(f"page_size is {page_size!r}: it must be a positive integer, or None")
    prompts = np.atleast_1d(np.asarray(prompt_len))
    if prompts.dtype.kind not in "iu" or prompts.ndim != 1:
        raise TypeError(f"prompt_len must be an integer or a vector of integers, got {prompt_len!r}")
    if (prompts < 0).any():
        request = int(np.argmax(prompts < 0))
        raise ValueError(f"prompt_len[{request}] is {prompts[request]}: it must not be negative")
    drafts = _per_request(paths, len(prompts), scalar=np.ndim(prompt_len) == 0)
    if len(prompts) != len(drafts):
        prompts = np.repeat(prompts, len(drafts))
    parent: list[int] = []
    kv_len: list[int] = []
    request_of: list[int] = []
    for request, (draft, prompt) in enumerate(zip(drafts, prompts.tolist())):
        above = -1
        if prompt:
            parent.append(-1)
            kv_len.append(prompt)
            request_of.append(request)
            above = len(parent) - 1
        if root:
            parent.append(above)
            kv_len.append(1)
            request_of.append(request)
            above = len(parent) - 1
        first = len(parent)
        for draft_parent in _parents(draft, request):
            parent.append(above if draft_parent < 0 else first + draft_parent)
            kv_len.append(1)
            request_of.append(request)
    lengths = np.array(kv_len, np.int64)
    is_prompt = np.zeros(len(parent), bool)
    starts = np.flatnonzero(np.diff(np.array(request_of), prepend=-1))
    is_prompt[starts[prompts[np.array(request_of, int)[starts]] > 0]] = True
    q_len = np.where(is_prompt, 0, 1)
    if page_size is None:
        return np.array(parent, np.int64), lengths, q_len, None, None, None
    table = _packed_pages(lengths, np.array(request_of), page_size)
    return np.array(parent, np.int64), lengths, q_len, *table


def _per_request(paths: Any, requests: int, scalar: bool) -> list[list[tuple[int, ...]]]:
    """One list of paths a request, from either form of the argument."""
    listed = list(paths)
    nested = bool(listed) and all(
        isinstance(one, Sequence) and len(one) > 0 and isinstance(one[0], Sequence | np.ndarray) for one in listed
    )
    if not nested:
        return [_choices(listed, 0)] * requests
    drafts = [_choices(one, request) for request, one in enumerate(listed)]
    if not scalar and requests != len(drafts):
        raise ValueError(f"prompt_len has {requests} entries but paths lists {len(drafts)} requests")
    return drafts


def _choices(draft: Any, request: int) -> list[tuple[int, ...]]:
    paths = []
    for index, path in enumerate(draft):
        try:
            paths.append(tuple(operator.index(choice) for choice in path))
        except TypeError:
            raise TypeError(f"paths[{index}] of request {request} is {path!r}: a path is a list of integers") from None
    return paths


def _parents(draft: list[tuple[int, ...]], request: int) -> list[int]:
    """Index of each path's prefix in the same list, -1 at depth 1."""
    seen: dict[tuple[int, ...], int] = {(): -1}
    parents = []
    for index, path in enumerate(draft):
        if not path:
            raise ValueError(f"paths[{index}] of request {request} is empty: a path has at least one choice")
        if min(path) < 0:
            raise ValueError(f"paths[{index}] of request {request} is {list(path)}: choices must not be negative")
        if path in seen:
            raise ValueError(f"paths[{index}] of request {request} repeats {list(path)}")
        if path[:-1] not in seen:
            raise ValueError(
                f"paths[{index}] of request {request} is {list(path)} but its prefix {list(path[:-1])} is not listed "
                f"before it"
            )
        parents.append(seen[path[:-1]])
        seen[path] = index
    return parents


def _packed_pages(lengths: np.ndarray, request_of: np.ndarray, page_size: int):
    """A page table in which a request's tokens lie side by side, in node order."""
    per_request = np.bincount(request_of, weights=lengths).astype(np.int64)
    request_page = exclusive_cumsum(ceil_div(per_request, page_size))[:-1]
    total_before = np.cumsum(lengths) - lengths
    request_start = np.cumsum(per_request) - per_request
    begin = total_before - request_start[request_of]
    first = begin // page_size
    count = ceil_div(begin + lengths, page_size) - first
    indptr = exclusive_cumsum(count)
    which = np.arange(indptr[-1]) - np.repeat(indptr[:-1], count)
    indices = np.repeat(request_page[request_of] + first, count) + which
    return indptr, indices, begin % page_size
