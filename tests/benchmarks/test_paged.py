"""`benchmarks/paged.py` gives each sequence pages of its own, and times no candidate that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import paged
from support.decode_cases import Shape


@pytest.fixture
def problem() -> paged.Problem:
    shape = Shape("ragged", "two", 4, 2, (300, 17), 512, 64)
    copies = shape.copies("cpu")
    return paged.Problem(shape, tuple(torch.randn(copies * shape.size).bfloat16() for _ in "kv"))


@pytest.mark.parametrize("page", paged.PAGES)
def test_no_page_is_given_twice(problem: paged.Problem, page: int) -> None:
    tables = problem.tables(page)
    named = tables[tables >= 0]
    assert len(named) == problem.copies * sum(-(-n // page) for n in problem.shape.lengths)
    assert len(named.unique()) == len(named)
    assert named.max() < len(problem.pools(page)[0])


def test_all_candidates_are_timed(problem: paged.Problem) -> None:
    names = {"dense", "lens", "gathered 16", "gathered 64", *(f"page {page}" for page in paged.PAGES)}
    assert paged.measure(problem, 1).keys() == names


def test_a_wrong_candidate_is_not_timed(problem: paged.Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = problem.tables(64)
    monkeypatch.setattr(
        paged,
        "candidates",
        lambda p: {
            "page 64": lambda q, i: paged.tatten.decode_attention(
                q, *p.pools(64), kv_lens=p.lens, block_table=tables[i].flip(1)
            )
        },
    )
    with pytest.raises(RuntimeError, match="page 64 is wrong"):
        paged.measure(problem, 1)
