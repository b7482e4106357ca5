"""Match RMS norms, as one op or as models write them out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.fx import Node

from tatten.passes.calls import argument, only_slices, op_name
from tatten.passes.no_effect import is_last_dim
from tatten.passes.op_names import CASTS, MULTIPLIES
from tatten.passes.projection import is_input
from tatten.passes.symbolic import known_shape, known_tensor, tensor_of


@dataclass(frozen=True)
class Norm:
    """An RMS norm of the rows of a tensor.

    Attributes:
        read: the node that reads the tensor before the norm as its first argument.
        weight: an input of the graph, by which each row is multiplied.
        eps: that of the norm.
        nodes: all nodes of the norm.
    """

    read: Node
    weight: Node
    eps: float
    nodes: frozenset[Node]

    @property
    def x(self) -> Node:
        """The tensor before the norm: another node once the op that computed it is replaced."""
        x: Node = argument(self.read, 0, "input")
        return x


def keeps_all(node: Node) -> bool:
    """Return True for a slice that leaves out nothing, such as that of the last of one token."""
    if op_name(node) != "getitem" or not isinstance(node.args[0], Node):
        return False
    before, after = tensor_of(node.args[0]), tensor_of(node)
    known = before is not None and after is not None and known_shape(before.shape, after.shape)
    return known and only_slices(node.args[1])


def norm_at(node: Any) -> Norm | None:
    """Return the RMS norm that a node computes, or None."""
    return _rms_norm(node) or _written_out_norm(node) if isinstance(node, Node) else None


def _rms_norm(node: Node) -> Norm | None:
    """Return the norm that a call of `rms_norm` computes."""
    if op_name(node) != "rms_norm":
        return None
    shape, weight, eps = (argument(node, i, name) for i, name in ((1, "normalized_shape"), (2, "weight"), (3, "eps")))
    dims = shape if isinstance(shape, (list, tuple)) else (shape,)
    if len(dims) != 1 or not isinstance(weight, Node) or not is_input(weight) or not _is_eps(eps):
        return None
    return Norm(node, weight, eps, frozenset([node]))


def _written_out_norm(node: Node) -> Norm | None:
    """Return the norm of `weight * (x.float() * rsqrt(mean(x.float() ** 2, -1) + eps)).to(x.dtype)`, or None.

    The last cast may also come after the product with the weight.
    """
    rounded = _cast_to(node, torch.bfloat16, torch.float16)
    for weight, normed in factors_of(node if rounded is None else rounded):
        if not is_input(weight):
            continue
        exact = normed if rounded is not None else _cast_to(normed, torch.bfloat16, torch.float16)
        for x, inverse in factors_of(exact):
            eps, steps = _eps_of(x, inverse) if _cast_to(x, torch.float32) is not None else (None, [])
            if eps is not None:
                nodes = (node, rounded, normed, exact, x, inverse, *steps)
                return Norm(x, weight, eps, frozenset([y for y in nodes if y is not None]))
    return None


def _eps_of(x: Node, inverse: Any) -> tuple[float | None, list[Node]]:
    """Return the eps of `rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)`, and the nodes of the sum; None for others."""
    total = argument(inverse, 0, "input") if isinstance(inverse, Node) and op_name(inverse) == "rsqrt" else None
    if not isinstance(total, Node) or op_name(total) != "add" or total.kwargs or len(total.args) != 2:
        return None, []
    mean, eps = total.args
    if not isinstance(mean, Node) or op_name(mean) != "mean" or not _is_eps(eps):
        return None, []
    squares, rank = argument(mean, 0, "input"), known_tensor(x).dim()
    keeps = argument(mean, 2, "keepdim", False) is True and is_last_dim(argument(mean, 1, "dim"), rank)
    if not keeps or "dtype" in mean.kwargs or len(mean.args) > 3 or not isinstance(squares, Node):
        return None, []
    is_square = op_name(squares) == "pow" and argument(squares, 1, "exponent") == 2
    if not is_square or argument(squares, 0, "input") is not x:
        return None, []
    return eps, [total, mean, squares]


def _is_eps(eps: Any) -> TypeGuard[float]:
    return isinstance(eps, float) and eps >= 0


def _cast_to(node: Any, *dtypes: torch.dtype) -> Node | None:
    """Return the tensor that a node converts to one of `dtypes`, or None if it does anything else."""
    if not isinstance(node, Node) or op_name(node) not in CASTS or not node.args or not isinstance(node.args[0], Node):
        return None
    before, after = tensor_of(node.args[0]), tensor_of(node)
    if before is None or after is None or after.dtype not in dtypes or before.dtype == after.dtype:
        return None
    return node.args[0] if before.device == after.device else None


def factors_of(node: Any) -> Iterator[tuple[Node, Node]]:
    """Yield the two factors of a product of two tensors, in both orders."""
    if isinstance(node, Node) and op_name(node) in MULTIPLIES and len(node.args) == 2 and not node.kwargs:
        a, b = node.args
        if isinstance(a, Node) and isinstance(b, Node):
            yield a, b
            yield b, a
