"""CI draws a share of the slow tests by a seed, and misses none of them for long."""

from __future__ import annotations

from slow import is_drawn

TESTS = [f"tests/test_file.py::test_case[{i}]" for i in range(1000)]


def test_a_share_is_drawn() -> None:
    drawn = [test for test in TESTS if is_drawn(test, 0.2, "87eccb3")]
    assert 140 < len(drawn) < 260
    assert drawn == [test for test in TESTS if is_drawn(test, 0.2, "87eccb3")]
    assert all(is_drawn(test, 1.0, "") for test in TESTS)
    assert not any(is_drawn(test, 0.0, "") for test in TESTS)


def test_a_hundred_commits_draw_every_test() -> None:
    assert all(any(is_drawn(test, 0.2, str(seed)) for seed in range(100)) for test in TESTS)
