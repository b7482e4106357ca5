"""Read the weights of attention that is written out, forwards from a softmax to the product with values."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import inactive_dropout, writes
from tatten.passes.no_effect import keeps_rows
from tatten.passes.op_names import CASTS, COPIES, RESHAPES
from tatten.passes.products import Product, product_of
from tatten.passes.symbolic import known_equal, tensor_of


@dataclass(frozen=True)
class Weights:
    """Weights of attention that is written out.

    Attributes:
        product: the product of weights and values.
        path: the nodes from the softmax to the one before the product.
        dropped: the column of the softmax that is dropped on the way, 0 or -1; None if none is.
        active_dropout: the dropout on the way that may change weights; None without one.
    """

    product: Product
    path: tuple[Node, ...]
    dropped: int | None = None
    active_dropout: Node | None = None


def find_weights(softmax: Node) -> Weights | None:
    """Find the product with values that a softmax leads to through ops that keep its weights, or return None."""
    return _follow(softmax, (), None, None)


def _follow(node: Node, path: tuple[Node, ...], dropped: int | None, dropout: Node | None) -> Weights | None:
    path = (*path, node)
    for user in node.users:
        product = product_of(user, weights=node)
        if product is not None and product.bias is None and product.scale == 1 and product.unknown_scale is None:
            return Weights(product, path, dropped, dropout)
        if writes(user) or not user.args or user.args[0] is not node:
            continue
        name, weights = op_name(user), None
        if name in ("dropout", "dropout_"):
            weights = _follow(user, path, dropped, dropout if inactive_dropout(user) else user)
        elif name in CASTS | COPIES or (name in RESHAPES and keeps_rows(node, user)):
            weights = _follow(user, path, dropped, dropout)
        elif dropped is None and (column := _drops_column(user, node)) is not None:
            weights = _follow(user, path, column, dropout)
        if weights is not None:
            return weights
    return None


def _drops_column(user: Node, node: Node) -> int | None:
    """Return the column that `x[..., :-1]` or `x[..., 1:]` drops, -1 or 0, or None for another node."""
    before, after = tensor_of(node), tensor_of(user)
    if before is None or after is None or before.dim() != after.dim():
        return None
    if not all(known_equal(a, b) for a, b in zip((*before.shape[:-1], before.shape[-1] - 1), after.shape, strict=True)):
        return None
    start: Any = None
    name, rank = op_name(user), before.dim()
    if name == "getitem":
        key = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
        last = key[-1]
        others = [x for x in key[:-1] if x != slice(None) and x is not builtins.Ellipsis]
        if others or not isinstance(last, slice) or (builtins.Ellipsis not in key and len(key) != rank):
            return None
        start = last.start or 0 if last.step in (None, 1) else None
    elif name == "slice" and argument(user, 1, "dim", 0) in (-1, rank - 1):
        start = argument(user, 2, "start") or 0 if argument(user, 4, "step", 1) == 1 else None
    elif name == "narrow" and argument(user, 1, "dim") in (-1, rank - 1):
        start = argument(user, 2, "start")
    return {0: -1, 1: 0}.get(start) if isinstance(start, int) else None
