"""Calls of SDPA in a graph, with arguments bound to its parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from tatten.passes.symbolic import number_in

if TYPE_CHECKING:
    from tatten.ops.distributed.placement import Sharding
    from tatten.passes.local import Share
    from tatten.passes.picks import Picks

SDPA_TARGETS = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class SdpaCall:
    """A call of `F.scaled_dot_product_attention` with its arguments in the graph, or attention of another form.

    Attention of another form has the same arguments, and those that SDPA lacks. Its tensors may be drafts
    (`tatten.passes.drafts`).

    Attributes:
        node: the call, or the node before which other attention has to be computed.
        softcap, sinks: as `tatten.decode_attention` takes them; `sinks` is a node.
        form: how attention was written, for the report; empty for a call of SDPA.
        log_sums: nodes that compute the call's lse, in any dtype.
        path: nodes that may have no users once an op replaces the call.
        fused: whether the compiler of the graph would fuse these nodes.
        grouped: whether these nodes multiply a kv head by all of its query heads at once.
        origin: the node whose source location the report shows; None for `node`.
        draft_result: the draft that stands for SDPA's result; None if `node` computes it.
        outputs: the nodes that are replaced, each with a draft that is computed from the result.
        remarks: the last remarks of the report.
        sharding: the placement of the program's DTensors, whose local parts are the tensors of the call. The states of
            ranks are merged. None for plain tensors.
        picks: the keys that the program selected. The op reads only these, with the mask `picks.mask`.
        shares: the parts of the segments of keys and of values that this rank attends to, if they differ in placement.
    """

    node: Node
    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False
    softcap: float | None = None
    sinks: Node | None = None
    form: str = ""
    log_sums: tuple[Node, ...] = ()
    path: tuple[Node, ...] = ()
    fused: bool = False
    grouped: bool = False
    origin: Node | None = None
    draft_result: Node | None = None
    outputs: tuple[tuple[Node, Node], ...] = ()
    remarks: tuple[str, ...] = ()
    sharding: Sharding | None = None
    shares: tuple[tuple[Share, ...], tuple[Share, ...]] | None = None
    picks: Picks | None = None

    @property
    def source_node(self) -> Node:
        """The node with the source location of the call."""
        return self.origin or self.node

    @property
    def result(self) -> Node:
        """The node of SDPA's result, `[batch, heads, q_length, head_dim]`, or the draft that stands for it."""
        return self.draft_result or self.node

    @property
    def replaced(self) -> dict[Node, Node]:
        """The nodes that are replaced, each with a draft for it."""
        return dict(self.outputs) or {self.node: self.node}

    @functools.cached_property
    def vanishing(self) -> frozenset[Node]:
        """The nodes that nothing uses once an op replaces the call."""
        unused = {*self.replaced}
        for node in sorted(set(self.path), reverse=True):
            if unused.issuperset(node.users):
                unused.add(node)
        return frozenset(unused)

    @property
    def variant(self) -> dict[str, Any]:
        """The arguments that SDPA lacks, by name; empty for a call of SDPA."""
        arguments = {"softcap": self.softcap, "sinks": self.sinks}
        return {name: x for name, x in arguments.items() if x is not None}


def sdpa_nodes(graph: Graph) -> list[Node]:
    """Return all nodes of a Dynamo or export graph that call SDPA, in order."""
    return sorted(x for target in SDPA_TARGETS for x in graph.find_nodes(op="call_function", target=target))


def find_sdpa(graph: Graph) -> Iterator[SdpaCall]:
    """Yield all SDPA calls of a Dynamo or export graph, in order."""
    yield from map(bind_sdpa, sdpa_nodes(graph))


def bind_sdpa(node: Node) -> SdpaCall:
    """Return the call of SDPA that a node makes now. Rewriting a call may replace the arguments of the next call."""
    arguments: dict[str, Any] = {**dict(zip(POSITIONAL, node.args, strict=False)), **node.kwargs}
    numbers = {name: x for name in ("dropout_p", "scale") if (x := number_in(arguments.get(name))) is not None}
    return SdpaCall(node, **(arguments | numbers))
