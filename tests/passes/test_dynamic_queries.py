"""A dynamic number of queries with a known bound: rewritten, exact for each number, and compiled no more often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from latent_forms import ACCEPTED as LATENT_FORMS
from latent_forms import arguments, clones
from torch import Tensor
from torch._dynamo import mark_dynamic
from torch._dynamo.decorators import mark_unbacked
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tatten
from tatten.passes import Declined, Rewritten, cost
from tatten.passes.reasons import Reason

pytestmark = pytest.mark.drawn(6)

MOST = 6
B, HQ, HKV, S, D = 4, 4, 2, 40, 16
PREFIX = 30
OFFSET = torch.tensor(S - MOST)


@pytest.fixture(autouse=True)
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1.0, 0.0, 1.0))


def inputs(n: int) -> list[Tensor]:
    """A query, keys, values, and a mask that leaves each query a key."""
    torch.manual_seed(n)
    mask = torch.rand(B, 1, n, S) < 0.7
    mask[..., 0] = True
    return [torch.randn(B, HQ, n, D), *torch.randn(2, B, HKV, S, D), mask]


def repeat_kv(x: Tensor) -> Tensor:
    return x[:, :, None].expand(-1, -1, HQ // HKV, -1, -1).flatten(1, 2)


def no_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v))


def any_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask)


def additive(q, k, v, mask):
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, bias.expand(-1, HQ, -1, -1), enable_gqa=True)


def causal(q, k, v, mask):
    places = torch.arange(S)[None, :] <= S - q.shape[2] + torch.arange(q.shape[2])[:, None]
    return F.scaled_dot_product_attention(q, k, v, places, enable_gqa=True)


def shared_prefix(q, k, v, mask):
    k, v = (torch.cat((x[:1, :, :PREFIX].expand(B, -1, -1, -1), x[:, :, PREFIX:]), dim=2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def selected_rows(q, k, v, mask):
    rows = torch.tensor([1, 0, 1, 1])
    k, v = (torch.cat((x[:2, :, :PREFIX][rows], x[:, :, PREFIX:]), dim=2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def transposed(q, k, v, mask):
    """The result has the strides of the query, as with transformers."""
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    return any_mask(q, k, v, mask).transpose(1, 2).reshape(B, -1, HQ * D)


def written_out(q, k, v, mask):
    scores = torch.tanh(q @ repeat_kv(k).mT / (D**0.5 * 30)) * 30
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    sinks = torch.linspace(-1, 1, HQ).view(1, -1, 1, 1).expand(B, -1, q.shape[2], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1] @ repeat_kv(v)


def in_8_bits(q, k, v, mask):
    k, v = ((x.clamp(-3, 3) * 40).to(torch.int8).to(q.dtype) * 0.025 for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def flex(q, k, v, blocks):
    return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)


def flex_inputs(n: int, block: int = 128) -> list[Any]:
    blocks = create_block_mask(lambda b, h, i, j: j <= i + OFFSET, None, None, n, S, "cpu", BLOCK_SIZE=(block, 128))
    return [*inputs(n)[:3], blocks]


FORMS = {
    form.__name__: form
    for form in (
        no_mask,
        any_mask,
        additive,
        causal,
        shared_prefix,
        selected_rows,
        transposed,
        written_out,
        in_8_bits,
    )
}


def bounded_by_check(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def bounded(q: Tensor, *args: Any) -> Tensor:
        torch._check(q.shape[2] <= MOST)
        return fn(q, *args)

    return bounded


def bounded_by_branch(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def bounded(q: Tensor, *args: Any) -> Tensor:
        if q.shape[2] > MOST:
            return q * 0
        return fn(q, *args)

    return bounded


def mark(tensors: list[Tensor], n: int, most: int = MOST) -> list[Tensor]:
    """Mark the dims of queries as dynamic with a range; one query alone is a graph of its own."""
    for x in (tensors[0], tensors[3]) if n > 1 else ():
        mark_dynamic(x, 2, min=2, max=most)
    return tensors


def run(
    fn: Callable[..., Tensor], make: Callable[[int], list[Tensor]], order: list[int], inner: str = "eager", **given: Any
) -> tatten.Report:
    """Compare with eager mode for all numbers of queries in `order`, and return the report."""
    torch._dynamo.reset()
    given = {"fullgraph": True, "options": {"inner": inner}, **given}
    compiled = torch.compile(fn, backend="tatten", **given)
    with torch.no_grad(), tatten.recording() as report:
        for n in order:
            got, want = compiled(*make(n)), fn(*make(n))
            torch.testing.assert_close(got, want)
            assert inner == "inductor" or got.stride() == want.stride()
    return report


def assert_rewritten(report: tatten.Report, graphs: int = 2) -> None:
    """One graph for a single query, and one for all other numbers."""
    assert len(report.graphs) == graphs
    for graph in report.graphs:
        assert graph.findings
        assert all(isinstance(x, Rewritten) for x in graph.findings), str(report)


# The first number above 1 equals no other size, as equal sizes get one symbol.
ORDERS = [5, 2, MOST, 3, 4, 1, 5, 1, 2], [1, 3, 1, *range(2, MOST + 1)]


@pytest.mark.parametrize("order", ORDERS, ids=["from several", "from one"])
@pytest.mark.parametrize("bound", [bounded_by_check, bounded_by_branch])
@pytest.mark.parametrize("name", FORMS)
def test_exact_for_each_number(name: str, bound: Callable[..., Any], order: list[int]) -> None:
    assert_rewritten(run(bound(FORMS[name]), inputs, order, dynamic=True))


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMS)
def test_inner_compilers(name: str, inner: str) -> None:
    report = run(bounded_by_check(FORMS[name]), inputs, ORDERS[0], inner, dynamic=True)
    if name == "written_out" and inner == "inductor":  # which fuses it on a CPU
        assert {x.decline.reason for x in report.declined} == {Reason.NO_GAIN}
        return
    assert_rewritten(report)


@pytest.mark.parametrize("name", FORMS)
def test_ranges_of_mark_dynamic(name: str) -> None:
    """As the first number of queries is marked, it is dynamic without `dynamic=True`."""
    assert_rewritten(run(FORMS[name], lambda n: mark(inputs(n), n), [3, MOST, 2, 4, 1, 5]))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", LATENT_FORMS)
def test_latents(name: str) -> None:
    def make(n: int) -> list[Tensor]:
        args = clones(arguments(name, n))
        for x in (args[0], args[4]) if n > 1 else ():
            mark_dynamic(x, 2, min=2, max=MOST)
        return args

    assert_rewritten(run(LATENT_FORMS[name], make, ORDERS[0]))


def test_automatic_dynamic_shapes() -> None:
    """Without `dynamic`, the first number has a graph of its own, and the second one makes the number dynamic."""
    assert_rewritten(run(bounded_by_check(any_mask), inputs, [4, 2, MOST, 3, 5, 1, 4]), graphs=3)


def test_flex_attention() -> None:
    """The lists of blocks have an entry for each number in the range, or the call is left."""
    assert_rewritten(run(bounded_by_check(flex), flex_inputs, ORDERS[0]), graphs=3)
    report = run(bounded_by_check(flex), lambda n: flex_inputs(n, block=5), [5, 4])
    assert isinstance(report.graphs[0].findings[0], Rewritten)
    assert "its list of blocks" in report.graphs[1].findings[0].decline.detail


def test_one_more_than_the_bound_is_another_graph() -> None:
    report = run(bounded_by_branch(any_mask), inputs, [3, MOST + 1, 4, MOST + 2, 2], dynamic=True)
    assert [len(graph.findings) for graph in report.graphs] == [1, 0]


def declined(fn: Callable[..., Any], *args: Tensor, max_q_len: int = 16, **given: Any) -> Declined:
    torch._dynamo.reset()
    with torch.no_grad(), tatten.recording() as report:
        options = {"inner": "eager", "max_q_len": max_q_len}
        got = torch.compile(fn, backend="tatten", fullgraph=True, options=options, **given)(*args)
        torch.testing.assert_close(got, fn(*args))
    (finding,) = report.declined
    assert not report.rewritten
    return finding


def test_declines_numbers_without_a_bound() -> None:
    finding = declined(any_mask, *inputs(3), dynamic=True)
    assert finding.decline.reason is Reason.Q_LEN_DYNAMIC
    assert "not known to be between 1 and 16" in finding.decline.detail


def test_declines_bounds_above_the_option() -> None:
    assert declined(bounded_by_check(any_mask), *inputs(3), max_q_len=5, dynamic=True).decline.reason is (
        Reason.Q_LEN_DYNAMIC
    )
    assert_rewritten(run(bounded_by_check(any_mask), inputs, [3, 5], options={"inner": "eager", "max_q_len": MOST}))
    assert declined(any_mask, *mark(inputs(3), 3, 32)).decline.reason is Reason.Q_LEN_DYNAMIC


@pytest.mark.parametrize("least", [0, 1])
def test_numbers_that_only_a_run_knows_may_be_1_but_not_0(least: int) -> None:
    def bounded(q, k, v):
        torch._check(q.shape[2] >= least)
        torch._check(q.shape[2] <= MOST)
        return (q @ repeat_kv(k).mT).softmax(-1) @ repeat_kv(v)

    def make(n: int) -> list[Tensor]:
        q, k, v, _ = inputs(n)
        mark_unbacked(q, 2)
        return [q, k, v]

    (finding,) = [x for graph in run(bounded, make, [3, 1, 5]).graphs for x in graph.findings]
    assert isinstance(finding, Rewritten if least else Declined)
    assert least or finding.decline.reason is Reason.Q_LEN_DYNAMIC


def test_declines_causal_calls() -> None:
    def prefill(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    finding = declined(bounded_by_check(prefill), *inputs(3), dynamic=True)
    assert finding.decline.reason is Reason.IS_CAUSAL


LENS = torch.tensor([S, 7, 20, 33])


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_ops_take_any_number(masked: bool, window: int | None, inner: str) -> None:
    """With lengths and windows, in one graph for all numbers but 1; the passes have no part in it."""

    def attend(q, k, v, mask):
        return tatten.decode_attention(
            q, k, v, attn_mask=mask if masked else None, kv_lens=LENS, window=window, return_lse=True
        )

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="tatten", options={"inner": inner}, fullgraph=True, dynamic=True)
    with torch.no_grad(), tatten.recording() as report:
        for n in ORDERS[0]:
            for got, want in zip(compiled(*inputs(n)), attend(*inputs(n)), strict=True):
                torch.testing.assert_close(got, want)
    assert len(report.graphs) == 2
