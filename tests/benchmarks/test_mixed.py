"""`benchmarks/mixed.py` gives each sequence pages of its own, and times no candidate that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import mixed


@pytest.fixture
def problem() -> mixed.Problem:
    shape = mixed.Mixed("two", (1, 30), (300, 17), 16, q_heads=4, kv_heads=2, head_dim=64)
    return mixed.Problem(shape, "cpu")


def test_no_page_is_given_twice(problem: mixed.Problem) -> None:
    named = problem.tables[problem.tables >= 0]
    assert len(named) == problem.copies * sum(-(-n // 16) for n in problem.shape.lengths)
    assert len(named.unique()) == len(named) == len(problem.key)


def test_all_candidates_are_timed(problem: mixed.Problem) -> None:
    assert mixed.measure(problem, 1).keys() == {"tatten", "gathered"}


def test_a_wrong_candidate_is_not_timed(problem: mixed.Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mixed.candidates(problem)["tatten"]
    monkeypatch.setattr(mixed, "candidates", lambda p: {"tatten": lambda q, i: right(q.flip(0), i)})
    with pytest.raises(RuntimeError, match="tatten is wrong"):
        mixed.measure(problem, 1)


def test_the_floor_counts_what_each_query_sees(problem: mixed.Problem) -> None:
    seen = 301 + sum(range(18, 48))
    assert problem.shape.flops == 4 * seen * 4 * 64
    assert problem.shape.kv_bytes == problem.shape.lengths[0] * 512 + problem.shape.lengths[1] * 512


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shapes(device: str) -> None:
    for shape in mixed.shapes(device):
        assert len(shape.q_lens) == len(shape.pasts)
    if device == "cuda":
        decodes = next(x for x in mixed.shapes(device) if x.name.startswith("31"))
        assert decodes.lengths == (*(8192,) * 31, 8192 + 2048)
