"""`benchmarks/gathers.py` times no backend that is wrong, and tatten reads pages in place of its gathers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gathers

import tatten


@pytest.mark.parametrize("page", [16, 64])
@torch.no_grad()
def test_the_gathers_become_pages(page: int) -> None:
    torch._dynamo.reset()  # or else the second page size is a dynamic one
    args = gathers.inputs(page, 256, torch.float32, capacity=512)
    assert args[4].tolist() == sorted(args[4].tolist())
    assert (args[4][0], args[4][-1]) == (128, 256)
    (finding,) = tatten.explain(gathers.gathered, *args).rewritten
    assert f"read by block table int32[8, {512 // page}] in pages of {page} keys" in finding.note


@torch.no_grad()
def test_a_wrong_backend_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    args = gathers.inputs(16, 64, torch.float32, capacity=64)
    monkeypatch.setattr(gathers, "BACKENDS", ("eager",))
    assert gathers.measure(args, rounds=1)["eager"] > 0
    monkeypatch.setattr(torch, "compile", lambda function, backend: lambda *given: function(*given) * 1.1)
    with pytest.raises(RuntimeError, match="eager is wrong: relative error"):
        gathers.measure(args, rounds=1)
