"""Numbers that a program writes as such, or makes tensors of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import writes, written_between
from tatten.passes.products import CASTS
from tatten.passes.symbolic import value_of


def number_of(x: Any, reader: Node) -> float | None:
    """The number that `reader` gets, itself or in all elements of a tensor made of one literal; None for others."""
    if isinstance(x, int | float):
        return float(x)
    if not isinstance(x, Node):
        return None
    value, name, number = value_of(x), op_name(x), None
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, Tensor) or writes(x) or written_between([value], x, reader) is not None:
        return None
    if name in ("tensor", "scalar_tensor", "as_tensor"):
        number = number_of(argument(x, 0, "data", x.kwargs.get("s")), x)
    elif name in ("full", "full_like", "new_full"):
        number = number_of(argument(x, 2 if name == "new_full" else 1, "fill_value"), x)
    elif name in ("zeros", "zeros_like", "new_zeros"):
        number = 0.0
    elif name in CASTS and x.args:
        number = number_of(x.args[0], x)
    return None if number is None else rounded(number, value.dtype)


def rounded(number: float, dtype: torch.dtype) -> float:
    """The number that a tensor of this dtype holds for it; infinite where it is too large."""
    return float(torch.tensor(number, dtype=dtype).item())
