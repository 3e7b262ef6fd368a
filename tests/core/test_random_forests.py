"""Random forests against the oracle. Capacities and pool sizes are fixed, so that examples share a few programs."""

import pytest
from forests import Heads, check_against_oracle, every_strategy, every_strategy_slowly
from hypothesis import given, settings
from hypothesis import strategies as st
from random_forests import forests, quick, thorough

from tree_attention_jax import Buckets
from tree_attention_jax.planning.strategies import STRATEGIES

HEADS = Heads(1, 1, 16)
BUCKETS = Buckets(queries=64, items=128, partials=1024, buffer=8192)

# At most as many queries as a narrow tile has rows: one tile class. The larger ones mix classes.
small = forests(max_nodes=9, max_tokens=24, max_queries=16, page_sizes=(4,))
large = forests(max_nodes=12, max_tokens=24, page_sizes=(4,))


def check(implementation: str, strategy: str, case, data: st.DataObject, **options) -> None:
    tree, page_size = case
    check_against_oracle(
        tree,
        page_size,
        HEADS,
        implementation=implementation,
        padding=BUCKETS.queries - tree.num_queries,
        pages=128,
        seed=data.draw(st.integers(0, 9), "seed"),
        plan={"strategy": strategy, "buckets": BUCKETS},
        **options,
    )


@every_strategy_slowly
@quick
@given(case=small, data=st.data())
def test_equals_the_oracle(strategy: str, case, data):
    check("xla", strategy, case, data)


@settings(quick, max_examples=15)
@given(case=small, data=st.data(), strategy=st.sampled_from(sorted(STRATEGIES)))
def test_window_equals_the_oracle(strategy: str, case, data):
    check("xla", strategy, case, data, sliding_window=9)


@pytest.mark.slow
@every_strategy
@settings(thorough, max_examples=120)
@given(case=large, data=st.data())
def test_equals_the_oracle_thoroughly(strategy: str, case, data):
    check("xla", strategy, case, data)


@pytest.mark.slow
@settings(quick, max_examples=60)
@given(case=large, data=st.data(), strategy=st.sampled_from(sorted(STRATEGIES)))
def test_pallas_equals_the_oracle(strategy: str, case, data):
    check("pallas_triton", strategy, case, data)
