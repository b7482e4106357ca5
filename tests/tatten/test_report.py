"""The report: the same in explain, logs, counters and trace, and made for people."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from provider_calls import provider_of_op
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

import tatten
from tatten.ops.cuda import providers, workload
from tatten.ops.cuda.tuning import Tuning
from tatten.passes.cost import Cost
from tatten.passes.findings import SourceLocation
from tatten.passes.latent_cost import LatentCost, Work
from tatten.passes.reasons import Decline, Reason
from tatten.passes.rewrite import Declined, GraphReport, Rewritten, rewrite
from tatten.report import Report, publish

pytestmark = pytest.mark.drawn(8)


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
        "graph 0: 3 of 4 attention calls rewritten",
        "3 x layers.0 ... layers.2: tatten.decode_attention.default",
        "125 KiB moved per step before, at most 25 KiB read now",
        "left as it is [no_gain]",
        "why   no mask, and 4 kv heads for 4 query heads as they are",
    ):
        assert part in text


@pytest.mark.parametrize("fn", ["x", None], ids=str)
def test_explain_of_no_function(fn: object) -> None:
    with pytest.raises(TypeError, match=f"`fn` must be callable, got {type(fn).__name__}"):
        tatten.explain(fn)


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


def test_work_before_and_after() -> None:
    """A call that was rewritten to attend to latents."""
    cost = LatentCost(Work(1 << 30, 10**12), Work(1 << 20, 2 * 10**9), saved_us=300.0, extra_us=20.0)
    location = SourceLocation("model.layers.0.attn", "a.py", 3, "F.sdpa(q, k, v)")
    report = Report([GraphReport((Rewritten(location, "tatten.latent", "q c w", cost, "one projection"),), 1.25)])
    assert str(report).splitlines()[1:-1] == [
        "  model.layers.0.attn: tatten.latent",
        "      line  a.py:3  F.sdpa(q, k, v)",
        "      with  q c w",
        "      moved 1 GiB per step before, at most 1 MiB now",
        "      flops 1e+12 per step before, at most 2e+09 now",
        "      note  one projection",
    ]


def test_text() -> None:
    assert str(Report([GRAPH])) == "\n".join(
        [
            "graph 0: 2 of 3 attention calls rewritten in 1.2 ms",
            "  2 x model.layers.0.attn ... model.layers.1.attn: tatten.op",
            "      line  a.py:3  F.sdpa(q, k, v)",
            "      with  q k v",
            "      KV    1 GiB moved per step before, at most 1 MiB read now",
            "  call: left as it is [dropout]",
            "      line  b.py:9  F.sdpa(x)",
            "      with  q",
            "      why   dropout_p is 0.1",
            "      helps decode with model.eval(), so that dropout_p is 0.0",
            "total: 2 of 3 attention calls rewritten in 1 graph; left as they are: 1 dropout",
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
        "graph 1: 2 of 3 attention calls rewritten in 1.2 ms",
        "graph 3: 0 of 0 attention calls rewritten in 2.0 ms",
        "graphs 0, 2, 4: no attention",
        "total: 2 of 3 attention calls rewritten in 5 graphs; left as they are: 1 dropout; "
        "attention that is no SDPA call: 3 no_sdpa",
    ]
    assert "  3 x 0.attn ... 1.attn: left as it is [no_sdpa]" in text
    assert str(Report([EMPTY])) == "graph 0: no attention\ntotal: 0 of 0 attention calls rewritten in 1 graph"


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
        weights = (x @ keys.mT).exp().masked_fill(~mask, 0)
        return weights / weights.sum(-1, keepdim=True) @ keys


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
        "total: 0 of 0 attention calls rewritten in 2 graphs; attention that is no SDPA call: 32 no_sdpa",
    ]


def test_every_reason_has_a_row_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/rewriting.md").read_text()
    for reason in Reason:
        assert f"\n| `{reason.value}`" in page, reason


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


def provider_in_report(dtype: torch.dtype, dim: int, kv_len: int, masked: bool) -> tuple[str, Node]:
    """Return the provider of SDPA on repeated heads that the report of its graph names, and the node of the op."""
    graph, mode = Graph(), FakeTensorMode()

    def add(node: Node, value: torch.Tensor) -> Node:
        node.meta["example_value"] = value
        return node

    with mode:
        query, key = (
            add(graph.placeholder(name), torch.empty(shape, dtype=dtype, device="cuda"))
            for name, shape in (("query", (1, 32, 1, dim)), ("key", (1, 8, kv_len, dim)))
        )
        mask = None
        if masked:
            mask = add(graph.placeholder("mask"), torch.empty(1, 1, 1, kv_len, dtype=torch.bool, device="cuda"))
        tensor = key.meta["example_value"]
        keys = add(graph.call_method("repeat_interleave", (key, 4), {"dim": 1}), tensor.repeat_interleave(4, dim=1))
    call = graph.call_function(F.scaled_dot_product_attention, (query, keys, keys, mask))
    graph.output((add(call, query.meta["example_value"]),))
    module = GraphModule({}, graph)
    (finding,) = rewrite(module).findings
    (op,) = module.graph.find_nodes(op="call_function", target=torch.ops.tatten.decode_attention.default)
    assert isinstance(finding, Rewritten)
    return finding.provider, op


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dim", [64, 100, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_report_names_the_provider_that_the_op_takes(dtype: torch.dtype, dim: int, masked: bool) -> None:
    """At 131072 keys, where the table has cuDNN."""
    provider, op = provider_in_report(dtype, dim, 131072, masked)
    args = [x.meta["example_value"] if isinstance(x, Node) and "example_value" in x.meta else x for x in op.args[:4]]
    assert provider == provider_of_op(*args)
    plain = not masked and dtype != torch.float32 and dim in (64, 128)
    assert provider == ("cudnn" if plain else "triton")


def test_the_report_says_whose_table_is_borrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "device_name", lambda device: "NVIDIA L40S")
    provider, _ = provider_in_report(torch.bfloat16, 128, 131072, masked=False)
    assert provider == "cudnn (provider table measured on NVIDIA H200, borrowed for NVIDIA L40S)"
    provider, _ = provider_in_report(torch.bfloat16, 128, 131072, masked=True)
    assert provider == "triton"


def test_the_report_says_where_flash_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "tuning_of", lambda *_: Tuning("a GPU", (9, 0), {1: {256: "flash"}}))
    monkeypatch.setattr(providers, "device_name", lambda device: "a GPU")
    provider, _ = provider_in_report(torch.bfloat16, 128, 4096, masked=False)
    assert provider == "flash"
    monkeypatch.setattr(workload, "current_flash_attention_impl", lambda: "FA4")
    provider, _ = provider_in_report(torch.bfloat16, 128, 4096, masked=False)
    assert provider == "triton (not flash: torch.nn.attention has FA4 in its place)"
