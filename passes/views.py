"""Walk back from a tensor through ops that only copy, reorder, repeat and select, to the stored tensor.

Each dim of the tensor where a walk begins has a role: batch, heads, length or head_dim. On the way back a role may
split into several dims, some of them stretched: `[G, 1, ...].expand(G, n, ...).reshape(G * n, ...)`. The proof of each
step uses the shapes before and after the op, never the spelling of its arguments: stretches only grow dims of size 1,
and reshapes only merge neighbours or move dims of size 1. `tatten.passes.rows` reads the selections of an index, and
`tatten.passes.stored` decides where a walk can end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.fx import Node

from tatten.ops.layout import BATCH
from tatten.passes.calls import argument, cat_arguments, only_adds_dims, op_name
from tatten.passes.drafts import without_drafts
from tatten.passes.mutation import writes
from tatten.passes.op_names import CASTS, CATS, COPIES, REORDERS, RESHAPES, STRETCHES
from tatten.passes.rows import SELECTS, Counts, Repeat, Select, selection_of
from tatten.passes.symbolic import constant, known_equal, known_shape, known_tensor, tensor_of, value_of

ROLES = range(4)  # the dims of keys and values, as `tatten.ops.layout` names them

WALKED = STRETCHES | RESHAPES | CASTS | COPIES | REORDERS | CATS | SELECTS | {"stack"}

# A role and the position within it, major to minor: the parts of one role sort in the order of its index.
Part = tuple[int, ...]
Size = int | SymInt


@dataclass(frozen=True)
class Walk:
    """A walk back to `node`.

    Attributes:
        node: the tensor that the walk has reached.
        parts: the part of a role that each dim of `node` counts; None for a dim of size 1.
        stretched: the parts that were stretched on the way, and the size of each.
        path: the nodes from where the walk began to the one that reads `node`.
        rows: the selections of rows of the batch on the way, the nearest to `node` first. After a selection, the
            batch's parts start again.
    """

    node: Node
    parts: tuple[Part | None, ...]
    stretched: tuple[tuple[Part, Size], ...] = ()
    path: tuple[Node, ...] = ()
    rows: tuple[Select | Counts | Repeat, ...] = ()

    @property
    def undone(self) -> tuple[int, int, bool]:
        """A sort key: more selections undone are better, then more stretched dims, then a tensor of rank 4."""
        return len(self.rows), len(self.stretched), len(self.parts) == 4

    def step(self, source: Node, parts: Sequence[Part | None], *stretched: tuple[Part, Size]) -> Walk:
        """Return the walk after one more step, to `source`, whose dims have these parts."""
        new_stretched = tuple((part, size) for part, size in stretched if not known_equal(size, 1))
        path = (*self.path, *without_drafts([self.node]))
        return Walk(source, tuple(parts), self.stretched + new_stretched, path, self.rows)

    def repeated_rows(self, dim: int) -> tuple[Repeat, ...] | None:
        """Return how the rows along `dim` of `node` were repeated on the way.

        Return None if that is unknown, or other dims count rows, too.
        """
        part, tensor = self.parts[dim] or (BATCH,), known_tensor(self.node)
        others = (size for d, size in enumerate(tensor.shape) if d != dim and _is_batch(self.parts[d]))
        if not _is_batch(part) or not all(known_equal(size, 1) for size in others):
            return None
        minor, major = (
            constant(math.prod(size for p, size in self.stretched if _is_batch(p) and (p < part) == is_major))
            for is_major in (False, True)
        )
        if minor is None or major is None:
            return None
        return () if minor == major == 1 else (Repeat(minor, major),)


def begin_walk(node: Node) -> Walk:
    """Begin a walk at keys or values, `[batch, heads, length, head_dim]`."""
    return Walk(node, tuple((role,) for role in ROLES))


def step_back(walk: Walk) -> Walk | None:
    """Go back one op, or return None if `node` doesn't only copy, reorder, repeat or select its source."""
    source, name = source_of(walk.node), op_name(walk.node)
    is_attribute = walk.node.target is getattr or name == "mT"  # `x.mT` is an op in PyTorch 2.15
    if source is None or not (name in WALKED or is_attribute) or writes(walk.node):
        return None
    before, after = known_tensor(source), known_tensor(walk.node)
    if type(before) is not type(after) or before.dtype != after.dtype or before.device != after.device:
        return None
    if name in CASTS | COPIES:
        return walk.step(source, walk.parts)
    if name in REORDERS or is_attribute:
        return _reorder(walk, source)
    if name in STRETCHES:
        return _stretch(walk, source, before.shape, after.shape)
    if name == "stack" or name in CATS:
        return _copies_of_one(walk, source, before, after)
    if name in SELECTS:
        selection = selection_of(walk.node, before)
        if selection is not None:
            return _select(walk, (walk.node,), source, before.shape, after.shape, selection)
    if name == "repeat_interleave":
        return _interleave(walk, source, before.shape, after.shape)
    if name in SELECTS and not (name == "getitem" and only_adds_dims(walk.node.args[1])):
        return None
    return undo_reshape(walk, source, before.shape, after.shape) or _flattened(walk, source)


