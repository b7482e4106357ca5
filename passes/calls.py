"""Identify the PyTorch op that a node calls, by name and by schema.

Functions are compared by identity: `mylib::to` or a user's function named `contiguous` doesn't count as PyTorch's.
"""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from tatten.ops.moved import moved
from tatten.passes.symbolic import value_of

if TYPE_CHECKING:
    from torch._ops import OpOverload, OpOverloadPacket
else:
    OpOverload, OpOverloadPacket = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)


def _owners() -> tuple[Any, ...]:
    """Return the modules and classes in which PyTorch's functions and methods are looked up by name."""
    private = ("_special", "_nn", "_linalg", "_fft")  # modules such as `torch.special` take their functions from these
    for name in private:
        if not hasattr(torch._C, name):
            moved(f"torch._C.{name}", "it is missing", "its functions are unknown to the passes")
    private_modules = (getattr(torch._C, name) for name in private if hasattr(torch._C, name))
    return (torch, F, torch.Tensor, operator, *private_modules)


OWNERS = _owners()


def op_name(node: Node) -> str:
    """Return the name of the op that a node calls, or an empty string if it isn't PyTorch's.

    A method, a function and an aten overload of one op have the same name, such as `repeat_interleave`.
    """
    target = node.target
    if node.op == "call_method":
        return str(target)
    if node.op != "call_function":
        return ""
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        packet = target.overloadpacket if isinstance(target, OpOverload) else target
        namespace, _, name = str(packet).partition(".")
        return name if namespace == "aten" else ""
    return _name_of(target, type(value_of(node)))  # type: ignore[arg-type]


def nodes_of(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of the bodies of higher-order operators in it."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def calls_ops(gm: GraphModule) -> bool:
    """Return True if a graph, or the body of a higher-order operator in it, calls an op of tatten."""
    return any(str(node.target).startswith("tatten.") for node in nodes_of(gm))


def overloads(node: Node) -> tuple[OpOverload, ...]:
    """Return the overloads that a node may call; none if its target has no schema, such as a Python function."""
    target = node.target
    if not has_schemas():
        return ()
    if isinstance(target, OpOverload):
        return (target,)
    if isinstance(target, OpOverloadPacket):
        return _overloads(target)
    return () if isinstance(target, FunctionType) else _aten_overloads(op_name(node))


@functools.cache
def has_schemas() -> bool:
    """Return True if the schemas of ops can be read, as `overload._schema`."""
    try:
        _ = [(x.name, x.alias_info, x.kwarg_only) for x in torch.ops.aten.add_.Tensor._schema.arguments]
    except Exception as error:
        moved("torch._ops.OpOverload._schema", error, "ops count as unknown functions")
        return False
    return True


def schemas(node: Node) -> tuple[OpOverload, ...]:
    """Return the `overloads` of a node. For a Python function of PyTorch, return the overloads of the same name.

    The function may do more than these.
    """
    return overloads(node) or _aten_overloads(op_name(node))


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, positional or by keyword. `position` counts the tensor itself."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def where_arguments(node: Node) -> tuple[Any, Any, Any]:
    """Return condition, input and other of a `where`, called as a function or as a method of the input."""
    names = ("input", "condition", "other") if node.op == "call_method" else ("condition", "input", "other")
    arguments = {name: argument(node, i, name) for i, name in enumerate(names)}
    return arguments["condition"], arguments["input"], arguments["other"]


def cat_arguments(node: Node) -> tuple[Any, Any]:
    """Return the tensors and the dim of a `cat` or `stack`. The dim may also be named `axis`."""
    return argument(node, 0, "tensors"), argument(node, 1, "dim", node.kwargs.get("axis", 0))


def reached(start: Node, onward: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return `start` and all nodes that `onward` leads to, from each node to the next ones."""
    visited, frontier = {start}, [start]
    while frontier:
        new = [x for x in onward(frontier.pop()) if x not in visited]
        visited.update(new)
        frontier += new
    return visited


def only_adds_dims(index: Any) -> bool:
    """Return True if `x[index]` is all of `x`, in order."""
    parts: Sequence[Any] = index if isinstance(index, (list, tuple)) else (index,)
    return all(part is None or part is builtins.Ellipsis or part == slice(None) for part in parts)


def only_slices(index: Any) -> bool:
    """Return True if each part of an index is a slice, so that no dim is added, dropped or reordered."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is builtins.Ellipsis or isinstance(part, slice) for part in parts)


@functools.lru_cache(maxsize=1024)  # bounded, as the cache keeps a user's functions alive
def _name_of(function: Callable[..., Any], result_type: type) -> str:
    """Return the name of a function of PyTorch, or of a method of `result_type`; empty for others."""
    name = getattr(function, "__name__", "")
    if any(getattr(owner, name, None) is function for owner in (*OWNERS, result_type)):
        return name
    if (getattr(function, "__module__", None) or "").startswith("torch._dynamo.variables."):
        return name.removeprefix("prim").lstrip("_ ")  # Dynamo's wrappers of methods of DTensor
    return ""


@functools.cache
def _aten_overloads(name: str) -> tuple[OpOverload, ...]:
    packet = getattr(torch.ops.aten, name, None) if name else None
    return _overloads(packet) if isinstance(packet, OpOverloadPacket) else ()


@functools.cache
def _overloads(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    return tuple(getattr(packet, name) for name in packet.overloads())
