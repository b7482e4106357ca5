"""Checks of the rows that sequences read. Each message names the argument, the expected and the actual value."""

from __future__ import annotations

import torch
from torch import Tensor


def check_rows(rows: Tensor, batch: int | None = None, name: str = "rows") -> None:
    """Raise unless `rows` holds one row for each sequence. Their values are left to `check_row_values`."""
    if rows.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`{name}` must be int32 or int64, got {rows.dtype}")
    if rows.dim() != 1 or rows.shape[0] == 0 or (batch is not None and rows.shape[0] != batch):
        wanted = "[batch]" if batch is None else f"[{batch}], the batch of `query`"
        raise ValueError(f"`{name}` must have shape {wanted}, got {tuple(rows.shape)}")


def check_row_values(rows: Tensor, kv_batch: int) -> None:
    """Raise ValueError unless each row lies in [0, kv_batch). Reads the tensor: CPU only."""
    low, high = rows.min().item(), rows.max().item()
    if low < 0 or high >= kv_batch:
        raise ValueError(
            f"`rows` must lie between 0 and {kv_batch - 1}, as {kv_batch} rows are stored, got {low} to {high}"
        )


def check_row_groups(row_groups: Tensor, batch: int, name: str) -> None:
    """Raise ValueError unless `row_groups` can be the result of `tatten::row_groups` for `batch` sequences."""
    if row_groups.dtype != torch.int32 or row_groups.shape != (4, batch + 1):
        wanted = f"int32 of shape {(4, batch + 1)}"
        raise ValueError(f"`{name}` must be {wanted}, got {row_groups.dtype} of shape {tuple(row_groups.shape)}")
