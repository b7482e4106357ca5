"""One layer of a cache whose tokens are dealt out in turn to the ranks of a DeviceMesh.

Attention gets a pair of DTensors, sharded over the sequence. Softmax does not depend on the order of the keys, so rank
r of n stores position `slot * n + r` in each slot: ranks are balanced at any length, and there is no table to look up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tatten.caches.arguments import check_alike
from tatten.caches.capture import is_captured
from tatten.caches.static_address import mark_static
from tatten.ops.distributed.ring import Ring


class Interleaved:
    """The tokens and heads that this rank stores: tokens at positions `rank`, `rank + ranks`, `rank + 2 * ranks` ...

    Attributes:
        mesh: the mesh.
        placements: of keys and values, `[batch, kv_heads, slots of all ranks, head_dim]`, on each dim of the mesh.
        ranks: number of ranks that share the sequence.
        rank: index of this rank among them; the first dim of the mesh varies slowest, as in DTensors.
        own: a slice that selects this rank's positions from all.
        sequence_dims, sharing_dims: the dims of the mesh that shard the sequence, and those that shard anything.
    """

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement]):
        self.mesh = mesh
        self.placements = tuple(placements)
        self.ranks, self.rank = 1, 0
        for dim, placement in enumerate(self.placements):
            if placement.is_shard(2):
                self.ranks *= mesh.size(dim)
                self.rank = self.rank * mesh.size(dim) + mesh.get_local_rank(dim)
        self.own = slice(self.rank, None, self.ranks)
        self.sequence_dims = [dim for dim, placement in enumerate(self.placements) if placement.is_shard(2)]
        self.sharing_dims = [dim for dim, placement in enumerate(self.placements) if placement.is_shard()]
        self._only_heads = tuple(Replicate() if placement.is_shard(2) else placement for placement in placements)

    def global_ranks(self, dims: Sequence[int]) -> list[int]:
        """The ranks at all places along these dims of the mesh, and at this rank's along the others, in order.

        That is the order of `get_local_rank`: along each dim, whatever the mesh says, PyTorch sorts the ranks.
        """
        place = self.mesh.get_coordinate()
        assert place is not None
        own = self.mesh.mesh[tuple(slice(None) if dim in dims else at for dim, at in enumerate(place))]
        for dim in range(own.dim()):
            own = own.sort(dim).values
        ranks: list[int] = own.flatten().tolist()
        return ranks

    @property
    def ring(self) -> Ring:
        """The ranks that share the sequence, in the order of their positions."""
        dims = self.sequence_dims
        group = self.mesh.get_group(dims[0]) if len(dims) == 1 else None  # no group of a mesh spans several dims
        return Ring(tuple(self.global_ranks(dims)), self.rank, group)

    def broadcast(self, tensor: Tensor, position: int) -> Tensor:
        """Overwrite a contiguous tensor by that of the rank that stores `position`; a collective."""
        place = position % self.ranks
        for dim in reversed(self.sequence_dims):
            place, at = divmod(place, self.mesh.size(dim))
            group = self.mesh.get_group(dim)
            dist.broadcast(tensor, dist.get_global_rank(group, at), group)
        return tensor

    def queries(self, local: Tensor) -> DTensor:
        """Make a DTensor of the queries of this rank's heads, the same on all ranks that share the sequence."""
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
        """Shard what `by_position` returned so that each rank has consecutive tokens, as a copy."""
        mine = ordered.redistribute(placements=self.placements).to_local().clone()
        shape, stride = ordered.shape, torch.empty(ordered.shape, device="meta").stride()
        return DTensor.from_local(mine, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)


