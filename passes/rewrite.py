"""All passes over one graph, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from tatten.ops.cuda.providers import Workload, borrowed_table, choose_provider
from tatten.passes.bifurcated import BifurcatedMatch, apply_bifurcated, match_bifurcated
from tatten.passes.cost import Cost
from tatten.passes.decode import DecodeMatch, apply_decode, match_decode
from tatten.passes.eligible import DEFAULT_MAX_Q_LEN, check_call
from tatten.passes.masks import Masks
from tatten.passes.mutation import mover_of, movers
from tatten.passes.other_attention import find_other_attention
from tatten.passes.reasons import Decline, Reason
from tatten.passes.sdpa import SdpaCall, find_sdpa
from tatten.passes.segments import find_segments, in_one
from tatten.passes.source_location import SourceLocation, source_location
from tatten.passes.symbolic import hint, tensor_of
from tatten.passes.tree import local_segments, merged_over, with_sharding


@dataclass(frozen=True)
class Rewritten:
    """An SDPA call that became a tatten op, and what that saves at least; `note` says why it isn't a better one."""

    place: SourceLocation
    op: str
    shapes: str
    cost: Cost | None
    note: str = ""
    provider: str = ""  # who computes it on a GPU, for the sizes of the example


@dataclass(frozen=True)
class Declined:
    """An SDPA call that stayed as it was, or attention that is no SDPA call."""

    place: SourceLocation
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
    masks = Masks()
    graphs = {name: body.graph for name, body in gm.named_modules() if isinstance(body, GraphModule)}
    others = [
        Declined(source_location(other.node), "", other.decline)
        for graph in graphs.values()
        for other in find_other_attention(graph)
    ]
    moving = movers(gm.graph)
    findings = [_rewrite_call(call, max_q_len, masks, moving) for call in find_sdpa(gm.graph)]
    if any(isinstance(finding, Rewritten) for finding in findings):
        gm.recompile()
    for name, graph in graphs.items():
        if graph is not gm.graph:
            nested = Decline(Reason.NESTED, f"inside `{name}`, the body of a higher-order operator")
            findings += (_declined(call, nested) for call in find_sdpa(graph))
    findings += others
    return GraphReport(tuple(findings), (time.perf_counter() - start) * 1e3)


def _rewrite_call(call: SdpaCall, max_q_len: int, masks: Masks, moving: Sequence[Node]) -> Rewritten | Declined:
    """Decide about one call, and change the graph. Shapes are read off nodes that this may erase."""
    call = with_sharding(call)
    decline = check_call(call, max_q_len)
    if decline is not None:
        return _declined(call, decline)
    mover = mover_of(call.node, moving)
    if mover is not None:
        detail = f"`{mover}` gives a tensor other memory or another shape in place"
        return _declined(call, Decline(Reason.WRITTEN, detail))
    place = source_location(call.node)
    keys, values = (local_segments(call, x, find_segments(x)) for x in (call.key, call.value))
    bifurcated = match_bifurcated(call, keys, values)
    if isinstance(bifurcated, BifurcatedMatch):
        shapes = _shapes(call, (x.base for x in bifurcated.keys), (x.base for x in bifurcated.values))
        op = apply_bifurcated(bifurcated, masks)
        return Rewritten(place, str(op.target), shapes, bifurcated.cost, merged_over(call), _provider(op))
    decode = match_decode(call, in_one(call.key, keys), in_one(call.value, values))
    if isinstance(decode, DecodeMatch):
        shapes = _shapes(call, [decode.key.base], [decode.value.base])
        op = apply_decode(decode, masks)
        notes = [merged_over(call)]
        if bifurcated is not None:
            notes.append(f"not bifurcated [{bifurcated.reason.value}]: {bifurcated.detail}")
        note = "; ".join(filter(None, [*notes, decode.doubt]))
        return Rewritten(place, str(op.target), shapes, decode.cost, note, _provider(op))
    return _declined(call, bifurcated or decode)


def _declined(call: SdpaCall, decline: Decline) -> Declined:
    return Declined(source_location(call.node), _shapes(call, [call.key], [call.value]), decline)


def _provider(op: Node) -> str:
    """Who will compute a rewritten call, as the op decides for the sizes of the example; empty on a CPU."""
    first = [x[0] if isinstance(x, (list, tuple)) else x for x in op.args[:3]]
    query, key, value = (tensor_of(x) for x in first)
    assert query is not None
    assert key is not None
    assert value is not None
    if query.device.type != "cuda":
        return ""
    is_decode = op.target is torch.ops.tatten.decode_attention.default
    plain = is_decode and all(x is None for x in (*op.args[3:5], *op.kwargs.values()))
    if plain and not all(hint(n) for x in (query, key, value) for n in x.shape):
        return "auto"
    work = Workload.of(query, key, value, plain, lambda n: hint(n) or 0)
    borrowed = borrowed_table(work)
    return choose_provider(work) + (f" ({borrowed})" if borrowed else "")


def _shapes(call: SdpaCall, keys: Iterable[Node], values: Iterable[Node]) -> str:
    named = [("q", call.query), *(("k", x) for x in keys), *(("v", x) for x in values), ("mask", call.attn_mask)]
    tensors = [(name, tensor) for name, node in named if (tensor := tensor_of(node)) is not None]
    return " ".join(f"{name} {str(tensor.dtype)[6:]}{list(tensor.shape)}" for name, tensor in tensors)
