"""Keys put together of pieces along head_dim: by `cat`, or by copies into parts of an empty tensor.

Functional graphs, such as exported ones, have `slice_scatter` in place of such copies.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import writes, written_between
from tatten.passes.symbolic import constant, known_equal, known_shape, same_storage, tensor_of
from tatten.passes.views import CATS, COPIES, begin, source_of, step_back

ALLOCATES = {"empty", "new_empty", "empty_like", "zeros", "new_zeros", "zeros_like"}
SPLITS = {"split", "split_with_sizes", "chunk", "tensor_split"}


@dataclass(frozen=True)
class Piece:
    """Columns `lo` to `hi` of a tensor's last dim, which hold the same as `source`."""

    lo: int
    hi: int
    source: Node

    @property
    def width(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class Assembly:
    """A tensor in pieces, in the order of their columns; those without columns are left out.

    Attributes:
        pieces: they tile all columns, if there is no `trouble`.
        path: the nodes that put it together, of which none is more than that.
        trouble: why the tensor may hold something else when it is read; empty if it can't.
    """

    pieces: tuple[Piece, ...]
    path: tuple[Node, ...] = ()
    trouble: str = ""


def pieces_of(node: Node, reader: Node) -> Assembly:
    """The pieces of the tensor `node` as `reader` finds it; one piece, itself, if it was not put together."""
    whole, path = node, list[Node]()
    while op_name(node) in COPIES and (walk := step_back(begin(node))) is not None:
        path.append(node)
        node = walk.here
    found = None
    if not writes(node):
        if op_name(node) in CATS:
            found = _concatenated(node, reader)
        elif op_name(node) in ALLOCATES:
            found = _copied(node, reader)
        elif op_name(node) == "slice_scatter":
            found = _scattered(node, reader)
    if found is None:
        return Assembly((Piece(0, _width(whole), whole),))
    copies = [] if found.trouble else [_written(copy, reader) for copy in path]
    return Assembly(found.pieces, (*path, *found.path), next(filter(None, copies), found.trouble))


def columns_of(node: Node) -> tuple[Node, int, int, tuple[Node, ...]] | None:
    """The tensor that `node` takes consecutive indices of one dim of: it, the dim, the first index, and the nodes."""
    path: tuple[Node, ...] = (node,)
    source: Any = argument(node, 0, "input")
    if node.target is operator.getitem and op_name(source) in SPLITS:
        path, source = (node, source), argument(source, 0, "tensor", source.kwargs.get("input"))
    elif op_name(node) not in ("narrow", "slice", "getitem") or (node.target is operator.getitem and not _slices(node)):
        return None
    before, after = tensor_of(source), tensor_of(node)
    if not isinstance(source, Node) or before is None or after is None or before.dim() != after.dim():
        return None
    if not same_storage(before, after):  # the offset would not tell which part of it this is
        return None
    dims = [d for d in range(after.dim()) if not known_equal(before.shape[d], after.shape[d])]
    skipped = constant(after.storage_offset() - before.storage_offset())
    if len(dims) != 1 or skipped is None or not known_shape(before.stride(), after.stride()):
        return None
    stride = constant(before.stride(dims[0]))
    return (source, dims[0], skipped // stride, path) if stride and skipped % stride == 0 else None


def _slices(node: Node) -> bool:
    index = node.args[1]
    return all(part is ... or isinstance(part, slice) for part in (index if isinstance(index, tuple) else (index,)))


def _width(node: Node) -> int:
    """The number of columns; -1 if it is dynamic, which is no one's."""
    tensor = tensor_of(node)
    assert tensor is not None
    width = constant(tensor.shape[-1])
    return -1 if width is None else width


def _written(node: Node, reader: Node) -> str:
    tensor = tensor_of(node)
    assert tensor is not None
    writer = written_between([tensor], node, reader)
    return f"`{node}` is written by `{writer}`" if writer is not None else ""


def _concatenated(node: Node, reader: Node) -> Assembly | None:
    """The pieces of a `cat` over the last dim."""
    tensors, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", node.kwargs.get("axis", 0))
    whole = tensor_of(node)
    if whole is None or not isinstance(tensors, (list, tuple)) or dim not in (-1, whole.dim() - 1):
        return None
    pieces, lo = [], 0
    for source in tensors:
        tensor = tensor_of(source)
        if tensor is None or tensor.dim() != whole.dim() or tensor.dtype != whole.dtype or _width(source) < 0:
            return None
        pieces.append(Piece(lo, lo + _width(source), source))
        lo = pieces[-1].hi
    return Assembly(_with_columns(pieces), (node,), _written(node, reader))


def _copied(node: Node, reader: Node) -> Assembly | None:
    """The pieces of an empty tensor, each copied into a view of it before `reader`."""
    whole = tensor_of(node)
    if whole is None:
        return None
    pieces, path, copied, trouble = list[Piece](), [node], node, ""
    while (writer := written_between([whole], copied, reader)) is not None:
        copied = writer
        piece = _copy(writer, whole) if op_name(writer) == "copy_" and not writer.users else None
        if piece is None:
            trouble = f"`{writer}` writes to `{node}` otherwise than a copy of columns does"
            continue
        pieces.append(piece)
        path.append(writer)
        view = writer.args[0]
        while isinstance(view, Node) and view is not node:
            path.append(view)
            view = source_of(view)
    tiles = _with_columns(pieces)
    return Assembly(tiles, tuple(path), trouble or _gap(tiles, whole)) if pieces else None


def _copy(writer: Node, whole: Tensor) -> Piece | None:
    """What a `copy_` of columns into a view of `whole` copies."""
    source = argument(writer, 1, "src")
    view, tensor = tensor_of(writer.args[0]), tensor_of(source)
    if view is None or tensor is None or view.dim() != whole.dim():
        return None
    if view.dtype != tensor.dtype or view.device != tensor.device or not known_shape(view.shape, tensor.shape):
        return None  # it casts, moves or broadcasts
    if view.dtype != whole.dtype or not known_shape(view.shape[:-1], whole.shape[:-1]):
        return None
    if known_equal(view.shape[-1], 0):
        return Piece(0, 0, source)
    lo, width = constant(view.storage_offset() - whole.storage_offset()), constant(view.shape[-1])
    if lo is None or width is None or not known_shape(view.stride(), whole.stride()):
        return None
    return Piece(lo, lo + width, source) if known_equal(view.stride(-1), 1) and same_storage(view, whole) else None


def _scattered(node: Node, reader: Node) -> Assembly | None:
    """The pieces of an empty tensor after a chain of `slice_scatter` over the last dim, the last one first."""
    whole = tensor_of(node)
    if whole is None:
        return None
    pieces, path = list[Piece](), list[Node]()
    while op_name(node) == "slice_scatter":
        base, source, dim = argument(node, 0, "self"), argument(node, 1, "src"), argument(node, 2, "dim", 0)
        start, end, step = argument(node, 3, "start"), argument(node, 4, "end"), argument(node, 5, "step", 1)
        if dim not in (-1, whole.dim() - 1) or step != 1 or not all(isinstance(x, int | None) for x in (start, end)):
            return None
        columns = range(_width(node))[slice(start, end)]
        path.append(node)
        if op_name(source) == "copy" and not writes(source):
            view, path = argument(source, 0, "self"), [*path, source]
            path += [view] if op_name(view) == "slice" else []
            source = argument(source, 1, "src")
        tensor = tensor_of(source)
        if tensor is None or tensor.dtype != whole.dtype:
            return None
        if not known_shape(tensor.shape, (*whole.shape[:-1], len(columns))):
            return None
        pieces.append(Piece(columns.start, columns.stop, source))
        node = base
    if op_name(node) not in ALLOCATES or not pieces:
        return None
    tiles = _with_columns(pieces)
    return Assembly(tiles, (*path, node), _gap(tiles, whole) or _written(node, reader))


def _with_columns(pieces: list[Piece]) -> tuple[Piece, ...]:
    return tuple(sorted((x for x in pieces if x.lo < x.hi), key=lambda piece: piece.lo))


def _gap(pieces: tuple[Piece, ...], whole: Tensor) -> str:
    """Why the pieces don't tile all columns; empty if they do."""
    ends = [0, *(piece.hi for piece in pieces)]
    starts = [*(piece.lo for piece in pieces), constant(whole.shape[-1])]
    return "" if starts == ends else f"columns {starts[:-1]} to {ends[1:]} of {whole.shape[-1]} are copied"
