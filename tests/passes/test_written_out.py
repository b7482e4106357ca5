"""Attention that is written out: every form is found, computes what it did, and nothing else is taken for it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing

import tatten
from tatten.passes import Declined, Rewritten, cost, rewrite
from tatten.passes.calls import op_name
from tatten.passes.reasons import Reason

B, H, KV, S, D = 2, 4, 2, 24, 8
LOWEST = torch.finfo(torch.float64).min


def tensors(q_len=1, heads=KV, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(B, H, q_len, D, dtype=torch.float64)
    k, v = torch.randn(2, B, heads, S, D, dtype=torch.float64)
    return q, k, v


def mask(q_len=1, value=LOWEST):
    """Sequence 0 has 9 keys, and sequence 1 all but the first 3; queries are causal among themselves."""
    at = torch.arange(S)
    keep = torch.stack([at < 9, at >= 3])[:, None, None].expand(B, 1, q_len, S).clone()
    for i in range(q_len):
        keep[0, :, i] &= at < 9 - (q_len - 1 - i)
    return torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, value)


def repeat(x, n=H // KV):
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def llama(q, k, v, m):
    w = torch.matmul(q, repeat(k).transpose(2, 3)) * D**-0.5
    w = w + m
    w = F.dropout(F.softmax(w, dim=-1, dtype=torch.float64).to(q.dtype), p=0.0, training=False)
    return torch.matmul(w, repeat(v)).transpose(1, 2).contiguous()


def plain(q, k, v, m):
    return (q @ repeat(k).mT / math.sqrt(D) + m).softmax(-1) @ repeat(v)


def t5(q, k, v, m):
    bias = torch.arange(H * S, dtype=q.dtype).view(1, H, 1, S) / 50
    s = torch.matmul(q, repeat(k).permute(0, 1, 3, 2)) * 1
    s = s + bias
    s += m
    return torch.matmul(s.softmax(-1).type_as(s), repeat(v))


def gemma(q, k, v, m):
    w = torch.tanh(torch.matmul(q, repeat(k).transpose(2, 3)) * 0.3 / 5.0) * 5.0
    return torch.matmul(F.softmax(w + m, dim=-1), repeat(v))


def gpt_oss(q, k, v, m):
    sinks = torch.linspace(-1, 2, H, dtype=q.dtype)
    w = torch.matmul(q, repeat(k).transpose(2, 3)) * D**-0.5 + m
    w = torch.cat([w, sinks.reshape(1, -1, 1, 1).expand(B, -1, q.shape[2], -1)], dim=-1)
    w = w - w.max(dim=-1, keepdim=True).values
    return torch.matmul(F.softmax(w, dim=-1, dtype=w.dtype)[..., :-1], repeat(v))


def sinks_first(q, k, v, m):
    sinks = torch.linspace(-1, 2, H, dtype=q.dtype)[None, :, None, None].expand(B, H, q.shape[2], 1)
    w = torch.cat((sinks, q @ repeat(k).mT + m), -1)
    return w.softmax(-1).narrow(-1, 1, S) @ repeat(v)


def largest(q, k, v, m):
    w = q @ repeat(k).transpose(-1, -2) * 0.2 + m
    return torch.softmax(w - torch.amax(w, -1, keepdim=True), -1) @ repeat(v)


def granite(q, k, v, m):
    w = q @ repeat(k).transpose(2, 3) * 0.2 + m
    lse = torch.logsumexp(w, dim=-1)
    out = w.softmax(-1) @ repeat(v)
    gate = torch.sigmoid(lse - torch.linspace(-1, 2, H, dtype=q.dtype).view(1, -1, 1))
    return out * gate.unsqueeze(-1)


def codegen(q, k, v, m):
    return ((q @ repeat(k).mT + m) / 4).softmax(-1) @ repeat(v)


def gpt_neo(q, k, v, m):
    s = q @ repeat(k).transpose(-1, -2)
    s = torch.where(m > -1, s, torch.tensor(LOWEST, dtype=s.dtype))
    return s.softmax(-1) @ repeat(v)


def mpt(q, k, v, m):
    alibi = torch.arange(1 - S, 1, dtype=q.dtype).view(1, 1, 1, S) * torch.logspace(-1, 0, H, dtype=q.dtype).view(
        H, 1, 1
    )
    s = q @ repeat(k).mT * 0.3
    s = (s + alibi).masked_fill(m < -1, torch.finfo(s.dtype).min)
    return s.softmax(-1) @ repeat(v)


def trocr(q, k, v, m):
    q, k, v = (x.reshape(B * H, -1, D) for x in (q, repeat(k), repeat(v)))
    w = torch.bmm(q, k.transpose(1, 2))
    w = (w.view(B, H, -1, S) + m).view(B * H, -1, S)
    return torch.bmm(F.softmax(w, dim=-1), v).view(B, H, -1, D).transpose(1, 2)


def xglm(q, k, v, m):
    q, k, v = (x.reshape(B * H, -1, D) for x in (q, repeat(k), repeat(v)))
    w = torch.bmm(q, k.transpose(1, 2)).view(B, H, -1, S) + m
    w = torch.max(w, torch.tensor(torch.finfo(w.dtype).min, dtype=w.dtype)).view(B * H, -1, S)
    return torch.bmm(F.softmax(w, dim=-1), v)


def bloom(q, k, v, m):
    alibi = torch.arange(B * H * S, dtype=q.dtype).view(B * H, 1, S) / 99
    q, k, v = (x.reshape(B * H, -1, D) for x in (q, repeat(k), repeat(v)))
    s = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=0.5, alpha=0.25)
    w = F.softmax(s.view(B, H, -1, S) + m, dim=-1)
    return torch.bmm(w.view(B * H, -1, S), v)


def neox_japanese(q, k, v, m):
    q, k, v = (x.reshape(B * H, -1, D) for x in (q, repeat(k), repeat(v)))
    s = torch.baddbmm(torch.zeros(B * H, q.shape[1], S, dtype=q.dtype), q, k.transpose(1, 2), beta=1.0, alpha=0.3)
    w = torch.dropout(F.softmax(s.view(B, H, -1, S) + m, dim=-1), 0.1, False)
    return torch.matmul(w, v.view(B, H, S, D))


def einsum(q, k, v, m):
    q, k, v = (x.transpose(1, 2) for x in (q, repeat(k), repeat(v)))
    w = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.2 + m
    return torch.einsum("bhqk,bkhd->bqhd", w.softmax(-1), v)


def one_head(q, k, v, m):
    """Rank 3 as written by hand: no heads at all."""
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    return (q @ k.transpose(1, 2) + m[:, 0]).softmax(-1) @ v


def minus(q, k, v, m):
    return (q @ repeat(k).mT - 2 * -m / 2).softmax(-1) @ repeat(v)


def functions(q, k, v, m):
    return torch.softmax(torch.bmm(q.flatten(0, 1), repeat(k).flatten(0, 1).mT), dim=2).matmul(repeat(v).flatten(0, 1))


def aten(q, k, v, m):
    s = torch.ops.aten.mul.Tensor(torch.ops.aten.matmul.default(q, repeat(k).mT), 0.3)
    return torch.ops.aten._softmax.default(torch.ops.aten.add.Tensor(s, m), -1, False) @ repeat(v)


def special(q, k, v, m):
    return torch.special.softmax(q @ repeat(k).mT * 0.3 + m, -1) @ repeat(v)


def indexer(q, k, v, m):
    """A mask that depends on products of its own, as of DeepSeek's sparse attention."""
    best = (q.sum(1) @ k.sum(1).mT + m[:, 0]).topk(5, dim=-1).indices
    keep = torch.full((B, q.shape[2], S), LOWEST, dtype=q.dtype).scatter_(-1, best, 0.0)
    return (q @ repeat(k).mT * 0.3 + (m + keep[:, None])).softmax(-1) @ repeat(v)


