"""`benchmarks/shared_pages.py` shares the pages that it says, and times no candidate that is wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import shared_pages

from tatten.ops.page_runs import OWN

TREE = shared_pages.Tree(4, 2, ((1, 128), (2, 64), (4, 32)), head_dim=32)


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch) -> shared_pages.Problem:
    monkeypatch.setitem(shared_pages.L2, "cpu", 2 * TREE.kv_bytes)
    return shared_pages.Problem(TREE, "cpu")


def test_no_page_is_used_twice_but_those_of_a_level(problem: shared_pages.Problem) -> None:
    pages = torch.cat([x.flatten() for x in problem.rows])
    assert problem.copies == 2
    assert len(pages.unique()) == len(pages) == problem.copies * TREE.pages == len(problem.pools[0])
    assert problem.find(1).data[OWN, :4].tolist() == [128] * 4


def test_all_candidates_are_timed(problem: shared_pages.Problem) -> None:
    assert shared_pages.measure(problem, 1).keys() == {"shared", "paged", "segments", "find"}


def test_own_parts_of_different_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = replace(TREE, least=4)
    monkeypatch.setitem(shared_pages.L2, "cpu", 2 * tree.kv_bytes)
    ragged = shared_pages.Problem(tree, "cpu")
    own = ragged.lens - 128 - 64
    assert len(own.unique()) > 1
    assert own.min() >= 4
    assert own.max() <= 32
    row = shared_pages.measure_row("ragged", tree, ragged, "segments", 1)  # all candidates are right
    assert row["us"].keys() == {"shared", "paged", "segments", "find"}
    assert row["name"].endswith("4 x 4 to 32")


def test_a_chunk_beside_decode_steps(problem: shared_pages.Problem) -> None:
    mixed = shared_pages.MixedProblem(TREE, "cpu", 100)
    assert mixed.starts.tolist() == [0, 100, 101, 102, 103]
    assert shared_pages.measure(mixed, 1).keys() == {"shared", "paged", "find"}
    mixed.pools.reverse()
    wrong = mixed.candidates()["shared"](0)
    mixed.pools.reverse()
    assert mixed.error("shared", wrong) > 1e-2
    row = shared_pages.measure_row("chunk", TREE, mixed, "paged", 1, chunk=100)
    assert row["name"].endswith("4 x 32, chunk 100")


def test_chunks_fit_into_their_sequences() -> None:
    for device in ("cpu", "cuda"):
        assert all(sum(keys for _, keys in tree.levels) >= chunk for tree, chunk in shared_pages.mixed_batches(device))


def test_a_wrong_candidate_is_not_timed(problem: shared_pages.Problem) -> None:
    problem.tables = problem.tables.roll(1, dims=1)
    with pytest.raises(RuntimeError, match="segments is wrong"):
        shared_pages.measure(problem, 1, ("segments",))


def test_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shared_pages.L2, "cpu", 1)
    rows = shared_pages.measure_finding("cpu", 1)
    assert [row["name"] for row in rows] == ["half shared", "nothing shared"]
    (what,) = shared_pages.bars([{"section": "shared", "ratio": 1.2}])
    assert "segments" in what
