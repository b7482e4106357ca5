"""Row groups: sequences ordered by the stored row that they read, so that kernels read a row once for many of them.

`rows[b]` is the row that sequence b reads. A *row group* is up to `group_size` sequences that read one row. Groups are
numbered by row, and slot `s` of group `g` is place `g * group_size + s`. With sequences in that order, the groups are a
segment whose rows all serve `group_size` sequences, except that some places are empty. Only the device knows the number
of groups; their largest number, `most_groups`, follows from shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.call import KeyValue
from tatten.ops.sizes import ceil_div


def group_size(batch: int, kv_batch: int, queries: int) -> int:
    """Return the largest number of sequences in a row group: as many as fill a kernel's block of packed queries.

    With most rows, larger blocks would be partly empty, and smaller ones would read a row more often.

    Args:
        batch: the number of sequences.
        kv_batch: the number of stored rows.
        queries: the queries of a sequence that read one kv head: its query heads, times q_length.
    """
    average = ceil_div(batch, kv_batch) * queries
    block = 16 if average <= 16 else 32 if average <= 32 else 64 if average <= 64 else 128
    return max(1, block // queries)


def most_groups(batch: int, kv_batch: int, size: int) -> int:
    """Return the largest number of row groups: each is full, or the last one of its row."""
    return min(batch, kv_batch + batch // size)


def row_groups_reference(rows: Tensor, kv_batch: int, size: int) -> Tensor:
    """Compute `tatten::row_groups` in plain PyTorch, without a host sync.

    Args:
        rows: integers `[B]`. Those outside `[0, kv_batch)` are clamped.
        kv_batch: the number of stored rows.
        size: the largest number of sequences in a group.

    Returns:
        int32 `[4, B + 1]`:
        - `[0, :B]` the stored row of each group, `[0, B]` the number of groups;
        - `[1]` the position in `[2]` where each group begins, and B from the last group on;
        - `[2, :B]` the sequences, sorted by row;
        - `[3, :B]` the place of each sequence.
        All other entries are 0.
    """
    batch = rows.shape[0]
    rows = rows.to(torch.int64).clamp(0, kv_batch - 1)
    each = torch.arange(batch, device=rows.device)
    order = torch.argsort(rows, stable=True)
    counts = rows.new_zeros(kv_batch).index_add(0, rows, torch.ones_like(rows))
    groups = (counts + size - 1) // size
    position = torch.empty_like(order).index_copy(0, order, each)
    rank = position - (counts.cumsum(0) - counts)[rows]
    group = (groups.cumsum(0) - groups)[rows] + rank // size
    # The first sequence of each group writes its entries; the others write to a column that is cut off.
    leads = torch.where(rank % size == 0, group, batch + 1)
    stored = rows.new_zeros(batch + 2).index_copy(0, leads, rows)
    begins = rows.new_full((batch + 2,), batch).index_copy(0, leads, position)
    last = rows.new_zeros(1)
    table_rows = (
        torch.cat((stored[:batch], groups.sum()[None])),
        begins[: batch + 1],
        torch.cat((order, last)),
        torch.cat((group * size + rank % size, last)),
    )
    return torch.stack(table_rows).to(torch.int32)


def rows_of(query: Tensor, stored: KeyValue) -> Tensor | None:
    """Return the row that each sequence of `query` reads, int64 `[B]`, or None if rows serve aligned blocks."""
    if stored.row_groups is None:
        return None
    batch, q_heads, q_len, _ = query.shape
    size = group_size(batch, stored.key.shape[0], q_heads // stored.key.shape[1] * q_len)
    places = stored.row_groups[3, :-1].to(torch.int64)
    return stored.row_groups[0].index_select(0, places // size).to(torch.int64)
