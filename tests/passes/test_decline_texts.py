"""Texts of declines: each holds for every way to get there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing

import tatten
from tatten.passes import Declined, rewrite
from tatten.passes.reasons import Decline, Reason


def left(fn, *args: torch.Tensor) -> Decline:
    gm = capture(fn, *args)
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined), finding
    assert listing(gm) == before
    return finding.decline


def tensors(q_len: int, kv_len: int, *batch: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*batch, 2, 4, n, 16) for n in (q_len, kv_len, kv_len))


def grown(q, k, v):
    return F.scaled_dot_product_attention(q, torch.cat((k, k[:, :, :1]), 2), torch.cat((v, v[:, :, :1]), 2))


@pytest.mark.parametrize("fn", [F.scaled_dot_product_attention, grown])
def test_no_placement_without_a_dtensor(fn) -> None:
    def mapped(q, k, v):
        return torch.vmap(lambda *args: fn(*args))(q, k, v)

    decline = left(mapped, *tensors(1, 64, 3))
    assert decline.reason is Reason.TORCH_FUNC


@pytest.mark.parametrize(
    ("kv_len", "detail"),
    [
        (8, "is_causal is True, q_length 8, kv_length 8: a prefill"),
        (64, "is_causal is True, q_length 8, kv_length 64"),
    ],
)
def test_is_causal_tells_a_prefill(kv_len: int, detail: str) -> None:
    decline = left(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *tensors(8, kv_len))
    assert decline == Decline(Reason.IS_CAUSAL, detail)
    assert "for a prefill" in decline.reason.help
    assert "more keys than queries" in decline.reason.help


def test_no_queries_are_no_prefill() -> None:
    decline = left(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *tensors(0, 64))
    assert decline.reason is Reason.EMPTY


def test_reports_of_vmap_and_of_a_prefill() -> None:
    with torch.no_grad():
        report = str(tatten.explain(torch.vmap(grown), *tensors(1, 64, 3)))
        assert "placement" not in report
        assert "DTensor" not in report
        prefill = tatten.explain(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *tensors(8, 8)
        )
    assert "why   is_causal is True, q_length 8, kv_length 8: a prefill" in str(prefill)
