"""Which nodes of a Dynamo graph write to memory, and whether a tensor was written between two places."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor
from torch._ops import OperatorBase, OpOverload, OpOverloadPacket
from torch.fx import Node

from tatten.passes.symbolic import same_storage, tensor_of

IN_PLACE_NAMES = frozenset(
    (
        *("setitem", "delitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "iconcat"),
    )
)
IN_PLACE_OPERATORS = frozenset(getattr(operator, name) for name in IN_PLACE_NAMES)
READING_OPERATORS = frozenset(getattr(operator, name) for name in operator.__all__ if not name.endswith("_"))
READING_OPERATORS -= IN_PLACE_OPERATORS


def written_arguments(node: Node) -> Iterator[Any]:
    """The arguments that `node` writes to.

    FX calls every `call_method` pure, and Inductor's pattern matcher does not know `setitem`: neither is asked.
    """
    if "out" in node.kwargs:
        yield from _flat(node.kwargs["out"])
    if node.op == "call_method":
        if _names_a_write(str(node.target)):
            yield node.args[0]
    elif node.op == "call_function" and node.target not in READING_OPERATORS:
        target = node.target
        if target in IN_PLACE_OPERATORS or _names_a_write(getattr(target, "__name__", "")) or _is_in_place(node):
            yield node.args[0] if node.args else next(iter(node.kwargs.values()))
        elif isinstance(target, OpOverload):
            for i, arg in enumerate(target._schema.arguments):
                if arg.alias_info is not None and arg.alias_info.is_write:
                    yield from _flat(node.args[i] if i < len(node.args) else node.kwargs.get(arg.name))
        elif isinstance(target, (OpOverloadPacket, OperatorBase)) or not _is_known(target):
            yield from node.all_input_nodes  # which overload, or what its body does, is not said
    elif node.op == "call_module":
        yield from node.all_input_nodes


def _names_a_write(name: str) -> bool:
    """`add_`, `__setitem__`, `__iadd__`: but not `__getitem__` or `__init__`."""
    if not name.endswith("_"):
        return False
    return not (name.startswith("__") and name.endswith("__")) or name.strip("_") in IN_PLACE_NAMES


def _is_in_place(node: Node) -> bool:
    """Whether a function like `F.relu` is called with `inplace`, by name or by position, or may be."""
    if not isinstance(node.target, FunctionType):
        return False
    signature = inspect.signature(node.target)
    if "inplace" not in signature.parameters:
        return False
    return signature.bind(*node.args, **node.kwargs).arguments.get("inplace", False) is not False


def _is_known(target: Any) -> bool:
    """Whether a function is PyTorch's or Python's own, whose names tell what they write."""
    module = getattr(target, "__module__", None) or ""
    return not module or module.split(".")[0] in ("torch", "_operator", "operator", "builtins", "math", "einops")


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from value
    elif value is not None:
        yield value


def written_between(tensors: Sequence[Tensor], start: Node, stop: Node) -> Node | None:
    """The first node after `start` and before `stop`, in the graph's order, that may write to one of `tensors`."""
    node = start.next
    while node is not stop:
        for argument in written_arguments(node):
            written = tensor_of(argument)
            if written is None or any(same_storage(written, tensor) for tensor in tensors):
                return node
        node = node.next
    return None
