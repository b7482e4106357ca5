"""The tree pass: SDPA over DTensors whose sequence is sharded becomes local attention and a merge over ranks.

The pass wraps the others. They match the local parts of query, keys and values as plain tensors; the parts that a match
needs are then inserted into the graph, an op attends to them, and its state is merged over the mesh dims that shard the
sequence.
"""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from tatten.ops.distributed.collectives import group_size_and_rank
from tatten.ops.distributed.tree_merge import fastest
from tatten.ops.states import accumulator_dtype
from tatten.passes.calls import op_name
from tatten.passes.masks import Masks, same_view
from tatten.passes.plain import AnyMatch, PlainCall
from tatten.passes.replace import with_strides_of
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.symbolic import FakeTensor, LocalPart, held, tensor_of

if TYPE_CHECKING:
    from tatten.ops.distributed.placement import Sharding


def find_sharded(call: SdpaCall) -> ShardedCall | None:
    """Return the call with its sharding, or None for plain tensors and for DTensors that are left to PyTorch."""
    query, key, value, mask = (tensor_of(x) for x in (call.query, call.key, call.value, call.attn_mask))
    if query is None or key is None or value is None or (mask is None) != (call.attn_mask is None):
        return None
    if all(isinstance(x, FakeTensor) for x in (query, key, value)):
        return None
    from tatten.ops.distributed.placement import find_sharding  # imports DTensor, which takes seconds

    sharding = find_sharding(query, key, value, mask)
    return None if sharding is None else ShardedCall(call, sharding)


@dataclass(frozen=True)
class ShardedCall(PlainCall):
    """An SDPA call on DTensors; the matchers see their local parts."""

    sharding: Sharding
    weighed: ClassVar[bool] = False  # the alternative is to gather the keys of all ranks

    @property
    def note(self) -> str:
        names = self.sharding.mesh.mesh_dim_names
        dims = ", ".join(repr(names[dim]) if names else str(dim) for dim in self.sharding.merge_dims)
        return f"local, then merged over mesh dim{'s' * (len(self.sharding.merge_dims) > 1)} {dims}"

    def check(self) -> None:
        """Return None: `find_sharding` has checked the call."""

    def seen(self) -> SdpaCall:
        query, key, value = (_local_part(x) for x in (self.call.query, self.call.key, self.call.value))
        return dataclasses.replace(self.call, query=query, key=key, value=value)

    def seen_segments(self, whole: Node, segments: tuple[Stored, ...]) -> tuple[Stored, ...]:
        """Return the local part of a single segment that is sharded as `whole` is, else the local part of `whole`."""
        from tatten.ops.distributed.placement import same_sharding

        tensor, base = tensor_of(whole), tensor_of(segments[0].base)
        assert tensor is not None
        assert base is not None
        if len(segments) == 1 and same_sharding(tensor, base, segments[0].dims):
            return (dataclasses.replace(segments[0], base=_local_part(segments[0].base)),)
        return (Stored(_local_part(whole)),)

    def insert(self, match: AnyMatch, masks: Masks) -> AnyMatch:
        """Insert `to_local` of the query, the segments and the mask; layers that share a mask share its node."""
        mask = self.call.attn_mask
        with self.call.node.graph.inserting_before(self.call.node):
            if mask is not None:
                key = same_view(mask), self.sharding
                mask = masks.once(key, lambda: _local_mask(self.call.attn_mask, self.sharding))
            query = _to_local(match.call.query)
            keys, values = (
                tuple(dataclasses.replace(x, base=_to_local(x.base)) for x in stored)
                for stored in (match.keys, match.values)
            )
        call = dataclasses.replace(match.call, query=query, attn_mask=mask)
        return dataclasses.replace(match, call=call, keys=keys, values=values)

    def output(self, state: Node) -> Node:
        """Insert a merge over each mesh dim, the last (inner) one first, and return the output, placed as SDPA's was.

        Users that only take the local part of SDPA's DTensor get it directly; if all do, no DTensor is made.
        """
        call, graph = self.call.node, state.graph
        like = held(tensor_of(call))
        lse = like.new_empty(like.shape[:-1], dtype=accumulator_dtype(like.dtype))
        with graph.inserting_before(call):
            out = _item(state, 0)
            for group in self.sharding.groups:
                ranks, rank = group_size_and_rank(group)
                args = out, _item(state, 1), group, ranks, rank, fastest(like, lse, group, ranks)
                state = graph.call_function(torch.ops.tatten.tree_merge.default, args)
                out = _item(state, 0)
            out.meta.update({**call.meta, "example_value": like})
            out = with_strides_of(out, like)
            for user in list(call.users):
                if op_name(user) == "to_local" and user.args == (call,) and not user.kwargs:
                    user.replace_all_uses_with(out)
                    graph.erase_node(user)
            if call.users:
                out = graph.call_function(FromLocal(self.sharding), (out,))
                out.meta.update(call.meta)
        return out


def _local_part(dtensor: Any) -> LocalPart:
    return LocalPart(dtensor, held(tensor_of(dtensor)))


def _to_local(x: Any) -> Node:
    """Insert `to_local` of a DTensor or local part."""
    part = x if isinstance(x, LocalPart) else _local_part(x)
    node = part.dtensor.graph.call_method("to_local", (part.dtensor,))
    node.meta["example_value"] = part.tensor
    return node


def _item(state: Node, index: int) -> Node:
    return state.graph.call_function(operator.getitem, (state, index))


def _local_mask(mask: Node, sharding: Sharding) -> Node:
    """Insert the local part of a mask. A replicated mask is cut where the scores are sharded, as by `torch.chunk`."""
    tensor: Any = tensor_of(mask)
    node = _to_local(mask)
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


@dataclass(frozen=True)
class FromLocal:
    """`DTensor.from_local` for one sharding, as a callable: a graph takes no meshes or placements as arguments."""

    sharding: Sharding
    __name__ = "from_local"

    def __call__(self, local: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, self.sharding.mesh, self.sharding.out, run_check=False)
