"""The kernel that moves the slots of a cache down by one and appends a new slot, in place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _slide_kernel(
    cache,  # [rows, slots, dim], contiguous
    edges,  # [rows, chunks - 1, dim], contiguous: the old first slot of each chunk but the first one
    new,  # [batch, heads, 1, dim], any strides
    stride_batch,
    stride_head,
    stride_dim,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, chunk = (tl.program_id(0) // CHUNKS).to(tl.int64), tl.program_id(0) % CHUNKS
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DIM
    if chunk == CHUNKS - 1:
        last = tl.load(new + row // HEADS * stride_batch + row % HEADS * stride_head + dims * stride_dim, mask=dim_ok)
    else:
        last = tl.load(edges + (row * (CHUNKS - 1) + chunk) * DIM + dims, mask=dim_ok)
    slots = chunk * BLOCK_S + tl.arange(0, BLOCK_S)
    end = tl.minimum(chunk * BLOCK_S + BLOCK_S, SLOTS) - 1
    at = cache + row * SLOTS * DIM + slots[:, None] * DIM + dims[None, :]
    moved = tl.load(at + DIM, mask=(slots < end)[:, None] & dim_ok[None, :])
    moved = tl.where((slots == end)[:, None], last[None, :], moved)
    # A program reads no slot that another one writes. All of its threads read before any of them writes.
    tl.debug_barrier()
    tl.store(at, moved, mask=(slots <= end)[:, None] & dim_ok[None, :])
