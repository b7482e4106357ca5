"""Local parts of DTensors and of the masks that belong to them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from tatten.ops.layout import LENGTH
from tatten.ops.picks import counted_from
from tatten.ops.sizes import ceil_div
from tatten.passes.calls import argument, op_name
from tatten.passes.drafts import Drafting, Drafts
from tatten.passes.symbolic import constant, known_tensor, same_storage, tensor_of

if TYPE_CHECKING:
    from tatten.ops.distributed.placement import Sharding
    from tatten.passes.stored import Stored


@dataclass(frozen=True)
class Share:
    """The part of a segment that this rank attends to, in a call whose segments differ in placement.

    Attributes:
        segment: the segment, a DTensor.
        part: this rank's part of it.
        chunks: for each mesh dim that shards the segment, the number of chunks and this rank's chunk.
        stripe: the number of ranks that divide a replicated segment among them, and the index of this rank.
    """

    segment: Stored
    part: Stored
    chunks: tuple[tuple[int, int], ...]
    stripe: tuple[int, int]

    def columns(self, draft: Drafting, columns: Node, dim: int) -> Node:
        """Draft the columns of a mask for this part from the columns for the segment."""
        for parts, index in self.chunks:
            columns = chunk(draft, columns, dim, parts, index)
        return stripe(draft, columns, dim, *self.stripe)

    def indices(self, draft: Drafting, indices: Node) -> Node:
        """Draft indices of this part's keys from indices of the segment's keys. The segment has a constant length."""
        size = constant(self.segment.size(LENGTH))
        assert size is not None
        for parts, index in self.chunks:
            first, size = _chunk_of(size, parts, index)
            indices = draft(counted_from, indices, first)
        ranks, rank = self.stripe
        return indices if ranks == 1 else draft(counted_from, indices, rank, ranks)


def local_input(dtensor: Node) -> Node | None:
    """Return the plain tensor from which `DTensor.from_local` made `dtensor`, or None.

    `shape` and `stride` only describe the other ranks. `run_check` may overwrite the tensor by that of another rank.
    Dynamo does not trace this, and PyTorch 2.11 would not show it.
    """
    if op_name(dtensor) != "from_local" or dtensor.kwargs.get("run_check"):
        return None
    node = argument(dtensor, 0, "local_tensor")
    local, full = tensor_of(node), tensor_of(dtensor)
    if local is None or full is None or not same_storage(local, full):  # or it was moved to the device of the mesh
        return None
    return node  # type: ignore[no-any-return]


def local_mask(drafts: Drafts, mask: Node, sharding: Sharding) -> Node:
    """Draft the local part of a mask. Mesh dims that shard the scores cut a replicated mask as `torch.chunk` does."""
    tensor: Any = tensor_of(mask)
    node = drafts.local_part(mask)
    assert sharding.mask is not None
    for mesh_dim, (actual, expected) in enumerate(zip(tensor.placements, sharding.mask, strict=True)):
        if actual != expected:
            parts, index = sharding.mesh.size(mesh_dim), sharding.mesh.get_local_rank(mesh_dim)
            node = chunk(Drafting(drafts, mask), node, expected.dim, parts, index)  # type: ignore[attr-defined]
    return node


def chunk(draft: Drafting, node: Node, dim: int, parts: int, index: int) -> Node:
    """Draft the chunk that one rank has of a DTensor sharded over `dim`."""
    size = known_tensor(node).shape[dim]
    if isinstance(size, int):
        return draft(torch.narrow, node, dim, *_chunk_of(size, parts, index))
    # Not torch.chunk, which may return fewer chunks than `parts`.
    size_node = draft("size", node, dim)
    full_length = draft(operator.floordiv, draft(operator.add, size_node, parts - 1), parts)
    begin = draft(torch.sym_min, draft(operator.mul, full_length, index), size_node)
    length = draft(torch.sym_min, full_length, draft(operator.sub, size_node, begin))
    return draft(torch.narrow, node, dim, begin, length)


def _chunk_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the begin and the length of a chunk."""
    full_length = ceil_div(size, parts)
    begin = min(index * full_length, size)
    return begin, min(full_length, size - begin)


def stripe(draft: Drafting, node: Node, dim: int, parts: int, index: int) -> Node:
    """Draft a view of every `parts`-th index of a dim, from `index` on. Return the node itself for one part.

    Unlike chunks, stripes stay balanced while a tensor fills from its first index on.
    """
    places = (*[slice(None)] * dim, slice(index, None, parts))
    return node if parts == 1 else draft(operator.getitem, node, places)


@dataclass(frozen=True)
class FromLocal:
    """`DTensor.from_local` for one sharding, as a callable: meshes and placements can't be arguments in a graph."""

    sharding: Sharding
    __name__ = "from_local"

    def __call__(self, local: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, self.sharding.mesh, self.sharding.out, run_check=False)
