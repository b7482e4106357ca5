"""`benchmarks/sparse.py` hands others' kernels the picks in their layouts, and times none that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import sparse
from support import peers, picked_kernel, picked_peers
from support.picked_cases import Shape

SHAPE = Shape(4, 3, 2176, "random", torch.bfloat16)


def attention(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """`[heads, 512]` of `[heads, 576]` and `[picks, 576]`, whose first columns are the values."""
    weights = (query.float() @ keys.float().T * scale).softmax(-1)
    return (weights @ keys[:, :512].float()).to(torch.bfloat16)


class Others:
    """The ops of vLLM's extensions on a CPU, with their arguments in order."""

    shift = 0  # of the picks

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
        q_v, (used, _, picks, table), scale = rest[2], rest[8:12], rest[20]
        assert k.shape[1] == 1
        assert used.tolist() == [picks] * len(q)
        keys = torch.cat((v, k), -1).flatten(1)[table.long() + self.shift]
        query = torch.cat((q_v, q), -1)[:, 0]
        return [torch.stack([attention(*of, scale) for of in zip(query, keys, strict=True)]).unsqueeze(1)]

    def sparse_prefill_fwd(self, q: Tensor, kv: Tensor, rows: Tensor, scale: float, *rest: Any) -> list[Tensor]:
        assert rest == (512, None, None, None)
        keys = kv[rows.long() + self.shift, 0][:, 0]
        return [torch.stack([attention(*of, scale) for of in zip(q, keys, strict=True)])]

    def sparse_decode_fwd(self, q: Tensor, pages: Tensor, rows: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        assert pages.shape[1:] == (64, 1, 656)
        length, sink, plan, splits, *extra, columns, scale, out = rest
        assert (length, sink, *extra, columns, out) == (None,) * 5 + (512, None)
        assert (plan is None) == (splits is None)
        stored = pages.view(-1, 656)[rows.long() + self.shift][:, 0].contiguous()
        values, scales, rope = stored.split((512, 16, 128), -1)
        latent = values.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
        latent = (latent * scales.contiguous().view(torch.float32).unsqueeze(-1)).flatten(-2)
        keys = torch.cat((latent, rope.contiguous().view(torch.bfloat16)), -1)
        made = [attention(*of, scale) for of in zip(q[:, 0], keys, strict=True)]
        return torch.stack(made).unsqueeze(1), None, q, q


def test_others_read_the_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ops_of", lambda name: Others())
    row = picked_kernel.measure(SHAPE, "cpu", 1e9, 1)
    assert row["left_out"] == {}
    assert tuple(row["us"]) == picked_kernel.CANDIDATES


def test_wrong_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others()
    others.shift = -1
    monkeypatch.setattr(peers, "ops_of", lambda name: others)
    row = picked_kernel.measure(SHAPE, "cpu", 1e9, 1)
    assert tuple(row["us"]) == picked_kernel.OURS
    assert all(row["left_out"][name].startswith("ArithmeticError: wrong") for name in picked_peers.PEERS)


def test_missing_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ops_of", lambda name: None)
    row = picked_kernel.measure(SHAPE, "cpu", 1e9, 1)
    assert row["left_out"] == dict.fromkeys(picked_peers.PEERS, "RuntimeError: not installed, or not for this device")


def test_bars() -> None:
    us = {"masked": 90.0, "copied": 20.0, "short": 9.0, "tatten": 10.0}
    row = {"heads": 128, "batch": 8, "length": 131072, "picks": "random", "dtype": "bfloat16"}
    rows = [{**row, "us": us | {"fa3": 8.0, "flash_mla_8": 1.0}}, {**row, "length": 8192, "us": us | {"fa3": 16.0}}]
    bars = sparse.bars_of(rows, "cuda")
    name = "128 heads, 8 x 131072, random, bfloat16"
    assert bars[f"{name}, us"] == (10.0, "at most", 26)
    assert bars[f"{name}, over fa3"] == (1.25, "at most", 1.0)
    figure, side, bound = bars["geometric mean over fa3"]
    assert (figure, side, bound) == (pytest.approx((1.25 * 0.625) ** 0.5), "at most", 0.85)
    assert not any("flash_mla" in x for x in bars)
