import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_attention_jax.cache.ragged import Ragged, spans

operations = st.lists(
    st.tuples(st.sampled_from(["push", "extend", "drop", "truncate", "clear"]), st.integers(0, 4), st.integers(0, 70)),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(operations)
def test_rows_hold_what_lists_would(steps):
    ragged, lists, next_value = Ragged(5), [[] for _ in range(5)], 0
    for name, row, n in steps:
        values = list(range(next_value, next_value + n))
        next_value += n
        if name == "push":
            ragged.push(row, values)
            lists[row] += values
        elif name == "extend":
            rows, counts = np.array([row, (row + 2) % 5]), np.array([n - n // 3, n // 3])
            ragged.extend(rows, counts, values)
            lists[rows[0]] += values[: counts[0]]
            lists[rows[1]] += values[counts[0] :]
        else:
            n = min(n, len(lists[row])) if name != "clear" else 0
            {"drop": ragged.drop_front, "truncate": ragged.truncate}.get(name, lambda r, n: ragged.clear(r))(row, n)
            lists[row] = lists[row][n:] if name == "drop" else lists[row][:n]
    assert [ragged[row].tolist() for row in range(5)] == lists
    assert ragged.gather(np.array([3, 1]), ragged.count[[3, 1]]).tolist() == lists[3] + lists[1]


def test_spans():
    assert spans(np.array([5, 0, 9]), np.array([2, 0, 1])).tolist() == [5, 6, 9]
    assert spans(np.zeros(0, int), np.zeros(0, int)).size == 0
