"""Numbers that are inputs of a graph: float attributes of modules under `dynamic=True`, and values that are read."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing

import tatten
from tatten.passes import Declined, Rewritten, rewrite
from tatten.passes.reasons import Reason

pytestmark = pytest.mark.drawn(4)

B, H, S, D = 2, 4, 64, 16


class Numbers(torch.nn.Module):
    """Attention whose numbers are attributes."""

    def __init__(self, attend, scale: float = 0.25) -> None:
        super().__init__()
        self.attend, self.scale, self.cap, self.fill, self.p, self.none = attend, scale, 5.0, -1e30, 0.1, 0.0
        self.factor = 0.5
        self.divisor = 1 / scale if scale else math.inf

    def forward(self, q, k, v, m):
        return self.attend(self, q, k, v, m)


def times(x, q, k, v, m):
    return (q @ k.mT * x.scale + m).softmax(-1) @ v


def divided(x, q, k, v, m):
    return (q @ k.mT / x.divisor + m).softmax(-1) @ v


def in_place(x, q, k, v, m):
    return (q @ k.mT).mul_(x.scale).add_(m).softmax(-1) @ v


def after_the_bias(x, q, k, v, m):
    return ((q @ k.mT + m) * x.scale / x.divisor).softmax(-1) @ v


def by_head_dim(x, q, k, v, m):
    return (q @ k.mT / math.sqrt(q.shape[-1]) + m).softmax(-1) @ v


def capped(x, q, k, v, m):
    return (x.cap * torch.tanh(q @ k.mT * x.scale / x.cap) + m).softmax(-1) @ v


def in_one_product(x, q, k, v, m):
    """As Bloom and GPT-NeoX Japanese: the product scales itself, and adds the bias."""
    q, k, bias = q.view(B * H, -1, D), k.view(B * H, -1, D), m.expand(-1, H, -1, -1).reshape(B * H, 1, S)
    scores = torch.baddbmm(bias, q, k.mT, beta=x.factor, alpha=x.scale)
    return scores.view(B, H, -1, S).softmax(-1) @ v


def dropped(x, q, k, v, m):
    return F.dropout((q @ k.mT * 0.25 + m).softmax(-1), x.p, x.training) @ v


def dropped_in_place(x, q, k, v, m):
    return F.dropout((q @ k.mT * 0.25 + m).softmax(-1), x.p, x.training, inplace=True) @ v


def sdpa(x, q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m, dropout_p=x.none, scale=x.scale)


def merged(x, q, k, v, m):
    q, k, v = (y.flatten(0, 1) for y in (q, k, v))
    scores = torch.bmm(q, k.mT).unflatten(0, (B, H)) * x.scale + m
    return torch.bmm(scores.flatten(0, 1).softmax(-1), v)


def dequantised(x, q, k, v, m):
    k, v = (y.mul(20).to(torch.int8) for y in (k, v))
    return F.scaled_dot_product_attention(q, k.to(q.dtype) * x.scale, v.to(q.dtype) * x.scale, m)


def arguments(q_len: int = 1) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, n, D) for n in (q_len, S, S))
    return q, k, v, torch.where(torch.rand(B, 1, 1, S) > 0.5, 0.0, -1e30)


KEPT = [times, divided, in_place, after_the_bias, by_head_dim, dropped, dropped_in_place, dequantised, in_one_product]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("attend", [*KEPT, capped, sdpa], ids=lambda fn: fn.__name__)
def test_same_as_eager(attend, inner: str) -> None:
    args = arguments()
    torch._dynamo.reset()
    with torch.no_grad(), tatten.recording() as report:
        for module in (Numbers(attend, scale).eval() for scale in (0.25, 0.3, 0.35)):
            got = torch.compile(module, backend="tatten", options={"inner": inner}, dynamic=True)(*args)
            torch.testing.assert_close(got, module(*args))
    assert not report.declined, str(report)
    assert report.rewritten
    if attend in KEPT:
        assert len(report.rewritten) == 1, str(report)


def test_layers_that_are_compiled_one_by_one_share_a_graph() -> None:
    """Each has a scale of its own, as in GPT-2's `scale_attn_by_inverse_layer_idx`; Dynamo would recompile 8 times."""
    layers = [Numbers(times, 0.25 / (1 + i)) for i in range(12)]
    args = arguments()
    torch._dynamo.reset()
    with torch.no_grad(), tatten.recording() as report:
        for layer in layers:
            layer.compile(backend="tatten", options={"inner": "aot_eager"})
            torch.testing.assert_close(layer(*args), times(layer, *args))
    assert not report.declined, str(report)
    assert len(report.rewritten) == 2  # with the first number as such, then for any


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_with_large_scales_share_a_graph(dtype: torch.dtype) -> None:
    """A graph for each number would be one for each call, until Dynamo gives up."""

    def attend(q, k, v, m, scale):
        return (q @ k.mT * scale + m).softmax(-1) @ v

    args = [x.to(dtype) for x in arguments()]
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="tatten", options={"inner": "eager"}, dynamic=True)
    with torch.no_grad(), tatten.recording() as report:
        for scale in (1.5, 2.5, 3.5, 0.001):
            want = attend(*(x.double() for x in args), scale)
            error, own = ((x.double() - want).abs().max() for x in (compiled(*args, scale), attend(*args, scale)))
            assert error <= 2 * own + 1e-6
    assert not report.declined, str(report)
    assert len(report.rewritten) == 1


