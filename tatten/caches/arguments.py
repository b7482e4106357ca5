"""Checks of arguments that several caches take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_positive(name: str, value: int) -> None:
    """Raise unless `value` is an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}")


def sequence_indices(indices: Sequence[int] | Tensor, batch: int) -> list[int]:
    """Return `indices` as a list. Raise unless they are the indices of sequences in a cache of `batch`."""
    if isinstance(indices, Tensor):
        indices = check_indices(indices).tolist()
    if not isinstance(indices, Sequence):
        raise TypeError(f"`indices` must be a sequence of integers or a tensor, got {indices!r}")
    if not batch:
        raise ValueError("`indices` must come after a prefill, got a cache without sequences")
    for index in indices:
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"`indices` must be integers, got {index!r}")
        if not 0 <= index < batch:
            raise IndexError(f"`indices` must be 0 to {batch - 1}, as the cache holds {batch} sequences, got {index}")
    if not indices:
        raise ValueError("`indices` must name at least one sequence, got none")
    return list(indices)


def check_indices(indices: Tensor) -> Tensor:
    """Return `indices`. Raise unless they are a non-empty tensor of integers with one dim; values are not read."""
    if indices.dtype not in INTEGERS:
        raise TypeError(f"`indices` must be integers, got a tensor of {indices.dtype}")
    if indices.dim() != 1:
        raise ValueError(f"`indices` must have one dimension, got shape {tuple(indices.shape)}")
    if not len(indices):
        raise ValueError("`indices` must name at least one sequence, got none")
    return indices


def check_alike(key: Tensor, value: Tensor) -> None:
    """Raise unless `value` is `[batch, kv_heads, q_len, head_dim]` with the first three sizes of `key`."""
    if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"`value` must have the batch, heads and length of `key`, {tuple(key.shape[:3])}, "
            f"got shape {tuple(value.shape)}"
        )
