"""Autocast: SDPA casts its arguments under `torch.autocast`, so its replacement has to cast them as well."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from tatten.ops.moved import moved

_FALLBACK = "attention in graphs that set autocast is left as it is"
try:
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
except ImportError as error:
    moved("torch.amp.autocast_mode._enter_autocast", error, _FALLBACK)
    _enter_autocast = _exit_autocast = None  # type: ignore[assignment]

SETTERS = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("set_autocast"))


def sets_autocast(graph: Graph) -> bool:
    """Return True if a graph sets autocast other than by a context manager, so that its state at a node is unknown."""
    return any(graph.find_nodes(op="call_function", target=setter) for setter in SETTERS)


def autocast_unknown(graph: Graph) -> str | None:
    """Return the reason why the state of autocast is unknown in a graph, or None if it is known."""
    if _enter_autocast is None:
        unknown = (x for x in graph.nodes if "autocast" in getattr(x.target, "__name__", ""))
        return next((f"`{x.target.__name__}` is a function that may set autocast" for x in unknown), None)
    if graph.find_nodes(op="call_function", target=_enter_autocast):
        try:
            autocast_dtype(next(iter(reversed(graph.nodes))), "cpu")
        except Exception as error:
            return moved("torch.amp.autocast_mode._enter_autocast", error, _FALLBACK)
    return None


def autocast_dtype(node: Node, device: str) -> torch.dtype | None:
    """Return the dtype that autocast computes in at a node of a Dynamo graph, or None if autocast is off.

    A graph starts in the state of autocast at its compilation, which Dynamo guards on. It enters and leaves regions by
    calls. The calls before the node are replayed.
    """
    calls = [
        x
        for target in (_enter_autocast, _exit_autocast)
        for x in node.graph.find_nodes(op="call_function", target=target)
    ]
    entered: dict[Node, Any] = {}
    try:
        for call in sorted(x for x in calls if x < node):
            if call.target is _enter_autocast:
                entered[call] = _enter_autocast(*call.args)
            else:
                _exit_autocast(entered.pop(call.args[0]))
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    finally:
        for mode in reversed(entered.values()):
            _exit_autocast(mode)
