"""Inductor with tatten's ops lowered to launches; with the ops opaque where that fails.

The lowerings rest on private interfaces of Inductor, any of which may move in the next release. An error before code is
generated leaves one call opaque (`tatten.ops.inductor.lowering`). A later error ends the compilation, so Inductor
compiles the graph once more, with all calls opaque.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from tatten.ops.moved import moved
from tatten.report import count
from tatten.saved import calls_ops

Compiled = Callable[..., Any]


def lower_ops(inputs: Iterable[object]) -> bool:
    """Have Inductor launch the kernels of tatten's ops itself, in graphs on a GPU; returns whether it will."""
    return any(x.is_cuda for x in inputs if isinstance(x, Tensor)) and _register()


@functools.cache
def _register() -> bool:
    try:
        from tatten.ops.inductor.custom_pass import with_lowerings
        from tatten.ops.inductor.lowering import register_lowerings

        with_lowerings({})
        register_lowerings(count)
    except Exception as error:  # of any kind: it's private API
        moved("torch._inductor", error, "Inductor calls the ops instead of launching their kernels")
        return False
    return True


def compile_lowered(wrapper: Any, gm: GraphModule, inputs: list[Tensor]) -> Compiled:
    """Compile a graph by Inductor, with its ops lowered.

    Args:
        wrapper: `torch.compile`'s own of Inductor, with options in its attribute `config`.
        gm, inputs: as `torch.compile` hands them to a backend.
    """
    from tatten.ops.inductor.custom_pass import with_lowerings
    from tatten.ops.inductor.lowering import failed, opaque

    options, restore = wrapper.config, _restorer(gm)
    try:
        wrapper.config = with_lowerings(options)
        return wrapper(gm, inputs)  # type: ignore[no-any-return]
    except Exception as error:
        if restore is None or _is_restart(error):
            raise
        first = error
    finally:
        wrapper.config = options
    restore()
    token = opaque.set(True)
    try:
        compiled: Compiled = wrapper(gm, inputs)  # raises if the error is the graph's own
    finally:
        opaque.reset(token)
    failed(first)
    return compiled


def _is_restart(error: BaseException) -> bool:
    """Tell whether Inductor asks Dynamo to trace again."""
    kind = getattr(torch._dynamo.exc, "RestartAnalysis", ())
    while not isinstance(error, kind) and error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, kind)


def _restorer(gm: GraphModule) -> Callable[[], None] | None:
    """Return a function that gives a module, and those within it, the graphs and attributes that they have now.

    Inductor rewrites the graph in place, and a pass of the user's must not see it twice. Returns None for a graph
    without ops of tatten, and where it can't be copied.
    """
    if not calls_ops(gm):
        return None
    modules = [x for x in gm.modules() if isinstance(x, GraphModule)]
    try:
        graphs = [_copied(module.graph) for module in modules]
    except Exception as error:
        moved("torch.fx.Graph._codegen", error, "errors of Inductor's are not outlived")
        return None
    saved = []
    for module, graph in zip(modules, graphs, strict=True):
        holders = {name: dict(x) for name, x in vars(module).items() if type(x) is dict}
        saved.append((module, {**vars(module), **holders}, graph))

    def restore() -> None:
        for module, attributes, graph in saved:
            vars(module).clear()
            vars(module).update(attributes)
            module.graph = graph

    return restore


def _copied(graph: Graph) -> Graph:
    """Like `copy.deepcopy(graph)`, which copies the structure of the inputs, too, and PyTorch warns of that."""
    made, nodes = Graph(), dict[Node, Node]()
    copied: Any = made.graph_copy(graph, nodes, return_output_node=True)
    results, output = copied
    made.output(results).meta.update(output.meta)
    made.set_codegen(graph._codegen)
    for old, new in nodes.items():  # Dynamo and AOTAutograd keep the sources of inputs in attributes of nodes
        vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})
    return made
