"""Find the pieces of keys that are joined along head_dim, by `cat` or by writes to columns of an empty tensor.

Functional graphs, such as exported ones, have `slice_scatter` in place of these writes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from tatten.ops.layout import HEAD_DIM, HEADS
from tatten.passes.calls import argument, cat_arguments, only_slices, op_name
from tatten.passes.drafts import without_drafts
from tatten.passes.mutation import writes, written_between
from tatten.passes.op_names import CASTS, CATS, COPIES, REORDERS
from tatten.passes.reasons import Decline, Reason
from tatten.passes.symbolic import constant, known_equal, known_shape, known_tensor, same_storage, tensor_of
from tatten.passes.views import Walk, begin_walk, source_of, step_back

ALLOCATES = {"empty", "new_empty", "empty_like", "zeros", "new_zeros", "zeros_like"}
SPLITS = {"split", "split_with_sizes", "chunk", "tensor_split"}


@dataclass(frozen=True)
class Piece:
    """Columns `lo` to `hi` of head_dim, which are equal to the tensor where `source` begins. Heads may share it."""

    lo: int
    hi: int
    source: Walk

    @property
    def width(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class Assembly:
    """A tensor in pieces, in the order of their columns. Pieces without columns are left out.

    Attributes:
        pieces: the pieces. They tile all columns unless there is an `obstacle`.
        path: the nodes that join the pieces and do nothing else.
        obstacle: the reason why the tensor may hold something else when it is read, or None.
    """

    pieces: tuple[Piece, ...]
    path: tuple[Node, ...] = ()
    obstacle: Decline | None = None


def pieces_of(node: Node, reader: Node) -> Assembly:
    """Return the pieces of keys `node` at the time when `reader` reads them. Other keys are one piece."""
    walk, path = begin_walk(node), list[Node]()
    while op_name(walk.node) in CASTS | COPIES | REORDERS and (back := step_back(walk)) is not None:
        path += without_drafts([walk.node])
        walk = back
    assembly, joined = None, tensor_of(walk.node)
    if joined is not None and walk.parts[-1] == (HEAD_DIM,) and not writes(walk.node):
        if op_name(walk.node) in CATS:
            assembly = _concatenated(walk, joined, reader)
        elif op_name(walk.node) in ALLOCATES:
            assembly = _written_in_columns(walk, joined, reader)
        elif op_name(walk.node) == "slice_scatter":
            assembly = _scattered(walk, joined, reader)
    if assembly is None or joined is None:
        return Assembly((Piece(0, _width(node), begin_walk(node)),))
    copies = [x for x in path if (tensor := tensor_of(x)) is not None and not same_storage(tensor, joined)]
    obstacles = (assembly.obstacle, *(_written(x, reader) for x in copies))
    return Assembly(assembly.pieces, (*path, *assembly.path), next(filter(None, obstacles), None))


def columns_of(node: Node) -> tuple[Node, int, int, tuple[Node, ...]] | None:
    """Return the tensor that `node` slices along one dim, the dim, the first index, and the nodes, or None."""
    path: tuple[Node, ...] = (node,)
    source: Any = argument(node, 0, "input")
    if node.target is operator.getitem and op_name(source) in SPLITS:
        path, source = (node, source), argument(source, 0, "tensor", source.kwargs.get("input"))
    elif op_name(node) not in ("narrow", "slice", "getitem") or (
        node.target is operator.getitem and not only_slices(node.args[1])
    ):
        return None
    before, after = tensor_of(source), tensor_of(node)
    if not isinstance(source, Node) or before is None or after is None or before.dim() != after.dim():
        return None
    if not same_storage(before, after):  # a copy, whose offset says nothing about the slice
        return None
    dims = [d for d in range(after.dim()) if not known_equal(before.shape[d], after.shape[d])]
    skipped = constant(after.storage_offset() - before.storage_offset())
    if len(dims) != 1 or skipped is None or not known_shape(before.stride(), after.stride()):
        return None
    stride = constant(before.stride(dims[0]))
    return (source, dims[0], skipped // stride, path) if stride and skipped % stride == 0 else None


def _width(node: Node) -> int:
    """Return the number of columns, or -1 if it is dynamic."""
    width = constant(known_tensor(node).shape[-1])
    return -1 if width is None else width


def _written(node: Node, reader: Node) -> Decline | None:
    writer = written_between([known_tensor(node)], node, reader)
    return None if writer is None else Decline(Reason.WRITTEN, f"`{node}`, keys in pieces, is written by `{writer}`")


def _concatenated(walk: Walk, joined: Tensor, reader: Node) -> Assembly | None:
    """Return the pieces of a `cat` over the last dim, or None."""
    node = walk.node
    tensors, dim = cat_arguments(node)
    if not isinstance(tensors, (list, tuple)) or dim not in (-1, joined.dim() - 1):
        return None
    pieces, lo = [], 0
    for source in tensors:
        tensor = tensor_of(source)
        width = None if tensor is None or tensor.dim() != joined.dim() else constant(tensor.shape[-1])
        if width is None or not _fill(source, range(width), walk, joined):
            return None
        pieces.append(_piece(range(lo, lo + width), source, walk))
        lo += width
    return Assembly(_with_columns(pieces), (node,), _written(node, reader))


def _written_in_columns(walk: Walk, joined: Tensor, reader: Node) -> Assembly | None:
    """Return the pieces that are written to columns of an empty tensor before `reader`, or None."""
    node, obstacle = walk.node, None
    pieces, path, last = list[Piece](), [node], node
    while (writer := written_between([joined], last, reader)) is not None:
        last = writer
        piece = None if writer.users else _piece_written(writer, walk, joined)
        if piece is None:
            obstacle = Decline(
                Reason.WRITTEN, f"`{writer}` writes to keys, `{node}`, otherwise than a copy of columns does"
            )
            continue
        pieces.append(piece)
        path.append(writer)
        view = writer.args[0]
        while isinstance(view, Node) and view is not node:
            path.append(view)
            view = source_of(view)
    tiles = _with_columns(pieces)
    return Assembly(tiles, tuple(path), obstacle or _gap(tiles, joined)) if pieces else None


def _piece_written(writer: Node, walk: Walk, joined: Tensor) -> Piece | None:
    """Return the piece that a `copy_` or an assignment writes to columns of `joined`, or None for other writes."""
    if writer.target is operator.setitem:
        _, index, source = writer.args
        columns = _columns_at(index, joined.dim())
    elif op_name(writer) == "copy_":
        columns, source = slice(None), argument(writer, 1, "src")
    else:
        return None
    view = tensor_of(argument(writer, 0, "self"))
    if view is None or view.dim() != joined.dim() or view.dtype != joined.dtype or not same_storage(view, joined):
        return None
    lo, width = constant(view.storage_offset() - joined.storage_offset()), constant(view.shape[-1])
    if columns is None or width is None or not known_shape(view.shape[:-1], joined.shape[:-1]):
        return None
    written = range(width)[columns]
    if not _fill(source, written, walk, joined):
        return None
    if not len(written):
        return _piece(written, source, walk)
    if lo is None or written.step != 1 or not known_shape(view.stride(), joined.stride()):
        return None
    return (
        _piece(range(lo + written.start, lo + written.stop), source, walk) if known_equal(view.stride(-1), 1) else None
    )


def _columns_at(index: Any, rank: int) -> slice | None:
    """Return the columns that an index takes from a tensor of this rank, or None if it cuts other dims."""
    parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    dots = [i for i, part in enumerate(parts) if part is ...]
    if len(dots) > 1 or any(part is not ... and not isinstance(part, slice) for part in parts):
        return None
    at = dots[0] if dots else len(parts)
    parts = (*parts[:at], *(slice(None) for _ in range(rank - len(parts) + len(dots))), *parts[at + 1 :])
    last = parts[-1]
    numbers = all(isinstance(x, int | None) for x in (last.start, last.stop, last.step))
    return last if numbers and all(x == slice(None) for x in parts[:-1]) else None


def _fill(source: Any, columns: range, walk: Walk, joined: Tensor) -> bool:
    """Return True if a copy of `source` fills these columns of `joined`, for each head or from one head for all."""
    tensor = tensor_of(source)
    if tensor is None or tensor.dtype != joined.dtype or tensor.device != joined.device or tensor.dim() != joined.dim():
        return False
    sizes = zip(walk.parts, tensor.shape, (*joined.shape[:-1], len(columns)), strict=True)
    return all(known_equal(a, b) or (part == (HEADS,) and known_equal(a, 1)) for part, a, b in sizes)


def _scattered(walk: Walk, joined: Tensor, reader: Node) -> Assembly | None:
    """Return the pieces that a chain of `slice_scatter` writes to columns of an empty tensor, last first, or None."""
    node = walk.node
    pieces, path = list[Piece](), list[Node]()
    while op_name(node) == "slice_scatter":
        base, source, dim = argument(node, 0, "self"), argument(node, 1, "src"), argument(node, 2, "dim", 0)
        start, end, step = argument(node, 3, "start"), argument(node, 4, "end"), argument(node, 5, "step", 1)
        if dim not in (-1, joined.dim() - 1) or step != 1 or not all(isinstance(x, int | None) for x in (start, end)):
            return None
        columns = range(_width(node))[slice(start, end)]
        path.append(node)
        if op_name(source) == "copy" and not writes(source):
            view, path = argument(source, 0, "self"), [*path, source]
            path += [view] if op_name(view) == "slice" else []
            source = argument(source, 1, "src")
        if not _fill(source, columns, walk, joined):
            return None
        pieces.append(_piece(columns, source, walk))
        node = base
    if op_name(node) not in ALLOCATES or not pieces:
        return None
    path.append(node)
    tiles = _with_columns(pieces)
    obstacles = (_gap(tiles, joined), *(_written(x, reader) for x in path))
    return Assembly(tiles, tuple(path), next(filter(None, obstacles), None))


def _piece(columns: range, source: Any, walk: Walk) -> Piece:
    return Piece(columns.start, columns.stop, Walk(source, walk.parts))


def _with_columns(pieces: list[Piece]) -> tuple[Piece, ...]:
    return tuple(sorted((x for x in pieces if x.lo < x.hi), key=lambda piece: piece.lo))


def _gap(pieces: tuple[Piece, ...], joined: Tensor) -> Decline | None:
    """Return the reason why the pieces don't tile all columns, or None if they do."""
    ends = [0, *(piece.hi for piece in pieces)]
    starts = [*(piece.lo for piece in pieces), constant(joined.shape[-1])]
    filled = ", ".join(f"{piece.lo}:{piece.hi}" for piece in pieces)
    return (
        None
        if starts == ends
        else Decline(Reason.PIECES, f"the keys have {joined.shape[-1]} columns, and {filled} are filled")
    )
