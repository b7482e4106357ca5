"""Which nodes of a Dynamo graph write to memory, and whether a tensor was written between two places.

A node is taken to write to all of its inputs unless it is known which it does write to: from the schemas of what it
calls, or, for a function of PyTorch's that is written in Python, from those of the ops that it calls in turn.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from tatten.passes.calls import op_name, overloads
from tatten.passes.symbolic import held, hint, same_storage, value_of

IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("setitem", "delitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "iconcat"),
    )
)
READING_OPERATORS = frozenset((getattr, *(getattr(operator, name) for name in operator.__all__ if name != "call")))
READING_OPERATORS -= IN_PLACE_OPERATORS
RESHAPED_IN_PLACE = {"squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "as_strided_"}
DTENSOR_READS = ("from_local", "to_local", "redistribute", "full_tensor")

T = TypeVar("T")


def written_arguments(node: Node) -> Iterator[Node]:
    """The arguments that `node` writes to, as far as it is known; else all of them.

    FX calls every `call_method` pure, and Inductor's pattern matcher does not know `setitem`: neither is asked.
    """
    target = node.target
    if node.op == "call_module":
        yield from node.all_input_nodes
    if node.op not in ("call_function", "call_method") or target in READING_OPERATORS:
        return
    if target in IN_PLACE_OPERATORS:
        yield from _all_of(Node, node.args[0])
        return
    yield from _all_of(Node, node.kwargs.get("out"))
    known = overloads(node)
    yield from _all_of(Node, _written(known, node.args, node.kwargs))
    if not known and op_name(node) not in DTENSOR_READS:
        yield from _written_in_trial(node)


def writes(node: Node) -> bool:
    """Whether `node` may write to anything: then it is no mere copy, and has to stay."""
    return any(True for _ in written_arguments(node))


def written_between(tensors: Sequence[Tensor], start: Node, stop: Node) -> Node | None:
    """The first node after `start` and before `stop`, in the graph's order, that may write to one of `tensors`."""
    tensors = [held(tensor) for tensor in tensors]
    node = start.next
    while node is not stop:
        if node.op == "call_module":
            return node  # its parameters may be anything
        if any(_may_alias(x, tensors) for x in node.all_input_nodes) and any(
            _may_alias(x, tensors) for x in written_arguments(node)
        ):
            return node
        node = node.next
    return None


def movers(graph: Graph) -> list[Node]:
    """The nodes that give a tensor other memory, shape or strides in place, as `set_` or `transpose_`.

    Nodes before it hold the same fake tensor, which then tells nothing of the memory and shape that they had.
    """
    tagged = (node for node in graph.nodes if any(torch.Tag.inplace_view in x.tags for x in _in_place(node)))
    return [node for node in tagged if op_name(node) != "detach_"]


def mover_of(call: Node, among: Sequence[Node]) -> Node | None:
    """The first of the movers `among` that leaves in doubt what `call` is or is made of.

    One that changes the shape alone does so for the nodes that hold its tensor; other memory, for what is written, too.
    """
    if not among:
        return None
    above, frontier = {call}, [call]
    while frontier:
        new = [source for source in frontier.pop().all_input_nodes if source not in above]
        above.update(new)
        frontier += new
    held_above = [value_of(node) for node in above]
    for mover in among:
        moved = value_of(mover.args[0]) if mover.args and isinstance(mover.args[0], Node) else None
        if op_name(mover) not in RESHAPED_IN_PLACE or any(value is moved for value in held_above):
            return mover
    return None


def _in_place(node: Node) -> tuple[OpOverload, ...]:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "").split(".")[0]
    return overloads(node) if name.endswith("_") and node.op.startswith("call_") else ()


def _may_alias(node: Node, tensors: Sequence[Tensor]) -> bool:
    """Whether writing to what a node stands for may change one of `tensors`."""
    value = value_of(node)
    if value is None:  # what was made of nothing, as the token of a context manager, holds no tensor
        return node.op != "call_function" or bool(node.all_input_nodes)
    return _holds(value, tensors)


def _holds(value: Any, tensors: Sequence[Tensor]) -> bool:
    if isinstance(value, Tensor):
        return any(same_storage(value, tensor) for tensor in tensors)
    if isinstance(value, (list, tuple)):
        return any(_holds(x, tensors) for x in value)
    return not isinstance(value, (int, float, complex, str, SymInt, SymFloat, SymBool, type(None)))


def _written(known: tuple[OpOverload, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for position, name in _written_by_schema(known):
        if position is not None and position < len(args):
            yield args[position]
        else:
            yield kwargs.get(name, kwargs.get("input") if name == "self" else None)


@functools.cache
def _written_by_schema(known: tuple[OpOverload, ...]) -> tuple[tuple[int | None, str], ...]:
    """Position and name of each argument that one of the overloads writes to; no position for one that has a name only.

    Schemas of batch norm don't tell that they write to `running_mean` and `running_var`; those of collectives
    (`c10d::allreduce_`) tell nothing but by the op's name.
    """
    found: dict[tuple[int | None, str], None] = {}
    for schema in (overload._schema for overload in known):
        places = [((None if x.kwarg_only else i, x.name), x.alias_info) for i, x in enumerate(schema.arguments)]
        written = [x for x, alias in places if (alias is not None and alias.is_write) or x[1].startswith("running_")]
        if not written and schema.name.endswith("_") and not schema.name.endswith("__"):
            written = [x for x, _ in places]
        found.update(dict.fromkeys(written))
    return tuple(found)


class _Watch(TorchDispatchMode):
    """Keeps the tensors that ops write to while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Tensor] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.written += _all_of(Tensor, _written((func,), args, kwargs))
        return func(*args, **kwargs)


def _written_in_trial(node: Node) -> Iterator[Node]:
    """The inputs that ops write to when the node is run on meta tensors; all of them if it can't be run so."""
    inputs = node.all_input_nodes
    stand_ins = {x: _stand_in(value_of(x)) for x in inputs}
    if not _may_run(node) or any(x is None for x in stand_ins.values()):
        yield from inputs
        return
    args = map_arg(node.args, stand_ins.__getitem__)
    kwargs = map_arg(node.kwargs, stand_ins.__getitem__)
    watch = _Watch()
    try:
        with torch.no_grad(), watch:
            function = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
            function(*(args[1:] if isinstance(node.target, str) else args), **kwargs)
    except Exception:  # which may be any: a meta tensor has no values, and what the node does is not known
        yield from inputs
        return
    yield from (x for x in inputs if _holds(stand_ins[x], watch.written))


def _may_run(node: Node) -> bool:
    """Whether to run a node once more has no effect but on its arguments: PyTorch's own functions compute only."""
    if node.op == "call_method":
        return True
    path = (getattr(node.target, "__module__", None) or "").split(".")
    return path[0] in ("torch", "einops") and path[:2] != ["torch", "distributed"]


def _stand_in(value: Any) -> Any:
    """A meta tensor or a number in place of what a node stands for; None if there is none."""
    if isinstance(value, (list, tuple)):
        parts = [_stand_in(x) for x in value]
        return None if any(x is None for x in parts) else parts
    if isinstance(value, Tensor):
        sizes, strides = [hint(x) for x in value.shape], [hint(x) for x in value.stride()]
        if None in sizes or None in strides:
            return None
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")  # type: ignore[arg-type]
    return hint(value) if isinstance(value, int | SymInt) else value if isinstance(value, float) else None


def _all_of(kind: type[T], value: Any) -> Iterator[T]:
    """The nodes, or the tensors, in an argument, however they are nested."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple, Iterator)):
        for x in value:
            yield from _all_of(kind, x)