def _is_batch(part: Part | None) -> bool:
    return part is not None and part[0] == BATCH


def source_of(node: Node) -> Node | None:
    """Return the tensor that a view-like node reads: its first argument, or the first item of a list, or None."""
    if node.target is F.embedding:
        weight = argument(node, 1, "weight")
        return weight if isinstance(weight, Node) else None
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self", node.kwargs.get("tensors")))
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    return first if isinstance(first, Node) and tensor_of(first) is not None else None


def order_of(node: Node, rank: int) -> list[int] | None:
    """Return the source's dims in their new order for `permute`, `transpose` and the like, or None for other nodes."""
    dims: Sequence[Any] = node.args[1:]
    if node.target is getattr or op_name(node) == "mT":
        dims = (-2, -1) if dims in ((), ("mT",)) else ()
    elif op_name(node) == "permute" and len(dims) == 1 and isinstance(dims[0], (list, tuple)):
        dims = dims[0]
    elif op_name(node) not in REORDERS:
        return None
    if not all(isinstance(d, int) for d in dims) or len(dims) != (rank if op_name(node) == "permute" else 2):
        return None
    if op_name(node) == "permute":
        return [d % rank for d in dims]
    order = list(range(rank))
    i, j = (d % rank for d in dims)
    order[i], order[j] = order[j], order[i]
    return order


def _reorder(walk: Walk, source: Node) -> Walk | None:
    rank = len(walk.parts)
    order = order_of(walk.node, rank)
    if order is None:
        return None
    parts: list[Part | None] = [None] * rank
    for dim, part in enumerate(walk.parts):
        parts[order[dim]] = part
    return walk.step(source, parts)


def _stretch(walk: Walk, source: Node, before: Sequence[Size], after: Sequence[Size]) -> Walk | None:
    """Undo `expand` and the like: dims of size 1 grow, larger ones are tiled, and new ones may be added in front."""
    n_new = len(after) - len(before)
    if n_new < 0:
        return None
    stretched = []
    parts: list[Part | None] = []
    for dim, (part, size) in enumerate(zip(walk.parts, after, strict=True)):
        old = before[dim - n_new] if dim >= n_new else 1
        if not known_equal(old, size):
            if part is None:
                return None
            if known_equal(old, 1):
                stretched.append((part, size))
                part = None
            else:
                tile, part = _tile(part, old, size)
                stretched.append(tile)
        if dim >= n_new:
            parts.append(part)
    return walk.step(source, parts, *stretched)


