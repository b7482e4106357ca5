"""Reports of rewritten and declined calls, for `tatten.explain`, the logs, the counters and the trace."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from tatten.ops.moved import moved, moved_notes
from tatten.passes import Declined, GraphReport, Rewritten
from tatten.passes.byte_sizes import shown_bytes
from tatten.passes.cost import Cost
from tatten.passes.index_cost import IndexCost
from tatten.passes.internal import decline_internal
from tatten.passes.latent_cost import LatentCost
from tatten.passes.reasons import OTHER_ATTENTION, Reason

log = logging.getLogger("tatten")
_recorders: ContextVar[tuple[Report, ...]] = ContextVar("tatten_recorders", default=())


@dataclass
class Report:
    """The findings in all graphs that the backend and `tatten.rewrite` saw. Print it to read them.

    `tatten.explain` and `tatten.recording` make reports.

    Examples:
        >>> import torch, tatten
        >>> print(tatten.explain(torch.add, torch.ones(2), torch.ones(2)))
        graph 0: no attention
        total: 0 of 0 attention calls rewritten in 1 graph
    """

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def rewritten(self) -> list[Rewritten]:
        """SDPA calls, and scores of indexers (`attention=False`), that became tatten ops, in order.

        Examples:
            >>> import torch, tatten
            >>> import torch.nn.functional as F
            >>> query, (key, value) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 2, 16384, 64)
            >>> mask = torch.arange(16384)[None] < 100
            >>> report = tatten.explain(F.scaled_dot_product_attention, query, key, value, mask, enable_gqa=True)
            >>> [call.op for call in report.rewritten]
            ['tatten.decode_attention.default']
        """
        return [x for graph in self.graphs for x in graph.findings if isinstance(x, Rewritten)]

    @property
    def declined(self) -> list[Declined]:
        """SDPA calls and scores of indexers that stayed, and attention that isn't an SDPA call, each with its reason.

        Examples:
            >>> import torch, tatten
            >>> import torch.nn.functional as F
            >>> query = key = value = torch.randn(1, 8, 512, 64)  # as many queries as in a prefill
            >>> report = tatten.explain(F.scaled_dot_product_attention, query, key, value)
            >>> [call.decline.detail for call in report.declined]
            ['q_length is 512, max_q_len is 16']
        """
        return [x for graph in self.graphs for x in graph.findings if isinstance(x, Declined)]

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "tatten: no graph was compiled (all was compiled before, nothing can be traced, or `generate` ran on a "
                "CPU, where it compiles only if it is told to)"
            )
        lines, empty = [], []
        for i, graph in enumerate(self.graphs):
            if graph.findings:
                lines.append(f"graph {i}: {_rewritten(graph.findings)} in {graph.milliseconds:.1f} ms")
                lines += [f"  note: {graph.note}"] if graph.note else []
                lines += (f"  {line}" for group in _groups(graph) for line in _describe(group))
            elif graph.note:
                lines += [f"graph {i}: no attention", f"  note: {graph.note}"]
            else:
                empty.append(i)
        if empty:
            lines.append(f"graph{'s' * (len(empty) > 1)} {', '.join(map(str, empty))}: no attention")
        return "\n".join([*lines, self._total()])

    def _total(self) -> str:
        graphs = len(self.graphs)
        findings = [finding for graph in self.graphs for finding in graph.findings]
        declined = Counter(finding.decline.reason for finding in self.declined)
        total = f"total: {_rewritten(findings)} in {graphs} graph{'s' * (graphs > 1)}"
        for title, is_other in (("left as they are", False), ("attention that is no SDPA call", True)):
            counts = [
                f"{n} {reason.value}" for reason, n in declined.items() if (reason in OTHER_ATTENTION) is is_other
            ]
            if counts:
                total += f"; {title}: {', '.join(counts)}"
        return total


def _rewritten(findings: Sequence[Rewritten | Declined]) -> str:
    """Return how many calls, and how many scores of indexers, were rewritten."""
    attention, scores = [x for x in findings if x.attention], [x for x in findings if not x.attention]
    rewritten = sum(isinstance(x, Rewritten) for x in attention)
    calls = sum(not (isinstance(x, Declined) and x.decline.reason in OTHER_ATTENTION) for x in attention)
    counts = f"{rewritten} of {calls} attention calls rewritten"
    if scores:
        rewritten = sum(isinstance(x, Rewritten) for x in scores)
        counts += f", and the scores of {rewritten} of {len(scores)} indexers"
    return counts


def _groups(graph: GraphReport) -> list[list[Rewritten | Declined]]:
    """Group the findings that differ only in the number of their layer."""
    groups: dict[Any, list[Rewritten | Declined]] = {}
    for finding in graph.findings:
        layerless = re.sub(r"(?<![^.])\d+(?![^.])", "*", finding.location.module)
        result = (
            (finding.op, finding.cost, finding.note, finding.provider)
            if isinstance(finding, Rewritten)
            else finding.decline.reason
        )
        shapes = re.sub(r"s\d+", "s", finding.shapes)
        groups.setdefault((layerless, finding.location.file, finding.location.line, shapes, result), []).append(finding)
    return list(groups.values())


def _describe(group: list[Rewritten | Declined]) -> Iterator[str]:
    first, last = group[0], group[-1]
    module = first.location.module
    if len(group) > 1:
        to_last = "" if last.location.module == module else f" ... {last.location.module}"
        module = f"{len(group)} x {module or 'call'}{to_last}"
    if isinstance(first, Rewritten):
        yield f"{module or 'call'}: {first.op}"
    else:
        yield f"{module or 'call'}: left as it is [{first.decline.reason.value}]"
    if first.location.file:
        yield f"    line  {first.location.file}:{first.location.line}  {first.location.code}"
    if first.shapes:
        yield f"    with  {first.shapes}"
    if isinstance(first, Rewritten):
        if first.cost is not None:
            yield from _costs(first.cost)
        if first.provider:
            yield f"    by    {first.provider}"
        if first.note:
            yield f"    note  {first.note}"
    else:
        yield f"    why   {first.decline.detail}"
        yield f"    helps {first.decline.reason.help}"


def _costs(cost: Cost | LatentCost | IndexCost) -> Iterator[str]:
    if isinstance(cost, IndexCost):
        yield f"    moved {shown_bytes(cost.moved)} per step before, at most {shown_bytes(cost.read)} now"
        return
    if isinstance(cost, LatentCost):
        before, now = cost.projected, cost.absorbed
        yield f"    moved {shown_bytes(before.bytes)} per step before, at most {shown_bytes(now.bytes)} now"
        yield f"    flops {before.flops:.3g} per step before, at most {now.flops:.3g} now"
        return
    yield f"    KV    {shown_bytes(cost.moved)} moved per step before, at most {shown_bytes(cost.read)} read now"
    if cost.segments > 1:
        yield f"    cost  {cost}"


@contextlib.contextmanager
def recording() -> Iterator[Report]:
    """Collect the reports of all graphs that the backend and `tatten.rewrite` see inside the block, in this thread.

    Examples:
        >>> import torch, tatten
        >>> import torch.nn.functional as F
        >>> query, (key, value) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 2, 16384, 64)
        >>> attend = torch.compile(F.scaled_dot_product_attention, backend="tatten", options={"inner": "eager"})
        >>> with tatten.recording() as report:
        ...     out = attend(query, key, value, torch.arange(16384)[None] < 100, enable_gqa=True)
        >>> len(report.rewritten)
        1
    """
    report = Report()
    token = _recorders.set((*_recorders.get(), report))
    try:
        yield report
    finally:
        _recorders.reset(token)


def count(name: str) -> None:
    """Add 1 to a counter of `torch._dynamo.utils.counters["tatten"]`."""
    try:
        from torch._dynamo.utils import counters  # imports Triton

        counters["tatten"][name] += 1
    except Exception as error:  # of any kind: a report is no reason to fail
        moved("torch._dynamo.utils.counters", error, "nothing is counted")


def publish(graph: GraphReport) -> None:
    """Add a graph's report to the recordings, the log (TORCH_LOGS=tatten), the counters and the structured trace.

    The report also names the private APIs that have moved. Call this after compilation, during which Dynamo may start
    over and replace the graph. An error of reporting is logged and never raised.
    """
    try:
        _count_findings(graph)
        _trace(graph)
    except Exception as error:
        log.warning("tatten: a report is incomplete, please open an issue: %s", decline_internal(error).detail)
    graph = dataclasses.replace(graph, note="; ".join(filter(None, (graph.note, *moved_notes()))))
    for report in _recorders.get():
        report.graphs.append(graph)
    errors = [x.decline for x in graph.findings if isinstance(x, Declined) and x.decline.reason is Reason.INTERNAL]
    if errors:
        log.warning("tatten: %s: %s", errors[0].detail, Reason.INTERNAL.help)
    log.info("%s", Report([graph]))


def _count_findings(graph: GraphReport) -> None:
    for finding in graph.findings:
        if isinstance(finding, Rewritten):
            count("rewritten")
        else:
            count("declined")
            count(f"declined_{finding.decline.reason.value}")


def _trace(graph: GraphReport) -> None:
    try:
        torch._logging.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": "tatten_report", "encoding": "json"},
            payload_fn=lambda: json.dumps([_as_json(finding) for finding in graph.findings]),
        )
    except Exception as error:  # of any kind: a report is no reason to fail
        moved("torch._logging.trace_structured", error, "the trace has no reports")


def _as_json(finding: Rewritten | Declined) -> dict[str, Any]:
    return {"kind": type(finding).__name__.lower(), **dataclasses.asdict(finding)}