def static_cache(q, k, v, m):
    """The cache is written after what becomes the query was reshaped."""
    q = q.reshape(B * H, -1, D)
    k, v = k.clone(), v.clone()
    k[:, :, 3] = 0.5
    v[:, :, 3] = 0.5
    w = (torch.bmm(q, repeat(k).reshape(B * H, -1, D).mT).view(B, H, -1, S) + m).softmax(-1)
    return torch.matmul(w, repeat(v))


def fsmt(q, k, v, m):
    """Queries of [length, batch * heads, head_dim], and nothing of rank 4 but the keys."""
    q = q.permute(2, 0, 1, 3).reshape(-1, B * H, D).transpose(0, 1)
    k, v = (repeat(x).reshape(B * H, -1, D) for x in (k, v))
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)


FORMS = [
    *(llama, plain, t5, gemma, gpt_oss, sinks_first, largest, granite, codegen, gpt_neo, mpt, trocr, xglm, bloom),
    *(neox_japanese, einsum, one_head, minus, functions, aten, special, indexer, static_cache, fsmt),
]


def strides(x):
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def run(fn, *args, **kwargs):
    """The findings, the graph after the passes, and what it returns."""
    found = []

    def backend(gm, _):
        found.extend((rewrite(gm, **kwargs).findings, gm))
        gm.graph.lint()
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(fn, backend=backend, fullgraph=True)(*args)
    findings, gm = found
    return findings, gm, out


