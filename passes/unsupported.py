"""Graphs that are left as they are, because their nodes do not show all that a rewrite would have to keep."""

from __future__ import annotations

from torch.fx import Graph, Node

from tatten.passes.reasons import Decline, Reason

FORWARD_MODE = {"_enter_dual_level", "_make_dual"}
STREAM_METHODS = {"wait_stream", "wait_event", "record_event", "record_stream"}


def check_graph(graph: Graph) -> Decline | None:
    """Return the reason to leave a graph alone, or None.

    Forward-mode differentiation keeps the tangents of tensors, and the ops of tatten have no derivatives. In a graph
    with several streams, a node that is moved past a wait, or that is inserted into another stream, reads memory too
    early.
    """
    for node in graph.nodes:
        if _name(node) in FORWARD_MODE:
            return Decline(Reason.TORCH_FUNC, f"`{node}` belongs to forward-mode differentiation")
        if _orders_streams(node):
            return Decline(Reason.STREAMS, f"`{node}` runs in a stream of its own, or orders streams")
    return None


def _orders_streams(node: Node) -> bool:
    if "stream" in (node.meta.get("custom") or {}):  # PyTorch 2.13 notes the stream of a node there
        return True
    if node.op == "call_method":
        return node.target in STREAM_METHODS
    module, name = getattr(node.target, "__module__", None) or "", _name(node).lower()
    if module.startswith("torch._ops"):  # the name of a custom op may be anything
        return module == "torch._ops.streams"
    return module.startswith("torch.") and ("stream" in name or "event" in name)


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""
