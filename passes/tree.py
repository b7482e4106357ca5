"""The tree pass: what the rewrites do where an SDPA call is one over DTensors whose sequence is sharded.

The op gets the local parts of its arguments, and what it returns is merged over the mesh dims that shard the sequence,
the last (inner) one first. Matching looks at the DTensors, which have the shapes that the model works with.
"""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from tatten.ops.distributed.collectives import group_size_and_rank
from tatten.ops.distributed.tree_merge import fastest
from tatten.ops.states import accumulator_dtype
from tatten.passes.calls import op_name
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import tensor_of
from tatten.passes.views import Stored

if TYPE_CHECKING:
    from tatten.ops.distributed.placement import Sharding
    from tatten.passes.masks import Masks


def with_sharding(call: SdpaCall) -> SdpaCall:
    """The call, with how its arguments are sharded if they are DTensors that the pass can do."""
    query, key, value, mask = (tensor_of(x) for x in (call.query, call.key, call.value, call.attn_mask))
    if query is None or key is None or value is None or (mask is None) != (call.attn_mask is None):
        return call
    if all(isinstance(x, FakeTensor) for x in (query, key, value)):
        return call
    from tatten.ops.distributed.placement import find_sharding  # imports DTensor, which takes seconds

    return dataclasses.replace(call, sharding=find_sharding(query, key, value, mask))


def merged_over(call: SdpaCall) -> str:
    """What a report says of a sharded call."""
    if call.sharding is None:
        return ""
    names = call.sharding.mesh.mesh_dim_names
    dims = ", ".join(repr(names[dim]) if names else str(dim) for dim in call.sharding.merge_dims)
    return f"local, then merged over mesh dim{'s' * (len(call.sharding.merge_dims) > 1)} {dims}"


def local_segments(call: SdpaCall, node: Node, segments: tuple[Stored, ...]) -> tuple[Stored, ...]:
    """The segments of key or value if their local parts are those of `node`; else `node` as it is."""
    if call.sharding is None:
        return segments
    from tatten.ops.distributed.placement import same_sharding

    whole, base = tensor_of(node), tensor_of(segments[0].base)
    assert whole is not None
    assert base is not None
    return segments if len(segments) == 1 and same_sharding(whole, base, segments[0].dims) else (Stored(node),)


def local_call(call: SdpaCall, key: Node, value: Node, masks: Masks) -> SdpaCall:
    """The call on the local parts of its query, of these keys and values, and of its mask."""
    mask = masks.local(call)
    with call.node.graph.inserting_before(call.node):
        query, key, value = to_local(call.query), to_local(key), to_local(value)
    return dataclasses.replace(call, query=query, key=key, value=value, attn_mask=mask)


def to_local(node: Node) -> Node:
    """The local part of a DTensor, as a node after it."""
    tensor: Any = tensor_of(node)
    local = node.graph.call_method("to_local", (node,))
    local.meta["example_value"] = tensor.to_local()
    return local


def local_mask(mask: Node, sharding: Sharding) -> Node:
    """The part of a mask that belongs to the local queries and keys: what is replicated is cut, as by `torch.chunk`."""
    tensor: Any = tensor_of(mask)
    node = to_local(mask)
    assert sharding.mask is not None
    for mesh_dim, (have, want) in enumerate(zip(tensor.placements, sharding.mask, strict=True)):
        if have != want:
            node = _cut(node, want.dim, sharding.mesh.size(mesh_dim), sharding.mesh.get_local_rank(mesh_dim))  # type: ignore[attr-defined]
    return node


def _cut(node: Node, dim: int, parts: int, index: int) -> Node:
    whole = tensor_of(node)
    assert whole is not None
    size = whole.shape[dim]
    each = (size + parts - 1) // parts
    begin = torch.sym_min(index * each, size)
    example = whole.narrow(dim, begin, torch.sym_min(each, size - begin))
    if isinstance(size, int):
        cut = node.graph.call_function(torch.narrow, (node, dim, begin, example.shape[dim]))
    else:  # not torch.chunk, which may make less than `parts` of it
        call = node.graph.call_function
        size_node = node.graph.call_method("size", (node, dim))
        each_node = call(operator.floordiv, (call(operator.add, (size_node, parts - 1)), parts))
        begin_node = call(torch.sym_min, (call(operator.mul, (each_node, index)), size_node))
        length = call(torch.sym_min, (each_node, call(operator.sub, (size_node, begin_node))))
        cut = call(torch.narrow, (node, dim, begin_node, length))
    cut.meta["example_value"] = example
    return cut


def merge_over(state: Node, out: Node, sharding: Sharding) -> Node:
    """The output of the merge over each mesh dim of the state whose output is `out`."""
    graph, local = out.graph, out.meta["example_value"].to_local()
    out.meta["example_value"] = local
    local_lse = local.new_empty(local.shape[:-1], dtype=accumulator_dtype(local.dtype))
    for group in sharding.groups:
        ranks, rank = group_size_and_rank(group)
        lse = graph.call_function(operator.getitem, (state, 1))
        args = out, lse, group, ranks, rank, fastest(local, local_lse, group, ranks)
        state = graph.call_function(torch.ops.tatten.tree_merge.default, args)
        last, out = out, graph.call_function(operator.getitem, (state, 0))
        out.meta.update(last.meta)
    return out


def hand_back(call: SdpaCall, out: Node) -> Node:
    """Give the local output to those who only asked SDPA's DTensor for it; returns what the others get."""
    sharding = call.sharding
    assert sharding is not None
    for user in list(call.node.users):
        if op_name(user) == "to_local" and user.args == (call.node,) and not user.kwargs:
            user.replace_all_uses_with(out)
            user.graph.erase_node(user)
    if not call.node.users:
        return out
    placed = out.graph.call_function(FromLocal(sharding), (out,))
    placed.meta.update(call.node.meta)
    return placed


@dataclass(frozen=True)
class FromLocal:
    """`DTensor.from_local` for one sharding: a graph takes no mesh and no placements as arguments."""

    sharding: Sharding
    __name__ = "from_local"

    def __call__(self, local: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, self.sharding.mesh, self.sharding.out, run_check=False)