def _tile(part: Part, before: Size, after: Size) -> tuple[tuple[Part, Size], Part]:
    """Return the part that tiles a dim of size `before`, with its size, and the part of the dim itself."""
    return ((*part, 0), after // before), (*part, 1)


def _interleave(walk: Walk, source: Node, before: Sequence[Size], after: Sequence[Size]) -> Walk | None:
    """Undo `repeat_interleave` with one count: each index of a dim becomes a block."""
    repeats, dim = argument(walk.node, 1, "repeats"), argument(walk.node, 2, "dim")
    if isinstance(repeats, Node):
        repeats = value_of(repeats)
    if not isinstance(repeats, int | SymInt) or not isinstance(dim, int):
        return None  # one count for each index, or a flattened tensor
    dim %= len(after)
    part = walk.parts[dim]
    if part is None or not known_equal(before[dim] * repeats, after[dim]):
        return None
    parts = list(walk.parts)
    parts[dim] = (*part, 0)
    return walk.step(source, parts, ((*part, 1), repeats))


def _copies_of_one(walk: Walk, source: Node, before: Tensor, after: Tensor) -> Walk | None:
    """Undo `stack([x] * n)` or `cat([x] * n)`."""
    tensors, dim = cat_arguments(walk.node)
    if not all(x is source for x in tensors) or not isinstance(dim, int):
        return None
    dim %= after.dim()
    part, parts = walk.parts[dim], list(walk.parts)
    if op_name(walk.node) == "stack":
        del parts[dim]
    elif known_equal(before.shape[dim], 1):
        parts[dim] = None
    elif part is not None:
        tile, parts[dim] = _tile(part, before.shape[dim], after.shape[dim])
        return walk.step(source, parts, tile)
    return walk.step(source, parts, *([] if part is None else [(part, after.shape[dim])]))


def _select(
    walk: Walk,
    path: Sequence[Node],
    source: Node,
    before: Sequence[Size],
    after: Sequence[Size],
    selection: tuple[int, Select | Counts],
) -> Walk | None:
    """Undo a selection of rows of the batch, or in any dim a selection from a single row."""
    dim, step = selection
    if not known_shape((*before[:dim], *before[dim + 1 :]), (*after[:dim], *after[dim + 1 :])):
        return None
    path = (*walk.path, *without_drafts(path))
    if known_equal(before[dim], 1):
        part = walk.parts[dim]
        parts = (*walk.parts[:dim], None, *walk.parts[dim + 1 :])
        return dataclasses.replace(walk.step(source, parts, *([] if part is None else [(part, after[dim])])), path=path)
    repeated = walk.repeated_rows(dim)
    if repeated is None:
        return None
    return Walk(
        source,
        tuple((BATCH,) if d == dim else None if _is_batch(part) else part for d, part in enumerate(walk.parts)),
        tuple((part, size) for part, size in walk.stretched if not _is_batch(part)),
        path,
        (step, *repeated, *walk.rows),
    )


def _flattened(walk: Walk, selected: Node) -> Walk | None:
    """Undo a selection of flattened rows, `F.embedding(index, x.flatten(1)).view(-1, *x.shape[1:])`, in one step."""
    source = source_of(selected) if op_name(selected) in SELECTS and not writes(selected) else None
    after, rows, flat = tensor_of(walk.node), tensor_of(selected), tensor_of(source)
    if source is None or after is None or rows is None or flat is None or rows.dim() != flat.dim():
        return None
    selection = selection_of(selected, flat)
    if selection is None or selection[0] != 0 or not known_equal(after.shape[0], rows.shape[0]):
        return None
    if not known_shape(rows.shape[1:], flat.shape[1:]):
        return None
    path = [walk.node, selected]
    shape = flat.shape[0], *after.shape[1:]
    while not known_shape(flat.shape, shape):
        reshaped = source_of(source) if op_name(source) in RESHAPES and not writes(source) else None
        unflattened = tensor_of(reshaped)
        if reshaped is None or unflattened is None or unflattened.dtype != flat.dtype:
            return None
        path.append(source)
        source, flat = reshaped, unflattened
    return _select(walk, path, source, shape, after.shape, selection)


def undo_reshape(walk: Walk, source: Node, before: Sequence[Size], after: Sequence[Size]) -> Walk | None:
    """Undo a reshape: neighbours merged into a dim are its parts, major to minor; dims of size 1 come and go."""
    parts: list[Part | None] = [None] * len(before)
    dim = 0
    for part, size in zip(walk.parts, after, strict=True):
        merged: list[int] = []
        product: Size = 1
        while not known_equal(product, size):
            if dim == len(before):
                return None
            if not known_equal(before[dim], 1):
                product = product * before[dim]
                merged.append(dim)
            dim += 1
        if part is None or not merged:
            continue
        for i, d in enumerate(merged):
            parts[d] = part if len(merged) == 1 else (*part, i)
    if not all(known_equal(size, 1) for size in before[dim:]):
        return None
    return walk.step(source, parts)


def walks_back(walk: Walk | None) -> Iterator[Walk]:
    """Yield this walk and all walks that go further back, in order."""
    while walk is not None:
        yield walk
        walk = step_back(walk)
