"""Attention written out whose scores are changed in place, or have other uses than their weights."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import capture, listing

from tatten.passes import Declined, Rewritten, rewrite
from tatten.passes.calls import op_name
from tatten.passes.reasons import Reason

B, H, Q, S, D = 2, 4, 2, 12, 8
LOWEST = torch.finfo(torch.float64).min


def divided_in_place(q, k, v, m):
    s = (q @ k.mT).div_(3.0)
    return (s + m).softmax(-1) @ v


def all_in_place(q, k, v, m):
    s = (q @ k.mT).mul_(3.0).div_(2.0)
    s = s.add_(m, alpha=2).sub_(m).masked_fill_(m < -1, LOWEST).clamp_(min=LOWEST)
    return s.sub_(s.amax(-1, keepdim=True)).softmax(-1) @ v


def cap_in_place(q, k, v, m):
    return (q @ k.mT).div_(5).tanh_().mul_(5).add_(m).softmax(-1) @ v


def in_place_of_heads_in_the_batch(q, k, v, m):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    s = torch.bmm(q, k.mT).view(B, H, Q, S).add_(m).view(B * H, Q, S)
    return torch.bmm(s.softmax(-1), v)


def in_place_by_aten(q, k, v, m):
    return torch.ops.aten.add_.Tensor(torch.ops.aten.mul_.Tensor(q @ k.mT, 0.3), m).softmax(-1) @ v


def fill_like_scores(q, k, v, m):
    s = q @ k.mT
    return torch.where(m < -1, torch.full_like(s, LOWEST), s).softmax(-1) @ v


def bias_like_scores(q, k, v, m):
    s = q @ k.mT
    bias = torch.zeros_like(s).masked_fill_(m < -1, LOWEST)
    return (s + bias + m.float().type_as(s) + m[0, 0].expand_as(s)).softmax(-1) @ v


def sizes_of_scores(q, k, v, m):
    s = q @ k.mT * 0.3
    bias = s.new_zeros(s.shape[-2], s.size(-1)).masked_fill(m < -1, torch.finfo(s.dtype).min)
    return (s + bias + torch.ones_like(s)).softmax(-1) @ v, s.shape[-1] * m


def sizes_of_a_view(q, k, v, m):
    """As ProphetNet asks for them."""
    s = q @ k.mT
    view = s.view(B, H, Q, S)
    bias = torch.zeros(view.shape[-2:], dtype=s.dtype) + view.unsqueeze(0).size(-1)
    return (s + m + bias).softmax(-1) @ v


def written_beside_scores(q, k, v, m):
    """A view as of scores, of another tensor, which is written."""
    s = q @ k.mT
    m.view_as(s).add_(1)
    return s.softmax(-1) @ v


def log_sums_of_heads_in_the_batch(q, k, v, m):
    gate = torch.linspace(-1, 2, H, dtype=q.dtype).repeat(B).view(-1, 1)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    s = (torch.bmm(q, k.mT).view(B, H, Q, S) + m).view(B * H, Q, S)
    out, kept = torch.bmm(s.softmax(-1), v), torch.logsumexp(s, -1, keepdim=True)
    return out * torch.sigmoid(torch.logsumexp(s, dim=2) - gate).unsqueeze(-1), kept


def log_sums_of_no_keys(q, k, v, m):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    s = (torch.bmm(q, k.mT).view(B, H, Q, S) + torch.full((B, 1, 1, S), -math.inf, dtype=q.dtype)).view(B * H, Q, S)
    return torch.logsumexp(s, -1), torch.bmm(s.softmax(-1), v), torch.logsumexp(s, -1, True)


def log_sums_without_heads(q, k, v, m):
    q, k, v, m = (x[:, 0] for x in (q, k, v, m))
    s = torch.baddbmm(m, q, k.mT)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def detached_for_nobody(q, k, v, m):
    """As Whisper's own code: scores are returned to a caller that doesn't take them."""
    s = q @ k.mT * 0.3 + m
    kept = s.detach()
    assert kept is not None
    return s.softmax(-1) @ v


def computed_for_nobody(q, k, v, m):
    s = q @ k.mT + m
    w = s.softmax(-1)
    _ = w.mean(1) * 2, s.detach().float().max(-1).values.sum(), torch.softmax(s, 1)[0]
    return w @ v


def part_as_a_form(q, k, v, m):
    """The column of a softmax with one more in its denominator, which is made like a part of the scores."""
    s = q @ k.mT
    w = torch.cat((s, torch.zeros_like(s[..., :1])), -1).softmax(-1)
    return w[..., :-1] @ v


REWRITTEN = [
    *(detached_for_nobody, computed_for_nobody, part_as_a_form),
    *(divided_in_place, all_in_place, cap_in_place, in_place_of_heads_in_the_batch, in_place_by_aten),
    *(fill_like_scores, bias_like_scores, sizes_of_scores, sizes_of_a_view, written_beside_scores),
    *(log_sums_of_heads_in_the_batch, log_sums_of_no_keys, log_sums_without_heads),
]

# What is as large as scores keeps their product in a Dynamo graph. Inductor drops it.
KEEPS_SCORES = (bias_like_scores, sizes_of_scores, written_beside_scores)


def arguments():
    torch.manual_seed(0)
    m = torch.zeros(B, H, Q, S, dtype=torch.float64).masked_fill(torch.arange(S) >= 9, -30.0)
    return *(torch.randn(B, H, n, D, dtype=torch.float64) for n in (Q, S, S)), m


@pytest.mark.drawn(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", REWRITTEN, ids=lambda fn: fn.__name__)
def test_same_as_eager(fn, dynamic: bool) -> None:
    found = []

    def backend(gm, _):
        found.extend(rewrite(gm).findings)
        gm.graph.lint()
        if fn not in KEEPS_SCORES:
            assert not {op_name(x) for x in gm.graph.nodes} & {"softmax", "matmul", "bmm", "baddbmm", "logsumexp"}
        return gm.forward

    args = arguments()
    for x in args if dynamic else ():
        torch._dynamo.maybe_mark_dynamic(x, 0)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = [x.clone() for x in args]
        got = torch.compile(fn, backend=backend, fullgraph=True)(*compiled)
    assert [type(x) for x in found] == [Rewritten], found
    torch.testing.assert_close(got, fn(*args), rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(compiled, list(args), rtol=0, atol=0)


def used_after_a_change(q, k, v, m):
    s = q @ k.mT
    t = s.div_(3.0)
    return (t + m).softmax(-1) @ v, s.sum()


def result_elsewhere(q, k, v, m):
    s = q @ k.mT
    return torch.add(s, m, out=torch.empty_like(s)).softmax(-1) @ v


def rounded_in_place(q, k, v, m):
    return (q @ k.mT).round_().softmax(-1) @ v


def mask_in_place(q, k, v, m):
    return m.sub_(q @ k.mT).softmax(-1) @ v


def maximum_before_a_change(q, k, v, m):
    s = q @ k.mT
    top = s.amax(-1, keepdim=True)
    return (s.add_(m) - top).softmax(-1) @ v


def values_written_into_a_bias(q, k, v, m):
    s = q @ k.mT
    bias = torch.zeros_like(s)
    bias.copy_(s)
    return (s + bias).softmax(-1) @ v


def values_written_by_a_view(q, k, v, m):
    s = q @ k.mT
    s.view(B * H, Q, S)[:, :, 0] = 1
    return (s + m).softmax(-1) @ v


def fill_of_scores(q, k, v, m):
    s = q @ k.mT
    return (s + torch.zeros_like(s) + s.new_ones(()) * s.sum()).softmax(-1) @ v


def log_sums_before_a_change(q, k, v, m):
    s = q @ k.mT
    lse = s.logsumexp(-1)
    return s.add_(m).softmax(-1) @ v, lse


def detached_for_the_caller(q, k, v, m):
    s = q @ k.mT + m
    return s.softmax(-1) @ v, s.detach()


def part_for_the_caller(q, k, v, m):
    s = q @ k.mT + m
    return s.softmax(-1) @ v, s[..., :1]


def random_for_nobody(q, k, v, m):
    """It moves the state of random numbers on."""
    w = (q @ k.mT + m).softmax(-1)
    assert w.bernoulli() is not None
    return w @ v, torch.rand(2)


def written_for_nobody(q, k, v, m):
    s = q @ k.mT
    s.detach().add_(1)
    return s.softmax(-1) @ v


def written_elsewhere(q, k, v, m):
    w = (q @ k.mT).softmax(-1)
    m.copy_(w.detach())
    return w @ v


def asserted(q, k, v, m):
    w = (q @ k.mT).softmax(-1)
    torch._assert_async((w >= 0).all())
    return w @ v


DECLINED = {
    detached_for_the_caller: Reason.WEIGHTS_USED,
    part_for_the_caller: Reason.WEIGHTS_USED,
    random_for_nobody: Reason.WEIGHTS_USED,
    written_for_nobody: Reason.WEIGHTS_USED,
    written_elsewhere: Reason.WEIGHTS_USED,
    asserted: Reason.WEIGHTS_USED,
    used_after_a_change: Reason.WEIGHTS_USED,
    result_elsewhere: Reason.IN_PLACE,
    rounded_in_place: Reason.IN_PLACE,
    mask_in_place: Reason.IN_PLACE,
    maximum_before_a_change: Reason.RELATIVE,
    values_written_into_a_bias: Reason.WEIGHTS_USED,
    values_written_by_a_view: Reason.WEIGHTS_USED,
    fill_of_scores: Reason.RELATIVE,
    log_sums_before_a_change: Reason.WEIGHTS_USED,
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("fn", DECLINED, ids=lambda fn: fn.__name__)
def test_what_stays(fn) -> None:
    gm = capture(fn, *arguments())
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined), finding
    assert finding.decline.reason is DECLINED[fn], finding.decline
    assert listing(gm) == before


def test_what_is_like_scores_may_be_written_elsewhere() -> None:
    gm = capture(fill_like_scores, *arguments())
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.full_like)
    given = next(x for x in gm.graph.nodes if x.op == "placeholder" and "v" in x.name)
    node.target, node.kwargs = torch.ops.aten.full_like.out, {"out": given}
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined)
    assert listing(gm) == before
