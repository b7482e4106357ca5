"""Matrix products of attention that is written out: the factors of a product, and their layout."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import writes
from tatten.passes.op_names import CASTS, COPIES, MATMULS, RESHAPES
from tatten.passes.symbolic import is_input_number, known_equal, known_shape, number_in, rank_of, tensor_of
from tatten.passes.views import Size, order_of

View = tuple[Any, ...]  # a method of tensors and its arguments
Heads = tuple[Size, ...]  # [batch, heads], or [batch, kv heads, query heads of each kv head]


@dataclass(frozen=True)
class Factor:
    """A factor of a product: `node` with `views` applied, which do not copy.

    Attributes:
        path: the nodes from the product to the one that reads `node`.
    """

    node: Node
    views: tuple[View, ...] = ()
    path: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Product:
    """A product `scale * (left @ right) + beta * bias` of tensors `[..., m, n]` and `[..., n, k]`.

    Attributes:
        result_view: the view that turns the product into the node's result; None if they are the same.
        unknown_scale: an input number that multiplies the product; `scale` is then 1.
        unknown_beta: an input number that multiplies the bias; `beta` is then 1.
    """

    node: Node
    left: Factor
    right: Factor
    scale: float = 1.0
    bias: Node | None = None
    beta: float = 1.0
    result_view: View | None = None
    unknown_scale: Node | None = None
    unknown_beta: Node | None = None


def product_of(node: Node, weights: Node | None = None) -> Product | None:
    """Return the batched product that a node computes, or None.

    Args:
        node: any node.
        weights: the node that must be the left factor. Without it, the last dim of the result tells left from right.
    """
    name = op_name(node)
    if name in MATMULS:
        left = argument(node, 0, "input", node.kwargs.get("self"))
        right = argument(node, 1, "other", node.kwargs.get("mat2"))
        return _checked(Product(node, Factor(left), Factor(right)), weights)
    if name == "baddbmm":
        bias, left, right = (argument(node, i, x) for i, x in enumerate(("input", "batch1", "batch2")))
        alpha, beta = (node.kwargs.get(x, 1) for x in ("alpha", "beta"))
        unknown_scale = alpha if is_input_number(alpha) else None
        unknown_beta = beta if is_input_number(beta) else None
        scale = number_in(alpha) if unknown_scale is None else 1.0
        beta = number_in(beta) if unknown_beta is None else 1.0
        if scale is None or beta is None:
            return None
        product = Product(
            node,
            Factor(left),
            Factor(right),
            scale,
            bias if beta else None,
            beta,
            unknown_scale=unknown_scale,
            unknown_beta=unknown_beta,
        )
        return _checked(product, weights)
    return _einsum(node, weights) if name == "einsum" else None


def _checked(product: Product, weights: Node | None) -> Product | None:
    factors = product.left.node, product.right.node
    if writes(product.node) or (weights is not None and factors[0] is not weights):
        return None
    ranks = [tensor.dim() for x in factors if (tensor := tensor_of(x)) is not None]
    return product if len(ranks) == 2 and ranks[0] == ranks[1] and ranks[0] in (3, 4, 5) else None


def _einsum(node: Node, weights: Node | None) -> Product | None:
    """Read an einsum of two factors with dims in any order, such as "bqhd,bkhd->bhqk" or "bkgqd,bskd->bkgqs"."""
    equation, factors = spelled_out(node)
    inputs, _, out = equation.partition("->")
    letters = inputs.split(",")
    if len(letters) != 2 or any(len(set(x)) != len(x) for x in (*letters, out)) or len(out) not in (3, 4, 5):
        return None
    if (weights is not None and factors[0] is not weights) or (weights is None and out[-1] in letters[0]):
        letters, factors = letters[::-1], factors[::-1]
    if weights is not None and factors[0] is not weights:
        return None
    left, right = letters
    rows, inner, columns = (
        [x for x in left if x in out and x not in right],
        [x for x in left if x in right and x not in out],
        [x for x in right if x in out and x not in left],
    )
    # The last dim of the left factor alone counts queries. Dims before it count heads that share their keys.
    order = out if weights is None else left
    rows = [x for x in order if x in rows][-1:]
    lead = [x for x in order if x in out and x not in (*rows, *inner, *columns)]
    if not len(rows) == len(inner) == len(columns) == 1 or set(left) != {*lead, *rows, *inner}:
        return None
    result = "".join([*lead, *rows, *columns])
    complete = {*out} == {*result} and {*right} <= {*lead, *inner, *columns}
    if (
        not complete
        or (weights is None and result != out)
        or (weights is not None and left != "".join([*lead, *rows, *inner]))
    ):
        return None
    result_view = None if result == out else ("permute", *[result.index(x) for x in out])
    first = Factor(factors[0], _permuted(left, [*lead, *rows, *inner]))
    new_dims = [("unsqueeze", i) for i, x in enumerate(lead) if x not in right]
    lead_of_right = [x for x in lead if x in right]
    second = Factor(factors[1], (*_permuted(right, [*lead_of_right, *inner, *columns]), *new_dims))
    return Product(node, first, second, result_view=result_view)


def spelled_out(node: Node) -> tuple[str, list[Any]]:
    """Return the equation of an einsum with letters in place of dots, and its factors.

    The equation is empty if it is not understood.
    """
    equation: Any
    factors: Any
    equation, *factors = node.args
    if len(factors) == 1 and isinstance(factors[0], (list, tuple)):
        factors = list(factors[0])
    tensors = [tensor_of(x) for x in factors]
    if not isinstance(equation, str) or "->" not in equation or len(tensors) != 2:
        return "", factors
    equation = equation.replace(" ", "")
    *inputs, out = re.split(",|->", equation)
    if "..." in equation and len(inputs) == 2:
        dotted = {
            -1 if x is None or "..." not in letters else x.dim() - len(letters) + 3
            for x, letters in zip(tensors, inputs, strict=True)
        }
        unused = [x for x in string.ascii_letters if x not in equation]
        if len(dotted) != 1 or "..." not in out or not 0 <= max(dotted) <= len(unused):
            return "", factors
        equation = equation.replace("...", "".join(unused[: max(dotted)]))
        inputs = equation.partition("->")[0].split(",")
    fits = all(x is not None and x.dim() == len(n) for x, n in zip(tensors, inputs, strict=False))
    return (equation if fits and "." not in equation else ""), factors


def _permuted(letters: str, order: list[str]) -> tuple[View, ...]:
    return () if list(letters) == order else (("permute", *[letters.index(x) for x in order]),)


def with_heads(factor: Factor, heads: Heads | None, *, narrow: bool) -> Factor | None:
    """Return the factor as `[batch, heads, ...]`, before ops that only copy it or merge or swap dims, or None.

    Args:
        factor: a factor of a product of tensors of rank 3 to 5.
        heads: the batch and the number of heads that the first dim merges in tensors of rank 3; or the batch, the kv
            heads and the query heads of each, as three dims.
        narrow: whether to go back before casts to a wider dtype, too.
    """
    node, path, swapped = factor.node, list(factor.path), False
    for source in _sources(factor.node, narrow):
        if source is not node:
            if factor.views and op_name(node) not in CASTS | COPIES:  # the views apply to these dims
                break
            path.append(node)
            swapped ^= _swaps(node)
            node = source
    views = factor.views
    tensor = viewed(Factor(node, views))
    if tensor is None:
        return None
    if heads is not None and len(heads) == 3:
        joined = _joined(tensor, heads)
        if joined is None:
            return None
        views += joined
    elif tensor.dim() == 3:
        if heads is None:
            return None
        views += (("unsqueeze", 1) if known_equal(heads[1], 1) else ("unflatten", 0, heads),)
    if swapped:
        views += (("transpose", -2, -1),)
    return Factor(node, views, tuple(path))


def viewed(factor: Factor) -> Tensor | None:
    """Return the tensor of a factor's node with its views applied, or None."""
    tensor = tensor_of(factor.node)
    for name, *args in factor.views if tensor is not None else ():
        tensor = getattr(tensor, name)(*args)
    return tensor


