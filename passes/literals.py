"""Numbers that are literals of a program, also as tensors of one number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import writes, written_between
from tatten.passes.op_names import CASTS
from tatten.passes.symbolic import number_in, value_of

FULL, ZEROS, ONES = (
    {name, f"{name}_like", f"new_{name}"} for name in ("full", "zeros", "ones")
)  # the result has memory of its own
TIMES = {"mul", "imul", "multiply", "div", "truediv", "itruediv", "divide", "true_divide"}


def number_of(x: Any, reader: Node) -> float | None:
    """Return the number that `reader` gets, alone or in all elements of a tensor made of one literal, or None."""
    if isinstance(x, int | float):
        return float(x)
    if not isinstance(x, Node):
        return None
    value, name, number = value_of(x), op_name(x), number_in(x)
    if number is not None:
        return number
    if not isinstance(value, Tensor) or writes(x) or written_between([value], x, reader) is not None:
        return None
    if name in ("tensor", "scalar_tensor", "as_tensor"):
        number = number_of(argument(x, 0, "data", x.kwargs.get("s")), x)
    elif name in FULL:
        number = number_of(argument(x, 2 if name == "new_full" else 1, "fill_value"), x)
    elif name in ZEROS:
        number = 0.0
    elif name in ONES:
        number = 1.0
    elif name in CASTS and x.args:
        number = number_of(x.args[0], x)
    return None if number is None or not _holds(value.dtype, number) else rounded(number, value.dtype)


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Return True if the conversion of a number to this dtype is defined."""
    if dtype.is_floating_point or dtype == torch.bool:
        return True
    return not dtype.is_complex and torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def rounded(number: float, dtype: torch.dtype) -> float:
    """Round a number to this dtype. It becomes infinite if it is too large."""
    return float(torch.tensor(number, dtype=dtype).item())


def factor_of(node: Node) -> tuple[Node, float] | None:
    """Return the node and the number whose product a node computes, or None if it is no such product.

    A division by a number counts as the product with its inverse.
    """
    a, b = argument(node, 0, "input"), argument(node, 1, "other")
    name = op_name(node).removesuffix("_")
    if name not in TIMES or node.kwargs.get("rounding_mode") is not None:
        return None
    divides, source, number = "div" in name, a, number_of(b, node)
    if number is None and not divides:
        source, number = b, number_of(a, node)
    if not isinstance(source, Node) or number is None or not math.isfinite(number) or number == 0:
        return None
    return source, 1 / number if divides else number