def test_the_numbers_stay_inputs() -> None:
    graphs = []

    def backend(gm, _):
        (finding,) = rewrite(gm).findings
        assert isinstance(finding, Rewritten)
        graphs.append(listing(gm))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Numbers(times), backend=backend, dynamic=True)(*arguments())
    assert "mul(l_q_, item)" in graphs[0]
    assert "softmax" not in graphs[0]


def filled(x, q, k, v, m):
    return (q @ k.mT).masked_fill(m < 0, x.fill).softmax(-1) @ v


def by_nothing(x, q, k, v, m):
    return (q @ k.mT * x.none + m).softmax(-1) @ v


def bounded(x, q, k, v, m):
    return (q @ k.mT + m).clamp(min=x.fill).softmax(-1) @ v


def active(x, q, k, v, m):
    return F.dropout((q @ k.mT + m).softmax(-1), x.p, True) @ v


def scaled_values(x, q, k, v, m):
    weights, v = (q @ k.mT + m).softmax(-1).view(B * H, -1, S), v.view(B * H, S, D)
    return torch.baddbmm(torch.zeros(B * H, 1, D), weights, v, beta=x.none, alpha=x.scale)


LEFT = {
    scaled_values: Reason.NO_SDPA,
    merged: Reason.RANK,
    filled: Reason.MASK_VALUE,
    by_nothing: Reason.SCALE,
    bounded: Reason.RELATIVE,
    active: Reason.DROPOUT,
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("attend", LEFT, ids=lambda fn: fn.__name__)
def test_what_stays(attend) -> None:
    gms = []

    def backend(gm, _):
        before = listing(gm)
        (finding,) = rewrite(gm).findings
        assert listing(gm) == before
        gms.append(finding)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Numbers(attend), backend=backend, dynamic=True)(*arguments())
    assert isinstance(gms[0], Declined)
    assert gms[0].decline.reason is LEFT[attend], gms[0].decline


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_number_that_is_read_stays() -> None:
    def fn(q, k, v, m, scale):
        return (q @ k.mT * scale.item() + m).softmax(-1) @ v

    (finding,) = rewrite(capture(fn, *arguments(), torch.tensor(0.25))).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.SCALE
    assert finding.decline.detail == "`item` may be another number in each run"


def by_length(q, k, v, m, n):
    return (q @ k.mT / k.shape[2] + m).softmax(-1) @ v


def by_position(q, k, v, m, n):
    return (q @ k.mT / n + m).softmax(-1) @ v


def by_capped_length(q, k, v, m, n):
    return (50.0 * torch.tanh(q @ k.mT / k.shape[2]) + m).softmax(-1) @ v


