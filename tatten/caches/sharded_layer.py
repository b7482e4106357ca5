"""One layer of a cache whose keys and values are sharded over the ranks of a DeviceMesh: a token here, the next there.

What it hands to attention is a pair of DTensors, sharded over the sequence. No order is kept among the keys, as softmax
does not care for one: rank r of n has position `slot * n + r` in each slot, always balanced, with nothing to look up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


class Interleaved:
    """Which tokens and heads live on this rank: those at positions `rank`, `rank + ranks`, `rank + 2 * ranks` ...

    Attributes:
        mesh: the mesh.
        placements: of keys and values, `[batch, kv_heads, slots of all ranks, head_dim]`, on each dim of the mesh.
        ranks: number of ranks that share the sequence.
        rank: the place of this one among them; the first of the mesh's dims counts most, as in DTensors.
        own: the positions of this rank, for a dim of a plain tensor that runs over all of them.
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
        self._only_heads = tuple(Replicate() if placement.is_shard(2) else placement for placement in placements)

    def queries(self, local: Tensor) -> DTensor:
        """Queries of this rank's heads, the same on all ranks that share the sequence, `[batch, heads, ...]`."""
        return DTensor.from_local(local, self.mesh, self._only_heads, run_check=False)

    def keys(self, local: Tensor) -> DTensor:
        """This rank's keys or values as a part of everybody's, `[batch, kv_heads, slots of all ranks, head_dim]`."""
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False)

    def mask(self, local: Tensor) -> DTensor:
        """The mask of this rank's keys as a part of everybody's, `[..., slots of all ranks]`."""
        placements = [Shard(3) if placement.is_shard(2) else Replicate() for placement in self.placements]
        return DTensor.from_local(local, self.mesh, placements, run_check=False)

    def by_position(self, local: Tensor, length: int) -> DTensor:
        """Keys or values of the first `length` positions in their order, on every rank of the sequence; collective."""
        slots = self.keys(local).redistribute(placements=self._only_heads).to_local()
        ordered = slots.unflatten(2, (self.ranks, -1)).transpose(2, 3).flatten(2, 3)[:, :, :length]
        return DTensor.from_local(ordered, self.mesh, self._only_heads, run_check=False)

    def chunks(self, ordered: DTensor) -> DTensor:
        """What `by_position` returns with consecutive tokens on each rank, as DTensor shards; a copy."""
        mine = ordered.redistribute(placements=self.placements).to_local().clone()
        shape, stride = ordered.shape, torch.empty(ordered.shape, device="meta").stride()
        return DTensor.from_local(mine, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)


