"""`benchmarks/gathers.py` times no backend that is wrong, and tatten reads pages in place of its gathers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gathers

import tatten

ROW = gathers.Row(16, 256, capacity=512, dtype="float32")


@pytest.mark.parametrize("page", [16, 64])
@torch.no_grad()
def test_the_gathers_become_pages(page: int) -> None:
    torch._dynamo.reset()  # or else the second page size is a dynamic one
    (args,) = gathers.inputs(replace(ROW, page=page))
    assert args[4].tolist() == sorted(args[4].tolist())
    assert (args[4][0], args[4][-1]) == (128, 256)
    (finding,) = tatten.explain(gathers.gathered, *args).rewritten
    assert f"read by block table int32[8, {512 // page}] in pages of {page} keys" in finding.note
    torch.testing.assert_close(gathers.copied(*args), gathers.gathered(*args))


def test_bytes_of_the_floor() -> None:
    row = replace(ROW, batch=2)  # 128 and 256 keys, 8 and 16 pages
    assert row.read_bytes == 2 * 384 * 8 * 128 * 4 + 4 * 24
    assert all(x.lengths == [4096] * x.batch for x in gathers.ROWS["cuda"] if x.used == 4096)


@torch.no_grad()
def test_a_wrong_backend_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = gathers.inputs(gathers.Row(16, 64, capacity=64, dtype="float32"))
    monkeypatch.setattr(gathers, "CANDIDATES", {"eager": (gathers.gathered, "eager")})
    assert gathers.measure(calls, rounds=1)["eager"] > 0
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *given: function(*given) * 1.1)
    with pytest.raises(RuntimeError, match="eager is wrong: relative error"):
        gathers.measure(calls, rounds=1)
