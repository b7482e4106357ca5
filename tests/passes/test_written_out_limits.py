"""Attention written out in ways that are nearly one that is known: each gives what eager gives, or is left."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import capture, listing

from tatten.passes import Declined, Rewritten, rewrite
from tatten.passes.reasons import Reason

B, H, Q, S, D = 2, 4, 2, 12, 8
LOWEST = torch.finfo(torch.float32).min


def max_before_cap(q, k, v, m):
    s = q @ k.mT
    return (torch.tanh((s - s.amax(-1, keepdim=True)) / 5) * 5 + m).softmax(-1) @ v


def max_before_sinks(q, k, v, m):
    s = q @ k.mT + m
    s = s - s.amax(-1, keepdim=True)
    return torch.cat([s, torch.ones(H).view(1, H, 1, 1).expand(B, H, Q, 1)], -1).softmax(-1)[..., :-1] @ v


def added_to_a_mask(q, k, v, m):
    m += q @ k.mT
    return m.softmax(-1) @ v


def filled_in_float32(q, k, v, m):
    return (q @ k.mT).float().masked_fill(m < 0, LOWEST).softmax(-1).to(q.dtype) @ v


def filled_in_float16(q, k, v, m):
    """Scores of keys that count may be as low as the lowest number of this dtype: here all are."""
    return (q @ k.mT - 1e5).clamp(min=-65504).masked_fill(m < 0, torch.finfo(q.dtype).min).softmax(-1) @ v


def no_keys_after_a_cast(q, k, v, m):
    return (q @ k.mT + torch.full((S,), LOWEST)).to(q.dtype).softmax(-1) @ v


def no_keys_in_place(q, k, v, m):
    s = q @ k.mT
    s += torch.full((S,), LOWEST)
    return s.softmax(-1) @ v


def no_keys_after_softmax_in_fewer_bits(q, k, v, m):
    return (q @ k.mT + torch.full((S,), LOWEST)).softmax(-1, dtype=q.dtype) @ v


def no_keys_below_the_maximum_in_fewer_bits(q, k, v, m):
    s = q @ k.mT + torch.full((S,), LOWEST)
    return (s - s.amax(-1, keepdim=True)).softmax(-1, dtype=q.dtype) @ v


def masks_of_fewer_bits(q, k, v, m):
    low = torch.full((S,), torch.finfo(torch.float16).min, dtype=torch.float16)
    return ((q.float() @ k.float().mT + low + low).softmax(-1) @ v.float()).to(q.dtype)


def scale_in_fewer_bits(q, k, v, m):
    return (q @ k.mT * torch.tensor(0.3, dtype=torch.bfloat16) + m).softmax(-1) @ v


def integer_scale(q, k, v, m):
    return (q @ k.mT * torch.tensor(2.7, dtype=torch.int64)).softmax(-1) @ v


def literal_beyond_its_dtype(q, k, v, m):
    return torch.where(m < 0, torch.tensor(-1e300, dtype=torch.float32), q @ k.mT).softmax(-1) @ v


def literal_is_written(q, k, v, m):
    low = torch.full((), -1e30, dtype=q.dtype)
    low.fill_(1.0)
    return torch.where(m < 0, low, q @ k.mT).softmax(-1) @ v


def zeros_are_written(q, k, v, m):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    bias = torch.zeros(B * H, Q, S, dtype=q.dtype)
    bias[:, :, 0] = 3
    return torch.bmm(torch.baddbmm(bias, q, k.mT).softmax(-1), v)


def alpha_beside_values(q, k, v, m):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.baddbmm(q.new_zeros(1, 1, 1), torch.bmm(q, k.mT).softmax(-1), v, beta=0, alpha=2)


def fill_repeats_scores(q, k, v, m):
    low = torch.full((B, 1, 1, 1), LOWEST, dtype=q.dtype)
    return torch.where(m[:1] < 0, low, q[:1] @ k[:1].mT).softmax(-1) @ v[:1]


def scale_repeats_scores(q, k, v, m):
    return (q[:1] @ k[:1].mT * torch.full((B, 1, 1, 1), 0.5, dtype=q.dtype)).softmax(-1) @ v[:1]


def logsumexp_below_the_maximum(q, k, v, m):
    s = q @ k.mT + m
    s = s - s.amax(-1, keepdim=True)
    return s.softmax(-1) @ v * torch.logsumexp(s, -1, keepdim=True)


def logsumexp_of_no_keys(q, k, v, m):
    s = q @ k.mT + torch.full((S,), -math.inf, dtype=q.dtype)
    return torch.logsumexp(s, -1, keepdim=True), s.softmax(-1) @ v, torch.logsumexp(s, -1)


def biases_of_rank_3_and_4(q, k, v, m):
    bias = torch.arange(B * H * S, dtype=q.dtype).view(B * H, 1, S) / 50
    s = (q @ k.mT).view(B * H, Q, S) + bias
    return (s.view(B, H, Q, S) + m).softmax(-1) @ v


def values_of_rank_3(q, k, v, m):
    return torch.bmm((q @ k.mT + m).softmax(-1).view(B * H, Q, S), v.reshape(B * H, S, D))


def where_as_a_method(q, k, v, m):
    return (q @ k.mT).where(m >= 0, LOWEST).softmax(-1) @ v


def no_lower_bound(q, k, v, m):
    return (q @ k.mT + m.masked_fill(m < 1, -math.inf)).clamp(min=-math.inf).softmax(-1) @ v


def bias_of_rank_0(q, k, v, m):
    return (q @ k.mT + torch.tensor(-math.inf, dtype=q.dtype)).softmax(-1) @ v


def bits_of_another_dtype(q, k, v, m):
    return (q @ k.mT).view(torch.int16).view(torch.float16).to(q.dtype).softmax(-1) @ v


def sinks_are_written(q, k, v, m):
    sinks = torch.linspace(-1, 2, H).to(torch.bfloat16)
    column = sinks.view(1, H, 1, 1).to(q.dtype).expand(B, H, Q, 1)
    sinks.add_(1)
    return torch.cat([q @ k.mT + m, column], -1).softmax(-1)[..., :-1] @ v


def sinks_of_one_head(q, k, v, m):
    q, k, v = (x[:, :1] for x in (q, k, v))
    column = torch.ones(1, dtype=q.dtype).view(1, 1, 1, 1).expand(B, 1, Q, 1)
    return torch.cat([q @ k.mT + m[:, :1], column], -1).softmax(-1)[..., :-1] @ v


CASES = {
    max_before_cap: Reason.RELATIVE,
    max_before_sinks: Reason.RELATIVE,
    added_to_a_mask: Reason.IN_PLACE,
    filled_in_float32: None,
    filled_in_float16: Reason.MASK_VALUE,
    no_keys_after_a_cast: None,
    no_keys_in_place: None,
    no_keys_after_softmax_in_fewer_bits: None,
    no_keys_below_the_maximum_in_fewer_bits: None,
    masks_of_fewer_bits: None,
    scale_in_fewer_bits: None,
    integer_scale: None,
    literal_beyond_its_dtype: None,
    literal_is_written: Reason.RELATIVE,
    zeros_are_written: None,
    alpha_beside_values: Reason.NO_SDPA,
    fill_repeats_scores: Reason.RELATIVE,
    scale_repeats_scores: Reason.RELATIVE,
    logsumexp_below_the_maximum: Reason.WEIGHTS_USED,
    logsumexp_of_no_keys: None,
    biases_of_rank_3_and_4: None,
    values_of_rank_3: None,
    where_as_a_method: None,
    no_lower_bound: None,
    bias_of_rank_0: None,
    bits_of_another_dtype: Reason.RELATIVE,
    sinks_are_written: Reason.WRITTEN,
    sinks_of_one_head: None,
}
DTYPES = {
    **dict.fromkeys((scale_in_fewer_bits, integer_scale, literal_beyond_its_dtype), torch.float32),
    **dict.fromkeys((filled_in_float32, filled_in_float16, masks_of_fewer_bits), torch.float16),
    **dict.fromkeys((no_keys_after_a_cast, no_keys_in_place, no_keys_after_softmax_in_fewer_bits), torch.bfloat16),
    no_keys_below_the_maximum_in_fewer_bits: torch.bfloat16,
    bits_of_another_dtype: torch.bfloat16,
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_same_as_eager(fn) -> None:
    torch.manual_seed(0)
    dtype = DTYPES.get(fn, torch.float64)
    q, k, v = torch.randn(B, H, Q, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)
    m = torch.zeros(B, H, Q, S).masked_fill(torch.arange(S) >= 9, -1e4)
    args = [x.to(dtype) for x in (q, k, v, m)]
    gm = capture(fn, *(x.clone() for x in args))
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    if CASES[fn] is None:
        assert isinstance(finding, Rewritten), finding
    else:
        assert isinstance(finding, Declined), finding
        assert finding.decline.reason is CASES[fn], finding.decline
        assert listing(gm) == before
    gm.graph.lint()
    eager, compiled = ([x.clone() for x in args] for _ in range(2))
    want = fn(*eager)
    inputs = {x.name.removeprefix("l_").strip("_"): None for x in gm.graph.nodes if x.op == "placeholder"}
    assert set(inputs) <= set("qkvm")
    got = gm(*(compiled["qkvm".index(name)] for name in inputs))
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    tolerance = 1e-12 if dtype == torch.float64 else 8 * torch.finfo(dtype).eps
    got = got if isinstance(want, tuple) else got[0]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_a_declined_call_leaves_nothing_of_its_mask() -> None:
    def fn(q, k, v, m):
        return (q @ k.mT + m).softmax(-1) @ v

    torch.manual_seed(0)
    q, k = torch.randn(2, B, H, S, D)
    gm = capture(fn, q, k, k, torch.zeros(S, S))
    before = listing(gm)
    (finding,) = rewrite(gm, max_q_len=Q).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.Q_LEN
    assert listing(gm) == before


def test_operands_may_be_written_before_they_are_read_and_afterwards() -> None:
    """At the first read of one operand, others may have to be written yet: a cache, say."""

    def fn(q, k, v, new):
        q = q.flatten(0, 1)
        k[:, :, :1] = new
        w = torch.bmm(q, k.flatten(0, 1).mT).softmax(-1)
        v[:, :, :1] = new
        out = torch.bmm(w, v.flatten(0, 1))
        v.zero_()
        return out

    torch.manual_seed(0)
    args = torch.randn(B, H, Q, D), *torch.randn(2, B, H, S, D), torch.randn(B, H, 1, D)
    gm = capture(fn, *(x.clone() for x in args))
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten), finding
    names = [x.name.removeprefix("l_").strip("_") for x in gm.graph.nodes if x.op == "placeholder"]
    (got,) = gm(*(dict(zip(("q", "k", "v", "new"), args, strict=True))[name].clone() for name in names))
    torch.testing.assert_close(got, fn(*args), rtol=1e-5, atol=1e-5)


def test_copies_that_are_written_stay() -> None:
    def fn(q, k, v):
        k = k.contiguous()
        k = k.clone()
        k[:, :, 0] = 1
        return (q @ k.mT).softmax(-1) @ v

    q, k = torch.randn(B, H, Q, D), torch.randn(B, H, S, D)
    gm = capture(fn, q, k, k)
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.WRITTEN
    assert listing(gm) == before


def test_exported() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, m):
            return (q @ k.mT + m).softmax(-1) @ v

    q, k = torch.randn(B, H, Q, D), torch.randn(B, H, S, D)
    args = q, k, k + 1, torch.zeros(Q, S)
    gm = torch.export.export(Attention(), args).module()
    (finding,) = rewrite(gm, may_guard=False).findings
    assert isinstance(finding, Rewritten), finding
    torch.testing.assert_close(gm(*args), Attention()(*args))
