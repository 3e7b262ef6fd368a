"""Draft verification: 64 one-token nodes under each prompt are a few masked blocks, not a thousand items."""

import numpy as np
import pytest
from forests import Case, Heads, check_against_oracle

import tree_attention_jax as ta

HEADS = Heads(32, 8, 128)


def draft_paths(nodes: int, seed: int = 0) -> list[list[int]]:
    """A draft tree as a choice list: each node's next child hangs under some node that is listed already."""
    rng = np.random.default_rng(seed)
    paths: list[list[int]] = []
    children: dict[tuple[int, ...], int] = {(): 0}
    while len(paths) < nodes:
        above = list(children)[int(rng.integers(0, min(len(children), 12)))]
        path = (*above, children[above])
        children[above] += 1
        children[path] = 0
        paths.append(list(path))
    return paths


def verification(requests: int, prompt: int, nodes: int, page_size: int | None) -> ta.TokenTree:
    return ta.TokenTree.from_paths([draft_paths(nodes, seed) for seed in range(requests)], prompt, page_size=page_size)


@pytest.mark.parametrize("page_size", [16, None])
@pytest.mark.parametrize("requests", [1, 16])
def test_few_masked_blocks(requests: int, page_size: int | None):
    tree = verification(requests, 2048, 63, page_size)
    plan = ta.plan_tree(tree, 16, HEADS.q, HEADS.kv, HEADS.dim, gpu="NVIDIA H200")
    plan.check(tree)
    assert plan.host is not None
    assert tree.num_queries == 64 * requests
    assert sum(plan.host.num_items) <= max(tree.num_queries / 3, 40)  # one request alone is split for more programs
    assert any(launch.tile.masked for launch in plan.shape.launches)


def test_draft_tokens_fill_an_entry_each_and_prompts_sixteen():
    plan = ta.plan_tree(verification(4, 500, 63, 16), 16, HEADS.q, HEADS.kv, HEADS.dim, gpu="NVIDIA H200")
    assert {launch.tile.unit for launch in plan.shape.launches} == {16}
    assert {launch.tile.masked_unit for launch in plan.shape.launches if launch.tile.masked} == {1}


def test_joined_levels_of_long_nodes_keep_long_entries():
    tree = ta.TokenTree.from_levels([1, 16, 64], [1024, 256, 32])
    plan = ta.plan_tree(tree, 16, HEADS.q, HEADS.kv, HEADS.dim, gpu="NVIDIA H200")
    assert {launch.tile.masked_unit for launch in plan.shape.launches if launch.tile.masked} == {16}


@pytest.mark.parametrize("implementation", ["xla", "pallas_triton"])
@pytest.mark.parametrize("page_size", [16, 4])
def test_short_masked_entries_equal_the_oracle(implementation: str, page_size: int):
    heads = Heads(4, 2, 32)
    case = Case("draft", lambda: verification(2, 550, 7, page_size), heads, page_size)
    plan = {"strategy": "auto", "gpu": "NVIDIA H200"}
    check_against_oracle(case.tree(), page_size, heads, implementation=implementation, plan=plan)
    made = ta.plan_tree(case.tree(), page_size, heads.q, heads.kv, heads.dim, gpu="NVIDIA H200")
    assert {launch.tile.masked_unit for launch in made.shape.launches} == {1}
