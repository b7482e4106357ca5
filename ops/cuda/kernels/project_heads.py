"""The kernel that multiplies each head's rows with the head's bfloat16 weight, with float32 sums."""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import halves_of


@triton.jit
def _prefetch(at):
    """Fetch the cache lines at these addresses into the L2."""
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
    LINE_C: tl.constexpr,
    LINE_K: tl.constexpr,
    LINES_OF_K: tl.constexpr,
    HALVES: tl.constexpr,
    PDL: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):
    x_b, x_h, x_l, x_k = x_strides
    weight_h, weight_c, weight_k = weight_strides
    column_blocks: tl.constexpr = (COLUMNS + BLOCK_C - 1) // BLOCK_C
    first_column = (tl.program_id(0) % column_blocks * BLOCK_C).to(tl.int64)
    columns = first_column + tl.arange(0, BLOCK_C)
    head = (tl.program_id(0) // column_blocks % heads).to(tl.int64)
    row = tl.program_id(0) // column_blocks // heads * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    weight_base = weight + head * weight_h
    if PDL:
        # The previous kernel may still write `x` or even the weight. A prefetch returns no data: it fills the L2, and
        # the previous kernel's writes go through the L2, too.
        line_c = tl.minimum(first_column + tl.arange(0, BLOCK_C // LINE_C) * LINE_C, COLUMNS - 1)
        line_k = tl.minimum(tl.arange(0, LINES_OF_K) * LINE_K, RANK - 1)
        _prefetch(weight_base + line_c[:, None] * weight_c + line_k[None, :] * weight_k)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence, position, row_ok = (row // q_len).to(tl.int64), (row % q_len).to(tl.int64), row < rows
    x_at = x + (sequence * x_b + head * x_h + position * x_l)[:, None]
    weight_at = weight_base + columns[:, None] * weight_c
    ranks = tl.arange(0, BLOCK_K).to(tl.int64)
    # The sums of rounded numbers and of residues are apart, so that no order of a sum depends on the size of blocks.
    acc = tl.zeros([BLOCK_C, BLOCK_ROWS], tl.float32)
    acc_low = tl.zeros([BLOCK_C, BLOCK_ROWS], tl.float32)
    for start in range(0, RANK, BLOCK_K):
        rank_ok = start + ranks < RANK
        w = tl.load(
            weight_at + (start + ranks)[None, :] * weight_k,
            mask=(columns < COLUMNS)[:, None] & rank_ok[None, :],
            other=0.0,
        )
        xs = tl.load(x_at + (start + ranks)[None, :] * x_k, mask=row_ok[:, None] & rank_ok[None, :], other=0.0)
        if FLOAT32_DOTS:
            w = w.to(tl.float32)
        if HALVES:
            xs, low = halves_of(xs, weight.dtype.element_ty)
            acc_low = tl.dot(w, tl.trans(low.to(w.dtype)), acc_low, input_precision="ieee")
        acc = tl.dot(w, tl.trans(xs.to(w.dtype)), acc, input_precision="ieee")
    at = out + (((sequence * heads + head) * q_len + position) * COLUMNS)[:, None] + columns[None, :]
    result = tl.trans(acc + acc_low).to(out.dtype.element_ty)
    tl.store(at, result, mask=row_ok[:, None] & (columns < COLUMNS)[None, :])
