"""Attention inside transforms of `torch.func`: left as it is, for a reason that says so, and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing
from torch import Tensor

import tatten
from tatten.passes import Declined, rewrite, sliding
from tatten.passes.reasons import Reason

N, B, H, S, D = 3, 2, 4, 64, 16


def sdpa(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m)


def written_out(q, k, v, m):
    return ((q @ k.mT) * 0.25).masked_fill(~m, -torch.inf).softmax(-1) @ v


def soft_cap(q, k, v, m):
    scores = torch.tanh((q @ k.mT) * 0.05) * 5 + torch.where(m, 0.0, -1e38)
    return scores.softmax(-1) @ v


def dequantised(q, k, v, m):
    return sdpa(q, *((x * 9).to(torch.int8).to(q.dtype) * 0.1 for x in (k, v)), m)


def shared(q, k, v, m):
    return sdpa(q, *(torch.cat((x[:1].expand(B, -1, -1, -1), x), dim=2) for x in (k, v)), torch.cat((m, m), dim=-1))


def latents(q, k, v, m):
    own, values = F.linear(k[:, :1], q.new_ones(H * 24, D)).view(B, S, H, 24).transpose(1, 2).split((8, D), dim=-1)
    return sdpa(q, torch.cat((own, v[:, :1, :, :8].expand(-1, H, -1, -1)), dim=-1), values, m)


def sliding_window(q, k, v, m):
    moved = k.roll(-1, dims=-2)
    moved[:, :, torch.tensor([-1])] = q
    k.copy_(moved)
    return sdpa(q, k, v, m)


FORMS = [sdpa, written_out, soft_cap, dequantised, shared, latents, sliding_window]


def tensors(*more: int) -> list[Tensor]:
    torch.manual_seed(0)
    mask = torch.rand(*more, B, 1, 1, S) > 0.3
    mask[..., 0] = True
    shapes = (B, H, 1, D), (B, H, S, D), (B, H, S, D)
    return [*(torch.randn(*more, *shape) for shape in shapes), mask]


def vmap(fn):
    return torch.vmap(fn), tensors(N)


def vmap_of_values(fn):
    """All but the values are outside: the scores are plain tensors."""
    q, k, v, m = tensors(N)
    return torch.vmap(fn, in_dims=(None, None, 0, None)), [q[0], k[0], v, m[0]]


def nested_vmap(fn):
    return torch.vmap(torch.vmap(fn)), tensors(2, N)


def grad(fn):
    return torch.func.grad(lambda *args: fn(*args).sum()), tensors()


def vmap_of_grad(fn):
    return torch.vmap(torch.func.grad(lambda *args: fn(*args).sum())), tensors(N)


def jvp(fn):
    return lambda q, k, v, m: torch.func.jvp(lambda x: fn(x, k, v, m), (q,), (torch.ones_like(q),)), tensors()


CASES = [(fn, wrap) for fn in FORMS for wrap in (vmap, nested_vmap, grad, vmap_of_grad)]
CASES += [(fn, jvp) for fn in (written_out, soft_cap)]  # SDPA has no forward mode
CASES += [(fn, vmap_of_values) for fn in FORMS if fn is not sliding_window]


def cloned(xs: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in xs]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("fn", "wrap"), CASES, ids=lambda x: x.__name__)
def test_transforms(fn: Callable[..., Any], wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sliding.LEAST_BYTES, "cpu", 1)
    wrapped, args = wrap(fn)
    want = wrapped(*cloned(args))
    gm = capture(wrapped, *cloned(args), grad=True)
    before = listing(gm)
    (finding,) = rewrite(gm, fuses=True).findings
    assert listing(gm) == before
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.TORCH_FUNC
    torch._dynamo.reset()
    out = torch.compile(wrapped, backend="tatten", options={"inner": "eager"})(*cloned(args))
    torch.testing.assert_close(out, want)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("fn", FORMS, ids=lambda x: x.__name__)
def test_functional_call_is_no_transform(fn: Callable[..., Any]) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(D, D, bias=False)

        def forward(self, q, k, v, m):
            return fn(self.project(q), k, v, m)

    model, args = Model(), tensors()
    weights = {name: x.detach() * 2 for name, x in model.named_parameters()}

    def call(*args):
        return torch.func.functional_call(model, weights, args)

    torch._dynamo.reset()
    with torch.no_grad(), tatten.recording() as report:
        want = call(*cloned(args))
        out = torch.compile(call, backend="tatten", options={"inner": "eager"})(*cloned(args))
    torch.testing.assert_close(out, want)
    assert len(report.rewritten) == 1


def test_attention_after_a_transform() -> None:
    """Plain tensors that a transform returned are plain."""

    def fn(q, k, v, m):
        return written_out(torch.vmap(lambda x: x * 2)(q), k, v, m)

    torch._dynamo.reset()
    with torch.no_grad(), tatten.recording() as report:
        out = torch.compile(fn, backend="tatten", options={"inner": "eager"})(*tensors())
    torch.testing.assert_close(out, fn(*tensors()))
    assert len(report.rewritten) == 1


def per_head(q, k, v, m):
    """Inside two `vmap`, a query `[1, head_dim]` and keys `[length, head_dim]`."""
    return ((q @ k.mT) * 0.25).masked_fill(~m, -torch.inf).softmax(-1) @ v


def per_head_capped(q, k, v, m):
    return (torch.tanh((q @ k.mT) * 0.05) * 5 + torch.where(m, 0.0, -1e38)).softmax(-1) @ v


def per_head_by_exp(q, k, v, m):
    scores = (q @ k.mT) * 0.25 + torch.where(m, 0.0, -1e38)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def one_query(q, k, v, m):
    return torch.softmax((k @ q[0]) * 0.25 + torch.where(m[0], 0.0, -1e38), -1) @ v


def over_batch_and_heads(fn):
    return torch.vmap(torch.vmap(fn, in_dims=(0, 0, 0, None)))


def scores_alone(fn):
    """Only the scores are computed inside."""
    return lambda q, k, v, m: torch.vmap(torch.vmap(lambda q, k: q @ k.mT))(q, k).masked_fill(~m, -1e38).softmax(-1) @ v


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("fn", "wrap"),
    [(x, over_batch_and_heads) for x in (per_head, per_head_capped, per_head_by_exp, one_query)]
    + [(per_head, scores_alone)],
    ids=lambda x: x.__name__,
)
def test_vmap_over_batch_and_heads(fn: Callable[..., Any], wrap: Callable[..., Any]) -> None:
    args = tensors()
    args[3] = args[3] if wrap is scores_alone else args[3][:, 0]
    gm = capture(wrap(fn), *args)
    (finding,) = rewrite(gm, fuses=True).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.TORCH_FUNC
    torch.testing.assert_close(
        torch.compile(wrap(fn), backend="tatten", options={"inner": "eager"})(*args), wrap(fn)(*args)
    )
