"""Attention that is written out, and who else uses its keys, values, scores and products."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing, run_rewritten

from tatten.passes import Declined, Rewritten, rewrite
from tatten.passes.reasons import Reason

B, H, S, D = 4, 4, 8192, 64


def tensors(*lengths: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, n, D) for n in lengths]


def test_an_lse_that_is_used_before_another_call_is_computed_in_time() -> None:
    """The second call comes first, and both scale one query and share one mask: nothing is read before it is there."""

    def fn(q, k1, v1, k2, v2, m):
        first = q @ k1.mT * 0.25 + m
        second = q @ k2.mT * 0.25 + m
        gate = torch.sigmoid(second.logsumexp(-1))
        out = first.softmax(-1) @ v1
        return out + gate[..., None] * (second.softmax(-1) @ v2)

    def by_einsum(q, k1, v1, k2, v2, m):
        q, k1, v1, k2, v2 = (x.transpose(1, 2) for x in (q, k1, v1, k2, v2))
        first, second = torch.einsum("bqhd,bkhd->bhqk", q, k1), torch.einsum("bqhd,bkhd->bhqk", q, k2)
        gate = torch.sigmoid(second.logsumexp(-1))
        out = torch.einsum("bhqk,bkhd->bqhd", first.softmax(-1), v1)
        return out + gate.mT[..., None] * torch.einsum("bhqk,bkhd->bqhd", second.softmax(-1), v2)

    args = [*tensors(1, 12, 12, 12, 12), torch.zeros(B, 1, 1, 12).masked_fill(torch.arange(12) > 8, float("-inf"))]
    for form in (fn, by_einsum):
        findings, _, out = run_rewritten(form, *args)
        assert all(isinstance(x, Rewritten) for x in findings), findings
        assert len(findings) == 2
        torch.testing.assert_close(out, form(*args))


def test_what_is_concatenated_to_be_key_and_value_is_read_in_segments() -> None:
    def fn(q, a, b):
        kv = torch.cat((a, b), 2)
        return (q @ kv.mT * 0.3).softmax(-1) @ kv

    (finding,) = rewrite(capture(fn, *tensors(1, S, 64))).findings
    assert isinstance(finding, Rewritten)
    assert finding.op == "tatten.bifurcated_attention.default"


@pytest.mark.parametrize("copy", [lambda k: k.repeat(1, 2, 1, 1), lambda k: k.contiguous(), lambda k: k.flatten(0, 1)])
def test_what_is_concatenated_and_used_elsewhere_is_read_in_one(copy) -> None:
    """It exists anyway."""

    def fn(q, a, b):
        k = copy(torch.cat((a, b), 2))
        heads = q.repeat(1, k.shape[1] // H, 1, 1) if k.dim() == 4 else q.flatten(0, 1)
        return (heads @ k.mT * 0.3).softmax(-1) @ k, k

    (finding,) = rewrite(capture(fn, *tensors(1, S, 64))).findings
    assert isinstance(finding, Rewritten)
    assert finding.op == "tatten.decode_attention.default"


def test_latents_whose_projection_is_used_are_not_absorbed() -> None:
    rank, width = 64, 32

    def fn(q, c, w):
        both = F.linear(c, w).view(B, S, H, 2 * width).transpose(1, 2)
        k, v = both.split((width, width), -1)
        t = k.mT
        return (q @ t * 0.1).softmax(-1) @ v, t

    args = torch.randn(B, H, 1, width), torch.randn(B, S, rank), torch.randn(H * 2 * width, rank)
    (finding,) = rewrite(capture(fn, *args)).findings
    assert not (isinstance(finding, Rewritten) and "latent" in finding.op), finding


def test_values_that_change_shape_in_place_are_noticed() -> None:
    """The lse is used before the values are read, so all is computed before that."""

    def fn(q, k, v):
        v = v * 1
        s = q @ k.mT * 0.3
        y = s.logsumexp(-1) + 1
        out = s.softmax(-1) @ v
        v.transpose_(1, 2)
        return out, y

    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 4, 8), torch.randn(2, 4, 4, 8)
    gm = capture(fn, q, k, v)
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.WRITTEN
    assert listing(gm) == before


def test_the_passes_take_linear_time_for_deep_masks() -> None:
    """Each number of a mask may be used twice: what a draft reads is found once for each node, not for each path."""

    def calls_made(depth: int) -> int:
        def fn(q, k, v, x):
            for _ in range(3):
                m = x
                for _ in range(depth):
                    m = m * 3 + m
                q = (q @ k.mT + m[:, None, None]).softmax(-1) @ v
            return q

        gm = capture(fn, *tensors(1, 12, 12), torch.randn(B, 12))
        events: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, arg: events.update([event]))
        try:
            rewrite(gm)
        finally:
            sys.setprofile(None)
        return events["call"]

    calls_made(4)
    assert calls_made(16) < 8 * calls_made(4)
