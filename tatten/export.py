"""`tatten.rewrite`: what the backend does to the graphs of Dynamo, done to a program of `torch.export`."""

from __future__ import annotations

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from tatten import passes
from tatten.passes import Rewritten
from tatten.report import publish


def rewrite(exported_program: ExportedProgram) -> ExportedProgram:
    """Rewrite the decode attention of an exported program: the passes of the backend, for what runs without Dynamo.

    The report goes where those of the backend go: to `tatten.recording`, the logs, the counters and the trace.

    Args:
        exported_program: a program from `torch.export.export` or `torch.export.load`, which stays as it is. Buffers
            that it writes to, such as a static cache, stay buffers that are written to.

    Returns:
        A program with the same inputs, outputs, parameters and buffers, in the form that `run_decompositions({})`
        gives: no op is decomposed, and writes in place have become outputs of the signature. If there is nothing to
        rewrite, `exported_program` itself.

    Raises:
        TypeError: `exported_program` isn't one.
        RuntimeError: PyTorch can't bring the program into that form, for one because it writes to a constant, as
            exports with `strict=False` do of a cache that is not registered as buffers.

    Examples:
        >>> import torch, tatten
        >>> import torch.nn.functional as F
        >>> class Attend(torch.nn.Module):
        ...     def forward(self, query, key, value, mask):
        ...         return F.scaled_dot_product_attention(query, key, value, mask)
        >>> query, (key, value) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 8, 4096, 64)
        >>> program = torch.export.export(Attend(), (query, key, value, torch.arange(4096)[None] < 100))
        >>> with tatten.recording() as report:
        ...     program = tatten.rewrite(program)
        >>> [call.op for call in report.rewritten]
        ['tatten.decode_attention.default']
    """
    if not isinstance(exported_program, ExportedProgram):
        raise TypeError(
            "tatten.rewrite: `exported_program` must be a torch.export.ExportedProgram, "
            f"got a {type(exported_program).__name__}; call torch.export.export on a module first"
        )
    # In this form nothing is written in place. The passes would find such writes by the storage of the nodes' values,
    # which `torch.export.load` gives each node anew.
    program: ExportedProgram = exported_program.run_decompositions({})
    _mark_gradients(program)
    report = passes.rewrite(program.graph_module, may_guard=False)
    publish(report)
    if not any(isinstance(finding, Rewritten) for finding in report.findings):
        return exported_program
    # The passes insert methods and functions of PyTorch, too: tracing again makes aten ops and the values of all nodes.
    rewritten: ExportedProgram = program.run_decompositions({})
    return rewritten


def _mark_gradients(program: ExportedProgram) -> None:
    """Let the values that depend on an input of the user that requires grad require it, too, as in a Dynamo graph.

    Export forgets that. Nothing follows from parameters, which require grad wherever nobody said otherwise.
    """
    given = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT}
    marked: set[Node] = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        if node.op == "placeholder":
            if is_float and node.name in given and value.requires_grad:
                marked.add(node)
        elif not marked.isdisjoint(node.all_input_nodes):
            marked.add(node)
            if is_float:
                node.meta["val"] = value.detach().requires_grad_()
