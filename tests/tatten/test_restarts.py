"""Reports hold what finished compilations used: graphs that Dynamo gave up or that failed to compile leave no trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters

import tatten

ARGS = torch.randn(2, 4, 1, 16), *torch.randn(2, 2, 4, 64, 16), torch.arange(64)[None, None, None] < 40


class Attend(torch.nn.Module):
    """Under `dynamic=True` its float is an input of the graph; AOTAutograd has Dynamo start over with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = 0.25

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.scaling)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_a_graph_that_dynamo_captures_again_is_reported_once(
    inner: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = []
    real = torch._logging.trace_structured

    def trace(name: str, metadata_fn=dict, **given) -> None:
        if name == "artifact" and metadata_fn().get("name") == "tatten_report":
            traced.append(name)
        real(name, metadata_fn, **given)

    monkeypatch.setattr(torch._logging, "trace_structured", trace)
    options = {"inner": inner}
    caplog.set_level(logging.INFO, "tatten")
    with torch.no_grad(), tatten.recording() as report, tatten.recording() as nested:
        out = torch.compile(Attend(), backend="tatten", dynamic=True, options=options)(*ARGS)
    torch.testing.assert_close(out, Attend()(*ARGS))
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["tatten"] == {"rewritten": 1}
    for found in (report, nested):
        assert len(found.graphs) == len(found.graphs[0].findings) == 1
    assert traced == ["artifact"]
    assert len([record for record in caplog.records if record.getMessage().startswith("graph 0")]) == 1


def test_a_graph_that_fails_to_compile_is_not_reported() -> None:
    def broken(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        raise RuntimeError("on purpose")

    registry.register_backend(broken, name="broken")
    try:
        with torch.no_grad(), tatten.recording() as report:
            with pytest.raises(Exception, match="on purpose"):
                torch.compile(Attend(), backend="tatten", options={"inner": "broken"})(*ARGS)
            torch._dynamo.reset()
            with torch._dynamo.config.patch(suppress_errors=True):
                out = torch.compile(Attend(), backend="tatten", options={"inner": "broken"})(*ARGS)
    finally:
        registry._BACKENDS.pop("broken", None)
        registry._COMPILER_FNS.pop("broken", None)
    torch.testing.assert_close(out, Attend()(*ARGS))
    assert report.graphs == []
    assert not counters["tatten"]


def test_what_follows_a_graph_break_is_a_graph_of_its_own() -> None:
    def twice(*args: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*args)
        torch._dynamo.graph_break()
        return F.scaled_dot_product_attention(out, *args[1:])

    with torch.no_grad(), tatten.recording() as report:
        torch.compile(twice, backend="tatten", options={"inner": "aot_eager"})(*ARGS)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(twice, backend="tatten", options={"inner": "aot_eager"}, fullgraph=True)(*ARGS)
    assert [len(graph.findings) for graph in report.graphs] == [1, 1]


def test_threads_have_recordings_of_their_own() -> None:
    def compile_in_thread(heads: int) -> tatten.Report:
        args = torch.randn(1, heads, 1, 16), *torch.randn(2, 1, heads, 64, 16), ARGS[3]
        with torch.no_grad(), tatten.recording() as report:
            # A graph of a dynamic number of heads, if two threads took turns, would serve the third call.
            torch.compile(Attend(), backend="tatten", options={"inner": "eager"}, dynamic=False)(*args)
        return report

    with ThreadPoolExecutor(2) as threads, tatten.recording() as outside:
        reports = list(threads.map(compile_in_thread, (2, 3, 5)))
    assert [len(report.graphs) for report in reports] == [1, 1, 1]
    assert outside.graphs == []
