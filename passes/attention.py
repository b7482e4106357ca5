"""Find all attention of a graph: calls of SDPA, attention that is written out, and calls of `flex_attention`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from tatten.passes.describe import declined
from tatten.passes.eligible import check_transformed
from tatten.passes.findings import Declined, source_location
from tatten.passes.flex import find_flex, read_flex
from tatten.passes.flex_mask import DenseMask
from tatten.passes.input_numbers import settle_numbers
from tatten.passes.internal import or_nothing
from tatten.passes.other_attention import find_other_attention
from tatten.passes.reasons import Decline, Reason
from tatten.passes.run import Run
from tatten.passes.sdpa import SdpaCall, bind_sdpa, find_sdpa, sdpa_nodes
from tatten.passes.symbolic import tensor_of
from tatten.passes.tiled import untiled_call
from tatten.passes.written_out import WrittenOut, find_written_out, read_written_out
from tatten.passes.written_out_call import written_out_call


@dataclass(frozen=True)
class Attention:
    """The attention of a graph that may be rewritten, as nodes.

    Attributes:
        sdpa: calls of SDPA.
        written_out: for attention that is written out, the product with values and its softmax.
        places: the node before which attention that is written out has to be computed, by the product with values.
        flex: calls of `flex_attention`.
    """

    sdpa: tuple[Node, ...]
    written_out: dict[Node, Node]
    places: dict[Node, Node]
    flex: tuple[Node, ...]

    @property
    def nodes(self) -> list[Node]:
        """The nodes of all attention, in the order of their places."""
        return sorted([*self.sdpa, *self.written_out, *self.flex], key=lambda node: self.places.get(node, node))


def find_attention(graph: Graph, errors: list[Declined]) -> Attention:
    """Find the attention of a graph. An error that belongs to no call is appended to `errors`."""
    written_out = or_nothing(lambda: find_written_out(graph), errors)
    softmaxes = {product: softmax for product, softmax, _ in written_out}
    places = {product: place for product, _, place in written_out}
    return Attention(tuple(sdpa_nodes(graph)), softmaxes, places, tuple(find_flex(graph)))


def read_attention(node: Node, attention: Attention, run: Run) -> SdpaCall | Declined:
    """Return the attention at a node as a call of SDPA, whose tensors may be drafts, or the reason why it can't be."""
    if node in attention.written_out:
        call = _read_written_out(node, attention.written_out[node], run)
    elif node in attention.flex:
        call = _read_flex(node, run)
    else:
        call = bind_sdpa(node)
    while isinstance(call, SdpaCall) and (untiled := untiled_call(call, run.masks)) is not None:
        call = untiled
    return call


def _read_written_out(product: Node, softmax: Node, run: Run) -> SdpaCall | Declined:
    attention = read_written_out(softmax)
    if isinstance(attention, WrittenOut):
        # On a CPU Inductor fuses most attention that is written out, so a graph for each number would not pay.
        value = tensor_of(attention.value.node)
        may_fix = not run.fuses or (value is not None and value.device.type != "cpu")
        attention = settle_numbers(attention, run.may_guard, may_fix)
    sinks = attention.sinks() if isinstance(attention, WrittenOut) else attention
    if isinstance(sinks, Decline) or not isinstance(attention, WrittenOut):
        assert isinstance(sinks, Decline)
        return Declined(source_location(product), "", sinks)
    return written_out_call(attention, sinks, run.masks, fused=run.fuses)


def _read_flex(node: Node, run: Run) -> SdpaCall | Declined:
    flex = check_transformed(node.all_input_nodes) or read_flex(node, run.masks.drafts)
    if isinstance(flex, Decline):
        return Declined(source_location(node), "", flex)
    call, mask = flex
    return call if mask is None else dataclasses.replace(call, attn_mask=DenseMask(call, run.masks).of(mask))


def find_nested(gm: GraphModule, errors: list[Declined]) -> list[Declined]:
    """Find the attention in bodies of higher-order operators. It is not rewritten."""
    bodies = {name: x.graph for name, x in gm.named_modules() if isinstance(x, GraphModule) and x.graph is not gm.graph}
    findings = []
    for name, graph in bodies.items():
        findings += or_nothing(lambda name=name, graph=graph: _nested(name, graph), errors)  # type: ignore[misc]
    return findings


def _nested(name: str, graph: Graph) -> list[Declined]:
    nested = Decline(Reason.NESTED, f"inside `{name}`, the body of a higher-order operator")
    findings = [declined(call, nested) for call in find_sdpa(graph)]
    written_out = {product: softmax for product, softmax, _ in find_written_out(graph)}
    for product, softmax in written_out.items():
        attention = read_written_out(softmax)
        findings.append(Declined(source_location(product), "", attention if isinstance(attention, Decline) else nested))
    return [*findings, *find_other_attention(graph, {*written_out.values()})]
