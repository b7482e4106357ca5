"""Steps from indices to a mask that change its columns: blocks of keys, the first ones, others in front of them."""

from __future__ import annotations

from torch.fx import Node

from tatten.ops.picks import with_first
from tatten.passes.calls import argument
from tatten.passes.marked import Marked, Reading
from tatten.passes.symbolic import constant, known_equal, known_shape, known_tensor, rank_of, same_storage, tensor_of

SLICES = {"getitem", "slice", "narrow"}


def read_in_blocks(reading: Reading, node: Node) -> Marked | None:
    """Each column several times."""
    each, dim, source = argument(node, 1, "repeats"), argument(node, 2, "dim"), argument(node, 0, "input")
    if not isinstance(each, int) or dim not in (-1, rank_of(node) - 1) or each < 1:
        return None
    marked = reading.read(source, node)
    if marked is None:
        return None
    inside = None if isinstance(marked.inside, Node) else marked.inside
    return marked.after(node, block=marked.block * each, inside=inside)


def read_sliced(reading: Reading, node: Node) -> Marked | None:
    """The first columns, of all rows."""
    source = argument(node, 0, "input")
    before, after = tensor_of(source), known_tensor(node)
    if before is None or before.dim() != after.dim() or not same_storage(before, after):
        return None
    if not known_shape(before.shape[:-1], after.shape[:-1]) or not known_shape(before.stride(), after.stride()):
        return None
    if not known_equal(before.storage_offset(), after.storage_offset()):
        return None
    marked = reading.read(source, node)
    if marked is None:
        return None
    inside, in_range = marked.inside, marked.in_range and known_equal(before.shape[-1], after.shape[-1])
    if isinstance(inside, Node):
        alike = known_shape(known_tensor(inside).shape, before.shape)
        inside = reading.draft(node.target, inside, *node.args[1:], **node.kwargs) if alike else None
    return marked.after(node, inside=inside, in_range=in_range)


def read_beside(reading: Reading, node: Node) -> Marked | None:
    """Columns of indices behind others, all of which are named from then on."""
    tensors, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", node.kwargs.get("axis", 0))
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
