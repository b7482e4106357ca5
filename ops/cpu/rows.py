"""Rows on a CPU: runs of stored rows whose sequences, padded to the largest number of them, make aligned blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tatten.ops.row_groups import group_size, row_groups_reference
from tatten.ops.validation import check_row_values, check_rows

# The most queries of a run, padding included, for each real query: padding is work, and each run is a call. 115 samples
# of 32 prompts of 128 tokens took 4.7 ms with 1, 2.3 with 2 and 2.2 with 4. With all but 31 samples from one prompt
# they took 3.4, 2.8 and 4.1 (8/2 heads of 64, 2 cores; copies of the prompts 2.8).
MOST_PADDED = 2.0


class RowRun(NamedTuple):
    """Stored rows `start` to `stop - 1`, which some sequences read.

    Attributes:
        sequences: `[stop - start, n]`, the sequences that read each row. Shorter rows are filled up to n with their
            first one.
        real: bool, of the same shape: False for entries that only fill up.
    """

    start: int
    stop: int
    sequences: Tensor
    real: Tensor


def row_groups(rows: Tensor, kv_batch: int, queries: int) -> Tensor:
    """Compute `tatten::row_groups` on a CPU."""
    check_rows(rows)
    check_row_values(rows, kv_batch)
    return row_groups_reference(rows, kv_batch, group_size(rows.shape[0], kv_batch, queries))


def runs_of(rows: Tensor, kv_batch: int) -> Iterator[RowRun]:
    """Find few runs of consecutive rows that hold all sequences, without much padding; unread rows are in no run."""
    order = torch.argsort(rows, stable=True)
    counts = torch.bincount(rows, minlength=kv_batch)
    starts = counts.cumsum(0) - counts
    for start, stop in _spans(counts.tolist()):
        run_counts = counts[start:stop, None]
        slots = torch.arange(int(run_counts.max()))
        real = slots < run_counts
        yield RowRun(start, stop, order[starts[start:stop, None] + torch.where(real, slots, 0)], real)


def _spans(counts: list[int]) -> Iterator[tuple[int, int]]:
    start, most, total = 0, 0, 0
    for row, count in enumerate([*counts, 0]):
        larger = max(most, count)
        if count == 0 or larger * (row + 1 - start) > MOST_PADDED * (total + count):
            if total:
                yield start, row
            start, most, total = row + (count == 0), count, count
        else:
            most, total = larger, total + count
