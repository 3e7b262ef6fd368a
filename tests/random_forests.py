"""Random forests for property tests: any shape, empty nodes, several roots, ragged queries, any page table."""

from __future__ import annotations

import numpy as np
from forests import lay_out
from hypothesis import settings
from hypothesis import strategies as st

import tree_attention_jax as ta

quick = settings(max_examples=40, deadline=None)
thorough = settings(max_examples=400, deadline=None)


@st.composite
def forests(
    draw: st.DrawFn,
    max_nodes: int = 14,
    max_tokens: int = 40,
    max_queries: int = 64,
    decoding: bool | None = None,
    page_sizes: tuple[int, ...] = (1, 2, 4, 10, 16, 64),
    reserve: int = 0,
) -> tuple[ta.TokenTree, int]:
    """(tree, page size). ``decoding``: only leaves have queries, one each; None: either kind."""
    count = draw(st.integers(1, max_nodes))
    parent = [draw(st.integers(-1, i - 1)) for i in range(count)]
    length = st.one_of(st.integers(0, 3), st.integers(0, max_tokens))
    kv_len = draw(st.lists(length, min_size=count, max_size=count))
    q_len = None
    if not (draw(st.booleans()) if decoding is None else decoding):
        room, q_len = max_queries, []
        for tokens in kv_len:
            q_len.append(draw(st.integers(0, min(tokens, room, 12))))
            room -= q_len[-1]
    tree = ta.TokenTree(parent, kv_len, q_len)
    page_size = draw(st.sampled_from(page_sizes))
    if reserve == 0 and draw(st.integers(0, 4)) == 0:
        return tree, page_size  # consecutive pages, by default
    sharing = draw(st.booleans())
    return lay_out(tree, page_size, seed=draw(st.integers(0, 99)), sharing=sharing, reserve=reserve), page_size


def grown(tree: ta.TokenTree, steps: int) -> ta.TokenTree:
    """The forest after ``steps`` decode steps of every leaf, on the same page table."""
    kv_len = tree.kv_len + np.where(tree.q_len == 1, steps, 0)
    return ta.TokenTree(tree.parent, kv_len, tree.q_len, tree.page_indptr, tree.page_indices, tree.first_slot)
