"""`make test` and CI draw tests by a seed, and miss none of them for long."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from slow import is_drawn, left_undrawn

TESTS = [f"tests/test_file.py::test_case[{i}]" for i in range(1000)]


def test_a_share_is_drawn() -> None:
    drawn = [test for test in TESTS if is_drawn(test, 0.2, "87eccb3")]
    assert 140 < len(drawn) < 260
    assert drawn == [test for test in TESTS if is_drawn(test, 0.2, "87eccb3")]
    assert all(is_drawn(test, 1.0, "") for test in TESTS)
    assert not any(is_drawn(test, 0.0, "") for test in TESTS)


def test_a_hundred_commits_draw_every_test() -> None:
    assert all(any(is_drawn(test, 0.2, str(seed)) for seed in range(100)) for test in TESTS)


FILE = """
import pytest

@pytest.mark.drawn(2)
@pytest.mark.parametrize("i", range(10))
def test_grid(i): ...

@pytest.mark.drawn(3, "models")
@pytest.mark.parametrize("i", range(20))
def test_many_models(i): ...

@pytest.mark.drawn(3, "models")
@pytest.mark.parametrize("i", range(2))
def test_few_models(i): ...

@pytest.mark.drawn(3, "models")
def test_model(): ...

@pytest.mark.parametrize("i", range(4))
def test_all(i): ...

@pytest.mark.drawn(1)
class TestAny:
    def test_a(self): ...
    def test_b(self): ...
"""


@pytest.fixture
def items(tmp_path: Path, request: pytest.FixtureRequest) -> list[pytest.Item]:
    (tmp_path / "test_file.py").write_text(FILE)
    module = pytest.Module.from_parent(request.session, path=tmp_path / "test_file.py")
    reports = [module]
    found: list[pytest.Item] = []
    while reports:
        for x in reports.pop().collect():
            (found if isinstance(x, pytest.Item) else reports).append(x)  # type: ignore[arg-type]
    return found


def drawn(items: list[pytest.Item], times: int, seed: str) -> list[str]:
    left = {*left_undrawn(items, times, seed)}
    return [x.name for x in items if x not in left]


def test_so_many_of_each_kind_are_drawn(items: list[pytest.Item]) -> None:
    for times, wanted in (1, (2, 1, 1, 1, 1)), (2, (4, 3, 2, 1, 2)), (100, (10, 20, 2, 1, 2)):
        names = drawn(items, times, "87eccb3")
        found = Counter(name.split("[")[0] for name in names)
        functions = ("test_grid", "test_many_models", "test_few_models", "test_model")
        assert (*(found[x] for x in functions), found["test_a"] + found["test_b"]) == wanted
        assert found["test_all"] == 4
        assert names == drawn(items[::-1], times, "87eccb3")[::-1]


def test_other_seeds_draw_the_others(items: list[pytest.Item]) -> None:
    assert {name for seed in range(100) for name in drawn(items, 1, str(seed))} == {x.name for x in items}
