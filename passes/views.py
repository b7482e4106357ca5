"""The walk back from a tensor through ops that only copy, reorder and repeat, towards the tensor that is stored.

Each dim of the tensor where a walk begins has a role: batch, heads, length or head_dim. On the way back a role may
split into several dims, some of them stretched: `[G, 1, ...].expand(G, n, ...).reshape(G * n, ...)`. Each step is
justified by what the op does to shapes, never by how its arguments are written: stretches only grow dims of size 1, and
reshapes only merge neighbours or move dims of size 1. `tatten.passes.stored` decides where a walk can end.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import writes
from tatten.passes.symbolic import known_equal, known_shape, tensor_of, value_of

ROLES = range(4)  # the dims of keys and values, as `tatten.ops.layout` names them

STRETCHES = {"expand", "broadcast_to", "repeat", "tile", "expand_as"}
RESHAPES = {"reshape", "view", "flatten", "unflatten", "reshape_as", "view_as", "_unsafe_view", "unsqueeze", "squeeze"}
COPIES = {"contiguous", "clone", "alias", "to"}
REORDERS = {"transpose", "swapaxes", "swapdims", "permute"}
CATS = {"cat", "concat", "concatenate"}
WALKED = STRETCHES | RESHAPES | COPIES | REORDERS | CATS | {"stack", "repeat_interleave", "index_select", "getitem"}

# A role and the position within it, major to minor: the parts of one role sort in the order of its index.
Part = tuple[int, ...]
Size = int | SymInt


@dataclass(frozen=True)
class Walk:
    """A place on a walk back.

    Attributes:
        here: the tensor at this place.
        parts: the part of a role that each dim of `here` holds; None for a dim of size 1.
        stretched: the parts that were stretched on the way, and how often.
        path: the nodes from where the walk began to the one that reads `here`.
    """

    here: Node
    parts: tuple[Part | None, ...]
    stretched: tuple[tuple[Part, Size], ...] = ()
    path: tuple[Node, ...] = ()

    @property
    def undone(self) -> tuple[int, bool]:
        """A rank of places: more stretched dims undone is better, and of equals a tensor of rank 4."""
        return len(self.stretched), len(self.parts) == 4

    def step(self, source: Node, parts: Sequence[Part | None], *stretched: tuple[Part, Size]) -> Walk:
        grown = tuple((part, size) for part, size in stretched if not known_equal(size, 1))
        return Walk(source, tuple(parts), self.stretched + grown, (*self.path, self.here))


def begin(node: Node) -> Walk:
    return Walk(node, tuple((role,) for role in ROLES))


def step_back(walk: Walk) -> Walk | None:
    """Go one op further back; None where `here` is not its source copied, reordered or repeated."""
    source, name = source_of(walk.here), op_name(walk.here)
    if source is None or name not in WALKED or writes(walk.here):
        return None
    before, after = tensor_of(source), tensor_of(walk.here)
    assert before is not None
    assert after is not None
    if type(before) is not type(after) or before.dtype != after.dtype or before.device != after.device:
        return None
    if name in COPIES:
        return walk.step(source, walk.parts)
    if name in REORDERS:
        return _reorder(walk, source, name)
    if name in STRETCHES:
        return _stretch(walk, source, before.shape, after.shape)
    if name == "repeat_interleave":
        return _interleave(walk, source, before.shape, after.shape)
    if name == "stack" or name in CATS:
        return _copies_of_one(walk, source, before, after)
    if name == "index_select":
        dim = argument(walk.here, 1, "dim")
        return _index(walk, source, before.shape, after.shape, dim) if isinstance(dim, int) else None
    if name == "getitem":
        index = walk.here.args[1]
        if not _only_adds_dims(index):
            is_rows = (
                isinstance(index, Node)
                and (rows := tensor_of(index)) is not None
                and rows.dtype in (torch.int32, torch.int64)
            )
            return _index(walk, source, before.shape, after.shape, 0) if is_rows else None
    return _reshape(walk, source, before.shape, after.shape)


def source_of(node: Node) -> Node | None:
    """The tensor that a view-like node reads: its first argument, or the first item of that."""
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self", node.kwargs.get("tensors")))
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    return first if isinstance(first, Node) and tensor_of(first) is not None else None


def _reorder(walk: Walk, source: Node, name: str) -> Walk | None:
    rank = len(walk.parts)
    args: Sequence[Any] = walk.here.args[1:]
    if name == "permute":
        args = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    if not all(isinstance(d, int) for d in args) or len(args) != (rank if name == "permute" else 2):
        return None
    order = list(range(rank))
    if name == "permute":
        order = [d % rank for d in args]
    else:
        i, j = args[0] % rank, args[1] % rank
        order[i], order[j] = order[j], order[i]
    parts: list[Part | None] = [None] * rank
    for dim, part in enumerate(walk.parts):
        parts[order[dim]] = part
    return walk.step(source, parts)


def _stretch(walk: Walk, source: Node, before: Sequence[Size], after: Sequence[Size]) -> Walk | None:
    """Undo `expand` and the like: dims of size 1 grow, and new ones may be added in front."""
    new = len(after) - len(before)
    if new < 0:
        return None
    stretched = []
    parts: list[Part | None] = []
    for dim, (part, size) in enumerate(zip(walk.parts, after, strict=True)):
        old = before[dim - new] if dim >= new else 1
        if not known_equal(old, size):
            if part is None or not known_equal(old, 1):
                return None
            stretched.append((part, size))
            part = None
        if dim >= new:
            parts.append(part)
    return walk.step(source, parts, *stretched)


def _interleave(walk: Walk, source: Node, before: Sequence[Size], after: Sequence[Size]) -> Walk | None:
    """Undo `repeat_interleave` with one count: each index of a dim becomes a block."""
    repeats, dim = argument(walk.here, 1, "repeats"), argument(walk.here, 2, "dim")
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
    """Undo `stack([x] * n)`, or `cat([x] * n)` over a dim of size 1."""
    tensors = argument(walk.here, 0, "tensors")
    dim = argument(walk.here, 1, "dim", walk.here.kwargs.get("axis", 0))
    if not all(x is source for x in tensors) or not isinstance(dim, int):
        return None
    dim %= after.dim()
    part, parts = walk.parts[dim], list(walk.parts)
    if op_name(walk.here) == "stack":
        del parts[dim]
    elif known_equal(before.shape[dim], 1):
        parts[dim] = None
    else:
        return None
    return walk.step(source, parts, *([] if part is None else [(part, after.shape[dim])]))


def _index(walk: Walk, source: Node, before: Sequence[Size], after: Sequence[Size], dim: int) -> Walk | None:
    """Undo `x[rows]` or `x.index_select(dim, rows)` where `x` has one row, which any valid index selects."""
    dim %= len(before)
    if len(before) != len(after) or not known_equal(before[dim], 1):
        return None
    if not known_shape((*before[:dim], *before[dim + 1 :]), (*after[:dim], *after[dim + 1 :])):
        return None
    part = walk.parts[dim]
    parts = (*walk.parts[:dim], None, *walk.parts[dim + 1 :])
    return walk.step(source, parts, *([] if part is None else [(part, after[dim])]))


def _reshape(walk: Walk, source: Node, before: Sequence[Size], after: Sequence[Size]) -> Walk | None:
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


def _only_adds_dims(index: Any) -> bool:
    parts: Sequence[Any] = index if isinstance(index, (list, tuple)) else (index,)
    return all(part is None or part is builtins.Ellipsis or part == slice(None) for part in parts)


def way_back(walk: Walk | None) -> Iterator[Walk]:
    """This place and all places further back, in order."""
    while walk is not None:
        yield walk
        walk = step_back(walk)
