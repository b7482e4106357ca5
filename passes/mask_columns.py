"""Steps from indices to a mask that change its columns: they repeat, slice or concatenate them."""

from __future__ import annotations

from torch.fx import Node

from tatten.ops.picks import counted_from, key_indices, with_first
from tatten.passes.calls import argument, cat_arguments, op_name
from tatten.passes.marked import Marked, Reading
from tatten.passes.symbolic import constant, known_equal, known_shape, known_tensor, rank_of, same_storage, tensor_of

SLICES = {"getitem", "slice", "narrow"}


def read_in_blocks(reading: Reading, node: Node) -> Marked | None:
    """Read a `repeat_interleave` of columns."""
    repeats, dim, source = argument(node, 1, "repeats"), argument(node, 2, "dim"), argument(node, 0, "input")
    if not isinstance(repeats, int) or dim not in (-1, rank_of(node) - 1) or repeats < 1:
        return None
    marked = reading.read(source, node)
    if marked is None:
        return None
    inside = None if isinstance(marked.inside, Node) else marked.inside
    return marked.after(node, block=marked.block * repeats, inside=inside)


def read_sliced(reading: Reading, node: Node) -> Marked | None:
    """Read a slice of columns, with any step, of all rows."""
    source = argument(node, 0, "input")
    before, after = tensor_of(source), known_tensor(node)
    if before is None or before.dim() != after.dim() or not same_storage(before, after):
        return None
    if not known_shape((*before.shape[:-1], *before.stride()[:-1]), (*after.shape[:-1], *after.stride()[:-1])):
        return None
    skipped = constant(after.storage_offset() - before.storage_offset())
    stride, new_stride = constant(before.stride(-1)), constant(after.stride(-1))
    marked = reading.read(source, node)
    if marked is None or skipped is None or not stride or not new_stride or skipped % stride or new_stride % stride:
        return None
    inside, first, step = marked.inside, skipped // stride, new_stride // stride
    in_range = marked.in_range and known_equal(before.shape[-1], after.shape[-1])
    if isinstance(inside, Node):
        can_slice = known_shape(known_tensor(inside).shape, before.shape)
        only_columns = op_name(node) != "narrow" or argument(node, 1, "dim") in (-1, before.dim() - 1)
        can_slice = can_slice or (only_columns and known_equal(known_tensor(inside).shape[-1], before.shape[-1]))
        inside = reading.draft(node.target, inside, *node.args[1:], **node.kwargs) if can_slice else None
    indices, block = _of_columns(reading, marked, source, first, step)
    return marked.after(node, indices=indices, block=block, inside=inside, in_range=in_range)


def _of_columns(reading: Reading, marked: Marked, source: Node, first: int, step: int) -> tuple[Node, int]:
    """Draft indices among every `step`-th column from `first` on. Also return the number of keys that each names."""
    indices, block = marked.indices, marked.block
    if first < step and block % step == 0:
        return indices, block // step  # some of the columns of each block
    if first % block or step > 1:
        columns = constant(known_tensor(source).shape[-1])
        size = reading.draft("size", source, -1) if columns is None else columns
        indices = indices if block == 1 else reading.draft(key_indices, indices, size, block)
        block = 1
    return reading.draft(counted_from, indices, first // block, step), block


def read_beside(reading: Reading, node: Node) -> Marked | None:
    """Read a `cat` of other columns and the marked ones. All of the other columns then count as named."""
    tensors, dim = cat_arguments(node)
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 2 or dim not in (-1, rank_of(node) - 1):
        return None
    first, last = (tensor_of(x) for x in tensors)
    n = None if first is None else constant(first.shape[-1])
    if first is None or last is None or n is None or first.dtype != last.dtype:
        return None
    marked = reading.read(tensors[1], node)
    if marked is None or marked.block != 1:
        return None
    return marked.after(node, indices=reading.draft(with_first, marked.indices, n), inside=None)