def _joined(tensor: Tensor, heads: Heads) -> tuple[View, ...] | None:
    """Return views that merge kv heads and the query heads of each into one dim, or None for other dims."""
    views: tuple[View, ...] = (("flatten", 1, 2),)
    if tensor.dim() == 4:
        views, tensor = (("unsqueeze", 0), *views), tensor.unsqueeze(0)
    if tensor.dim() != 5 or not known_shape(tensor.shape[:2], heads[:2]):
        return None
    group_size = tensor.shape[2]
    return views if known_equal(group_size, 1) or known_equal(group_size, heads[2]) else None


def _sources(node: Node, narrow: bool) -> Iterator[Node]:
    """Yield a factor and the tensors that it was copied from, with dims `[batch, heads]` or one dim for both."""
    while True:
        yield node
        source = node.args[0] if node.args else None
        before, after = tensor_of(source), tensor_of(node)
        if not isinstance(source, Node) or before is None or after is None or writes(node):
            return
        merged = before.dim() == 4 and after.dim() == 3 and op_name(node) in RESHAPES
        if op_name(node) in CASTS:
            floats = before.is_floating_point() and after.is_floating_point()
            if not floats or not (before.dtype == after.dtype or (narrow and _widens(before.dtype, after.dtype))):
                return
        elif merged:
            if not known_shape((before.shape[0] * before.shape[1], *before.shape[2:]), after.shape):
                return
        elif op_name(node) not in COPIES and not _swaps(node):
            return
        node = source


def _widens(before: Any, after: Any) -> bool:
    return bool(before.itemsize < after.itemsize)


def _swaps(node: Node) -> bool:
    """Return True if a node swaps the last two dims, and nothing else."""
    rank = rank_of(node)
    return rank >= 3 and order_of(node, rank) == [*range(rank - 2), rank - 1, rank - 2]