@pytest.mark.parametrize("attend", [by_length, by_position, by_capped_length], ids=lambda fn: fn.__name__)
def test_no_guard_fixes_a_size(attend) -> None:
    """A guard on a scale that is made of a length would capture a new graph for each token."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="tatten", options={"inner": "eager"}, dynamic=True)
    with torch.no_grad(), tatten.recording() as report:
        for n in (S, S + 1, S + 2):
            args = *(torch.randn(B, H, length, D) for length in (1, n, n)), torch.zeros(B, 1, 1, n), n + 100
            torch.testing.assert_close(compiled(*args), attend(*args))
    assert len(report.graphs) == 1
    assert [x.decline.reason for x in report.declined] == [Reason.SCALE]
    assert "depends on a dynamic size" in report.declined[0].decline.detail


def test_no_guard_is_added_for_a_number_that_stays_unknown() -> None:
    def by_a_quotient(x, q, k, v, m):
        q, k, bias = q.view(B * H, -1, D), k.view(B * H, -1, D), m.expand(-1, H, -1, -1).reshape(B * H, 1, S)
        return torch.baddbmm(bias, q, k.mT, beta=-1 / x.divisor).view(B, H, -1, S).softmax(-1) @ v

    args = arguments()
    torch._dynamo.reset()
    with torch.no_grad(), tatten.recording() as report:
        for module in (Numbers(by_a_quotient, scale) for scale in (0.25, 0.3, 0.35)):
            got = torch.compile(module, backend="tatten", options={"inner": "eager"}, dynamic=True)(*args)
            torch.testing.assert_close(got, module(*args))
    assert [x.decline.reason for x in report.declined] == [Reason.SCALE], str(report)


def test_two_numbers_are_no_factors_of_queries_in_float16() -> None:
    """Queries times both may be subnormal numbers there."""

    def twice(x, q, k, v, m):
        return ((q @ k.mT + m) * x.scale / x.divisor).softmax(-1) @ v

    texts = []

    def backend(gm, _):
        (finding,) = rewrite(gm).findings
        assert isinstance(finding, Rewritten)
        texts.append(listing(gm))
        return gm.forward

    torch._dynamo.reset()
    q, k, v, _ = (x.half() for x in arguments())
    mask = torch.zeros(B, 1, 1, S, dtype=torch.float16)
    with torch.no_grad():
        torch.compile(Numbers(twice, 0.01), backend=backend, dynamic=True)(q, k, v, mask)
    assert "div(" not in texts[0]


def test_numbers_stay_where_no_guard_would_be_heeded() -> None:
    found = []

    def backend(gm, _):
        found.extend(rewrite(gm, may_guard=False).findings)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Numbers(times), backend=backend, dynamic=True)(*arguments())
    assert [x.decline.reason for x in found] == [Reason.SCALE]


def test_a_program_in_float32_keeps_the_queries_of_16_bits_as_they_are() -> None:
    def widened(x, q, k, v, m):
        return (q.float() @ k.float().mT * x.scale + m).softmax(-1).to(q.dtype) @ v

    args = [x.bfloat16() for x in arguments()]
    texts = []

    def backend(gm, _):
        (finding,) = rewrite(gm).findings
        assert isinstance(finding, Rewritten)
        texts.append(listing(gm))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Numbers(widened, 0.3), backend=backend, dynamic=True)(*args)
    assert "0.3" in texts[0]
    assert "mul(" not in texts[0]


def test_soft_caps_share_a_graph_where_inductor_compiles_for_a_cpu() -> None:
    """There such attention mostly stays as it is: a graph for each cap would be compiled for nothing."""
    reports = []

    def backend(gm, inputs):
        reports.append(rewrite(gm, fuses=True))
        return gm.forward

    def attend(q, k, v, m, cap):
        return (cap * torch.tanh(q @ k.mT * 0.25 / cap) + m).softmax(-1) @ v

    args = arguments()
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, dynamic=True)
    with torch.no_grad():
        for cap in (3.0, 4.0, 5.0, 6.0, 7.0):
            torch.testing.assert_close(compiled(*args, cap), attend(*args, cap))
    assert len(reports) == 1
    (finding,) = reports[0].findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.SCALE