@pytest.mark.drawn(3)
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("fn", FORMS, ids=lambda fn: fn.__name__)
def test_forms(fn, q_len: int) -> None:
    args = (*tensors(q_len), mask(q_len))
    want = fn(*args)
    (finding,), gm, got = run(fn, *args)
    assert isinstance(finding, Rewritten), finding
    assert finding.note.startswith("attention written out")
    read_as_stored = f"k float64[{B}, {KV}, {S}, {D}] v float64[{B}, {KV}, {S}, {D}]"
    assert read_as_stored in finding.shapes or fn in (einsum, one_head, neox_japanese, static_cache)
    left = {op_name(x) for x in gm.graph.nodes} & {"softmax", "matmul", "bmm", "baddbmm", "einsum", "logsumexp"}
    assert left == ({"matmul"} if fn is indexer else set())
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert strides(got) == strides(want)


ROWS = {
    "no keys, lowest": (LOWEST, None),
    "no keys, -inf": (-math.inf, None),
    "two biases of the lowest": (LOWEST, LOWEST),
    "two biases, one -inf": (-1e4, -math.inf),
    "all keys": (0.0, None),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROWS)
def test_rows_without_keys(name: str, dtype: torch.dtype) -> None:
    """They are the mean of all values or NaN, as the program has it in its dtype."""

    def fn(q, k, v, a, b):
        s = torch.matmul(q, k.transpose(2, 3)) * 0.3 + a
        return torch.matmul((s + b).softmax(-1), v)

    q, k, v = (x.to(dtype) for x in tensors(2, H))
    first, second = (torch.finfo(dtype).min if x == LOWEST else x or 0.0 for x in ROWS[name])
    a = torch.zeros(B, 1, 2, S, dtype=dtype)
    a[:, :, :, 5:], a[1] = first, first
    b = torch.zeros(B, 1, 1, S, dtype=dtype)
    b[1] = second
    (finding,), _, got = run(fn, q, k, v, a, b)
    want = fn(q, k, v, a, b)
    assert isinstance(finding, Rewritten)
    exact = fn(*(x.double() for x in (q, k, v)), *(x.double() for x in (a, b)))
    assert torch.equal(got.isnan(), want.isnan())
    assert want.isnan().any() == ("inf" in name or "two" in name)
    ok = ~want.isnan()
    assert (got - exact)[ok].abs().max() <= max(1.01 * (want - exact)[ok].abs().max(), 4 * torch.finfo(dtype).eps)


def used(q, k, v, m):
    w = (q @ k.mT + m).softmax(-1)
    return w @ v, w


def scores_used(q, k, v, m):
    s = q @ k.mT + m
    return s.softmax(-1) @ v, s.sum()


def masked_in_place(q, k, v, m):
    s = q @ k.mT
    s.masked_fill_(m < 0, -math.inf)
    return s.softmax(-1) @ v


def weak_fill(q, k, v, m):
    return (q @ k.mT).masked_fill(m < 0, -1e4).softmax(-1) @ v


def relative(q, k, v, m):
    return (q @ k.mT + q @ k.flip(2).mT + m).softmax(-1) @ v


def multiplicative(q, k, v, m):
    keep = (m == 0).to(q.dtype)
    return (q @ k.mT * keep - 1e4 * (1 - keep)).softmax(-1) @ v


def by_tensor(q, k, v, m):
    return (q @ k.mT * k[0, 0, 0, 0] + m).softmax(-1) @ v


def bias_before_cap(q, k, v, m):
    return (torch.tanh(q @ k.mT + m) * 5).softmax(-1) @ v


def dropout(q, k, v, m):
    return F.dropout((q @ k.mT + m).softmax(-1), 0.1, training=True) @ v


def two_sinks(q, k, v, m):
    s = torch.cat([q @ k.mT + m, torch.zeros(B, H, q.shape[2], 2, dtype=q.dtype)], -1)
    return s.softmax(-1)[..., :-2] @ v


