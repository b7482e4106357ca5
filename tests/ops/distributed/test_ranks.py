"""Tests on several ranks end in time and say what happened, whatever a rank does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks, run_torchrun, try_ranks


def fail_on_one(how: str) -> float:
    """Rank 1 skips the collective of the others."""
    if dist.get_rank() == 1:
        if how == "pytest":
            with pytest.raises(ValueError):
                pass
        if how == "exit":
            raise SystemExit("tokens: DIFFERENT")
        while how == "hangs":
            time.sleep(1)
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize("how, says", [("pytest", "DID NOT RAISE"), ("exit", "tokens: DIFFERENT")])
def test_an_error_that_is_no_exception_is_reported(how: str, says: str) -> None:
    start = time.monotonic()
    results = try_ranks(2, fail_on_one, how, seconds=60.0, timeout=10.0)
    assert says in str(results[1])
    assert isinstance(results[0], RankError)
    assert time.monotonic() - start < 40


@pytest.mark.drawn(1, "ranks that fail")
def test_a_rank_that_hangs_is_ended() -> None:
    results = try_ranks(2, fail_on_one, "hangs", seconds=12.0, timeout=3.0)
    assert "still running" in str(results[1])
    assert isinstance(results[0], RankError)
    assert "still running" not in str(results[0])


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(2, dist.get_rank) == [0, 1]


@pytest.mark.slow
def test_torchrun_ends_in_time(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nprint('rank', os.environ['RANK'], flush=True)\ntime.sleep(float(sys.argv[1]))"
    )
    assert sorted(run_torchrun(2, str(script), "0").split("\n"))[-2:] == ["rank 0", "rank 1"]
    start = time.monotonic()
    with pytest.raises(RankError, match="still running after 15 s"):
        run_torchrun(2, str(script), "600", seconds=15.0)
    assert time.monotonic() - start < 80
