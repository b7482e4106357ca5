"""Attention written out whose heads are laid out as in ports of JAX and in gpt-oss's own code."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import capture, run_rewritten

from tatten.passes import Declined, Rewritten, rewrite
from tatten.passes.calls import op_name
from tatten.passes.reasons import Reason

B, KV, G, S, D = 2, 2, 3, 24, 8
H = KV * G
LOWEST = torch.finfo(torch.float64).min


def tensors(q_len=1, dtype=torch.float64):
    torch.manual_seed(0)
    q = torch.randn(B, H, q_len, D, dtype=dtype)
    k, v = torch.randn(2, B, KV, S, D, dtype=dtype)
    keep = torch.arange(S) < torch.tensor([9, 20])[:, None, None, None]
    return q, k, v, torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)


def grouped_einsum(q, k, v, m):
    q = q.unflatten(1, (KV, G))
    w = torch.einsum("bkgqd,bksd->bkgqs", q, k) * 0.3 + m[:, None]
    return torch.einsum("bkgqs,bksd->bkgqd", w.softmax(-1), v).flatten(1, 2)


def tokens_first(q, k, v, m):
    """MaxText's: what is stored is [batch, length, heads, head_dim]."""
    q, k, v = q.transpose(1, 2).unflatten(2, (KV, G)), k.transpose(1, 2), v.transpose(1, 2)
    w = torch.einsum("btkgd,bskd->bkgts", q, k) * 0.3
    w = torch.where((m > -1)[:, None], w, LOWEST)
    return torch.einsum("bkgts,bskd->btkgd", w.softmax(-1), v).flatten(2, 3)


def grouped_matmul(q, k, v, m):
    w = q.unflatten(1, (KV, G)) @ k.unsqueeze(2).mT / math.sqrt(D) + m.unsqueeze(2)
    return (w.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)


def grouped_expanded(q, k, v, m):
    k, v = (x[:, :, None].expand(B, KV, G, S, D) for x in (k, v))
    return ((q.unflatten(1, (KV, G)) @ k.mT + m[:, None]).softmax(-1) @ v).flatten(1, 2)


def grouped_slopes(q, k, v, m):
    """A bias per head, which has both dims, one per query of a kv head, and one per kv head."""
    both = torch.linspace(0, 1, H, dtype=q.dtype).view(KV, G, 1, 1) * torch.arange(S)
    one = torch.linspace(0, 1, G, dtype=q.dtype).view(G, 1, 1) * torch.arange(S)
    other = torch.linspace(0, 1, KV, dtype=q.dtype).view(1, KV, 1, 1, 1) * torch.arange(S)
    w = torch.einsum("bkgqd,bksd->bkgqs", q.unflatten(1, (KV, G)), k) + both - one + other + m[:, None]
    return torch.einsum("bkgqs,bksd->bkgqd", w.softmax(-1), v).flatten(1, 2)


def grouped_sinks(q, k, v, m):
    sinks = torch.linspace(-1, 2, H, dtype=q.dtype).view(1, KV, G, 1, 1).expand(B, -1, -1, q.shape[2], -1)
    w = torch.einsum("bkgqd,bksd->bkgqs", q.unflatten(1, (KV, G)), k) + m[:, None]
    w = torch.cat((w, sinks), -1).softmax(-1)[..., :-1]
    return torch.einsum("bkgqs,bksd->bkgqd", w, v).flatten(1, 2)


def one_kv_head(q, k, v, m):
    k, v = k[:, 0], v[:, 0]
    w = torch.einsum("b h i d, b j d -> b h i j", q, k) + m
    return torch.einsum("b h i j, b j d -> b h i d", w.softmax(-1), v)


def flax(q, k, v, m):
    q, k, v = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(G, 1) for x in (k, v))))
    w = torch.einsum("...qhd,...khd->...hqk", q, k) * 0.3 + m
    return torch.einsum("...hqk,...khd->...qhd", w.softmax(-1), v)


