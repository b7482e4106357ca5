"""Placement algebra for attention over DTensors whose sequence is sharded: local parts, and mesh dims to merge over.

Softmax does not depend on which rank holds which keys. So attention over all keys is local attention on each rank, then
one merge of states over each mesh dim that shards the sequence (Tree Attention, arXiv 2408.04093).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tatten.ops.distributed.collectives import collectives_problem
from tatten.ops.layout import BATCH, HEADS, LENGTH
from tatten.ops.moved import moved

# A stored tensor, and its dims for the roles batch, heads, length and head_dim; None for a role that it lacks.
PlacedSegment = tuple[Tensor, Sequence[int | None]]


@dataclass(frozen=True)
class Sharding:
    """The relation between the local tensors of an SDPA call over DTensors.

    Attributes:
        mesh: the mesh of all tensors.
        merge_dims: the mesh dims over which states are merged, in order: the last dim of the mesh first.
        out: the placements of the result, which are those of the query.
        mask: the placements by which the mask's local part covers the local queries and keys; None without a mask.
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
    """Return the sharding of a call, or None to leave the call to PyTorch's own rules.

    Keys and values have `Shard(2)`, the sequence, on at least one mesh dim, and the query is replicated there. On other
    mesh dims all three may be replicated, or sharded over the batch or the heads into equal parts. The mask is sharded
    as the scores are, or it is replicated: then it is cut, without communication.
    """
    if not all(type(x) is DTensor for x in (query, key, value)) or not (mask is None or type(mask) is DTensor):
        return None
    assert isinstance(query, DTensor)
    assert isinstance(key, DTensor)
    assert isinstance(value, DTensor)
    if collectives_problem() is not None:
        return None
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


def find_segment_sharding(
    query: Tensor, result: Tensor, keys: Sequence[PlacedSegment], values: Sequence[PlacedSegment], mask: Tensor | None
) -> Sharding | str:
    """Return the sharding of a call with keys and values in segments, or the reason to leave it to PyTorch's own rules.

    Some segments have `Shard` of their sequence on at least one mesh dim; the others, the query and the mask are
    replicated there. On other mesh dims all may be replicated, or sharded over the batch or the heads into equal parts,
    except that a single row or head is replicated, as all ranks share it.

    Args:
        result: the result that PyTorch's rules give the call; it has to be placed like the query.
        keys, values: the segments; key i and value i belong together.
    """
    if (problem := collectives_problem()) is not None:
        return problem
    segments = {f"segment {i} of key": segment for i, segment in enumerate(keys)}
    segments |= {f"segment {i} of value": segment for i, segment in enumerate(values)}
    unsegmented = {"query": query, "result": result, **({} if mask is None else {"attn_mask": mask})}
    if not isinstance(query, DTensor):
        return "query is not a DTensor, as others are"
    mesh = query.device_mesh
    for name, x in (unsegmented | {name: x for name, (x, _) in segments.items()}).items():
        if type(x) is not DTensor or x.device_mesh != mesh or not _in_mesh_order(x):
            return f"{name} is not a DTensor on {mesh}, the mesh of query, sharded by its dims in order"
    if query.device_mesh.get_coordinate() is None:
        return f"this rank is not in {mesh}"
    if _placements(result) != query.placements:
        return f"the result is placed as {_placements(result)}, query as {query.placements}"
    merge_dims: list[int] = []
    wanted: list[Placement] = []
    for dim, q in enumerate(query.placements):
        for name, (x, dims) in segments.items():
            if not _fits(x, dims, dim, query):
                return f"{name} is placed as {_placements(x)}, query as {query.placements}"
        replicated, of_values = ([_placements(x)[dim].is_replicate() for x, _ in xs] for xs in (keys, values))
        if replicated != of_values:
            return f"segments of key and of value are placed in different ways on mesh dim {dim}"
        if isinstance(q, Shard):
            wanted.append(_mask_placement(mask, q.dim - 4, query.shape[q.dim]))
        else:
            wanted.append(q)
            if not all(replicated):
                merge_dims.append(dim)
    if not merge_dims:
        return "no segment is sharded over the sequence"
    if mask is not None and not _needs_no_communication(_placements(mask), wanted):
        return f"attn_mask is placed as {_placements(mask)}, which cannot be cut to {tuple(wanted)}"
    return Sharding(
        query.device_mesh, tuple(reversed(merge_dims)), query.placements, None if mask is None else tuple(wanted)
    )