class ShardedKV:
    """This rank's keys and values of one layer.

    Attributes:
        keys, values: `[batch, kv_heads of this rank, slots, head_dim]` from the first tokens on; None before.
        length: int64 tensor without dimensions, the number of tokens on all ranks together.
    """

    keys: Tensor | None
    values: Tensor | None

    def __init__(self, layout: Interleaved, slots: int):
        self.layout = layout
        self.slots = slots
        self.keys = self.values = None
        self.length = torch.zeros((), dtype=torch.int64, device=layout.mesh.device_type)
        # A CUDA graph copies its inputs unless their addresses are known to stay.
        torch._dynamo.mark_static_address(self.length)

    @property
    def capacity(self) -> int:
        """Slots of all ranks."""
        return self.slots * self.layout.ranks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values, if there are any."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def prefill(self, key: Tensor, value: Tensor) -> None:
        """Store the first tokens, each `[batch, kv_heads of this rank, tokens, head_dim]`, the same on each rank.

        Raises ValueError or TypeError, with nothing written, as `append`, or if there are tokens already.
        """
        self._check_fit(key, value)
        used = self._used()
        if used:
            raise ValueError(f"`prefill` needs an empty cache, got one with {used} tokens: use `append`")
        self.check_room(key.shape[2])
        for held, new in zip(self._storage(key, value), (key, value), strict=True):
            own = new[:, :, self.layout.own]
            held[:, :, : own.shape[2]].copy_(own)
        self.length.fill_(key.shape[2])

    def append(self, key: Tensor, value: Tensor) -> tuple[DTensor, DTensor]:
        """Add new tokens, `[batch, kv_heads of this rank, q_len, head_dim]`, the same on each rank; return all slots.

        What is returned covers the slots of all ranks, `[batch, kv_heads, capacity, head_dim]`: a mask has to exclude
        the unused ones. The first tokens of all have to come in eager mode, as they decide what is allocated.

        Raises ValueError or TypeError, with nothing written, if the tensors do not fit those that are held or if there
        is no room for them (as `check_room`).
        """
        self._check_fit(key, value)
        q_len = key.shape[2]
        self.check_room(q_len)
        ranks, rank = self.layout.ranks, self.layout.rank
        # This rank's among the new tokens. The last of these is one too far on some ranks, which write what is there.
        tokens = (rank - self.length) % ranks + ranks * torch.arange(math.ceil(q_len / ranks), device=key.device)
        slots, real = (self.length + tokens) // ranks, tokens < q_len
        slots, tokens = torch.where(real, slots, slots % self.slots), tokens.clamp(max=q_len - 1)
        storage = self._storage(key, value)
        for held, new in zip(storage, (key, value), strict=True):
            written = torch.where(real[:, None], new.index_select(2, tokens), held.index_select(2, slots))
            held.index_copy_(2, slots, written)
        self.length.add_(q_len)
        keys, values = map(self.layout.keys, storage)
        return keys, values

    def check_room(self, q_len: int) -> None:
        """Raise ValueError if there are less than `q_len` free slots. Reads `length` on the host.

        While a graph is traced or captured there is nothing to read, and nothing is checked.
        """
        used = self._used()
        if used is not None and used + q_len > self.capacity:
            raise ValueError(f"`capacity` must hold {used} used and {q_len} new slots, got {self.capacity}")

    def reorder(self, rows: Tensor) -> None:
        """Make sequence i what sequence `rows[i]` was."""
        for tensor in self.tensors:
            tensor.copy_(tensor.index_select(0, rows.to(tensor.device)))

    def clear(self) -> None:
        """Forget all tokens; what they took stays allocated."""
        for tensor in (*self.tensors, self.length):
            tensor.zero_()

    def _used(self) -> int | None:
        if torch.compiler.is_compiling() or (self.length.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        return int(self.length)

    def _storage(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self._allocate(key, value)
        return self.tensors  # type: ignore[return-value]

    @torch.compiler.disable(reason="what a graph allocates is not there to stay: store the first tokens in eager mode")
    def _allocate(self, key: Tensor, value: Tensor) -> None:
        self.keys, self.values = (new.new_zeros(*new.shape[:2], self.slots, new.shape[3]) for new in (key, value))
        torch._dynamo.mark_static_address(self.keys)
        torch._dynamo.mark_static_address(self.values)

    def _check_fit(self, key: Tensor, value: Tensor) -> None:
        for name, tensor in (("key", key), ("value", value)):
            if isinstance(tensor, DTensor):
                raise TypeError(f"`{name}` must be a plain tensor with this rank's heads, got a DTensor")
        if key.dim() != 4 or not key.shape[2]:
            raise ValueError(f"`key` must be [batch, kv_heads, q_len, head_dim], got shape {tuple(key.shape)}")
        if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
            raise ValueError(
                f"`value` must have the batch, heads and length of `key`, {tuple(key.shape[:3])}, "
                f"got shape {tuple(value.shape)}"
            )
        for name, tensor, held in zip(("key", "value"), (key, value), self.tensors or (key, value), strict=True):
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise ValueError(f"`{name}` must not require grad to be written into the cache: use torch.no_grad()")
            if tensor.device != self.length.device:
                raise ValueError(f"`{name}` must be on {self.length.device}, as the mesh, got {tensor.device}")
            if tensor.dtype != held.dtype:
                raise TypeError(f"`{name}` must be {held.dtype}, as what it joins, got {tensor.dtype}")
            want = (*held.shape[:2], tensor.shape[2], held.shape[3])
            if tensor.shape != want:
                raise ValueError(f"`{name}` must have shape {want} to join the cache, got {tuple(tensor.shape)}")
