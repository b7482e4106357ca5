"""Sinks of attention that is written out: a column beside scores, traced back to one number per head."""

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
from tatten.passes.views import Size, Walk, begin, source_of, way_back


def sinks_of(column: Node, query: Node, q_heads: Size, reader: Node) -> Factor | Decline:
    """The tensor `[q_heads]` whose values stand beside the scores of all keys.

    Args:
        column: scores' last dim of size 1, as it is joined to them.
        query: a tensor of the dtype and device of queries.
        q_heads: how many heads there are.
        reader: the node that reads them in the end.
    """
    walk, tensor, like = find_vector(column), tensor_of(column), tensor_of(query)
    if walk is not None and (vector := tensor_of(walk.here)) is not None and known_equal(vector.shape[0], q_heads):
        writer = written_between([vector], min(walk.path), reader)
        if writer is not None:
            return Decline(Reason.WRITTEN, f"`{writer}` writes to sinks after they were copied")
        return Factor(walk.here)
    number, heads = number_of(column, reader), constant(q_heads)
    if number is not None and heads is not None and like is not None and rounded(number, like.dtype) == number:
        return Factor(query, (("new_full", (heads,), number),))
    # Dims of stride 0 have the same numbers at all indices.
    if tensor is not None and all(
        tensor.shape[d] == 1 or tensor.stride(d) == 0 for d in (*range(tensor.dim() - 4), -2)
    ):
        views = (*(("select", 0, 0),) * (tensor.dim() - 4), ("narrow", 2, 0, 1), ("flatten",))
        if known_equal(math.prod(tensor.shape[-4:-2]), q_heads):
            return Factor(column, views)
    return Decline(Reason.RELATIVE, f"`{column}` is not known to be one number for each head")


def find_vector(column: Node) -> Walk | None:
    """The walk from a column `[batch, heads, q_len, 1]` back to a tensor `[heads]`, if it was made of one."""
    tensor = tensor_of(column)
    start: Walk | None = begin(column) if tensor is not None and tensor.dim() == 4 else None
    while start is not None:
        for walk in way_back(start):
            tensor = tensor_of(walk.here)
            if tensor is not None and tensor.dim() == 1:
                return walk if known_equal(tensor.shape[0], 1) or walk.parts == ((HEADS,),) else None
            start = walk
        start = _before_cast(start)
    return None


def _before_cast(walk: Walk) -> Walk | None:
    """The walk before a cast to a wider dtype."""
    source, here = source_of(walk.here), tensor_of(walk.here)
    before = tensor_of(source)
    if source is None or before is None or here is None or op_name(walk.here) not in CASTS:
        return None
    widens = before.is_floating_point() and before.dtype.itemsize < here.dtype.itemsize
    return dataclasses.replace(walk, here=source, path=(*walk.path, walk.here)) if widens else None
