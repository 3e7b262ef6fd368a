"""The program for memory checkers: that its cases run, and that a wrong result fails it."""

import pytest

from benchmarks import memcheck


def test_cases_agree_with_numpy(monkeypatch, capsys):
    monkeypatch.setattr(memcheck, "CASES", memcheck.CASES[-1:])
    assert memcheck.main(["--implementations", "xla"]) == 0
    assert "r128" in capsys.readouterr().out


def test_a_difference_is_a_failure(monkeypatch):
    monkeypatch.setattr(memcheck, "CASES", memcheck.CASES[:1])
    monkeypatch.setattr(memcheck, "difference", lambda case, name: 0.5)
    assert memcheck.main([]) == 1


def test_scattered_queries_do_not_lie_side_by_side():
    [case] = (case for case in memcheck.CASES if case.scattered)
    tree = case.tree()
    below = tree.parent[tree.q_len > 0]
    assert (below[1:] != below[:-1]).all()


@pytest.mark.parametrize("case", memcheck.CASES, ids=lambda case: f"{case.strategy}-{case.head_dim}")
def test_pools_have_no_page_to_spare(case):
    tree = case.tree().with_pages(case.page_size)
    pages = tree.page_table(case.page_size)[1]
    assert sorted(set(pages.tolist())) == list(range(int(pages.max()) + 1))