def gpt_oss(q, k, v, m):
    """One sequence, whose keys are [length, kv heads, head_dim]; the window is a band of its own mask."""
    q, k, v = q[0].transpose(0, 1).unflatten(1, (KV, G)), k[0].transpose(0, 1), v[0].transpose(0, 1)
    n = q.shape[0]
    sinks = torch.linspace(-1, 2, H, dtype=q.dtype).reshape(KV, G, 1, 1).expand(-1, -1, n, -1)
    k, v = (x[:, :, None].expand(-1, -1, G, -1) for x in (k, v))
    band = torch.triu(q.new_full((n, S), -math.inf), diagonal=S - n + 1)
    band = band + torch.tril(band.new_full((n, S), -math.inf), diagonal=S - n - 8)
    w = torch.einsum("qhmd,khmd->hmqk", q, k) * 0.3 + band[None, None]
    w = torch.cat((w, sinks), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hmqk,khmd->qhmd", w, v).reshape(n, -1)


def softmax_of_one_more(q, k, v, m):
    """A sink of 0 for all heads: weights over `1 + sum(exp(scores))`."""
    k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    zeros = torch.zeros(B, H, q.shape[2], 1, dtype=q.dtype)
    return torch.cat((q @ k.mT + m, zeros), -1).softmax(-1)[..., :-1] @ v


FORMS = [
    *(grouped_einsum, tokens_first, grouped_matmul, grouped_expanded, grouped_slopes, grouped_sinks, one_kv_head),
    *(flax, gpt_oss, softmax_of_one_more),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("fn", FORMS, ids=lambda fn: fn.__name__)
def test_forms(fn, q_len: int) -> None:
    args = tensors(q_len)
    want = fn(*args)
    (finding,), gm, got = run_rewritten(fn, *args)
    assert isinstance(finding, Rewritten), finding
    heads = 1 if fn is one_kv_head else KV
    assert (
        fn is gpt_oss
        or f"k float64[{B}, {heads}, {S}, {D}]" in finding.shapes
        or "float64[2, 24, 2, 8]" in finding.shapes
    )
    assert not {op_name(x) for x in gm.graph.nodes} & {"softmax", "matmul", "einsum", "cat"}
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_keys_that_no_query_repeats_count_once() -> None:
    """The program's own products read a kv head for all of its queries at once."""
    (finding,), _, _ = run_rewritten(grouped_einsum, *tensors())
    assert finding.cost.moved == 2 * B * KV * S * D * 8


@pytest.mark.parametrize("value", [LOWEST, -math.inf])
def test_rows_without_keys(value: float) -> None:
    """They are the mean of all values, or NaN."""
    q, k, v, m = tensors(2)
    m[1] = value
    (finding,), _, got = run_rewritten(grouped_einsum, q, k, v, m)
    assert isinstance(finding, Rewritten), finding
    torch.testing.assert_close(got, grouped_einsum(q, k, v, m), rtol=1e-12, atol=1e-12, equal_nan=True)


def test_keys_are_read_before_they_are_widened_for_einsum() -> None:
    def fn(q, k, v, m):
        w = torch.einsum("bkgqd,bksd->bkgqs", q.unflatten(1, (KV, G)).float(), k.float()) + m[:, None]
        return torch.einsum("bkgqs,bksd->bkgqd", w.softmax(-1).to(v.dtype), v)

    args = tensors(1, torch.bfloat16)
    (finding,), _, got = run_rewritten(fn, *args)
    assert isinstance(finding, Rewritten), finding
    assert f"k bfloat16[{B}, {KV}, {S}, {D}]" in finding.shapes
    want = fn(*(x.double() for x in args))
    assert (got - want).norm() <= 1.01 * (fn(*args) - want).norm()


def other_keys_for_each_query(q, k, v, m):
    """Keys that are shared by kv heads and not by the queries of each."""
    k = k.repeat_interleave(G, 1)[:, None, :G]
    return (q.unflatten(1, (KV, G)) @ k.mT + m[:, None]).softmax(-1) @ v[:, :, None]


def sums_over_queries(q, k, v, m):
    w = torch.einsum("bkgqd,bksd->bkgqs", q.unflatten(1, (KV, G)), k) + m[:, None]
    return torch.einsum("bkgqs,bksd->bkqd", w.softmax(-1), v)


def rank_changes(q, k, v, m):
    w = torch.einsum("bkgqd,bksd->bkgqs", q.unflatten(1, (KV, G)), k).flatten(0, 2)
    v = v.repeat_interleave(G, 1).flatten(0, 1)
    return (w.softmax(-1) @ v).unflatten(0, (B, H))


def keys_once_and_values_repeated(q, k, v, m):
    v = v[:, :, None].expand(B, KV, G, S, D)
    return ((q.unflatten(1, (KV, G)) @ k[:, :, None].mT + m[:, None]).softmax(-1) @ v).flatten(1, 2)


def log_sum(q, k, v, m):
    w = torch.einsum("bkgqd,bksd->bkgqs", q.unflatten(1, (KV, G)), k) + m[:, None]
    return torch.einsum("bkgqs,bksd->bkgqd", w.softmax(-1), v), w.logsumexp(-1)


def by_log_sums(q, k, v, m):
    w = q @ k.repeat_interleave(G, 1).mT + m
    return (w - w.logsumexp(-1, keepdim=True)).exp() @ v.repeat_interleave(G, 1)


def by_log_softmax(q, k, v, m):
    return (q @ k.repeat_interleave(G, 1).mT + m).log_softmax(-1).exp() @ v.repeat_interleave(G, 1)


def split_sinks(q, k, v, m):
    w = torch.cat((q @ k.repeat_interleave(G, 1).mT + m, q.new_ones(H, 1, 1).expand(B, -1, q.shape[2], -1)), -1)
    return w.softmax(-1).split((S, 1), -1)[0] @ v.repeat_interleave(G, 1)


LEFT = {
    other_keys_for_each_query: Reason.RANK,
    sums_over_queries: Reason.NO_SDPA,
    rank_changes: Reason.RANK,
    keys_once_and_values_repeated: Reason.HEADS,
    log_sum: Reason.WEIGHTS_USED,
    by_log_sums: Reason.NO_SDPA,
    by_log_softmax: Reason.NO_SDPA,
    split_sinks: Reason.BEYOND_SDPA,
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("fn", LEFT, ids=lambda fn: fn.__name__)
def test_left_with_a_reason(fn) -> None:
    args = tensors(2)
    gm = capture(fn, *args)
    before = str(gm.graph)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined), finding
    assert finding.decline.reason is LEFT[fn], finding
    assert str(gm.graph) == before
