"""Capturing Dynamo graphs for the pass tests, and printing them for expecttest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tatten.passes import rewrite


def capture(fn: Callable[..., Any], *args: Any, grad: bool = False, **compile_kwargs: Any) -> GraphModule:
    """The one graph that Dynamo makes of `fn(*args)`."""
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        torch.compile(fn, backend=backend, fullgraph=True, **compile_kwargs)(*args)
    assert len(graphs) == 1
    return graphs[0]


def run_rewritten(fn: Callable[..., Any], *args: Any, **compile_kwargs: Any) -> tuple[Any, GraphModule, Any]:
    """The findings of the one graph of `fn(*args)`, the graph after the passes, and what it returns."""
    found: list[Any] = []

    def backend(gm: GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        found.extend((rewrite(gm).findings, gm))
        gm.graph.lint()
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(fn, backend=backend, fullgraph=True, **compile_kwargs)(*args)
    findings, gm = found
    return findings, gm, out


def name_of(placeholder: Node) -> str:
    """Return the name of an input, which Dynamo writes `l_x_`."""
    return placeholder.name.strip("_").removeprefix("l_").strip("_")


def listing(gm: GraphModule) -> str:
    """The calls of a graph, which has to be sound, a line each: names, targets and arguments."""
    gm.graph.lint()
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"return {_show(node.args[0])}")
            continue
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        args = [_show(arg) for arg in node.args] + [f"{name}={_show(arg)}" for name, arg in node.kwargs.items()]
        lines.append(f"{node.name} = {target}({', '.join(args)})")
    return "\n".join(lines)


def _show(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(map(_show, value))})"
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return repr(value)
