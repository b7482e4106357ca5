"""The kernel that merges stacked attention states."""

from __future__ import annotations

import triton
import triton.language as tl


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
