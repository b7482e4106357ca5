"""Let an op read queries before the program multiplies, copies or concatenates them, or merges heads with the batch.

The op multiplies scores by a number anyway, in the dtype of sums. The program's product rounds once more and, if it is
not fused, takes a kernel in each layer, as in Whisper and BART. Merging heads with the batch copies queries that are a
part of a larger tensor. Queries for latents have two parts, which models concatenate by a kernel in each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Node

from tatten.ops.storage import all_of
from tatten.passes.calls import op_name
from tatten.passes.literals import TIMES, factor_of
from tatten.passes.metadata import reads_values
from tatten.passes.mutation import writes, written_between
from tatten.passes.op_names import COPIES, REORDERS, RESHAPES
from tatten.passes.pieces import pieces_of
from tatten.passes.replace import erase_unused_of
from tatten.passes.symbolic import constant, known_equal, known_shape, tensor_of
from tatten.passes.views import source_of

# The tensors that were concatenated to queries along head_dim, by the first column and the one after the last.
QueryParts = Mapping[tuple[int, int], Node]

# The range of the factor: outside it, scores before the multiplication might overflow or underflow float32.
LEAST, LARGEST = 2.0**-20, 2.0**20


def restore_query(op: Node) -> str:
    """Let an op read its queries before they were multiplied and copied. Return a note for the report."""
    note = _restore_product(op)
    _restore_copy(op)
    return note


def _restore_product(op: Node) -> str:
    """Let an op multiply by the number that its queries were multiplied by. Return a note for the report."""
    reader_and_product = next((x for x in _query_sources(op) if op_name(x[1]) in TIMES), None)
    if reader_and_product is None:
        return ""
    reader, product = reader_and_product
    source_and_factor, scale = factor_of(product), _scale_of(op)
    if source_and_factor is None or scale is None:
        return ""
    source, factor = source_and_factor
    before, after = tensor_of(source), tensor_of(product)
    if before is None or after is None or not _same_kind(before, after) or not _same_strides(before, after):
        return ""
    if not LEAST <= factor <= LARGEST or written_between([before], product, op) is not None:
        return ""
    reader.replace_input_with(product, source)
    op.update_arg(_scale_position(op), scale * factor)
    erase_unused_of([product])
    return f"scale {scale * factor:g}, with the {factor:g} that multiplied the queries"


def _restore_copy(op: Node) -> None:
    """Let an op read the earliest tensor of the same shape from which its queries were only reshaped and copied."""
    query, path, source_and_path = tensor_of(op.args[0]), list[Node](), None
    for _, node in _query_sources(op):
        source = source_of(node) if op_name(node) in RESHAPES | COPIES else None
        tensor = tensor_of(source)
        if source is None or tensor is None or query is None or not _same_kind(tensor, query):
            break
        if written_between([tensor], node, op) is not None:
            break
        path.append(node)
        if known_shape(tensor.shape, query.shape) and known_equal(tensor.stride(3), 1):  # as some kernels need it
            source_and_path = source, [*path]
    if source_and_path is not None:
        op.update_arg(0, source_and_path[0])
        erase_unused_of(source_and_path[1])


def find_query_parts(query: Node, reader: Node) -> QueryParts:
    """Return the tensors that a `cat` along head_dim, `query`, was made of, if `reader` can still read them.

    A `cat` that was then copied or reordered, and parts that were assigned to an empty tensor, are not considered.
    """
    concatenated, assembly = tensor_of(query), pieces_of(query, reader)
    if concatenated is None or assembly.obstacle is not None or assembly.path != (query,):
        return {}
    parts = {}
    for piece in assembly.pieces:
        tensor = tensor_of(piece.source.node)
        if (
            tensor is None
            or not _same_kind(tensor, concatenated)
            or written_between([tensor], query, reader) is not None
        ):
            continue
        if known_equal(tensor.stride(3), 1):  # as some kernels need it
            parts[piece.lo, piece.hi] = piece.source.node
    return parts


def _query_sources(op: Node) -> Iterator[tuple[Node, Node]]:
    """Yield each reader and the node that it reads: an op's queries, and back through views and copies.

    Nothing else reads these nodes, so nothing else writes to them.
    """
    reader, node, query = op, source_of(op), tensor_of(op.args[0])
    while node is not None and query is not None and _reads_alone(reader, node) and not writes(node):
        tensor = tensor_of(node)
        if tensor is None or not _same_kind(tensor, query):
            return
        yield reader, node
        if op_name(node) not in RESHAPES | REORDERS | COPIES:
            return
        reader, node = node, source_of(node)


def _same_kind(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.device, a.requires_grad) == (b.dtype, b.device, b.requires_grad)


def _reads_alone(reader: Node, node: Node) -> bool:
    """Return True if `reader` alone reads values of a node, and reads it once."""
    arguments = all_of(Node, [reader.args, list(reader.kwargs.values())])
    return [x for x in node.users if reads_values(x, node)] == [reader] and sum(x is node for x in arguments) == 1


def _same_strides(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have one shape, and equal strides in dims of more than one element.

    Then views and copies of either tensor have the same layout.
    """
    if not known_shape(a.shape, b.shape):
        return False
    dims = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(known_equal(size, 1) or known_equal(x, y) for size, x, y in dims)


def _scale_of(op: Node) -> float | None:
    """Return the scale of an op as a number, or None if it isn't one."""
    scale: Any = op.args[_scale_position(op)]
    if scale is not None:
        return scale if isinstance(scale, float) and 0 < scale < math.inf else None
    query = tensor_of(op.args[0])
    head_dim = None if query is None else constant(query.shape[3])
    return head_dim**-0.5 if head_dim else None


def _scale_position(op: Node) -> int:
    schema: Any = op.target
    return [x.name for x in schema._schema.arguments].index("scale")
