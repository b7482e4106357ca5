"""Queries about shapes and storage. Only functions named `guard_*` add guards.

All use of the symbolic-shape API is in this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

from torch import SymFloat, SymInt, Tensor
from torch.fx import Node

from tatten.ops import storage
from tatten.ops.moved import moved

try:
    from torch._subclasses.fake_tensor import FakeTensor
except ImportError as error:
    moved("torch._subclasses.fake_tensor.FakeTensor", error, "attention on fake tensors is left as it is")

    class FakeTensor(Tensor):  # type: ignore[no-redef]
        """A class without instances."""


T = TypeVar("T")
_EXPR = "torch.SymFloat.node.expr"


def value_of(node: Node) -> Any:
    """Return the value of a node, such as a fake tensor or a size, or None if the graph has none."""
    return node.meta.get("example_value", node.meta.get("val"))


def tensor_of(x: Any) -> Tensor | None:
    """Return the fake tensor of a node, or None if its value isn't one tensor."""
    value = value_of(x) if isinstance(x, Node) else None
    return value if isinstance(value, Tensor) else None


def known_tensor(x: Any) -> Tensor:
    """Return the fake tensor of a node whose value is known to be a tensor."""
    tensor = tensor_of(x)
    assert tensor is not None
    return tensor


def rank_of(node: Node) -> int:
    """Return the number of dims of a node's tensor, or -1 if its value isn't one tensor."""
    tensor = tensor_of(node)
    return -1 if tensor is None else tensor.dim()


def known_equal(a: int | SymInt, b: int | SymInt) -> bool:
    """Return True if `a == b` in every run of the graph, and False if that can't be proven."""
    return _known_true(a == b)


def known_different(a: int | SymInt, b: int | SymInt) -> bool:
    """Return True if `a != b` in every run of the graph, and False if that can't be proven."""
    return _known_true(a != b)


def known_at_most(a: int | SymInt, b: int | SymInt) -> bool:
    """Return True if `a <= b` in every run of the graph, and False if that can't be proven.

    The range of a dynamic size counts: from `mark_dynamic(min=, max=)`, `torch._check`, or a branch that was taken.
    """
    return _known_true(a <= b)


def _known_true(condition: Any) -> bool:
    if isinstance(condition, bool):
        return condition
    try:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    except Exception as error:
        moved("torch.fx.experimental.symbolic_shapes.statically_known_true", error, "dynamic sizes are unknown")
        return False


def known_shape(shape: Sequence[int | SymInt], expected: Sequence[int | SymInt]) -> bool:
    return len(shape) == len(expected) and all(known_equal(a, b) for a, b in zip(shape, expected, strict=True))


def constant(size: int | SymInt) -> int | None:
    """Return the value of a size that is the same in every run, also inside a SymInt, or None for a dynamic size."""
    if isinstance(size, int):
        return size
    return _ask(size, "torch.SymInt.node.maybe_as_int", lambda node: node.maybe_as_int())


def _ask(number: Any, api: str, ask: Callable[[Any], T]) -> T | None:
    """Return `ask` of the node of a symbolic number, or None if the private API has moved."""
    try:
        return ask(number.node)
    except Exception as error:
        unknown = "dynamic sizes" if "SymInt" in api else "numbers that are inputs"
        moved(api, error, f"{unknown} are unknown")
        return None


def number_in(x: Any) -> float | None:
    """Return the number that a node or a value is in every run, also inside a SymFloat, or None for anything else."""
    value = value_of(x) if isinstance(x, Node) else x
    if isinstance(value, SymFloat):
        value = _ask(value, "torch.SymFloat.node.maybe_as_float", lambda node: node.maybe_as_float())
    elif isinstance(value, SymInt):
        value = constant(value)
    return float(value) if isinstance(value, int | float) else None


def is_input_number(x: Any) -> TypeGuard[Node]:
    """Return True for a node of a number that may differ between runs, such as an attribute under `dynamic=True`."""
    return isinstance(x, Node) and isinstance(value_of(x), SymFloat | SymInt) and number_in(x) is None