def _fits(segment: Tensor, dims: Sequence[int | None], mesh_dim: int, query: DTensor) -> bool:
    """Return True if, on one mesh dim, each rank's part of a segment belongs to its part of the query."""
    assert isinstance(segment, DTensor)
    have, q = segment.placements[mesh_dim], query.placements[mesh_dim]
    role = next((role for role in (BATCH, HEADS) if q == Shard(role)), LENGTH)
    dim = dims[role]
    sharded = dim is not None and have == Shard(dim)
    if role == LENGTH:
        return q == Replicate() and (sharded or have == Replicate())
    if not _even(query, role):
        return False
    if have == Replicate():
        return dim is None or segment.shape[dim] == 1
    return sharded and _even(segment, dim or 0)


def _placements(x: Tensor) -> tuple[Placement, ...]:
    assert isinstance(x, DTensor)
    return x.placements


def belongs_to_heads(x: Tensor, sharding: Sharding) -> bool:
    """Return True if each rank's part of `x` belongs to its own query heads. `x` has one number for each query head."""
    wanted = tuple(Shard(0) if q == Shard(HEADS) else Replicate() for q in sharding.out)
    if not isinstance(x, DTensor):
        return Shard(0) not in wanted
    return x.device_mesh == sharding.mesh and x.placements == wanted and _in_mesh_order(x)


def same_sharding(derived: Tensor, base: Tensor, dims: Sequence[int | None]) -> bool:
    """Return True if each rank's part of `derived` comes from its part of `base`.

    Dim i of `derived` is `dims[i]` of `base`.
    """
    if not isinstance(derived, DTensor) or not isinstance(base, DTensor) or base.device_mesh != derived.device_mesh:
        return False
    if not _in_mesh_order(base):
        return False
    for have, want in zip(base.placements, derived.placements, strict=True):
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
    """Return True if each rank holds the part that it needs.

    A replicated tensor can be cut along a dim, but not if an inner mesh dim shards that dim.
    """
    cut_placements = set()
    for old, new in zip(have, want, strict=True):
        if old != new and old != Replicate():
            return False
        if old != new:
            cut_placements.add(new)
        elif new in cut_placements:
            return False
    return True


def _mask_placement(mask: Tensor | None, dim: int, size: int) -> Placement:
    """Return the mask's placement for scores sharded over `dim`, a negative one; replicated if it broadcasts there."""
    if mask is None or mask.dim() < -dim or mask.shape[dim] != size:
        return Replicate()
    return Shard(mask.dim() + dim)


def _even(x: DTensor, dim: int) -> bool:
    """Return True if all ranks have equal parts of a dim, so that kv heads are on the ranks of their query heads."""
    sizes = [x.device_mesh.size(i) for i, placement in enumerate(x.placements) if placement == Shard(dim)]
    return bool(x.shape[dim] % math.prod(sizes) == 0)


def _in_mesh_order(x: DTensor) -> bool:
    """Return True if the first of several mesh dims that shard one dim cuts it first; the order of cuts matters."""
    try:
        return all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in x._spec.shard_order)
    except Exception as error:
        moved(
            "torch.distributed.tensor.DTensor._spec.shard_order", error, "a dim may be sharded over one mesh dim only"
        )
        sharded = [placement.dim for placement in x.placements if isinstance(placement, Shard)]
        return len(sharded) == len(set(sharded))
