"""Attention that is no SDPA call: what is found, as what, and which softmaxes are none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from graphs import capture, listing
from torch import nn

from tatten.passes import Rewritten, rewrite
from tatten.passes.reasons import Reason

B, H, S, D = 2, 4, 16, 8


def q(n=1):
    return torch.randn(B, H, n, D)


def kv():
    return torch.randn(B, H, S, D)


def scores(a, k):
    return a @ k.transpose(2, 3) * 0.3


def exp(a, k, v):
    e = torch.exp(scores(a, k) - scores(a, k).amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


def exp_divided_last(a, k, v):
    e = scores(a, k).float().exp_()
    return (e @ v) / e.sum(-1, keepdim=True)


def masked_in_place(a, k, v):
    s = scores(a, k)
    s += torch.zeros(S)
    s.masked_fill_(torch.arange(S) > 3, float("-inf"))
    return F.dropout(F.softmax(s, dim=-1, dtype=torch.float32).to(v.dtype), 0.0, training=False) @ v


def shifted(a, k, v):
    """Relative positions: scores are padded, and shifted by a view."""
    s = scores(a, k)
    padded = torch.cat([torch.zeros(B, H, a.shape[2], 1), s], -1)
    shifted = padded.view(B, H, S + 1, a.shape[2])[:, :, 1:].view_as(s)
    return (s + shifted).softmax(-1) @ v


def split(a, k, v):
    """Scores of two caches, side by side: neither are sinks."""
    return torch.cat([scores(a, k), scores(a, k)], -1).softmax(-1) @ torch.cat([v, v], 2)


def two_sinks(a, k, v):
    s = torch.cat([scores(a, k), torch.zeros(H)[None, :, None, None].expand(B, H, 1, 2)], -1)
    return F.softmax(s, dim=-1)[..., :-2] @ v


def softcap(a, k, v):
    return (torch.tanh(scores(a, k) / 30) * 30 + torch.zeros(S)).softmax(-1) @ v


def softcap_of_exp(a, k, v):
    e = torch.exp(torch.tanh(scores(a, k) / 30) * 30)
    return e / e.sum(-1, keepdim=True) @ v


WRITTEN_OUT = {
    exp: (Reason.NO_SDPA, "exp over its sum"),
    exp_divided_last: (Reason.NO_SDPA, "exp over its sum"),
    masked_in_place: (Reason.IN_PLACE, "changes `s_1` in place"),
    shifted: (Reason.RELATIVE, "depends on them itself"),
    split: (Reason.RELATIVE, "joins scores with others"),
    two_sinks: (Reason.BEYOND_SDPA, "with sinks ("),
    softcap_of_exp: (Reason.BEYOND_SDPA, "with a soft cap ("),
}


@pytest.mark.parametrize("fn", WRITTEN_OUT, ids=lambda fn: fn.__name__)
def test_written_out(fn) -> None:
    """Forms of attention written out that no op computes; `test_written_out.py` has those that are rewritten."""
    reason, detail = WRITTEN_OUT[fn]
    (finding,) = rewrite(capture(fn, q(), kv(), kv())).findings
    assert finding.decline.reason is reason
    assert detail in finding.decline.detail
    assert finding.location.file == __file__


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(D, 2, batch_first=True)

    def forward(self, x):
        return self.layer(self.attn(x, x, x)[0])


def test_multihead_attention() -> None:
    attn, layer = rewrite(capture(Multihead().eval(), torch.randn(B, 3, D))).findings
    assert {attn.decline.reason, layer.decline.reason} == {Reason.MULTIHEAD}
    assert (attn.location.module, attn.location.file) == ("attn", __file__)
    assert layer.location.module == "layer"
    assert "self.attn(x, x, x)" in attn.location.code


def test_beside_what_is_rewritten() -> None:
    """In its order, after SDPA calls, which may have been rewritten; also inside a higher-order operator."""

    def fn(a, k, v):
        x = F.scaled_dot_product_attention(exp(a, k, v), k, v, torch.ones(1, S, dtype=torch.bool))
        return torch.utils.checkpoint.checkpoint(softcap_of_exp, x, k, v, use_reentrant=False)

    done, written_out, nested = rewrite(capture(fn, q(), kv(), kv())).findings
    assert isinstance(done, Rewritten)
    assert written_out.decline.reason is Reason.NO_SDPA
    assert nested.decline.reason is Reason.BEYOND_SDPA


def test_inside_a_higher_order_operator() -> None:
    """Calls that would be rewritten elsewhere are left because they are inside; the others keep their own reasons."""

    def branch(a, k, v):
        return softcap(a, k, v) + shifted(a, k, v) + F.scaled_dot_product_attention(a, k, v)

    def fn(a, k, v):
        x = torch.utils.checkpoint.checkpoint(softcap, a, k, v, use_reentrant=False)
        return torch.cond(x.sum() > 0, branch, lambda a, k, v: a.clone(), (x, k, v))

    gm = capture(fn, q(), kv(), kv())
    before = listing(gm)
    findings = rewrite(gm).findings
    assert all(x.location.file == __file__ for x in findings)
    inside = {x.decline.detail for x in findings if x.decline.reason is Reason.NESTED}
    assert [x.decline.reason for x in findings] == [Reason.NESTED] * 3 + [Reason.RELATIVE]
    assert len(inside) == 2
    assert all("the body of a higher-order operator" in x for x in inside)
    assert listing(gm) == before


class Router(nn.Module):
    """Mixtures of experts: chosen by `topk`, or all of them weighed by a product."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(4, D))
        self.linear = nn.Linear(D, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, D, D))
        self.dense = dense

    def forward(self, x, k, v):
        x = scores(x, k) @ v  # linear attention, so that there is a product of activations above
        x = F.layer_norm(x + x.sigmoid(), (D,))
        if self.dense:
            weights = (x.float() @ self.gate.float().t()).softmax(-1)
            return torch.einsum("...e,...ed->...d", weights, torch.einsum("...d,edf->...ef", x, self.experts))
        best, _ = F.softmax(self.linear(x), dim=-1).topk(2)
        return (best[..., None] * x[..., None, :]).sum(-2) @ k.transpose(2, 3)


