"""Kernels that merge attention states: N stacked ones, and two that lie apart."""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import store_lse


@triton.jit(do_not_specialize=["n_stacked", "n_states"])
def _merge_states_kernel(
    out,
    lse,
    merged_out,
    merged_lse,
    n_stacked,
    n_states,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    state = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DIM

    lse_max = tl.full([BLOCK_N], float("-inf"), tl.float32)
    stacked = tl.arange(0, BLOCK_N).to(tl.int64)
    for _ in range(0, n_stacked, BLOCK_N):
        log_sums = tl.load(lse + stacked * n_states + state, mask=stacked < n_stacked, other=float("-inf"))
        log_sums = tl.where(log_sums < float("inf"), log_sums, float("-inf"))  # NaN compares false
        lse_max = tl.maximum(lse_max, log_sums)
        stacked += BLOCK_N
    lse_max_all = tl.max(lse_max, axis=0)
    base = tl.where(lse_max_all == float("-inf"), 0.0, lse_max_all)

    weight_sums = tl.zeros([BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    stacked = tl.arange(0, BLOCK_N).to(tl.int64)
    for _ in range(0, n_stacked, BLOCK_N):
        log_sums = tl.load(lse + stacked * n_states + state, mask=stacked < n_stacked, other=float("-inf"))
        log_sums = tl.where(log_sums < float("inf"), log_sums, float("-inf"))
        weights = tl.exp(log_sums - base)
        # An empty state's out may be NaN: it is not loaded.
        values = tl.load(
            out + ((stacked * n_states + state) * DIM)[:, None] + dims[None, :],
            mask=(weights > 0)[:, None] & dim_ok[None, :],
            other=0.0,
        )
        weight_sums += weights
        acc += tl.sum(weights[:, None] * values.to(tl.float32), axis=0)
        stacked += BLOCK_N
    weight_sum = tl.sum(weight_sums, axis=0)
    filled = weight_sum != 0  # true for NaN
    acc = acc / tl.where(filled, weight_sum, 1.0)
    tl.store(merged_out + state * DIM + dims, acc.to(merged_out.dtype.element_ty), mask=dim_ok)
    tl.store(
        merged_lse + state, tl.where(filled, lse_max_all + tl.log(tl.where(filled, weight_sum, 1.0)), float("-inf"))
    )


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
    BLOCK_STATES: tl.constexpr,
    MAX_AND_SUM: tl.constexpr,
    FINAL: tl.constexpr,
):
    state = tl.program_id(0).to(tl.int64) * BLOCK_STATES + tl.arange(0, BLOCK_STATES)
    dims = tl.arange(0, BLOCK_D)
    ok = state < n_states
    at, value_ok = (state * DIM)[:, None] + dims[None, :], ok[:, None] & (dims < DIM)[None, :]
    lse_at = state * 2 if MAX_AND_SUM else state
    log_a, log_b = tl.load(lse_a + lse_at, mask=ok, other=0.0), tl.load(lse_b + lse_at, mask=ok, other=0.0)
    a, b = tl.load(out_a + at, mask=value_ok, other=0.0), tl.load(out_b + at, mask=value_ok, other=0.0)
    row_max = tl.maximum(log_a, log_b)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    weight_a, weight_b = tl.exp(log_a - base), tl.exp(log_b - base)
    if MAX_AND_SUM:
        weight_a *= tl.load(lse_a + lse_at + 1, mask=ok, other=0.0)
        weight_b *= tl.load(lse_b + lse_at + 1, mask=ok, other=0.0)
    row_sum = weight_a + weight_b
    filled = row_sum != 0  # true for NaN, which must come out
    divisor = tl.where(filled, row_sum, 1.0)
    merged = (a.to(tl.float32) * weight_a[:, None] + b.to(tl.float32) * weight_b[:, None]) / divisor[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=value_ok)
    log_sum = tl.where(filled, row_max + tl.log(divisor), float("-inf"))
    store_lse(lse, state, log_sum, row_max, row_sum, ok, MAX_AND_SUM and not FINAL)
