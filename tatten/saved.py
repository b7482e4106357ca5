"""Compiled graphs in files: one that calls ops of tatten imports tatten when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch.fx import GraphModule


@dataclass(frozen=True)
class _Saved:
    """Wraps an object that is pickled, so that unpickling imports this module, and with it the ops, first."""

    content: Any

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _content, (self.content,)


def _content(content: Any) -> Any:
    return content


def calls_ops(gm: GraphModule) -> bool:
    """Tell whether a graph, or the body of a higher-order operator in it, calls an op of tatten."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    return any(str(node.target).startswith("tatten.") for graph in graphs for node in graph.nodes)


def save_with_ops(compiled: Callable[..., Any]) -> None:
    """Have `aot_compile` save a compiled graph in a way that loads in a process which hasn't imported tatten.

    Inductor and "aot_eager" give the functions that they return an attribute `serialize`, which makes the object that
    `save_compiled_function` pickles. A function without it can't be saved, and PyTorch says so.
    """
    serialize = getattr(compiled, "serialize", None) if isinstance(compiled, FunctionType) else None
    if callable(serialize):
        compiled.serialize = lambda: _Saved(serialize())  # type: ignore[attr-defined]
