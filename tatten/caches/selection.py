"""Sequences chosen from a batch, and the stored rows of a shared prefix that they read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.caches.arguments import check_indices, sequence_indices


class Selection:
    """Sequences chosen from a batch, in that order.

    Attributes:
        host_indices: their indices; None for a tensor on an accelerator, which is never read on the host.
        batch: number of sequences in the batch.
    """

    def __init__(self, indices: Sequence[int] | Tensor, batch: int):
        self.batch = batch
        self.host_indices: list[int] | None = None
        self._tensors: dict[torch.device, Tensor] = {}
        if isinstance(indices, Tensor) and indices.device.type != "cpu":
            self._device_indices = check_indices(indices)
        else:
            self.host_indices = sequence_indices(indices, batch)

    def __len__(self) -> int:
        return len(self._device_indices) if self.host_indices is None else len(self.host_indices)

    def on(self, device: torch.device) -> Tensor:
        """Return the indices on `device`, int64."""
        if device not in self._tensors:
            if self.host_indices is None:
                self._tensors[device] = self._device_indices.to(device, torch.int64)
            else:
                self._tensors[device] = torch.tensor(self.host_indices, device=device)
        return self._tensors[device]

    def take(self, tensor: Tensor) -> Tensor:
        """Return `tensor[indices]`, as a view if the host knows that the indices are consecutive."""
        if self.host_indices is not None and _consecutive(self.host_indices):
            return tensor[self.host_indices[0] : self.host_indices[-1] + 1]
        return tensor.index_select(0, self.on(tensor.device))

    def rows(self, rows: Tensor | None, stored: int, device: torch.device, narrow: bool) -> tuple[slice, Tensor | None]:
        """Return the stored rows of a prefix to keep, and the row that each chosen sequence reads.

        Args:
            rows: the row that each sequence of the batch reads, `[batch]`; None for aligned blocks: sequence j reads
                row `j // (batch / stored)`.
            stored: number of stored rows.
            device: the device of the prefix.
            narrow: whether rows that no chosen sequence reads may be left out.

        Returns:
            A slice of the stored rows, and the new `rows`: None if the host knows that the sequences read aligned
            blocks of the slice.
        """
        everything = slice(0, stored)
        if rows is not None:
            return everything, rows.index_select(0, self.on(rows.device))
        seqs_per_kv = self.batch // stored
        if self.host_indices is not None:
            blocks = equal_blocks([index // seqs_per_kv for index in self.host_indices])
            if _consecutive(blocks) and (narrow or len(blocks) == stored):
                return slice(blocks[0], blocks[-1] + 1), None
        return everything, (self.on(device) // seqs_per_kv).to(torch.int32)


def expand_to_batch(shared: Tensor, batch: int, rows: Tensor | None = None) -> Tensor:
    """Expand `[B_i, ...]` to `[batch, ...]`, as a view if possible.

    Sequence j gets row `rows[j]`, or without `rows` the row of its aligned block.
    """
    if rows is not None:
        return shared.index_select(0, rows)
    return shared.unsqueeze(1).expand(-1, batch // shared.shape[0], *[-1] * (shared.dim() - 1)).flatten(0, 1)


def equal_blocks(rows: Sequence[int]) -> list[int]:
    """Return one entry of each block, where `rows` is as few blocks of one size as possible, each of equal entries."""
    changes = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1]]
    return list(rows[:: math.gcd(len(rows), *changes)])


def _consecutive(indices: Sequence[int]) -> bool:
    return list(indices) == list(range(indices[0], indices[0] + len(indices)))
