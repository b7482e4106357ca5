"""Compile by Inductor with tatten's ops lowered to kernel launches, or with opaque ops if that fails.

The lowerings rest on private interfaces of Inductor, any of which may move in the next release. An error before code
generation leaves one call opaque (`tatten.ops.inductor.lowering`). A later error ends the compilation, and Inductor
compiles the graph once more, with all calls opaque and without the options in `PLAIN`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from tatten.ops.moved import moved
from tatten.passes.calls import calls_ops
from tatten.report import count

Compiled = Callable[..., Any]
# PyTorch calls combined kernels experimental. Early launches need `tatten.ops.inductor.waits`.
PLAIN = {"combo_kernels": False, "triton.enable_pdl": False}


def on_gpu(inputs: Iterable[object]) -> bool:
    """Return True if a tensor among the inputs is on a GPU."""
    return any(x.is_cuda for x in inputs if isinstance(x, Tensor))


def lower_ops(inputs: Iterable[object]) -> bool:
    """Let Inductor launch the kernels of tatten's ops itself in graphs on a GPU. Return True if it will."""
    return on_gpu(inputs) and _register()


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
        wrapper: the object by which `torch.compile` calls Inductor, with options in its attribute `config`.
        gm, inputs: as `torch.compile` passes them to a backend.
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
        compiled = compile_plainly(wrapper, gm, inputs)  # raises if the error is the graph's own
    finally:
        opaque.reset(token)
    failed(first)
    return compiled


def compile_plainly(wrapper: Any, gm: GraphModule, inputs: list[Tensor]) -> Compiled:
    """Compile a graph by Inductor without the lowerings, and with the options in `PLAIN`; see `compile_lowered`."""
    options = wrapper.config
    try:
        wrapper.config = {**options, **PLAIN}
        return wrapper(gm, inputs)  # type: ignore[no-any-return]
    finally:
        wrapper.config = options


def _is_restart(error: BaseException) -> bool:
    """Return True if the error asks Dynamo to trace again."""
    kind = getattr(torch._dynamo.exc, "RestartAnalysis", ())
    while not isinstance(error, kind) and error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, kind)


def _restorer(gm: GraphModule) -> Callable[[], None] | None:
    """Return a function that restores the current graphs and attributes of a module and its submodules.

    Inductor rewrites the graph in place, and a pass of the user's must not run on a graph that it has already changed.
    Return None for a graph without ops of tatten or one that can't be copied.
    """
    if not calls_ops(gm):
        return None
    modules = [x for x in gm.modules() if isinstance(x, GraphModule)]
    try:
        graphs = [_copied(module.graph) for module in modules]
    except Exception as error:
        moved("torch.fx.Graph._codegen", error, "errors of Inductor end the compilation")
        return None
    saved = []
    for module, graph in zip(modules, graphs, strict=True):
        copies = {name: dict(x) for name, x in vars(module).items() if type(x) is dict}
        saved.append((module, {**vars(module), **copies}, graph))

    def restore() -> None:
        for module, attributes, graph in saved:
            vars(module).clear()
            vars(module).update(attributes)
            module.graph = graph

    return restore


def _copied(graph: Graph) -> Graph:
    """Copy a graph like `copy.deepcopy`, except for the structure of the inputs: PyTorch warns of a copy of that."""
    copied, nodes = Graph(), dict[Node, Node]()
    copied_output: Any = copied.graph_copy(graph, nodes, return_output_node=True)
    results, output = copied_output
    copied.output(results).meta.update(output.meta)
    copied.set_codegen(graph._codegen)
    for old, new in nodes.items():  # Dynamo and AOTAutograd keep the sources of inputs in attributes of nodes
        vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})
    return copied