class ShardedLayer:
    """This rank's keys and values of one layer.

    Attributes:
        keys, values: `[batch, kv_heads of this rank, slots, head_dim]`; None before the first tokens.
        length: int64 tensor without dimensions, the number of tokens on all ranks together.
    """

    keys: Tensor | None
    values: Tensor | None

    def __init__(self, layout: Interleaved, slots: int):
        self.layout = layout
        self.slots = slots
        self.keys = self.values = None
        self.length = torch.zeros((), dtype=torch.int64, device=layout.mesh.device_type)
        mark_static(self.length)

    @property
    def capacity(self) -> int:
        """Number of slots of all ranks together."""
        return self.slots * self.layout.ranks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values; empty before the first tokens."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def prefill(self, key: Tensor, value: Tensor) -> None:
        """Store this rank's share of the first tokens, `[batch, kv_heads of this rank, tokens, head_dim]`.

        Raises:
            ValueError, TypeError: as for `append`, or there are tokens already. Nothing has been written.
        """
        self._check_fit(key, value)
        if used := int(self.length):
            raise ValueError(f"`prefill` needs an empty cache, got one with {used} tokens: use `append`")
        self.check_room(key.shape[2])
        for held, new in zip(self._storage(key, value), (key, value), strict=True):
            own = new[:, :, self.layout.own]
            held[:, :, : own.shape[2]].copy_(own)
        self.length.fill_(key.shape[2])

    def storage_for(self, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Slots for this rank's share of the first `tokens` tokens, of keys and values like these; see `adopt`.

        Raises:
            ValueError, TypeError: as for `append`.
        """
        self._check_fit(key, value)
        self.check_room(tokens)
        return self.tensors or self._new_slots(key, value)  # type: ignore[return-value]

    def adopt(self, storage: tuple[Tensor, Tensor], tokens: int) -> None:
        """Begin with what was written into `storage_for`, where the slot behind this rank's last token is cleared."""
        own = len(range(tokens)[self.layout.own])
        for tensor in storage:
            tensor[:, :, own : own + 1].zero_()
        self.keys, self.values = storage
        self.length.fill_(tokens)

    def append(self, key: Tensor, value: Tensor) -> tuple[DTensor, DTensor]:
        """Add new tokens, `[batch, kv_heads of this rank, q_len, head_dim]`, the same on each rank; return all slots.

        The result covers the slots of all ranks, `[batch, kv_heads, capacity, head_dim]`: a mask has to exclude the
        unused ones. The very first tokens have to come in eager mode, as they allocate the storage.

        Raises:
            ValueError, TypeError: the tensors do not match those of the cache, or there is no room for them (see
                `check_room`). Nothing has been written.
        """
        keys, values = map(self.layout.keys, self.append_to_own(key, value))
        return keys, values

    def append_to_own(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens, as `append`, and return this rank's slots as plain tensors."""
        self._check_fit(key, value)
        q_len = key.shape[2]
        self.check_room(q_len)
        storage = self._storage(key, value)
        write_own(self.layout, 0, self.length, storage, (key, value))
        self.length.add_(q_len)
        return storage

    def check_room(self, q_len: int) -> None:
        """Raise ValueError if there are fewer than `q_len` free slots. Reads `length` on the host.

        Checks nothing while a graph is traced or captured, when there is no length to read.
        """
        if is_captured(self.length):
            return
        used = int(self.length)
        if used + q_len > self.capacity:
            raise ValueError(f"`capacity` must hold {used} used and {q_len} new slots, got {self.capacity}")

    def select(self, indices: Tensor) -> None:
        """Make sequence i what sequence `indices[i]` was, in the same memory unless the batch changes."""
        if self.keys is None or self.values is None:
            return
        indices = indices.to(self.keys.device)
        if len(indices) == self.keys.shape[0]:
            for tensor in (self.keys, self.values):  # one after the other: each needs a copy of its size
                tensor.copy_(tensor.index_select(0, indices))
        else:
            self.keys, self.values = (tensor.index_select(0, indices) for tensor in (self.keys, self.values))
            mark_static(self.keys, self.values)

    def clear(self) -> None:
        """Forget all tokens; their memory stays allocated."""
        for tensor in (*self.tensors, self.length):
            tensor.zero_()

    def _storage(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.keys, self.values = self._new_slots(key, value)
        return self.keys, self.values

    @torch.compiler.disable(
        reason="a graph can't allocate storage that outlives it: store the first tokens in eager mode"
    )
    def _new_slots(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (new.new_zeros(*new.shape[:2], self.slots, new.shape[3]) for new in (key, value))
        mark_static(keys, values)
        return keys, values

    def _check_fit(self, key: Tensor, value: Tensor) -> None:
        check_plain(key, value)
        if key.dim() != 4 or not key.shape[2]:
            raise ValueError(f"`key` must be [batch, kv_heads, q_len, head_dim], got shape {tuple(key.shape)}")
        check_alike(key, value)
        for name, tensor, held in zip(("key", "value"), (key, value), self.tensors or (key, value), strict=True):
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise ValueError(f"`{name}` must not require grad to be written into the cache: use torch.no_grad()")
            if tensor.device != self.length.device:
                raise ValueError(
                    f"`{name}` must be on {self.length.device}, the device of the mesh, got {tensor.device}"
                )
            if tensor.dtype != held.dtype:
                raise TypeError(f"`{name}` must be {held.dtype}, the dtype of the cache, got {tensor.dtype}")
            want = (*held.shape[:2], tensor.shape[2], held.shape[3])
            if tensor.shape != want:
                raise ValueError(f"`{name}` must have shape {want} to join the cache, got {tuple(tensor.shape)}")


def write_own(
    layout: Interleaved, first: int, length: Tensor, storage: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]
) -> None:
    """Write this rank's share of new tokens.

    Shapes are the same on all ranks, so some have one token too many at the end: these write back what its slot holds.

    Args:
        first: position of the first token that all ranks together hold in these slots.
        length: number of tokens that they hold.
        storage: keys and values, `[batch, kv_heads, slots, head_dim]`.
        new: keys and values, `[batch, kv_heads, q_len, head_dim]`.
    """
    ranks, q_len, slots = layout.ranks, new[0].shape[2], storage[0].shape[2]
    start = (layout.rank - first) % ranks  # the token in this rank's first slot
    tokens = (start - length) % ranks + ranks * torch.arange(math.ceil(q_len / ranks), device=length.device)
    found, real = (length + tokens - start) // ranks, tokens < q_len
    tokens, at = tokens.clamp(max=q_len - 1), torch.where(real, found, found % slots)
    for held, tensor in zip(storage, new, strict=True):
        held.index_copy_(2, at, torch.where(real[:, None], tensor.index_select(2, tokens), held.index_select(2, at)))


def check_plain(key: Tensor, value: Tensor) -> None:
    """Raise TypeError for a DTensor."""
    for name, tensor in (("key", key), ("value", value)):
        if isinstance(tensor, DTensor):
            raise TypeError(f"`{name}` must be a plain tensor with this rank's heads, got a DTensor")


def placements(mesh: DeviceMesh, sequence: str | Sequence[str], heads: str | None) -> list[Placement]:
    """The placements of keys and values on each dim of `mesh`."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"`mesh` must be a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("`mesh` must have named dims, got none: use init_device_mesh(..., mesh_dim_names=...)")
    if mesh.get_coordinate() is None:
        raise ValueError(f"`mesh` must contain this rank, got {mesh}")
    for dim in range(mesh.ndim):  # else several ranks have the same places in their groups, which are sorted
        orders = mesh.mesh.argsort(dim).movedim(dim, 0).reshape(mesh.size(dim), -1)
        if (orders != orders[:, :1]).any():
            raise ValueError(f"`mesh` must have ranks in one order along each dim, got {mesh.mesh.tolist()}")
    shared = [sequence] if isinstance(sequence, str) else list(sequence)
    if not shared or shared != [name for name in names if name in shared]:
        raise ValueError(f"`sequence` must name dims of the mesh, {names}, in their order, got {sequence!r}")
    if heads is not None and (heads not in names or heads in shared):
        raise ValueError(f"`heads` must name a dim of the mesh, {names}, other than {shared}, got {heads!r}")
    return [Shard(2) if name in shared else Shard(1) if name == heads else Replicate() for name in names]
