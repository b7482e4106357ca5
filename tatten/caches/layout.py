"""The layout of a cache on one device. `Interleaved` overrides it for a cache over a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class OneDevice:
    """The layout of a cache on one device: one rank stores all tokens, and attention gets plain tensors.

    Attributes:
        mesh: the mesh that keys and values are sharded over; None on one device.
        ranks: number of ranks that share the sequence.
        rank: index of this rank among them.
    """

    mesh: DeviceMesh | None = None
    ranks, rank = 1, 0

    @property
    def sharding(self) -> object:
        """The mesh and the placements on it; None on one device."""
        return None

    @property
    def replicated(self) -> OneDevice:
        """The layout in which each rank stores all tokens."""
        return self

    def local_from(self, start: int) -> slice:
        """Return the slice that selects this rank's tokens from those at positions `start`, `start + 1` ..."""
        return slice((self.rank - start) % self.ranks, None, self.ranks)

    def slots(self, start: int, tokens: int) -> int:
        """Return the number of slots that this rank fills with `tokens` tokens from position `start` on."""
        return len(range(tokens)[self.local_from(start)])

    def write(self, start: int, length: Tensor, storage: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
        """Write this rank's share of new tokens.

        Args:
            start: position of the first token that all ranks together hold in these slots.
            length: number of tokens that they hold.
            storage: keys and values, `[batch, kv_heads, slots, head_dim]`.
            new: keys and values, `[batch, kv_heads, q_len, head_dim]`.
        """
        at = length + torch.arange(new[0].shape[2], device=length.device)
        for stored, tensor in zip(storage, new, strict=True):
            if tensor.shape[3]:  # values of index keys have width 0, which needs no kernel
                stored.index_copy_(2, at, tensor)

    def keys(self, local: Tensor) -> Tensor:
        """Convert this rank's keys or values to the tensor that attention gets."""
        return local

    def mask(self, local: Tensor) -> Tensor:
        """Convert the mask of this rank's keys to the tensor that attention gets."""
        return local

    def check_plain(self, key: Tensor, value: Tensor) -> None:
        """Raise TypeError unless these are plain tensors of this rank's heads. On one device all tensors are."""


ONE_DEVICE = OneDevice()
