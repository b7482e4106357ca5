"""The row groups kernel: sorts sequences by the row that they read, and numbers their groups.

`tatten.ops.row_groups.row_groups_reference` says what it computes. Each number is a count of sequences that come
before, so that programs need nothing of each other, and nothing is sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(rows, at, batch, kv_batch):
    """The clamped rows of the sequences `at`; the first row behind all of them where there is no such sequence."""
    row = tl.load(rows + at, mask=at < batch, other=0).to(tl.int64)
    return tl.where(at < batch, tl.minimum(tl.maximum(row, 0), kv_batch - 1), kv_batch).to(tl.int32)


@triton.jit
def _count(x, axis: tl.constexpr):
    return tl.sum(x.to(tl.int32), axis=axis)


@triton.jit(do_not_specialize=["batch", "kv_batch", "size"])
def _row_groups_kernel(rows, row_groups, batch, kv_batch, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write `BLOCK` columns, and the entries of those groups that these sequences begin."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_rows, starts = row_groups, row_groups + batch + 1
    order, places = starts + batch + 1, starts + 2 * (batch + 1)
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = _rows(rows, mine, batch, kv_batch)
    rank = tl.zeros([BLOCK], tl.int32)  # among the sequences of the row
    position = tl.zeros([BLOCK], tl.int32)  # among all sequences, sorted by row
    groups_before = tl.zeros([BLOCK], tl.int32)  # those of lower rows
    n_groups = 0
    for j in range(0, batch, BLOCK):
        others = j + tl.arange(0, BLOCK)
        other_row = _rows(rows, others, batch, kv_batch)
        other_rank = tl.zeros([BLOCK], tl.int32)
        for i in range(0, batch, BLOCK):
            third = i + tl.arange(0, BLOCK)
            same = _rows(rows, third, batch, kv_batch)[:, None] == other_row[None, :]
            other_rank += _count(same & (third[:, None] < others[None, :]), 0)
        begins = (others < batch) & (other_rank % size == 0)
        lower = other_row[None, :] < row[:, None]
        before = (other_row[None, :] == row[:, None]) & (others[None, :] < mine[:, None])
        rank += _count(before, 1)
        position += _count(before | lower, 1)
        groups_before += _count(lower & begins[None, :], 1)
        n_groups += _count(begins, 0)

    ok = mine < batch
    group = groups_before + rank // size
    begins_here = ok & (rank % size == 0)
    tl.store(kv_rows + group, row, mask=begins_here)
    tl.store(starts + group, position, mask=begins_here)
    tl.store(order + position, mine, mask=ok)
    tl.store(places + mine, group * size + rank % size, mask=ok)
    # No sequence begins the groups from `n_groups` on, so that nobody else writes these.
    nothing = tl.zeros([BLOCK], tl.int32)
    tl.store(kv_rows + mine, nothing, mask=ok & (mine >= n_groups))
    tl.store(starts + mine, nothing + batch, mask=(mine <= batch) & (mine >= n_groups))
    last = mine == batch
    tl.store(kv_rows + mine, nothing + n_groups, mask=last)
    tl.store(order + mine, nothing, mask=last)
    tl.store(places + mine, nothing, mask=last)
