"""Merging states in one Triton kernel each: N stacked ones, and two apart."""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.tile_scheduler import store_lse


@triton.jit(do_not_specialize=["n_states", "rows"])
def _merge_states_kernel(
    out,
    lse,
    merged_out,
    merged_lse,
    n_states,
    rows,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DIM

    row_max = tl.full([BLOCK_N], float("-inf"), tl.float32)
    states = tl.arange(0, BLOCK_N).to(tl.int64)
    for _ in range(0, n_states, BLOCK_N):
        log_sums = tl.load(lse + states * rows + row, mask=states < n_states, other=float("-inf"))
        log_sums = tl.where(log_sums < float("inf"), log_sums, float("-inf"))  # NaN compares false
        row_max = tl.maximum(row_max, log_sums)
        states += BLOCK_N
    top = tl.max(row_max, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)

    row_sum = tl.zeros([BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    states = tl.arange(0, BLOCK_N).to(tl.int64)
    for _ in range(0, n_states, BLOCK_N):
        log_sums = tl.load(lse + states * rows + row, mask=states < n_states, other=float("-inf"))
        log_sums = tl.where(log_sums < float("inf"), log_sums, float("-inf"))
        weights = tl.exp(log_sums - base)
        # An empty state's out may be NaN: it is not loaded.
        values = tl.load(
            out + ((states * rows + row) * DIM)[:, None] + dims[None, :],
            mask=(weights > 0)[:, None] & dim_ok[None, :],
            other=0.0,
        )
        row_sum += weights
        acc += tl.sum(weights[:, None] * values.to(tl.float32), axis=0)
        states += BLOCK_N
    weight = tl.sum(row_sum, axis=0)
    filled = weight != 0  # true for NaN
    acc = acc / tl.where(filled, weight, 1.0)
    tl.store(merged_out + row * DIM + dims, acc.to(merged_out.dtype.element_ty), mask=dim_ok)
    tl.store(merged_lse + row, tl.where(filled, top + tl.log(tl.where(filled, weight, 1.0)), float("-inf")))


@triton.jit(do_not_specialize=["n_states"])
def _merge_pair_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    n_states,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAIRED: tl.constexpr,
    FINAL: tl.constexpr,
):
    states = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    ok = states < n_states
    at, all_ok = (states * DIM)[:, None] + dims[None, :], ok[:, None] & (dims < DIM)[None, :]
    first = states * 2 if PAIRED else states
    log_a, log_b = tl.load(lse_a + first, mask=ok, other=0.0), tl.load(lse_b + first, mask=ok, other=0.0)
    a, b = tl.load(out_a + at, mask=all_ok, other=0.0), tl.load(out_b + at, mask=all_ok, other=0.0)
    top = tl.maximum(log_a, log_b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(log_a - base), tl.exp(log_b - base)
    if PAIRED:
        weight_a *= tl.load(lse_a + first + 1, mask=ok, other=0.0)
        weight_b *= tl.load(lse_b + first + 1, mask=ok, other=0.0)
    row_sum = weight_a + weight_b
    filled = row_sum != 0  # true for NaN, which must come out
    divisor = tl.where(filled, row_sum, 1.0)
    merged = (a.to(tl.float32) * weight_a[:, None] + b.to(tl.float32) * weight_b[:, None]) / divisor[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=all_ok)
    log_sum = tl.where(filled, top + tl.log(divisor), float("-inf"))
    store_lse(lse, states, log_sum, top, row_sum, ok, PAIRED and not FINAL)