def sinks_of_sequences(q, k, v, m):
    s = torch.cat([q @ k.mT + m, k[:, :, :1, :1].expand(B, H, q.shape[2], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


def other_column_dropped(q, k, v, m):
    s = torch.cat([q @ k.mT + m, torch.ones(H, dtype=q.dtype).view(1, H, 1, 1).expand(B, H, q.shape[2], 1)], -1)
    return s.softmax(-1)[..., 1:] @ v


def written_between(q, k, v, m):
    w = (q @ k.mT + m).softmax(-1)
    k[:, :, 0] = 0
    return w @ v


def bias_written(q, k, v, m):
    s = q @ k.mT + m
    m.zero_()
    return s.softmax(-1) @ v


def copy_written(q, k, v, m):
    c = k.contiguous(memory_format=torch.contiguous_format).clone()
    s = q @ c.mT + m
    c.mul_(2)
    return (s.softmax(-1) @ v) + c.sum()


def copy_written_before(q, k, v, m):
    c = k.clone()
    t = c.mT
    c.mul_(2)
    return (q @ t + m).softmax(-1) @ v


def long(q, k, v, m):
    return (k @ k.mT).softmax(-1) @ v


DECLINED = {
    used: Reason.WEIGHTS_USED,
    scores_used: Reason.WEIGHTS_USED,
    masked_in_place: Reason.IN_PLACE,
    weak_fill: Reason.MASK_VALUE,
    relative: Reason.RELATIVE,
    multiplicative: Reason.RELATIVE,
    by_tensor: Reason.RELATIVE,
    bias_before_cap: Reason.RELATIVE,
    dropout: Reason.DROPOUT,
    two_sinks: Reason.BEYOND_SDPA,
    sinks_of_sequences: Reason.RELATIVE,
    other_column_dropped: Reason.RELATIVE,
    written_between: Reason.WRITTEN,
    bias_written: Reason.WRITTEN,
    copy_written: Reason.WRITTEN,
    copy_written_before: Reason.WRITTEN,
    long: Reason.Q_LEN,
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("fn", DECLINED, ids=lambda fn: fn.__name__)
def test_what_stays(fn) -> None:
    args = (*tensors(2, H), mask(2))
    gm = capture(fn, *(x.clone() for x in args))
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined), finding
    assert finding.decline.reason is DECLINED[fn]
    assert finding.location.file == __file__
    assert listing(gm) == before


def shared(q, k, v, m):
    k, v = (torch.cat((x[:1].expand(B, -1, -1, -1), x), dim=2) for x in (k, v))
    return (q @ repeat(k).mT + torch.cat((m, m), -1)).softmax(-1) @ repeat(v)


def test_what_a_compiler_fuses_on_a_cpu_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """But keys that sequences share are read once only by the op."""
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(bytes_per_us=1.0, segment_us=0.0))
    gm = capture(llama, *tensors(), mask())
    before = listing(gm)
    (finding,) = rewrite(gm, fuses=True).findings
    assert finding.decline.reason is Reason.NO_GAIN
    assert "Inductor fuses" in finding.decline.detail
    assert listing(gm) == before
    args = (*tensors(), mask())
    (finding,), _, got = run(shared, *args, fuses=True)
    assert finding.op == "tatten.bifurcated_attention.default", finding
    torch.testing.assert_close(got, shared(*args), rtol=1e-12, atol=1e-12)


def test_layers_share_what_is_made_of_their_mask() -> None:
    def fn(q, k, v, m):
        for _ in range(3):
            q = llama(q, k, v, m[:, :, :, :S]).transpose(1, 2)
        return q

    findings, gm, _ = run(fn, *tensors(), mask())
    assert [type(x) for x in findings] == [Rewritten] * 3
    names = [op_name(x) for x in gm.graph.nodes]
    assert names.count("masked_fill") == names.count("all") == 1


@pytest.mark.drawn(1, "exported programs")
@pytest.mark.parametrize("fn", [llama, gemma, gpt_oss, trocr, granite], ids=lambda fn: fn.__name__)
def test_exported_programs(fn) -> None:
    class Module(torch.nn.Module):
        def forward(self, q, k, v, m):
            return fn(q, k, v, m)

    args = (*tensors(2), mask(2))
    with tatten.recording() as report:
        program = tatten.rewrite(torch.export.export(Module(), args))
    assert len(report.rewritten) == 1
    assert not any("softmax" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*args), fn(*args), rtol=1e-12, atol=1e-12)