def integers_in(number: Any) -> set[Any] | None:
    """Return the symbols of integers, such as dynamic sizes, that a number is computed from, or None if unknown.

    A float that is an input of the graph is not an integer.
    """
    if isinstance(number, int | float):
        return set()
    return _ask(number, _EXPR, lambda node: {symbol for symbol in node.expr.free_symbols if symbol.is_integer})


def guard_number(x: Node) -> bool:
    """Guard a number, so that another value captures a new graph. Return False if it was unknown at capture."""
    value = value_of(x)
    if number_in(x) is None and number_hint(value) is not None and not _computed_of_floats(value):
        int(value) if isinstance(value, SymInt) else float(value)
    return number_in(x) is not None


def _computed_of_floats(number: Any) -> bool:
    """Return True if a number is computed from floats that are inputs. It would stay unknown in spite of a guard."""
    known = _ask(number, _EXPR, lambda node: node.expr.is_symbol or all(x.is_integer for x in node.expr.free_symbols))
    return not known


def guard_between(x: Node, least: float, most: float) -> bool:
    """Return True if a number was in a range at capture, and guard it: a run where it isn't captures a new graph."""
    value = value_of(x)
    at_capture = number_hint(value)
    if at_capture is None or not least <= at_capture <= most:
        return False
    return bool(value >= least) and bool(value <= most)


def number_hint(number: SymInt | SymFloat) -> float | None:
    """Return the value of a number when the graph was captured, or None without one."""
    at_capture = _ask(number, "torch.SymFloat.node.hint", lambda node: node.hint)
    return at_capture if isinstance(at_capture, int | float) else None


def hint(size: int | SymInt) -> int | None:
    """Return the value of a size when the graph was captured, or None without one. Other runs may differ."""
    if isinstance(size, int):
        return size
    at_capture = _ask(size, "torch.SymInt.node.hint", lambda node: node.hint)
    return at_capture if isinstance(at_capture, int) else None


def may_be_0_or_1(size: int | SymInt) -> bool:
    """Return True for an unbacked size that isn't known to be at least 2: an op that tests for 0 or 1 can't trace."""
    return constant(size) is None and hint(size) is None and not _known_true(size > 1)


def guard_equal(a: int | SymInt, b: int | SymInt) -> bool:
    """Return True if `a == b` at capture, and guard it: a run where they differ captures a new graph."""
    return known_equal(a, b) or (None not in (hint(a), hint(b)) and bool(a == b))


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Return True if two fake tensors are views of one storage, so that writing one may change the other."""
    return storage.same_storage(in_memory(a), in_memory(b))


def in_memory(tensor: Any) -> Tensor:
    """Return the tensor that owns storage and has the strides in memory: for a DTensor, its local tensor."""
    plain = isinstance(tensor, FakeTensor) or not hasattr(tensor, "to_local")  # hasattr is slow on a fake tensor
    local: Tensor = tensor if plain else tensor.to_local()
    return local


def memory_of(tensor: Any) -> list[Tensor]:
    """Return the fake tensors that own a tensor's memory: those inside a transform of `torch.func`, or in a subclass.

    A tensor of another kind is returned as it is.
    """
    tensor = in_memory(tensor)
    if isinstance(tensor, FakeTensor):
        return [tensor]
    inner = storage.unwrapped(tensor)
    if inner is not None:
        return memory_of(inner)
    if hasattr(tensor, "__tensor_flatten__"):
        return [x for name in tensor.__tensor_flatten__()[0] for x in memory_of(getattr(tensor, name))]
    return [tensor]


def bytes_of(tensor: Tensor) -> int | None:
    """Return the size of a tensor in bytes when the graph was captured, or None if it was unknown."""
    sizes = [hint(n) for n in tensor.shape]
    return None if None in sizes else math.prod(n or 0 for n in sizes) * tensor.element_size()
