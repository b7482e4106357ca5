"""Walk back from keys or values to the product of latents and a weight that makes them, in any spelling.

Letters name dims, as in `einsum`: `linear` is `abr,nr->abn`, where `n` counts the columns of all heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from tatten.ops.layout import BATCH, HEAD_DIM, HEADS, LENGTH
from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import writes
from tatten.passes.op_names import CASTS, COPIES, RESHAPES
from tatten.passes.pieces import columns_of
from tatten.passes.symbolic import constant, known_equal, known_shape, known_tensor, same_storage, tensor_of
from tatten.passes.views import Part, Size, Walk, begin_walk, source_of, step_back

FLAT: Part = (HEADS, HEAD_DIM)  # a dim with all columns of the first head, then those of the next head
RANK: Part = (-1,)  # the dim of a weight that is multiplied with latents

Letters = tuple[str, str, str]  # the letters of the dims of both factors and of the product


@dataclass(frozen=True)
class Projection:
    """Columns `lo` to `hi` of each head of a product of latents and a weight, as `[batch, heads, length, hi - lo]`.

    Attributes:
        product: the node that multiplies.
        latent: a walk from the latents, the factor that all heads share.
        weight: the other factor.
        order: the dims of `weight` that count heads, columns and rank; or columns of all heads, and rank.
        heads, width: the heads of the product, and the columns of each.
        lo, hi: the columns of each head.
        path: the nodes from where the walk began to the product.
    """

    product: Node
    latent: Walk
    weight: Node
    order: tuple[int, ...]
    heads: int
    width: int
    lo: int
    hi: int
    path: tuple[Node, ...]


def projection_of(start: Walk) -> Projection | Node:
    """Walk back from keys or values to a projection of latents. Without one, return the node where the walk ends."""
    walk: Walk | None = start
    path: tuple[Node, ...] = ()
    lo, end = 0, start.node
    while walk is not None and not walk.stretched and not walk.rows:
        end = walk.node
        columns = columns_of(end)
        if columns is None:
            projection = _projection_at(end, walk.parts) or _split_into_heads(walk)
            if projection is not None:
                width = constant(tensor_of(start.node).shape[start.parts.index((HEAD_DIM,))])  # type: ignore[union-attr]
                path = (*path, *walk.path, *projection.path)
                return end if width is None else dataclasses.replace(projection, lo=lo, hi=lo + width, path=path)
            walk = step_back(walk)
        else:
            source, dim, first, nodes = columns
            if walk.parts[dim] != (HEAD_DIM,):
                break
            lo, path, walk = lo + first, (*path, *nodes), walk.step(source, walk.parts)
    return end


def same_latents(a: Walk, b: Walk) -> bool:
    """Return True if two factors are the same tensor in memory, apart from dims of size 1."""
    if a.node is b.node:
        return a.parts == b.parts
    x, y = tensor_of(a.node), tensor_of(b.node)
    if x is None or y is None or not same_storage(x, y) or not known_equal(x.storage_offset(), y.storage_offset()):
        return False
    dims = [(a.parts.index(part), b.parts.index(part)) for part in a.parts if part is not None and part in b.parts]
    same_layout = all(known_equal(x.shape[i], y.shape[j]) and known_equal(x.stride(i), y.stride(j)) for i, j in dims)
    return same_layout and {*a.parts} - {None} == {*b.parts} - {None} and x.is_neg() == y.is_neg()


def is_input(node: Node) -> bool:
    """Return True if a tensor is an input of the graph, or a view of one."""
    while node.op not in ("placeholder", "get_attr"):
        columns = columns_of(node)
        source = columns[0] if columns is not None else source_of(node)
        before, after = tensor_of(source), tensor_of(node)
        if source is None or before is None or after is None or writes(node) or not same_storage(before, after):
            return False
        node = source
    return True


def _split_into_heads(walk: Walk) -> Projection | None:
    """Return the projection whose columns were reshaped to the tensor `[batch, length, heads, width]`, or None."""
    node, split = walk.node, tensor_of(walk.node)
    if op_name(node) not in RESHAPES or walk.parts != ((BATCH,), (LENGTH,), (HEADS,), (HEAD_DIM,)) or split is None:
        return None
    path, source = [node], source_of(node)
    while (
        source is not None and op_name(source) in CASTS | COPIES and (back := step_back(begin_walk(source))) is not None
    ):
        path.append(source)
        source = back.node
    flat = tensor_of(source)
    if source is None or flat is None:
        return None
    batch, length, *last = split.shape
    heads, width = map(constant, last)
    if heads is None or width is None:
        return None
    for ones in ((), (None,)):
        if known_shape(flat.shape, (batch, *(1 for _ in ones), length, heads * width)):
            projection = _projection_at(source, ((BATCH,), *ones, (LENGTH,), FLAT))
            if projection is not None:
                return dataclasses.replace(projection, heads=heads, width=width, path=(*path, *projection.path))
    return None


def _projection_at(node: Node, parts: Sequence[Part | None]) -> Projection | None:
    """Return the projection of latents that `node` computes, whose dims have these parts, or None."""
    factors, product = _factors(node), tensor_of(node)
    if factors is None or product is None:
        return None
    a, b, (a_letters, b_letters, product_letters) = factors
    part_of = dict(zip(product_letters, parts, strict=True))
    orders = (a, b, a_letters, b_letters), (b, a, b_letters, a_letters)
    for latent, weight, latent_letters, weight_letters in orders:
        shared = {*latent_letters} & {*weight_letters}
        if len(shared) != 1 or shared & {*product_letters}:
            return None
        ranks = [size for x, letters in ((a, a_letters), (b, b_letters)) for size in _sizes(x, letters, shared)]
        walk = _latents(latent, [(HEAD_DIM,) if x in shared else part_of.get(x) for x in latent_letters])
        order = _order([RANK if x in shared else part_of.get(x) for x in weight_letters])
        if walk is None or order is None or not known_equal(*ranks):  # `einsum` broadcasts
            continue
        sizes = dict(zip(parts, product.shape, strict=True))
        heads, width = (constant(sizes.get(part, 1)) for part in ((HEADS,), (HEAD_DIM,)))
        if heads is not None and width is not None:
            return Projection(node, walk, weight, order, heads, width, 0, width, (node,))
    return None


def _sizes(node: Node, letters: str, among: set[str]) -> list[Size]:
    return [size for letter, size in zip(letters, known_tensor(node).shape, strict=True) if letter in among]


def _latents(node: Node, parts: Sequence[Part | None]) -> Walk | None:
    """Return a walk from latents whose dims have these parts, or None if these are not the parts of latents."""
    tensor = tensor_of(node)
    if tensor is None or (LENGTH,) not in parts or not {*parts} <= {(BATCH,), (LENGTH,), (HEAD_DIM,), None}:
        return None
    ones = (size for part, size in zip(parts, tensor.shape, strict=True) if part is None)
    return Walk(node, tuple(parts)) if all(known_equal(size, 1) for size in ones) else None


def _order(parts: Sequence[Part | None]) -> tuple[int, ...] | None:
    """Return the dims of a weight that count heads, columns and rank, or columns and rank; None for other dims."""
    for wanted in ([(HEADS,), (HEAD_DIM,), RANK], [FLAT, RANK], [(HEAD_DIM,), RANK]):
        if len(wanted) == len(parts) and all(part in parts for part in wanted):
            return tuple(map(parts.index, wanted))
    return None


def _factors(node: Node) -> tuple[Node, Node, Letters] | None:
    """Return the factors of a product and the letters of all dims, or None."""
    name = op_name(node)
    equation: Any = ""
    operands = list[Any]()
    if name == "einsum":
        equation, *operands = node.args
        operands = [x for operand in operands for x in (operand if isinstance(operand, (list, tuple)) else (operand,))]
    elif name in ("linear", "matmul"):
        operands = [argument(node, 0, "input"), argument(node, 1, "weight" if name == "linear" else "other")]
    if len(operands) != 2:
        return None
    a, b = operands
    first, second = tensor_of(a), tensor_of(b)
    if not isinstance(a, Node) or not isinstance(b, Node) or first is None or second is None or writes(node):
        return None
    letters = (str(equation) or _equation(name, first, second)).replace(" ", "").replace("->", ",").split(",")
    if len(letters) != 3 or any(len({*x}) != len(x) for x in letters):  # a diagonal, or an ellipsis
        return None
    return a, b, (letters[0], letters[1], letters[2])


def _equation(name: str, a: Tensor, b: Tensor) -> str:
    """Return the einsum equation of `linear(a, b)` or `matmul(a, b)` if `b` may be a weight; else an empty string."""
    rows = "abcdef"[: a.dim() - 1]
    if b.dim() == 2:
        return f"{rows}r,nr->{rows}n" if name == "linear" else f"{rows}r,rn->{rows}n"
    if (a.dim(), b.dim()) == (4, 3) and known_equal(a.shape[1], 1):  # latents that all heads share
        return "asbr,hrn->ahbn"
    return ""
