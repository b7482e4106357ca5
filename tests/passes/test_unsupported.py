"""Graphs that stay as they are: with several streams, and with forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import listing
from one_row_layers import take_any_size
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

import tatten
from tatten.passes import Declined, GraphReport, Rewritten, counters, rewrite
from tatten.passes.reasons import Reason
from tatten.passes.unsupported import check_graph

B, HQ, H, S, D = 1, 8, 2, 64, 16


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    q, (k, v), w = torch.randn(B, HQ, 1, D), torch.randn(2, B, H, S, D), torch.randn(D, D)
    mask = torch.arange(S).expand(1, 1, 1, S) < 50
    return [*(x.bfloat16() for x in (q, k, v)), mask, w.bfloat16(), torch.tensor(3), torch.tensor(3)]


def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True)


def step(q, k, v, m, w, a, b):
    """Attention, a linear layer and two counters: all passes of the option `decode` have something to do."""
    out = F.linear(attend(q, k, v, m), w)
    a.add_(1)
    b.add_(1)
    return out


def in_a_stream(*args):
    with torch.Stream(device="cpu"):
        return step(*args)


def before_a_stream(q, *args):
    out = step(q, *args)
    with torch.Stream(device="cpu"):
        return out + q.cos()


def waits(*args):
    a, b = (torch.Stream(device="cpu") for _ in range(2))
    a.wait_stream(b)
    return step(*args)


def dual(q, *args):
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        return forward_ad.unpack_dual(step(forward_ad.make_dual(q, q.cos()), *args)).tangent


@pytest.fixture
def _all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    take_any_size(monkeypatch)
    monkeypatch.setattr(counters, "ON_DEVICES", {"cpu"})


def rewritten(fn: Callable[..., Any]) -> tuple[GraphReport, str, str]:
    """The report on a function's graph, and the graph before and after. It does not run: a CPU has no events."""
    results: list[tuple[GraphReport, str, str]] = []

    def backend(gm: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        before = listing(gm)
        results.append((rewrite(gm, linears=True, counters=True), before, listing(gm)))
        raise RuntimeError("captured")

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(fn, backend=backend, fullgraph=True)(*tensors())
    (result,) = results
    return result


@pytest.mark.usefixtures("_all_passes")
def test_the_step_is_rewritten() -> None:
    report, _, _ = rewritten(step)
    assert [type(x) for x in report.findings] == [Rewritten]
    assert report.note == "1 linear layer in 1 launch; 2 counters in one launch"


REASONS = {in_a_stream: Reason.STREAMS, before_a_stream: Reason.STREAMS, waits: Reason.STREAMS, dual: Reason.TORCH_FUNC}


@pytest.mark.usefixtures("_all_passes")
@pytest.mark.parametrize("fn, reason", REASONS.items(), ids=[fn.__name__ for fn in REASONS])
def test_left_as_it_is(fn: Callable[..., Any], reason: Reason) -> None:
    report, before, after = rewritten(fn)
    (finding,) = report.findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is reason
    assert (report.note, after) == ("", before)


def test_the_tangent_of_attention() -> None:
    args = [x.float() if x.is_floating_point() else x for x in tensors()]

    def tangent(q, k, v, m):
        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            return forward_ad.unpack_dual(attend(forward_ad.make_dual(q, q.cos()), k, v, m)).tangent

    torch._dynamo.reset()
    with torch.no_grad(), tatten.recording() as report:
        out = torch.compile(tangent, backend="tatten", options={"inner": "aot_eager"})(*args[:4])
    torch.testing.assert_close(out, tangent(*args[:4]))
    assert [x.decline.reason for x in report.declined] == [Reason.TORCH_FUNC]


def test_attention_in_a_dual_level_without_tangents() -> None:
    args = tensors()[:4]
    torch._dynamo.reset()
    with forward_ad.dual_level(), tatten.recording() as report:
        out = torch.compile(attend, backend="tatten", options={"inner": "aot_eager"})(*args)
    torch.testing.assert_close(out, attend(*args))
    assert len(report.rewritten) == 1


@pytest.fixture(scope="module")
def _library() -> Iterator[None]:
    with torch.library._scoped_library("upstream", "DEF") as library:
        library.define("event_stream(Tensor x) -> Tensor")
        yield


@pytest.mark.usefixtures("_library")
def test_functions_that_order_streams() -> None:
    def orders(op: str, target: Any) -> bool:
        graph = torch.fx.Graph()
        graph.create_node(op, target, (graph.placeholder("x"),))
        return check_graph(graph) is not None

    assert orders("call_function", torch.cuda.current_stream)
    assert orders("call_function", torch.cuda.Event)
    assert orders("call_method", "record_stream")
    for name in ("wait_event", "synchronize_device"):
        assert not hasattr(torch.ops.streams, name) or orders("call_function", getattr(torch.ops.streams, name))
    assert not orders("call_function", torch.ops.upstream.event_stream)
    assert not orders("call_function", torch.ops.upstream.event_stream.default)
    assert not orders("call_function", torch.sin)
    assert not orders("call_method", "sin")
