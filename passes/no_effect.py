"""Ops on scores and weights of attention that change neither the weights nor their places."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.op_names import CASTS, COPIES
from tatten.passes.symbolic import known_equal, tensor_of

MAXIMA = {"max", "amax"}


def subtracts_maximum(node: Node) -> list[Node] | None:
    """Return the nodes of the maximum in `x - x.max(-1, keepdim=True)`, or None for another node.

    Softmax has the same result without the subtraction.
    """
    if op_name(node) not in ("sub", "isub", "sub_") or len(node.args) != 2 or node.kwargs:
        return None
    x, maximum = node.args
    nodes, items = [], []
    while isinstance(maximum, Node) and op_name(maximum) in {"getitem", "getattr", "detach"} | CASTS | COPIES:
        nodes.append(maximum)
        items += [maximum.args[1]] if op_name(maximum) in ("getitem", "getattr") else []
        maximum = maximum.args[0]
    if not isinstance(maximum, Node) or op_name(maximum) not in MAXIMA or maximum.args[0] is not x:
        return None
    tensor, rows = tensor_of(x), tensor_of(node.args[1])
    if tensor is None or rows is None or rows.dim() != tensor.dim():
        return None
    if not is_last_dim(argument(maximum, 1, "dim"), tensor.dim()):
        return None
    takes_values = items in ([0], ["values"]) if op_name(maximum) == "max" else not items
    return [*nodes, maximum] if takes_values else None


def is_last_dim(dim: Any, rank: int) -> bool:
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    return isinstance(dim, int) and dim in (-1, rank - 1)


def keeps_rows(source: Node, node: Node) -> bool:
    """Return True if a reshape keeps the last two dims, and only merges or splits the dims before them."""
    before, after = tensor_of(source), tensor_of(node)
    return (
        before is not None
        and after is not None
        and before.dtype == after.dtype
        and {before.dim(), after.dim()} <= {3, 4, 5}
        and all(known_equal(a, b) for a, b in zip(before.shape[-2:], after.shape[-2:], strict=True))
    )
