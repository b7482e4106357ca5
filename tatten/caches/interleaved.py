"""The layout of a cache whose tokens are interleaved over the ranks of a DeviceMesh.

Attention gets DTensors, sharded over the sequence. Softmax does not depend on the order of the keys, so rank r of n
stores position p if `p % n` is r, in all levels of a shared prefix. Ranks are balanced at any length, no table is
needed, and the mask of a rank has the columns `r, r + n, r + 2 * n ...`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tatten.caches.layout import OneDevice
from tatten.ops.distributed.striped import Ring
from tatten.ops.sizes import ceil_div


class Interleaved(OneDevice):
    """The tokens and heads that this rank stores: tokens at positions `rank`, `rank + ranks`, `rank + 2 * ranks` ...

    Attributes:
        placements: of keys and values, `[batch, kv_heads, slots of all ranks, head_dim]`, on each dim of the mesh.
        rank: index of this rank among those that share the sequence; the first dim of the mesh varies slowest, as in
            DTensors.
        local_tokens: the slice that selects this rank's positions from all.
        sequence_dims, sharing_dims: the dims of the mesh that shard the sequence, and those that shard anything.
    """

    mesh: DeviceMesh

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement]):
        self.mesh = mesh
        self.placements = tuple(placements)
        for dim, placement in enumerate(self.placements):
            if placement.is_shard(2):
                self.ranks *= mesh.size(dim)
                self.rank = self.rank * mesh.size(dim) + mesh.get_local_rank(dim)
        self.local_tokens = self.local_from(0)
        self.sequence_dims = [dim for dim, placement in enumerate(self.placements) if placement.is_shard(2)]
        self.sharing_dims = [dim for dim, placement in enumerate(self.placements) if placement.is_shard()]
        self._only_heads = tuple(Replicate() if placement.is_shard(2) else placement for placement in placements)

    @property
    def sharding(self) -> object:
        return self.mesh, self.placements

    @property
    def replicated(self) -> Replicated:
        return Replicated(self.mesh)

    def global_ranks(self, dims: Sequence[int]) -> list[int]:
        """Return the ranks along these dims of the mesh, at this rank's coordinates in the other dims.

        They are in the order of `get_local_rank`: PyTorch sorts the ranks along each dim of the mesh.
        """
        coordinates = self.mesh.get_coordinate()
        assert coordinates is not None
        submesh = self.mesh.mesh[tuple(slice(None) if dim in dims else at for dim, at in enumerate(coordinates))]
        for dim in range(submesh.dim()):
            submesh = submesh.sort(dim).values
        ranks: list[int] = submesh.flatten().tolist()
        return ranks

    @property
    def ring(self) -> Ring:
        """The ranks that share the sequence, in the order of their positions."""
        dims = self.sequence_dims
        group = self.mesh.get_group(dims[0]) if len(dims) == 1 else None  # no group of a mesh spans several dims
        return Ring(tuple(self.global_ranks(dims)), self.rank, group)

    def broadcast(self, tensor: Tensor, position: int) -> Tensor:
        """Broadcast a contiguous tensor, in place, from the rank that stores `position`. This is a collective."""
        source = position % self.ranks
        for dim in reversed(self.sequence_dims):
            source, coordinate = divmod(source, self.mesh.size(dim))
            group = self.mesh.get_group(dim)
            dist.broadcast(tensor, dist.get_global_rank(group, coordinate), group)
        return tensor

    def queries(self, local: Tensor) -> DTensor:
        """Make a DTensor of this rank's queries. They are the same on all ranks that share the sequence."""
        return DTensor.from_local(local, self.mesh, self._only_heads, run_check=False)

    def keys(self, local: Tensor) -> DTensor:
        """Make a DTensor `[batch, kv_heads, slots of all ranks, head_dim]` of this rank's keys or values."""
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False)

    def mask(self, local: Tensor) -> DTensor:
        """Make a DTensor `[..., slots of all ranks]` of the mask of this rank's keys."""
        placements = [Shard(3) if placement.is_shard(2) else Replicate() for placement in self.placements]
        return DTensor.from_local(local, self.mesh, placements, run_check=False)

    def by_position(self, local: Tensor, length: int) -> DTensor:
        """Gather keys or values of the first `length` positions, in order, on every rank that shares the sequence."""
        slots = self.keys(local).redistribute(placements=self._only_heads).to_local()
        ordered = slots.unflatten(2, (self.ranks, -1)).transpose(2, 3).flatten(2, 3)[:, :, :length]
        return DTensor.from_local(ordered, self.mesh, self._only_heads, run_check=False)

    def chunks(self, ordered: DTensor) -> DTensor:
        """Copy the result of `by_position` into a DTensor in which each rank has consecutive tokens."""
        local = ordered.redistribute(placements=self.placements).to_local().clone()
        shape, stride = ordered.shape, torch.empty(ordered.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)

    def write(self, start: int, length: Tensor, storage: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
        """Write this rank's share of new tokens; see `OneDevice.write`.

        Shapes are the same on all ranks, so that a rank may have one token too many. It then rewrites the contents of
        that token's slot.
        """
        ranks, q_len, n_slots = self.ranks, new[0].shape[2], storage[0].shape[2]
        first = (self.rank - start) % ranks  # the token in this rank's first slot
        tokens = (first - length) % ranks + ranks * torch.arange(ceil_div(q_len, ranks), device=length.device)
        slots, real = (length + tokens - first) // ranks, tokens < q_len
        tokens, slots = tokens.clamp(max=q_len - 1), torch.where(real, slots, slots % n_slots)
        for stored, tensor in zip(storage, new, strict=True):
            local = torch.where(real[:, None], tensor.index_select(2, tokens), stored.index_select(2, slots))
            stored.index_copy_(2, slots, local)

    def check_plain(self, key: Tensor, value: Tensor) -> None:
        """Raise TypeError for a DTensor."""
        for name, tensor in (("key", key), ("value", value)):
            if isinstance(tensor, DTensor):
                raise TypeError(f"`{name}` must be a plain tensor with this rank's heads, got a DTensor")


class Replicated(OneDevice):
    """The layout of a cache in which each rank of a mesh stores all tokens, as plain tensors."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh


def placements(mesh: DeviceMesh, sequence: str | Sequence[str], heads: str | None) -> list[Placement]:
    """Return the placements of keys and values on each dim of `mesh`.

    Raises:
        ValueError, TypeError: an argument is not as `ShardedKVCache` takes it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"`mesh` must be a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("`mesh` must have named dims, got none: use init_device_mesh(..., mesh_dim_names=...)")
    if mesh.get_coordinate() is None:
        raise ValueError(f"`mesh` must contain this rank, got {mesh}")
    for dim in range(mesh.ndim):  # groups are sorted: with other orders, ranks would share a place in them
        orders = mesh.mesh.argsort(dim).movedim(dim, 0).reshape(mesh.size(dim), -1)
        if (orders != orders[:, :1]).any():
            raise ValueError(f"`mesh` must have ranks in one order along each dim, got {mesh.mesh.tolist()}")
    sequence_names = [sequence] if isinstance(sequence, str) else list(sequence)
    if not sequence_names or sequence_names != [name for name in names if name in sequence_names]:
        raise ValueError(f"`sequence` must name dims of the mesh, {names}, in their order, got {sequence!r}")
    if heads is not None and (heads not in names or heads in sequence_names):
        raise ValueError(f"`heads` must name a dim of the mesh, {names}, other than {sequence_names}, got {heads!r}")
    return [Shard(2) if name in sequence_names else Shard(1) if name == heads else Replicate() for name in names]
