"""Grouped heads in the other order: query head h reads kv head `h % kv_heads`."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing, run_rewritten

import tatten
from tatten.passes import Declined, Rewritten, rewrite
from tatten.passes.calls import op_name
from tatten.passes.reasons import Reason

pytestmark = pytest.mark.drawn(5)

B, HK, N, S, D = 2, 3, 4, 2048, 16
sdpa = F.scaled_dot_product_attention


def repeated(x):
    return x.repeat(1, N, 1, 1)


def tiled(x):
    return torch.tile(x, (N, 1, 1))


def concatenated(x):
    return torch.cat([x] * N, 1)


def expanded(x):
    return x[:, None].expand(B, N, HK, x.shape[2], D).reshape(B, N * HK, x.shape[2], D)


def before_a_transpose(x):
    return x.transpose(1, 2).contiguous().repeat(1, 1, N, 1).transpose(1, 2)


def tiled_twice(x):
    return x.repeat(1, 2, 1, 1).repeat(1, 2, 1, 1)


def interleaved_then_tiled(x):
    return x.repeat_interleave(2, 1).repeat(1, 2, 1, 1)


def tiled_then_interleaved(x):
    return x.repeat(1, 2, 1, 1).repeat_interleave(2, 1)


SPELLINGS = [repeated, tiled, concatenated, expanded, before_a_transpose]
SPELLINGS += [tiled_twice, interleaved_then_tiled, tiled_then_interleaved]


def arguments(q_heads: int = N * HK, q_len: int = 2, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(B, q_heads, q_len, D), torch.randn(B, HK, S, D), torch.randn(B, HK, S, D)
    return *(x.to(dtype) for x in (q, k, v)), torch.arange(S) < torch.tensor([900, 70])[:, None, None, None]


def check(fn, *args: torch.Tensor) -> None:
    """Check that a call is rewritten without a copy of keys and values, and what it returns."""
    (finding,), gm, out = run_rewritten(fn, *args)
    assert isinstance(finding, Rewritten), finding
    assert re.search(rf" k \w+\[\w+, {HK}, \w+, {D}\] ", finding.shapes), finding.shapes
    assert "queries are permuted" in finding.note
    left = {op_name(node) for node in gm.graph.nodes}
    assert not left & {"repeat", "tile", "cat", "repeat_interleave", "scaled_dot_product_attention", "softmax"}
    want = fn(*args)
    assert out.stride() == want.stride()
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("tile", SPELLINGS, ids=lambda fn: fn.__name__)
def test_spellings(tile) -> None:
    check(lambda q, k, v, m: sdpa(q, tile(k), tile(v), m), *arguments())


@pytest.mark.parametrize("q_len", [1, 3])
def test_without_a_mask(q_len: int) -> None:
    q, k, v, _ = arguments(q_len=q_len)
    k, v = (x.repeat(1, 1, 16, 1) for x in (k, v))
    (finding,), _, out = run_rewritten(lambda q, k, v: sdpa(q, repeated(k), repeated(v)), q, k, v)
    assert isinstance(finding, Rewritten), finding
    torch.testing.assert_close(out, sdpa(q, repeated(k), repeated(v)))


def test_masks_for_each_head_follow() -> None:
    q, k, v, m = arguments()
    bias = torch.randn(B, N * HK, 1, S).masked_fill(~m, -torch.inf)
    check(lambda q, k, v, m: sdpa(q, repeated(k), repeated(v), m), q, k, v, bias)
    check(lambda q, k, v, m: sdpa(q, repeated(k), repeated(v), m), q, k, v, bias[0])


def test_layers_share_the_permuted_mask() -> None:
    q, k, v, m = arguments()
    m = torch.randn(B, N * HK, 1, S).masked_fill(~m, -torch.inf)

    def fn(q, k, v, m):
        return sdpa(sdpa(q, repeated(k), repeated(v), m), repeated(k), repeated(v), m)

    findings, gm, out = run_rewritten(fn, q, k, v, m)
    assert all(isinstance(x, Rewritten) for x in findings)
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.tatten.block_mask.default)) == 1
    torch.testing.assert_close(out, fn(q, k, v, m))


def test_gqa_on_top() -> None:
    args = arguments(2 * N * HK)
    check(lambda q, k, v, m: sdpa(q, repeated(k), repeated(v), m, enable_gqa=True), *args)


def test_sinks_of_attention_written_out_follow() -> None:
    sinks = torch.linspace(-2, 3, N * HK)

    def fn(q, k, v, m):
        scores = (q @ repeated(k).mT * 0.3).masked_fill(~m, -torch.inf)
        column = sinks.view(1, -1, 1, 1).expand(B, -1, q.shape[2], 1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ repeated(v)

    check(fn, *arguments())


def test_dynamic_batch_and_length() -> None:
    args = arguments()
    for x, dims in zip(args, ((0,), (0, 2), (0, 2), (0, 3)), strict=True):
        for dim in dims:
            torch._dynamo.mark_dynamic(x, dim)
    check(lambda q, k, v, m: sdpa(q, repeated(k), repeated(v), m), *args)


def test_16_bits() -> None:
    check(lambda q, k, v, m: sdpa(q, repeated(k), repeated(v), m), *arguments(dtype=torch.bfloat16))


def test_rows_that_sequences_share() -> None:
    q, k, v, _ = arguments()

    def fn(q, k, v):
        k, v = (x[:1].expand(B, -1, -1, -1) for x in (k, v))
        return sdpa(q, repeated(k), repeated(v))

    (finding,), _, out = run_rewritten(fn, q, k, v)
    assert isinstance(finding, Rewritten)
    assert "bifurcated" in finding.op
    torch.testing.assert_close(out, fn(q, k, v))


def different_orders(q, k, v, m):
    return sdpa(q, repeated(k), v.repeat_interleave(N, 1), m)


def written_between(q, k, v, m):
    keys, values = repeated(k), repeated(v)
    k.mul_(2)
    return sdpa(q, keys, values, m)


@pytest.mark.parametrize("fn", [different_orders, written_between])
def test_heads_that_are_read_as_they_are(fn) -> None:
    args = arguments()
    want = fn(*(x.clone() for x in args))
    (finding,), _, out = run_rewritten(fn, *(x.clone() for x in args))
    assert "permuted" not in getattr(finding, "note", "")
    torch.testing.assert_close(out, want)


def test_a_decline_leaves_the_graph() -> None:
    gm = capture(lambda q, k, v, m: sdpa(q, repeated(k), repeated(v), m), *arguments(q_len=17))
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.Q_LEN
    assert listing(gm) == before


def test_gradients_are_still_wanted() -> None:
    q, k, v, m = arguments()
    q.requires_grad_()
    gm = capture(lambda q, k, v, m: sdpa(q, repeated(k), repeated(v), m), q, k, v, m, grad=True)
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.REQUIRES_GRAD
    assert listing(gm) == before


@pytest.mark.drawn(1)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_end_to_end(inner: str) -> None:
    q, k, v, m = arguments(q_len=1)

    def fn(q, k, v, m):
        return sdpa(q, repeated(k), repeated(v), m)

    torch._dynamo.reset()
    with torch.no_grad(), tatten.recording() as report:
        got = torch.compile(fn, backend="tatten", options={"inner": inner})(q, k, v, m)
    torch.testing.assert_close(got, fn(q, k, v, m))
    assert len(report.rewritten) == 1
