"""All passes over one graph, and what came of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from tatten.passes.decode import DEFAULT_MAX_Q_LEN, apply_decode, kv_bytes, match_decode, shared_spans
from tatten.passes.heads import op_name
from tatten.passes.places import Place, place_of
from tatten.passes.reasons import Decline, Reason
from tatten.passes.sdpa import find_sdpa
from tatten.passes.symbolic import tensor_of


@dataclass(frozen=True)
class Rewritten:
    """An SDPA call that became a tatten op. Bytes are of K and V in one step: moved before, read at most after."""

    place: Place
    op: str
    shapes: str
    kv_bytes: tuple[int, int] | None


@dataclass(frozen=True)
class Declined:
    """An SDPA call that stayed as it was, or a graph without any."""

    place: Place
    shapes: str
    decline: Decline


@dataclass(frozen=True)
class GraphReport:
    """What the passes did to one graph."""

    findings: tuple[Rewritten | Declined, ...]
    milliseconds: float


def rewrite(gm: GraphModule, max_q_len: int = DEFAULT_MAX_Q_LEN) -> GraphReport:
    """Rewrite a Dynamo graph in place: every decode SDPA becomes a tatten op, everything else stays."""
    start = time.perf_counter()
    findings: list[Rewritten | Declined] = []
    spans: dict[Node, tuple[Node, Node]] = {}
    for call in find_sdpa(gm.graph):
        place, shapes = place_of(call.node), _shapes(call.query, call.key, call.value, call.attn_mask)
        match = match_decode(call, max_q_len)
        if isinstance(match, Decline):
            findings.append(Declined(place, shapes, match))
            continue
        # The bytes are read off nodes that `apply_decode` may erase.
        moved = kv_bytes(match)
        shapes = _shapes(call.query, match.key.base, match.value.base, call.attn_mask)
        op = apply_decode(match, shared_spans(match, spans))
        findings.append(Rewritten(place, str(op.target), shapes, moved))
    if any(isinstance(finding, Rewritten) for finding in findings):
        gm.graph.lint()
        gm.recompile()
    for name, body in gm.named_modules():
        if body is not gm and isinstance(body, GraphModule):
            findings += (
                Declined(
                    place_of(call.node),
                    _shapes(call.query, call.key, call.value, call.attn_mask),
                    Decline(Reason.NESTED, f"inside `{name}`, the body of a higher-order operator"),
                )
                for call in find_sdpa(body.graph)
            )
    if not findings:
        findings = [
            Declined(place_of(node), "", Decline(Reason.NO_SDPA, "attention written out: softmax of a matrix product"))
            for node in gm.graph.nodes
            if _is_written_out(node)
        ]
    return GraphReport(tuple(findings), (time.perf_counter() - start) * 1e3)


def _shapes(query: Node, key: Node, value: Node, mask: Node | None) -> str:
    parts = []
    for name, node in (("q", query), ("k", key), ("v", value), ("mask", mask)):
        tensor = tensor_of(node)
        if tensor is not None:
            parts.append(f"{name} {str(tensor.dtype)[6:]}{list(tensor.shape)}")
    return " ".join(parts)


def _is_written_out(node: Node) -> bool:
    """A softmax with a matrix product somewhere close above it: attention that no SDPA call stands for."""
    if op_name(node) not in ("softmax", "_softmax"):
        return False
    frontier = [node]
    for _ in range(8):
        frontier = [source for n in frontier for source in n.all_input_nodes]
        if any(op_name(n) in ("matmul", "bmm", "baddbmm", "einsum") for n in frontier):
            return True
    return False
