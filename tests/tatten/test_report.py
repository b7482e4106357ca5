"""The report: the same in explain, logs, counters and trace, and made for people."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import tatten
from tatten.passes.cost import Cost
from tatten.passes.reasons import OTHER_ATTENTION, Decline, Reason
from tatten.passes.rewrite import Declined, GraphReport, Rewritten
from tatten.passes.source_location import SourceLocation
from tatten.report import Report, publish


class Layer(torch.nn.Module):
    def forward(self, x, k, mask):
        keys = k.repeat_interleave(2, dim=1)
        return F.scaled_dot_product_attention(x, keys, keys, attn_mask=mask)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x, k, mask):
        for layer in self.layers:
            x = layer(x, k, mask)
        return F.scaled_dot_product_attention(x, x, x)


ARGS = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 100, 8), torch.ones(2, 1, 1, 100, dtype=torch.bool)


def test_explain() -> None:
    report = tatten.explain(Model(), *ARGS)
    assert len(report.rewritten) == 3
    first = report.rewritten[0]
    assert first.location.module == "layers.0"
    assert first.location.file == __file__
    assert "scaled_dot_product_attention(x, keys, keys" in first.location.code
    base = 2 * 2 * 2 * 100 * 8 * 4  # key and value, batch, heads, length, head_dim, bytes
    assert (first.cost.moved, first.cost.read) == (base * 5, base)
    (left,) = report.declined
    assert left.decline.reason is Reason.NO_GAIN
    text = str(report)
    for part in (
        "graph 0: 3 of 4 SDPA calls rewritten",
        "3 x layers.0 ... layers.2: tatten.decode_attention.default",
        "125 KiB moved per step before, at most 25 KiB read now",
        "left as it is [no_gain]",
        "why   no mask, and 4 kv heads for 4 query heads as they are",
    ):
        assert part in text


def test_explain_again_and_of_what_is_compiled_already() -> None:
    model = Model()
    compiled = torch.compile(model, backend="tatten", options={"inner": "eager"})
    compiled(*ARGS)
    for _ in range(12):  # more often than Dynamo's recompile limit
        assert len(tatten.explain(compiled, *ARGS).rewritten) == 3
    assert len(tatten.explain(torch.compile(lambda *a: model(*a)), *ARGS).rewritten) == 3


def test_explain_passes_keywords_and_results_through() -> None:
    assert len(tatten.explain(Layer().forward, ARGS[0], k=ARGS[1], mask=None).rewritten) == 1


def test_nothing_compiled() -> None:
    assert "no graph was compiled" in str(tatten.explain(torch.compiler.disable(lambda: 1)))


def test_recordings_nest() -> None:
    with tatten.recording() as outer:
        with tatten.recording() as inner:
            tatten.explain(Layer(), *ARGS)
        tatten.explain(Layer(), *ARGS)
    assert len(inner.rewritten) == 1
    assert len(outer.rewritten) == 2


COST = Cost(moved=1 << 30, read=1 << 20, segments=1, saved_us=300.0, extra_us=20.0)
GRAPH = GraphReport(
    (
        Rewritten(SourceLocation("model.layers.0.attn", "a.py", 3, "F.sdpa(q, k, v)"), "tatten.op", "q k v", COST),
        Rewritten(SourceLocation("model.layers.1.attn", "a.py", 3, "F.sdpa(q, k, v)"), "tatten.op", "q k v", COST),
        Declined(SourceLocation("", "b.py", 9, "F.sdpa(x)"), "q", Decline(Reason.DROPOUT, "dropout_p is 0.1")),
    ),
    1.25,
)


def test_text() -> None:
    assert str(Report([GRAPH])) == "\n".join(
        [
            "graph 0: 2 of 3 SDPA calls rewritten in 1.2 ms",
            "  2 x model.layers.0.attn ... model.layers.1.attn: tatten.op",
            "      line  a.py:3  F.sdpa(q, k, v)",
            "      with  q k v",
            "      KV    1 GiB moved per step before, at most 1 MiB read now",
            "  call: left as it is [dropout]",
            "      line  b.py:9  F.sdpa(x)",
            "      with  q",
            "      why   dropout_p is 0.1",
            "      helps decode with model.eval(), so that dropout_p is 0.0",
            "total: 2 of 3 SDPA calls rewritten in 1 graph; left as they are: 1 dropout",
        ]
    )


EMPTY = GraphReport((), 0.5)
WRITTEN_OUT = GraphReport(
    tuple(
        Declined(SourceLocation(f"{i}.attn", "c.py", 7, "p @ v"), "", Decline(Reason.NO_SDPA, "attention written out"))
        for i in (0, 1, 1)
    ),
    2.0,
)


def test_text_of_many_graphs() -> None:
    text = str(Report([EMPTY, GRAPH, EMPTY, WRITTEN_OUT, EMPTY])).splitlines()
    assert [line for line in text if not line.startswith("  ")] == [
        "graph 1: 2 of 3 SDPA calls rewritten in 1.2 ms",
        "graph 3: 0 of 0 SDPA calls rewritten in 2.0 ms",
        "graphs 0, 2, 4: no attention",
        "total: 2 of 3 SDPA calls rewritten in 5 graphs; left as they are: 1 dropout; "
        "attention that is no SDPA call: 3 no_sdpa",
    ]
    assert "  3 x 0.attn ... 1.attn: left as it is [no_sdpa]" in text
    assert str(Report([EMPTY])) == "graph 0: no attention\ntotal: 0 of 0 SDPA calls rewritten in 1 graph"


def test_text_of_one_place_that_is_passed_twice() -> None:
    again = GraphReport(WRITTEN_OUT.findings[1:], 1.0)
    assert "  2 x 1.attn: left as it is [no_sdpa]" in str(Report([again])).splitlines()


class WrittenOut(torch.nn.Module):
    """32 layers in one graph, and nothing in another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Written() for _ in range(32))

    def forward(self, x, k, mask):
        for layer in self.layers:
            x = layer(x, k, mask)
        torch._dynamo.graph_break()
        return x + 1