def sample(logits):
    probs = (logits / 0.7).softmax(-1)
    kept = probs.sort(descending=True)
    return torch.multinomial(kept.values.masked_fill(kept.values.cumsum(-1) - kept.values > 0.9, 0), 1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.randn(5, D))

    def forward(self, x):
        probs = (x @ self.classes.t()).softmax(-1)
        return probs, probs @ self.classes  # the expected class, embedded


NO_ATTENTION = {
    "softmax alone": lambda: (lambda x: x.softmax(-1), q()),
    "router": lambda: (Router(dense=False), q(), kv(), kv()),
    "dense router": lambda: (Router(dense=True), q(), kv(), kv()),
    "sampler": lambda: (lambda h, w: sample(h @ w.t()), torch.randn(B, D), nn.Parameter(torch.randn(9, D))),
    "classifier": lambda: (Classifier(), torch.randn(B, D)),
    "contrastive": lambda: (lambda a, b: (a @ b.t()).softmax(-1), torch.randn(B, D), torch.randn(B, D)),
    "gate": lambda: (lambda a, k, v: scores(a, k).softmax(-1) * v[..., 0][:, :, None], q(), kv(), kv()),
    "no product": lambda: (lambda x: x.softmax(-1) @ x.transpose(2, 3), q()),
    "linear attention": lambda: (lambda a, k, v: (a.exp() @ k.exp().transpose(2, 3)) @ v, q(), kv(), kv()),
    "unnormalised": lambda: (lambda a, k, v: scores(a, k).exp() @ v, q(), kv(), kv()),
    "unnormalised view": lambda: (lambda a, k, v: scores(a, k).exp().view(B, H, 1, S) @ v, q(), kv(), kv()),
}


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_what_is_no_attention(name: str) -> None:
    fn, *args = NO_ATTENTION[name]()
    assert rewrite(capture(fn, *args)).findings == ()
