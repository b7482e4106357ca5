"""Where in the user's program a node comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)')


@dataclass(frozen=True)
class Place:
    """A call in the user's program: the module that made it, and the line."""

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""


def place_of(node: Node) -> Place:
    """The innermost line and module of a node of a Dynamo graph; empty where the graph doesn't say."""
    stack = node.meta.get("nn_module_stack") or {}
    module = _module_path(str(list(stack.values())[-1][0])) if stack else ""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return Place(module)
    last = frames[-1]
    return Place(module, last["file"], int(last["line"]), last["code"].strip())


def _module_path(path: str) -> str:
    """`L['self'].model._modules['layers'][0]` as `model.layers.0`."""
    path = re.sub(r"^L\['(?:self|fn|mod|model)'\]\.?", "", path)
    path = re.sub(r"_modules\['([^']+)'\]", r"\1", path)
    path = re.sub(r"\._modules\b", "", path)
    return re.sub(r"\['?([^'\]]+)'?\]", r".\1", path).strip(".")
