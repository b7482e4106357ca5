"""The walk back from keys or values to the product of latents and a weight that makes them, however it is written.

Dims are told by letters, as in `einsum`: `linear` is `abr,nr->abn`, where `n` are the columns of all heads. LoRA that
is not merged (Hu et al., arXiv 2106.09685) is a projection, too, `c W + s (c A) B`: the query becomes
`q W_uk + s (q B_uk) A`, and neither `B A` nor anything of the latents' length is made.
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
from tatten.passes.mutation import inactive_dropout, writes
from tatten.passes.op_names import CASTS, COPIES, RESHAPES
from tatten.passes.pieces import columns_of
from tatten.passes.symbolic import (
    constant,
    is_input_number,
    known_equal,
    known_shape,
    known_tensor,
    number_in,
    same_storage,
    tensor_of,
)
from tatten.passes.views import Part, Size, Walk, begin, source_of, step_back

FLAT: Part = (HEADS, HEAD_DIM)  # of a dim that has all columns of the first head, then those of the next
RANK: Part = (-1,)  # of the dim of a weight that latents are multiplied with

Letters = tuple[str, str, str]  # of the dims of both factors and of the product


@dataclass(frozen=True)
class Adapter:
    """The term that LoRA adds to a projection: `factor * up(down(latents))`, with the weights of `down` and `up`.

    Attributes:
        path: the nodes from the sum to the first product, and copies of latents before that.
    """

    down: Projection
    up: Projection
    factor: float | Node
    path: tuple[Node, ...]


@dataclass(frozen=True)
class Projection:
    """Columns `lo` to `hi` of each head of a product of latents and a weight, as `[batch, heads, length, hi - lo]`.

    Attributes:
        product: the node that multiplies.
        latent: a walk from one factor, of which heads have nothing of their own.
        weight: the other one.
        order: the dims of `weight` that have heads, columns and rank; or columns of all heads, and rank.
        heads, width: the heads of the product, and the columns of each.
        path: the nodes from where this was found on, the product among them.
        adapters: what LoRA adds to the product.
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
    adapters: tuple[Adapter, ...] = ()

    @property
    def products(self) -> tuple[Node, ...]:
        return (self.product, *(x.product for adapter in self.adapters for x in (adapter.down, adapter.up)))

    @property
    def weights(self) -> tuple[Node, ...]:
        return (self.weight, *(x.weight for adapter in self.adapters for x in (adapter.down, adapter.up)))


def projection_of(start: Walk) -> Projection | Node:
    """Walk back from keys or values to a projection of latents; the node where that ends if to none."""
    walk: Walk | None = start
    path: tuple[Node, ...] = ()
    lo, end = 0, start.here
    while walk is not None and not walk.stretched and not walk.rows:
        end = walk.here
        columns = columns_of(end)
        if columns is None:
            projection = _adapted(end, walk.parts) or _split_into_heads(walk)
            if projection is not None:
                width = constant(tensor_of(start.here).shape[start.parts.index((HEAD_DIM,))])  # type: ignore[union-attr]
                path = (*path, *walk.path, *projection.path)
                return end if width is None else dataclasses.replace(projection, lo=lo, hi=lo + width, path=path)
            walk = step_back(walk)
        else:
            source, dim, first, nodes = columns
            if walk.parts[dim] != (HEAD_DIM,):
                break
            lo, path, walk = lo + first, (*path, *nodes), walk.step(source, walk.parts)
    return end


def terms_of(node: Node) -> tuple[Node, Node] | None:
    """The tensors of which `node` is the sum, if it is one that broadcasts neither."""
    if op_name(node) != "add" or len(node.args) != 2 or node.kwargs or writes(node):
        return None
    base, added = node.args
    total = tensor_of(node)
    if not isinstance(base, Node) or not isinstance(added, Node) or total is None:
        return None
    terms = [tensor_of(x) for x in (base, added)]
    alike = all(x is not None and x.dtype == total.dtype and known_shape(x.shape, total.shape) for x in terms)
    return (base, added) if alike else None


def multiple_of(node: Node) -> tuple[float | Node, Node] | None:
    """The number and the tensor of which `node` is the product: 1 and itself if it is none; None if it is of others."""
    if op_name(node) != "mul":
        return 1.0, node
    a, b = node.args if len(node.args) == 2 else (None, None)
    number, tensor = (b, a) if tensor_of(a) is not None else (a, b)
    if not isinstance(tensor, Node) or tensor_of(tensor) is None or node.kwargs or writes(node):
        return None
    if isinstance(number, Node) and is_input_number(number):
        return number, tensor
    known = number_in(number)
    return None if known is None else (known, tensor)


