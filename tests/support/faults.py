"""Errors raised inside the passes, at the start or the end of each of their functions in turn."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from tatten import passes
from tatten.passes import internal

FOLDER = str(passes.__file__).removesuffix("__init__.py")


class Fault(Exception):
    """An error that nobody foresaw."""


def reached(run: Callable[[], Any]) -> dict[tuple[CodeType, str], int]:
    """How often `run()` enters and leaves each function of the passes, by its code and the event."""
    seen: Counter[tuple[CodeType, str]] = Counter()

    def profile(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event in ("call", "return") and is_of_passes(code):
            seen[code, event] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return dict(seen)


def is_of_passes(code: CodeType) -> bool:
    """Tell whether a function belongs to the passes, and not to the frame that contains their errors."""
    return (
        code.co_filename.startswith(FOLDER)
        and code.co_filename != internal.__file__
        and code.co_name not in ("rewrite", "<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>", "<module>")
    )


def with_fault(code: CodeType, event: str, nth: int, run: Callable[[], Any], error: type[BaseException] = Fault) -> Any:
    """`run()`, with an error raised as a function is entered or left for the nth time."""
    left = nth

    def profile(frame: FrameType, what: str, arg: object) -> None:
        nonlocal left
        if frame.f_code is code and what == event:
            left -= 1
            if left == 0:
                raise error(f"at the {event} of {code.co_qualname}")

    sys.setprofile(profile)
    try:
        return run()
    finally:
        sys.setprofile(None)
        assert left <= 0, f"{code.co_qualname} was not reached"


def copy_of(gm: GraphModule) -> GraphModule:
    """A graph with nodes and metas of its own."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node, before in zip(graph.nodes, gm.graph.nodes, strict=True):
        node.meta, node.name = dict(before.meta), before.name
    return GraphModule(gm, graph)


def state_of(gm: GraphModule) -> list[Any]:
    """All that a graph consists of: nodes, arguments, users and metas, and its code."""
    nodes: list[Any] = [
        (
            x.name,
            x.op,
            x.target,
            str(x.args),
            str(x.kwargs),
            [*map(str, x.users)],
            {k: id(v) for k, v in x.meta.items()},
        )
        for x in gm.graph.nodes
    ]
    return [gm.code, *nodes]


def captured(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[GraphModule, Callable[[GraphModule], Any]]:
    """The graph of `fn(*args)`, and a function that runs such a graph: its results and what its inputs hold then."""
    graphs: list[Any] = []

    def backend(gm: GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        copy = copy_of(gm)  # Dynamo takes values out of its own afterwards

        def call(*inputs: Any) -> Any:
            graphs.extend((copy, [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]))
            return gm.forward(*inputs)

        return call

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True, **options)(*args)
    gm, inputs = graphs

    def run(graph: GraphModule) -> Any:
        given = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        with torch.no_grad():
            return graph(*given), [x for x in given if isinstance(x, torch.Tensor)]

    return gm, run
