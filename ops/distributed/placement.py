"""Placement algebra for attention over DTensors whose sequence is sharded: what is local, and where states are merged.

It doesn't matter to softmax which rank holds which keys: local attention on each rank, then one merge of states over
each mesh dim that shards the sequence (Tree Attention, arXiv 2408.04093), is attention over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tatten.ops.layout import BATCH, HEADS, LENGTH


@dataclass(frozen=True)
class Sharding:
    """The way in which the local tensors of an SDPA call over DTensors fit together.

    Attributes:
        mesh: the mesh of all of them.
        merge_dims: the mesh dims over which states are merged, in order: the last dim of the mesh first.
        out: the placements of the result, which are those of the query.
        mask: the placements that make the mask's local part belong to the local queries and keys; None without mask.
    """

    mesh: DeviceMesh
    merge_dims: tuple[int, ...]
    out: tuple[Placement, ...]
    mask: tuple[Placement, ...] | None = None

    @property
    def groups(self) -> list[str]:
        """The names of the process groups to merge over, in order."""
        return [self.mesh.get_group(dim).group_name for dim in self.merge_dims]


def find_sharding(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Sharding | None:
    """Return the sharding of a call, or None if the call is left to PyTorch's own rules.

    Keys and values have `Shard(2)`, the sequence, on at least one mesh dim, and the query is replicated there. On other
    mesh dims all three may be replicated, or sharded over the batch or the heads into equal parts. The mask is sharded
    as the scores are, or replicated: then it is cut, without communication.
    """
    if not all(type(x) is DTensor for x in (query, key, value)) or not (mask is None or type(mask) is DTensor):
        return None
    assert isinstance(query, DTensor)
    assert isinstance(key, DTensor)
    assert isinstance(value, DTensor)
    mesh = query.device_mesh
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if any(x.device_mesh != mesh for x in tensors) or any(x.dim() != 4 for x in (query, key, value)):
        return None
    if mesh.get_coordinate() is None or not all(_in_mesh_order(x) for x in tensors):
        return None
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]:
        return None
    merge_dims, wanted = [], []
    for dim, (q, k, v) in enumerate(zip(query.placements, key.placements, value.placements, strict=True)):
        if q == Replicate() and k == v == Shard(LENGTH):
            merge_dims.append(dim)
            wanted.append(_mask_placement(mask, -1, key.shape[LENGTH]))
        elif q == k == v == Replicate():
            wanted.append(Replicate())
        elif q == k == v and q in (Shard(BATCH), Shard(HEADS)) and all(_even(x, q.dim) for x in (query, key)):
            wanted.append(_mask_placement(mask, q.dim - 4, query.shape[q.dim]))
        else:
            return None
    if not merge_dims:
        return None
    if mask is None:
        return Sharding(mesh, tuple(reversed(merge_dims)), query.placements)
    assert isinstance(mask, DTensor)
    if not _needs_no_communication(mask.placements, wanted):
        return None
    return Sharding(mesh, tuple(reversed(merge_dims)), query.placements, tuple(wanted))


def same_sharding(whole: Tensor, base: Tensor, dims: Sequence[int | None]) -> bool:
    """Whether each rank's part of `whole` comes from its part of `base`; dim i of `whole` is `dims[i]` of `base`."""
    if not isinstance(whole, DTensor) or not isinstance(base, DTensor) or base.device_mesh != whole.device_mesh:
        return False
    if not _in_mesh_order(base):
        return False
    for have, want in zip(base.placements, whole.placements, strict=True):
        if isinstance(want, Shard):
            dim = dims[want.dim]
            if dim is None or have != Shard(dim):
                return False
            if want.dim != LENGTH and not _even(base, dim):
                return False
        elif have != want:
            return False
    return True


def _needs_no_communication(have: Sequence[Placement], want: Sequence[Placement]) -> bool:
    """Whether each rank holds what it needs. A replicated dim can be cut, but not if an inner mesh dim shards it."""
    cut = set()
    for old, new in zip(have, want, strict=True):
        if old != new and old != Replicate():
            return False
        if old != new:
            cut.add(new)
        elif new in cut:
            return False
    return True


def _mask_placement(mask: Tensor | None, dim: int, size: int) -> Placement:
    """The mask's placement where scores are sharded over `dim`, a negative one; replicated if it broadcasts there."""
    if mask is None or mask.dim() < -dim or mask.shape[dim] != size:
        return Replicate()
    return Shard(mask.dim() + dim)


def _even(x: DTensor, dim: int) -> bool:
    """Whether all ranks have equal parts of a dim: none is empty, and kv heads are with their query heads."""
    sizes = [x.device_mesh.size(i) for i, placement in enumerate(x.placements) if placement == Shard(dim)]
    return bool(x.shape[dim] % math.prod(sizes) == 0)


def _in_mesh_order(x: DTensor) -> bool:
    """Whether the first of several mesh dims that shard one dim cuts it first; the order of cuts matters."""
    return all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in x._spec.shard_order)
