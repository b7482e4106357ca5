"""Trace the sinks of attention that is written out, a column beside scores, back to one number per head."""

from __future__ import annotations

import dataclasses
import math

from torch.fx import Node

from tatten.ops.layout import HEADS
from tatten.passes.calls import op_name
from tatten.passes.literals import number_of, rounded
from tatten.passes.mutation import written_between
from tatten.passes.op_names import CASTS
from tatten.passes.products import Factor
from tatten.passes.reasons import Decline, Reason
from tatten.passes.symbolic import constant, known_equal, tensor_of
from tatten.passes.views import Size, Walk, begin_walk, source_of, walks_back


def sinks_of(column: Node, query: Node, q_heads: Size, reader: Node) -> Factor | Decline:
    """Return the tensor `[q_heads]` of sinks, or the reason why a column isn't one number per head.

    Args:
        column: the column that is concatenated to scores.
        query: a tensor with the dtype and device of queries.
        q_heads: the number of query heads.
        reader: the node before which the op reads the sinks.
    """
    walk, tensor, like = find_vector(column), tensor_of(column), tensor_of(query)
    if walk is not None and (vector := tensor_of(walk.node)) is not None and known_equal(vector.shape[0], q_heads):
        writer = written_between([vector], min(walk.path), reader)
        if writer is not None:
            return Decline(Reason.WRITTEN, f"`{writer}` writes to sinks after they were copied")
        return Factor(walk.node)
    number, heads = number_of(column, reader), constant(q_heads)
    if number is not None and heads is not None and like is not None and rounded(number, like.dtype) == number:
        return Factor(query, (("new_full", (heads,), number),))
    # A dim of stride 0 has the same number at all indices.
    if tensor is not None and all(
        tensor.shape[d] == 1 or tensor.stride(d) == 0 for d in (*range(tensor.dim() - 4), -2)
    ):
        views = (*(("select", 0, 0),) * (tensor.dim() - 4), ("narrow", 2, 0, 1), ("flatten",))
        if known_equal(math.prod(tensor.shape[-4:-2]), q_heads):
            return Factor(column, views)
    return Decline(Reason.RELATIVE, f"`{column}` is not known to be one number for each head")


def find_vector(column: Node) -> Walk | None:
    """Return the walk from a column `[batch, heads, q_len, 1]` back to a tensor `[heads]`, or None."""
    tensor = tensor_of(column)
    start: Walk | None = begin_walk(column) if tensor is not None and tensor.dim() == 4 else None
    while start is not None:
        for walk in walks_back(start):
            tensor = tensor_of(walk.node)
            if tensor is not None and tensor.dim() == 1:
                return walk if known_equal(tensor.shape[0], 1) or walk.parts == ((HEADS,),) else None
            start = walk
        start = _before_cast(start)
    return None


def _before_cast(walk: Walk) -> Walk | None:
    """Return the walk before a cast to a wider dtype, or None for another node."""
    source, after = source_of(walk.node), tensor_of(walk.node)
    before = tensor_of(source)
    if source is None or before is None or after is None or op_name(walk.node) not in CASTS:
        return None
    widens = before.is_floating_point() and before.dtype.itemsize < after.dtype.itemsize
    return dataclasses.replace(walk, node=source, path=(*walk.path, walk.node)) if widens else None
