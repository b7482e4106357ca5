"""Putting an op in SDPA's place: what both rewrites do to the graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from tatten.passes.mutation import written_between
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import held, hint, known_equal, known_shape, tensor_of
from tatten.passes.tree import hand_back, merge_over
from tatten.passes.views import Stored


def written_since(stored: Stored, call: SdpaCall) -> Node | None:
    """The node that may write to what is stored, or to a copy on the way, after it is read and before the call."""
    if not stored.path:
        return None
    tensors = [tensor for tensor in map(tensor_of, (stored.base, *stored.path)) if tensor is not None]
    return written_between(tensors, stored.path[-1], call.node)


def scale_of(call: SdpaCall) -> Any:
    return call.scale if call.scale is None or isinstance(call.scale, Node) else float(call.scale)


def replace_call(call: SdpaCall, op: OpOverload, args: tuple[Any, ...], orphans: Iterable[Node]) -> Node:
    """Call `op`, which returns a state, instead of SDPA; erase those of `orphans` that nobody uses then.

    Returns the op's node. Never `graph.eliminate_dead_code()`: on a Dynamo graph it deletes the writes to the cache.
    """
    graph = call.node.graph
    result = tensor_of(call.node)
    assert result is not None
    with graph.inserting_before(call.node):
        node = graph.call_function(op, args)
        out = graph.call_function(operator.getitem, (node, 0))
        node.meta.update({k: v for k, v in call.node.meta.items() if k != "example_value"})
        out.meta.update(call.node.meta)
        if call.sharding is None:
            out = _with_strides_of(out, result)
        else:
            out = merge_over(node, out, call.sharding)
            out = hand_back(call, _with_strides_of(out, held(result)))
    call.node.replace_all_uses_with(out)
    graph.erase_node(call.node)
    for orphan in sorted(set(orphans), reverse=True):
        if not orphan.users:
            graph.erase_node(orphan)
    return node


def _with_strides_of(out: Node, like: Tensor) -> Node:
    """`out`, which is contiguous, laid out as `like` was, because a `view` further on may rest on SDPA's strides."""
    strides = [hint(stride) for stride in like.stride()]
    if known_equal(like.shape[2], 1) or None in strides:
        return out  # with one query, [b, h, 1, d] and [b, 1, h, d] are the same in memory
    order = sorted(range(4), key=lambda dim: -(strides[dim] or 0))
    if order == list(range(4)):
        return out
    back = [order.index(dim) for dim in range(4)]
    dense = like.permute(order)
    if not known_shape(dense.stride(), torch.empty(dense.shape, device="meta").stride()):
        return out
    graph = out.graph
    for name, args in (("permute", order), ("contiguous", ()), ("permute", back)):
        node = graph.call_method(name, (out, *args))
        node.meta.update(out.meta)
        out = node
    return out
