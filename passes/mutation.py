"""Which nodes of a Dynamo graph write to memory, and whether a tensor was written between two places."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Node

from tatten.passes.symbolic import same_storage, tensor_of

IN_PLACE_OPERATORS = frozenset(
    vars(operator)[name]
    for name in (
        *("setitem", "delitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "iconcat"),
    )
)


def written_arguments(node: Node) -> Iterator[Any]:
    """The arguments that `node` writes to.

    FX calls every `call_method` pure, and Inductor's pattern matcher does not know `setitem`: neither is asked.
    """
    if "out" in node.kwargs:
        yield from _flat(node.kwargs["out"])
    if node.op == "call_method":
        name = str(node.target)
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
            yield node.args[0]
    elif node.op == "call_function":
        if node.target in IN_PLACE_OPERATORS:
            yield node.args[0]
        elif isinstance(node.target, OpOverload):
            for i, arg in enumerate(node.target._schema.arguments):
                if arg.alias_info is not None and arg.alias_info.is_write:
                    yield from _flat(node.args[i] if i < len(node.args) else node.kwargs.get(arg.name))
        elif isinstance(node.target, OpOverloadPacket | HigherOrderOperator):  # which overload or body is not said
            yield from node.all_input_nodes
        else:
            name = getattr(node.target, "__name__", "")
            if name.endswith("_") and not name.endswith("__"):
                yield node.args[0] if node.args else next(iter(node.kwargs.values()))
            elif node.kwargs.get("inplace") is True:
                yield node.args[0] if node.args else node.kwargs.get("input")
            elif not _is_known_pure(node):
                yield from node.all_input_nodes
    elif node.op == "call_module":
        yield from node.all_input_nodes


def _is_known_pure(node: Node) -> bool:
    """Whether a Python function in the graph is PyTorch's or Python's own, whose names tell what they write."""
    if isinstance(node.target, str):
        return False
    module = getattr(node.target, "__module__", None) or ""
    return not module or module.split(".")[0] in ("torch", "_operator", "operator", "builtins", "math", "einops")


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from value
    elif value is not None:
        yield value


def written_between(tensor: Tensor, start: Node, stop: Node) -> Node | None:
    """The first node after `start` and before `stop`, in the graph's order, that may write to `tensor`'s memory."""
    node = start.next
    while node is not stop:
        for argument in written_arguments(node):
            written = tensor_of(argument)
            if written is None or same_storage(written, tensor):
                return node
        node = node.next
    return None
