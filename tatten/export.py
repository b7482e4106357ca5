"""`tatten.rewrite`: the passes of the backend, applied to a program of `torch.export`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from tatten import passes
from tatten.lowered import lower_ops
from tatten.passes import GraphReport, Rewritten
from tatten.passes.calls import OpOverload, calls_ops
from tatten.passes.internal import declined_graph
from tatten.passes.mutation import written_arguments
from tatten.passes.symbolic import same_storage, tensor_of
from tatten.report import publish

LIFTED = torch.ops.aten.lift_fresh_copy.default  # how an exported graph copies a `torch.tensor(...)` of numbers

NEEDS_OPS = "a process that loads the program has to import tatten first, unless its ops are decomposed"


def rewrite(exported_program: ExportedProgram) -> ExportedProgram:
    """Rewrite the decode attention of an exported program with the passes of the backend, without Dynamo.

    `tatten.recording`, the logs, the counters and the trace receive the report, as they do for the backend. AOTInductor
    compiles the Triton kernels of the ops into packages for CUDA.

    Args:
        exported_program: a program from `torch.export.export` or `torch.export.load`. It is not changed. Buffers that
            it writes to, such as a static cache, are also written by the result.

    Returns:
        A program with the same inputs, outputs, parameters and buffers, in the form that `run_decompositions({})`
        gives: no op is decomposed, and writes in place have become outputs of the signature. If there is nothing to
        rewrite, `exported_program` itself is returned, as after an internal error of tatten, which the report names
        `internal`.

    Raises:
        TypeError: `exported_program` is not an ExportedProgram.
        ValueError: the program writes to a constant. An export with `strict=False` makes constants of the tensors in a
            cache object.

    Examples:
        >>> import torch, tatten
        >>> import torch.nn.functional as F
        >>> class Attend(torch.nn.Module):
        ...     def forward(self, query, key, value, mask):
        ...         return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        >>> query, (key, value) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 2, 16384, 64)
        >>> program = torch.export.export(Attend(), (query, key, value, torch.arange(16384)[None] < 100))
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
    literals = _literals(exported_program)
    _check_constants(exported_program, literals)
    start = time.perf_counter()
    try:
        rewritten, report = _rewrite(exported_program, literals)
        needs = NEEDS_OPS if calls_ops(rewritten.graph_module) else ""
        lower_ops([tensor_of(node) for node in rewritten.graph.nodes])
    except Exception as error:
        milliseconds = (time.perf_counter() - start) * 1e3
        rewritten, report, needs = exported_program, GraphReport((declined_graph(error),), milliseconds), ""
    publish(dataclasses.replace(report, note=needs))
    return rewritten


def _rewrite(exported_program: ExportedProgram, literals: set[str]) -> tuple[ExportedProgram, GraphReport]:
    """Return the rewritten program, or the program itself if nothing was rewritten, and the report of the passes."""
    with _without_autocast():
        # This form has no writes in place. The passes would find them by the storage of the nodes' values, but
        # `torch.export.load` gives each node a storage of its own.
        program: ExportedProgram = exported_program.run_decompositions({})
        _restore_values(program)
        _write_literals(program, literals)
        report = passes.rewrite(program.graph_module, may_guard=False)
        if not any(isinstance(finding, Rewritten) for finding in report.findings):
            return exported_program, report
        _update_modules(program)
        # The passes also insert methods and functions of PyTorch. A new trace turns them into aten ops with values.
        return program.run_decompositions({}), report


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Turn autocast off: otherwise tracing puts its casts into the program."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _check_constants(program: ExportedProgram, literals: set[str]) -> None:
    """Raise ValueError if a program writes to a constant, for which PyTorch has no functional form.

    The program may write to copies of literals, though their values in the graph share a storage with the literals.
    """
    targets = {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    names = targets.keys() - literals
    constants = [(node, tensor_of(node)) for node in program.graph.nodes if node.name in names]
    for node in program.graph.nodes if constants else ():
        for written in written_arguments(node) if isinstance(node.target, OpOverload) else ():
            tensor = tensor_of(written)
            for constant, constant_tensor in constants:
                if tensor is not None and constant_tensor is not None and same_storage(tensor, constant_tensor):
                    raise ValueError(
                        f"tatten.rewrite: `exported_program` writes to the constant {targets[constant.name]!r} in "
                        f"`{node.name}`; a cache has to be buffers of the module, exported with strict=True"
                    )


def _literals(program: ExportedProgram) -> set[str]:
    """Return the names of inputs that stand for `torch.tensor(...)` in the program's code: only copies read them.

    An attribute or a buffer of a module is not a literal, as its value may change between two runs.
    """
    inputs = program.graph.find_nodes(op="placeholder")
    return {x.name for x in inputs if x.users and all(user.target is LIFTED for user in x.users)}


def _write_literals(program: ExportedProgram, literals: set[str]) -> None:
    """Replace each copy of a literal that is one number by `full`, whose number the passes can read."""
    numbers = {}
    for spec in program.graph_signature.input_specs:
        value = program.constants.get(spec.target or "")
        if spec.arg.name in literals and type(value) is Tensor and value.numel() == 1 and not value.is_complex():
            numbers[spec.arg.name] = value
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        value = numbers.get(node.args[0].name)
        if value is not None:
            args, options = (list(value.shape), value.item()), {"dtype": value.dtype, "device": value.device}
            with program.graph.inserting_before(node):
                full = program.graph.call_function(torch.ops.aten.full.default, args, options)
            full.meta.update(node.meta)
            node.replace_all_uses_with(full)
            program.graph.erase_node(node)


def _restore_values(program: ExportedProgram) -> None:
    """Give the nodes the values of a Dynamo graph: parameters are Parameters, and tensors require grad as inputs do.

    Only users' inputs that require grad pass this on. Parameters require grad by default, also for inference.
    """
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    requiring: set[Node] = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            requiring.update([node] if not requiring.isdisjoint(node.all_input_nodes) else [])
        elif node.op == "placeholder":
            if kinds[node.name] is InputKind.PARAMETER:
                node.meta["val"] = torch.nn.Parameter(value, value.requires_grad)
            elif kinds[node.name] is InputKind.USER_INPUT and value.requires_grad:
                requiring.add(node)
        elif not requiring.isdisjoint(node.all_input_nodes):
            requiring.add(node)
            if value.is_floating_point():
                node.meta["val"] = value.detach().requires_grad_()


def _update_modules(program: ExportedProgram) -> None:
    """Assign each node that the passes inserted to the module of the node that follows it.

    A module loses its signature if the passes removed one of its inputs or outputs.
    """
    stack = None
    for node in reversed(program.graph.nodes):
        stack = node.meta.get("nn_module_stack") or stack
        if node.op in ("call_function", "call_method") and stack:
            node.meta["nn_module_stack"] = stack
    names = {node.name for node in program.graph.nodes}
    for entry in program.module_call_graph:
        signature = entry.signature
        if signature and not names.issuperset(x.name for x in (*signature.inputs, *signature.outputs) if x.name):
            entry.signature = None
