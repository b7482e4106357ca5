"""Writes to memory: the arguments that a node of a Dynamo graph writes, and writes to a tensor between two nodes.

A node counts as writing to all of its inputs unless schemas prove otherwise: the schemas of the op that it calls or,
for a PyTorch function written in Python, of the ops that the function calls in turn.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tatten.ops.picks import counted_from, key_indices, with_first, without_duplicates
from tatten.ops.sizes import ceil_div
from tatten.ops.storage import all_of, same_storage
from tatten.ops.watch import Watch
from tatten.passes.calls import OpOverload, argument, op_name, overloads, reached
from tatten.passes.symbolic import FakeTensor, hint, memory_of, number_hint, number_in, value_of

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
READING_FUNCTIONS = frozenset((without_duplicates, with_first, counted_from, key_indices, ceil_div))  # of tatten itself
DTENSOR_READS = ("from_local", "to_local", "redistribute", "full_tensor")

T = TypeVar("T")


def written_arguments(node: Node) -> Iterator[Node]:
    """Yield the arguments that `node` writes to, or all arguments if that is unknown.

    FX's `is_impure` isn't used, as it counts each `call_method` as pure, nor Inductor's, which doesn't know `setitem`.
    """
    target = node.target
    if inactive_dropout(node):
        return
    if node.op == "call_module":
        yield from node.all_input_nodes
    if node.op not in ("call_function", "call_method") or target in READING_OPERATORS | READING_FUNCTIONS:
        return
    if target in IN_PLACE_OPERATORS:
        yield from all_of(Node, node.args[0])
        return
    yield from all_of(Node, node.kwargs.get("out"))
    known = overloads(node)
    yield from all_of(Node, _written(known, node.args, node.kwargs))
    if not known and op_name(node) not in DTENSOR_READS:
        yield from _written_in_trial(node)


def inactive_dropout(node: Node) -> bool:
    """Return True if a node is a dropout that returns its input unchanged."""
    if op_name(node) not in ("dropout", "dropout_"):
        return False
    training = argument(node, 2, "training", node.kwargs.get("train", True))
    return number_in(argument(node, 1, "p", 0.5)) == 0 or training is False


def writes(node: Node) -> bool:
    """Return True if `node` may write to any argument, so that it must stay in the graph."""
    return any(True for _ in written_arguments(node))


def written_between(tensors: Sequence[Tensor], start: Node, stop: Node) -> Node | None:
    """Return the first node between `start` and `stop` that may write to one of `tensors`, or None."""
    if start.graph is not stop.graph or stop < start:
        return start  # a search forward from `start` would not reach `stop`
    tensors = [x for tensor in tensors for x in memory_of(tensor)]
    node = stop if start is stop else start.next
    while node is not stop:
        if node.op == "call_module":
            return node  # a module may write to anything
        if any(may_alias(x, tensors) for x in node.all_input_nodes) and any(
            may_alias(x, tensors) for x in written_arguments(node)
        ):
            return node
        node = node.next
    return None


def written_in(graph: Graph) -> list[Node] | None:
    """Return the nodes that any node of a graph may write to, or None if a module may write to anything."""
    if graph.find_nodes(op="call_module", sort=False):
        return None
    return [*dict.fromkeys(x for node in graph.nodes for x in written_arguments(node))]


def movers(graph: Graph) -> list[Node]:
    """Return the nodes that change a tensor's memory, shape or strides in place, such as `set_` or `transpose_`.

    Earlier nodes hold the same fake tensor, which no longer shows their memory and shape.
    """
    tagged = (node for node in graph.nodes if any(torch.Tag.inplace_view in x.tags for x in _in_place(node)))
    return [node for node in tagged if op_name(node) != "detach_"]


def mover_of(call: Node, among: Sequence[Node]) -> Node | None:
    """Return the first of the movers `among` that may affect `call` or a node that it depends on, or None.

    A change of shape affects only nodes that hold the same tensor. A change of memory also hides writes to others.
    """
    if not among:
        return None
    held_above = [value_of(node) for node in reached(call, lambda node: node.all_input_nodes)]
    for mover in among:
        moved = value_of(mover.args[0]) if mover.args and isinstance(mover.args[0], Node) else None
        if op_name(mover) not in RESHAPED_IN_PLACE or any(value is moved for value in held_above):
            return mover
    return None


def enters_inference_mode(graph: Graph) -> bool:
    """Return True if a graph enters inference mode: moving a node into that mode or out of it would change the node."""
    return any(getattr(node.target, "__name__", "") == "_enter_inference_mode" for node in graph.nodes)


def _in_place(node: Node) -> tuple[OpOverload, ...]:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "").split(".")[0]
    return overloads(node) if name.endswith("_") and node.op.startswith("call_") else ()


def may_alias(node: Node, tensors: Sequence[Tensor]) -> bool:
    """Return True if a write to the value of a node may change one of `tensors`, which own their storage."""
    value = value_of(node)
    if value is None:  # a result without inputs, such as the token of a context manager, holds no tensor
        return node.op != "call_function" or bool(node.all_input_nodes)
    return _holds(value, tensors)


def _holds(value: Any, tensors: Sequence[Tensor]) -> bool:
    if isinstance(value, Tensor):
        parts = memory_of(value)
        known = all(isinstance(x, FakeTensor) for x in (*parts, *tensors))
        return not known or any(_shares_storage(x, tensors) for x in parts)
    if isinstance(value, (list, tuple)):
        return any(_holds(x, tensors) for x in value)
    return not isinstance(value, (int, float, complex, str, SymInt, SymFloat, SymBool, type(None)))


def _shares_storage(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(same_storage(tensor, other) for other in others)


def _written(known: tuple[OpOverload, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for position, name in _written_by_schema(known):
        if position is not None and position < len(args):
            yield args[position]
        else:
            yield kwargs.get(name, kwargs.get("input") if name == "self" else None)


@functools.cache
def _written_by_schema(known: tuple[OpOverload, ...]) -> tuple[tuple[int | None, str], ...]:
    """Return position and name of each argument that an overload writes to; keyword-only ones have no position.

    The schema of batch norm does not show its writes to `running_mean` and `running_var`. The schemas of collectives
    such as `c10d::allreduce_` show writes only in the op's name.
    """
    all_written: dict[tuple[int | None, str], None] = {}
    for schema in (overload._schema for overload in known):
        arguments = [((None if x.kwarg_only else i, x.name), x.alias_info) for i, x in enumerate(schema.arguments)]
        written = [x for x, alias in arguments if (alias is not None and alias.is_write) or x[1].startswith("running_")]
        if not written and schema.name.endswith("_") and not schema.name.endswith("__"):
            written = [x for x, _ in arguments]
        all_written.update(dict.fromkeys(written))
    return tuple(all_written)


def _written_in_trial(node: Node) -> Iterator[Node]:
    """Yield the inputs that a node writes to when it runs on meta tensors, or all inputs if it can't run on them."""
    inputs = node.all_input_nodes
    stand_ins = {x: _stand_in(value_of(x)) for x in inputs}
    if not _may_run(node) or any(x is None for x in stand_ins.values()):
        yield from inputs
        return
    args = map_arg(node.args, stand_ins.__getitem__)
    kwargs = map_arg(node.kwargs, stand_ins.__getitem__)
    written: list[Tensor] = []

    def called(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        written.extend(all_of(Tensor, _written((func,), args, kwargs)))

    watch = Watch(called)
    try:
        with torch.no_grad(), watch:
            function = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
            function(*(args[1:] if isinstance(node.target, str) else args), **kwargs)
    except Exception:  # any kind: meta tensors have no values, and the node's code is unknown
        yield from inputs
        return
    yield from (x for x in inputs if any(_shares_storage(y, written) for y in all_of(Tensor, stand_ins[x])))


def _may_run(node: Node) -> bool:
    """Return True if an extra run of a node affects only its arguments, as with PyTorch's functions."""
    if node.op == "call_method":
        return True
    path = (getattr(node.target, "__module__", None) or "").split(".")
    return path[0] in ("torch", "einops") and path[:2] != ["torch", "distributed"]


def _stand_in(value: Any) -> Any:
    """Return a meta tensor or a number that stands in for a node's value, or None."""
    if isinstance(value, (list, tuple)):
        parts = [_stand_in(x) for x in value]
        return None if any(x is None for x in parts) else parts
    if isinstance(value, Tensor):
        sizes, strides = [hint(x) for x in value.shape], [hint(x) for x in value.stride()]
        if None in sizes or None in strides:
            return None
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")  # type: ignore[arg-type]
    if isinstance(value, SymFloat):
        return number_hint(value)
    return hint(value) if isinstance(value, int | SymInt) else value if isinstance(value, float) else None
