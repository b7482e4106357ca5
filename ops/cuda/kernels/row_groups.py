"""The row groups kernel: sorts sequences by the row that they read, and numbers their groups, in one program.

`tatten.ops.row_groups.row_groups_reference` describes the result.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch", "kv_batch", "size"])
def _row_groups_kernel(rows, row_groups, batch, kv_batch, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_rows, starts = row_groups, row_groups + batch + 1
    order, places = starts + batch + 1, starts + 2 * (batch + 1)
    at = tl.arange(0, BLOCK)
    ok = at < batch
    row = tl.load(rows + at, mask=ok, other=0).to(tl.int64)
    row = tl.where(ok, tl.minimum(tl.maximum(row, 0), kv_batch - 1), kv_batch)
    key = tl.sort(row * BLOCK + at)  # all keys differ, so that sequences of one row keep their order
    row, sequence = (key // BLOCK).to(tl.int32), (key % BLOCK).to(tl.int32)

    # Neighbours and the first sequence of a row are read back from the memory of the result.
    tl.store(kv_rows + at, row, mask=ok)
    tl.debug_barrier()
    first = ok & (row != tl.load(kv_rows + at - 1, mask=ok & (at > 0), other=-1))
    nth_row = tl.cumsum(first.to(tl.int32), axis=0) - 1
    tl.store(starts + nth_row, at, mask=first)
    tl.debug_barrier()
    rank = at - tl.load(starts + nth_row, mask=ok, other=0)
    begins = ok & (rank % size == 0)
    group = tl.cumsum(begins.to(tl.int32), axis=0) - 1
    n_groups = tl.sum(begins.to(tl.int32), axis=0)
    tl.debug_barrier()  # all reads come before the writes

    tl.store(kv_rows + group, row, mask=begins)
    tl.store(starts + group, at, mask=begins)
    tl.store(kv_rows + at, tl.zeros([BLOCK], tl.int32), mask=ok & (at >= n_groups))
    tl.store(starts + at, batch + tl.zeros([BLOCK], tl.int32), mask=ok & (at >= n_groups))
    tl.store(order + at, sequence, mask=ok)
    tl.store(places + sequence, group * size + rank % size, mask=ok)
    tl.store(kv_rows + batch, n_groups)
    tl.store(starts + batch, batch)
    tl.store(order + batch, 0)
    tl.store(places + batch, 0)