class Written(torch.nn.Module):
    def forward(self, x, k, mask):
        keys = k.repeat_interleave(2, dim=1)
        return (x @ keys.mT).masked_fill(~mask, float("-inf")).softmax(-1) @ keys


def test_explain_attention_that_is_no_sdpa_call() -> None:
    with torch.no_grad():
        report = tatten.explain(WrittenOut(), *ARGS)
    assert {finding.decline.reason for finding in report.declined} == {Reason.NO_SDPA}
    text = str(report).splitlines()
    assert [line for line in text if "left as it is" in line] == [
        "  32 x layers.0 ... layers.31: left as it is [no_sdpa]"
    ]
    assert text[-2:] == [
        "graph 1: no attention",
        "total: 0 of 0 SDPA calls rewritten in 2 graphs; attention that is no SDPA call: 32 no_sdpa",
    ]


def test_reasons_are_in_the_readme() -> None:
    """The codes of attention that is no SDPA call, with the rest of the table."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for reason in OTHER_ATTENTION:
        assert f"`{reason.value}` |" in readme


def test_counters_and_logs(caplog) -> None:
    counters.clear()
    with caplog.at_level(logging.INFO, logger="tatten"):
        publish(GRAPH)
    assert counters["tatten"] == {"rewritten": 2, "declined": 1, "declined_dropout": 1}
    assert str(Report([GRAPH])) in caplog.text


def test_trace(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(
        torch._logging,
        "trace_structured",
        lambda name, metadata_fn, payload_fn: seen.append((metadata_fn(), payload_fn())),
    )
    publish(GRAPH)
    ((metadata, payload),) = seen
    assert metadata == {"name": "tatten_report", "encoding": "json"}
    assert [entry["kind"] for entry in json.loads(payload)] == ["rewritten", "rewritten", "declined"]
    assert json.loads(payload)[2]["decline"]["reason"] == "dropout"
