"""Identification of the PyTorch op that a node calls, by name and by schema.

Functions are compared by identity: neither `mylib::to` nor a user's function named `contiguous` is PyTorch's.
"""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from tatten.ops.moved import moved
from tatten.passes.symbolic import value_of

if TYPE_CHECKING:
    from torch._ops import OpOverload, OpOverloadPacket
else:
    OpOverload, OpOverloadPacket = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)


def _owners() -> tuple[Any, ...]:
    """The modules and classes that PyTorch's functions and methods are found in by name."""
    private = ("_special", "_nn", "_linalg", "_fft")  # `torch.special` and its like take their functions from these
    for name in private:
        if not hasattr(torch._C, name):
            moved(f"torch._C.{name}", "it is missing", "its functions are unknown to the passes")
    private_modules = (getattr(torch._C, name) for name in private if hasattr(torch._C, name))
    return (torch, F, torch.Tensor, operator, *private_modules)


OWNERS = _owners()


def op_name(node: Node) -> str:
    """The op's name, `repeat_interleave` for method, function and aten overload alike; empty if it isn't PyTorch's."""
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


def overloads(node: Node) -> tuple[OpOverload, ...]:
    """The overloads that a node may call; empty where its target has no schema, as a Python function."""
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
    """Tell whether the schemas of ops can be read, as `overload._schema`."""
    try:
        _ = [(x.name, x.alias_info, x.kwarg_only) for x in torch.ops.aten.add_.Tensor._schema.arguments]
    except Exception as error:
        moved("torch._ops.OpOverload._schema", error, "ops count as unknown functions")
        return False
    return True


def schemas(node: Node) -> tuple[OpOverload, ...]:
    """Like `overloads`, but by name for a Python function of PyTorch, too, which may do more than they do."""
    return overloads(node) or _aten_overloads(op_name(node))


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, positional or by keyword; `position` counts the tensor itself."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


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


@functools.lru_cache(maxsize=1024)  # a user's functions are not kept for ever
def _name_of(function: Callable[..., Any], made: type) -> str:
    """The name of a function that is PyTorch's or a method of what it returns; empty for others."""
    name = getattr(function, "__name__", "")
    if any(getattr(owner, name, None) is function for owner in (*OWNERS, made)):
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