def before_copies(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """The tensor that copies, or dropout which is off, leave as it is, and the nodes that are such."""
    path: tuple[Node, ...] = ()
    while op_name(node) in CASTS | COPIES or inactive_dropout(node):
        source = node.all_input_nodes[0]
        before, after = tensor_of(source), tensor_of(node)
        if before is None or after is None or before.dtype != after.dtype or before.device != after.device:
            break
        if writes(node) or not known_shape(before.shape, after.shape):
            break
        path, node = (*path, node), source
    return node, path


def same_latents(a: Walk, b: Walk) -> bool:
    """Return True if two factors are the same in memory, maybe as two views that differ in dims of size 1."""
    if a.here is b.here:
        return a.parts == b.parts
    x, y = tensor_of(a.here), tensor_of(b.here)
    if x is None or y is None or not same_storage(x, y) or not known_equal(x.storage_offset(), y.storage_offset()):
        return False
    dims = [(a.parts.index(part), b.parts.index(part)) for part in a.parts if part is not None and part in b.parts]
    alike = all(known_equal(x.shape[i], y.shape[j]) and known_equal(x.stride(i), y.stride(j)) for i, j in dims)
    return alike and {*a.parts} - {None} == {*b.parts} - {None} and x.is_neg() == y.is_neg()


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
    """The product whose columns were reshaped to the tensor at hand, `[batch, length, heads, width]`."""
    node, split = walk.here, tensor_of(walk.here)
    if op_name(node) not in RESHAPES or walk.parts != ((BATCH,), (LENGTH,), (HEADS,), (HEAD_DIM,)) or split is None:
        return None
    path, source = [node], source_of(node)
    while source is not None and op_name(source) in CASTS | COPIES and (back := step_back(begin(source))) is not None:
        path.append(source)
        source = back.here
    flat = tensor_of(source)
    if source is None or flat is None:
        return None
    batch, length, *last = split.shape
    heads, width = map(constant, last)
    if heads is None or width is None:
        return None
    for ones in ((), (None,)):
        if known_shape(flat.shape, (batch, *(1 for _ in ones), length, heads * width)):
            projection = _adapted(source, ((BATCH,), *ones, (LENGTH,), FLAT))
            if projection is not None:
                return dataclasses.replace(projection, heads=heads, width=width, path=(*path, *projection.path))
    return None


def _adapted(node: Node, parts: Sequence[Part | None]) -> Projection | None:
    """The projection of latents that `node` is, alone or with what LoRA makes of the same latents added."""
    terms = terms_of(node)
    if terms is None:
        return _product(node, parts)
    base, adapter = _adapted(terms[0], parts), _adapter(terms[1], parts)
    if base is None or adapter is None or not same_latents(base.latent, adapter.down.latent):
        return None
    path = (node, *base.path, *adapter.path)
    return dataclasses.replace(base, adapters=(*base.adapters, adapter), path=path)


def _adapter(node: Node, parts: Sequence[Part | None]) -> Adapter | None:
    """The two products, one of the other, that `node` is, maybe times a number."""
    multiple = multiple_of(node)
    up = None if multiple is None else _product(multiple[1], parts)
    down = None if up is None else _product(up.latent.here, up.latent.parts)
    if multiple is None or up is None or down is None:
        return None
    latent, copies = before_copies(down.latent.here)
    path = (*([node] if node is not up.product else []), *up.path, *down.path, *copies)
    down = dataclasses.replace(down, latent=dataclasses.replace(down.latent, here=latent))
    return Adapter(down, up, multiple[0], path)


def _product(node: Node, parts: Sequence[Part | None]) -> Projection | None:
    """The projection of latents that `node` is, if it is one whose dims have these parts."""
    factors, product = _factors(node), tensor_of(node)
    if factors is None or product is None:
        return None
    a, b, (of_a, of_b, of_product) = factors
    part_of = dict(zip(of_product, parts, strict=True))
    for latent, weight, of_latent, of_weight in ((a, b, of_a, of_b), (b, a, of_b, of_a)):
        shared = {*of_latent} & {*of_weight}
        if len(shared) != 1 or shared & {*of_product}:
            return None
        ranks = [size for x, letters in ((a, of_a), (b, of_b)) for size in _sizes(x, letters, shared)]
        walk = _latents(latent, [(HEAD_DIM,) if x in shared else part_of.get(x) for x in of_latent])
        order = _order([RANK if x in shared else part_of.get(x) for x in of_weight])
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
    """A walk from latents, if their dims have these parts."""
    tensor = tensor_of(node)
    if tensor is None or (LENGTH,) not in parts or not {*parts} <= {(BATCH,), (LENGTH,), (HEAD_DIM,), None}:
        return None
    ones = (size for part, size in zip(parts, tensor.shape, strict=True) if part is None)
    return Walk(node, tuple(parts)) if all(known_equal(size, 1) for size in ones) else None


def _order(parts: Sequence[Part | None]) -> tuple[int, ...] | None:
    """Where a weight has heads, columns and rank, or columns and rank; None if it has anything else."""
    for wanted in ([(HEADS,), (HEAD_DIM,), RANK], [FLAT, RANK], [(HEAD_DIM,), RANK]):
        if len(wanted) == len(parts) and all(part in parts for part in wanted):
            return tuple(map(parts.index, wanted))
    return None


def _factors(node: Node) -> tuple[Node, Node, Letters] | None:
    """The factors of a product, and the letters of all dims."""
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
