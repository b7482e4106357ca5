"""Autocast: SDPA casts its arguments under `torch.autocast`, so its replacement has to cast them as well."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, Node

SETTERS = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("set_autocast"))


def sets_autocast(graph: Graph) -> bool:
    """Whether a graph sets autocast other than by a context manager, so that its state at a node is unknown."""
    return any(graph.find_nodes(op="call_function", target=setter) for setter in SETTERS)


def autocast_dtype(node: Node, device: str) -> torch.dtype | None:
    """The dtype that autocast computes in at a node of a Dynamo graph; None where it is off.

    A graph starts in the state it was compiled in, which Dynamo guards on, and enters and leaves regions by calls. The
    calls before the node are replayed.
    """
    calls = [
        x
        for target in (_enter_autocast, _exit_autocast)
        for x in node.graph.find_nodes(op="call_function", target=target)
    ]
    inside: dict[Node, Any] = {}
    try:
        for call in sorted(x for x in calls if x < node):
            if call.target is _enter_autocast:
                inside[call] = _enter_autocast(*call.args)
            else:
                _exit_autocast(inside.pop(call.args[0]))
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    finally:
        for mode in reversed(inside.values()):
            _exit_autocast(mode)
