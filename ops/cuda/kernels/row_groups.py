"""The row groups kernel: sorts sequences by the row that they read and numbers their groups, in one program.

`tatten.ops.row_groups.row_groups_reference` says what it computes. Each number is a count of sequences that come
before, so that nothing is sorted: B * B comparisons.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(rows, at, batch, kv_batch):
    """The clamped rows of the sequences `at`; the first row behind all of them where there is no such sequence."""
    row = tl.load(rows + at, mask=at < batch, other=0).to(tl.int64)
    return tl.where(at < batch, tl.minimum(tl.maximum(row, 0), kv_batch - 1), kv_batch).to(tl.int32)


@triton.jit(do_not_specialize=["batch", "kv_batch", "size"])
def _row_groups_kernel(rows, ranks, row_groups, batch, kv_batch, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_rows, starts = row_groups, row_groups + batch + 1
    order, places = starts + batch + 1, starts + 2 * (batch + 1)

    for i in range(0, batch, BLOCK):
        mine = i + tl.arange(0, BLOCK)
        row = _rows(rows, mine, batch, kv_batch)
        rank = tl.zeros([BLOCK], tl.int32)  # among the sequences of the row
        position = tl.zeros([BLOCK], tl.int32)  # among all sequences, sorted by row
        for j in range(0, batch, BLOCK):
            others = j + tl.arange(0, BLOCK)
            other_row = _rows(rows, others, batch, kv_batch)
            before = (other_row[None, :] == row[:, None]) & (others[None, :] < mine[:, None])
            rank += tl.sum(before.to(tl.int32), axis=1)
            position += tl.sum((before | (other_row[None, :] < row[:, None])).to(tl.int32), axis=1)
        ok = mine < batch
        tl.store(ranks + mine, rank, mask=ok)
        tl.store(ranks + batch + mine, position, mask=ok)
        tl.store(order + position, mine, mask=ok)
        tl.store(kv_rows + mine, tl.zeros([BLOCK], tl.int32), mask=ok)
        tl.store(starts + mine, batch + tl.zeros([BLOCK], tl.int32), mask=mine <= batch)
    tl.debug_barrier()  # what one thread stored above, others load and overwrite below

    n_groups = 0
    for i in range(0, batch, BLOCK):
        mine = i + tl.arange(0, BLOCK)
        ok = mine < batch
        row = _rows(rows, mine, batch, kv_batch)
        rank = tl.load(ranks + mine, mask=ok, other=0)
        group = rank // size
        for j in range(0, batch, BLOCK):
            others = j + tl.arange(0, BLOCK)
            other_rank = tl.load(ranks + others, mask=others < batch, other=1)
            leads = (others < batch) & (other_rank % size == 0)  # the first sequence of a group
            lower = _rows(rows, others, batch, kv_batch)[None, :] < row[:, None]
            group += tl.sum((lower & leads[None, :]).to(tl.int32), axis=1)
        first = ok & (rank % size == 0)
        n_groups += tl.sum(first.to(tl.int32), axis=0)
        tl.store(places + mine, group * size + rank % size, mask=ok)
        tl.store(kv_rows + group, row, mask=first)
        tl.store(starts + group, tl.load(ranks + batch + mine, mask=ok, other=0), mask=first)
    tl.store(kv_rows + batch, n_groups)
    if batch % BLOCK == 0:  # the loops above end before the last column
        tl.store(starts + batch, batch)
    tl.store(order + batch, 0)
    tl.store(places + batch, 0)
