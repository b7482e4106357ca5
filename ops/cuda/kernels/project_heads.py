"""The kernel that multiplies each head's rows in float32 with a weight of its own in 16 bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _prefetch(at):
    """Bring the lines of the L2 at these addresses from memory."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["rows", "q_len", "heads"])
def _project_heads_kernel(
    x,  # [rows / q_len, heads, q_len, RANK]
    weight,  # [heads, COLUMNS, RANK]
    out,  # [rows / q_len, heads, q_len, COLUMNS], contiguous
    x_strides,
    weight_strides,
    rows,
    q_len,
    heads,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):
    x_b, x_h, x_l, x_k = x_strides
    weight_h, weight_c, weight_k = weight_strides
    column_blocks: tl.constexpr = (COLUMNS + BLOCK_C - 1) // BLOCK_C
    columns = tl.program_id(0) % column_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    head = (tl.program_id(0) // column_blocks % heads).to(tl.int64)
    row = tl.program_id(0) // column_blocks // heads * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    ranks = tl.arange(0, BLOCK_K)
    of_columns = weight + head * weight_h + columns[:, None] * weight_c
    if PDL:
        # What comes before may still write `x`, and for all that is known the weight: the L2 is never stale.
        lines = tl.minimum(tl.arange(0, LINES) * 64, RANK - 1)
        _prefetch(
            weight + head * weight_h + tl.minimum(columns, COLUMNS - 1)[:, None] * weight_c + lines[None, :] * weight_k
        )
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence, position, row_ok = (row // q_len).to(tl.int64), (row % q_len).to(tl.int64), row < rows
    of_rows = x + (sequence * x_b + head * x_h + position * x_l)[:, None]
    products = tl.zeros([BLOCK_C, BLOCK_ROWS], tl.float32)
    for start in range(0, RANK, BLOCK_K):
        rank_ok = start + ranks < RANK
        factors = tl.load(
            of_columns + (start + ranks)[None, :] * weight_k,
            mask=(columns < COLUMNS)[:, None] & rank_ok[None, :],
            other=0.0,
        )
        terms = tl.load(of_rows + (start + ranks)[None, :] * x_k, mask=row_ok[:, None] & rank_ok[None, :], other=0.0)
        if FLOAT32_DOTS:
            products = tl.dot(factors.to(tl.float32), tl.trans(terms), products, input_precision="ieee")
        else:
            high = terms.to(factors.dtype)
            low = (terms - high.to(tl.float32)).to(factors.dtype)
            products = tl.dot(factors, tl.trans(low), tl.dot(factors, tl.trans(high), products))
    at = out + (((sequence * heads + head) * q_len + position) * COLUMNS)[:, None] + columns[None, :]
    tl.store(at, tl.trans(products).to(out.dtype.element_ty), mask=row_ok[:, None] & (columns < COLUMNS)[None, :])
