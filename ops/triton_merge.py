"""Merging states in one Triton kernel each: N stacked ones, and two that each lie as their own attention left them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tatten.ops.sizes import ceil_div, power_of_2


@triton.jit(do_not_specialize=["n_states", "rows"])
def _merge_kernel(
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

    highest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    states = tl.arange(0, BLOCK_N).to(tl.int64)
    for _ in range(0, n_states, BLOCK_N):
        log_sums = tl.load(lse + states * rows + row, mask=states < n_states, other=float("-inf"))
        log_sums = tl.where(log_sums < float("inf"), log_sums, float("-inf"))  # NaN compares false
        highest = tl.maximum(highest, log_sums)
        states += BLOCK_N
    top = tl.max(highest, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)

    total = tl.zeros([BLOCK_N], tl.float32)
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
        total += weights
        acc += tl.sum(weights[:, None] * values.to(tl.float32), axis=0)
        states += BLOCK_N
    weight = tl.sum(total, axis=0)
    filled = weight != 0  # true for NaN
    acc = acc / tl.where(filled, weight, 1.0)
    tl.store(merged_out + row * DIM + dims, acc.to(merged_out.dtype.element_ty), mask=dim_ok)
    tl.store(merged_lse + row, tl.where(filled, top + tl.log(tl.where(filled, weight, 1.0)), float("-inf")))


def merge_states_triton(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """`tatten.ops.states.merge` for checked inputs `[n, ..., d]` and `[n, ...]` whose lse is float32."""
    out, lse = out.contiguous(), lse.contiguous()
    merged_out = out.new_empty(out.shape[1:], dtype=out.dtype)
    merged_lse = lse.new_empty(lse.shape[1:])
    rows, dim = merged_lse.numel(), out.shape[-1]
    if rows:
        _merge_kernel[(rows,)](
            out,
            lse,
            merged_out,
            merged_lse,
            out.shape[0],
            rows,
            DIM=dim,
            BLOCK_D=power_of_2(dim),
            BLOCK_N=8,
            num_warps=2,
        )
    return merged_out, merged_lse


@triton.jit(do_not_specialize=["n_rows"])
def _merge_pair_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    a_b,
    a_h,
    a_l,
    b_b,
    b_h,
    b_l,
    lse_a_b,
    lse_a_h,
    lse_a_l,
    lse_b_b,
    lse_b_h,
    lse_b_l,
    shared_a,
    shared_b,
    group_a,
    group_b,
    heads,
    q_len,
    n_rows,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    row_ok = rows < n_rows
    ok = row_ok[:, None] & (dims < DIM)[None, :]
    position = rows % q_len
    head = rows // q_len % heads
    sequence = rows // q_len // heads
    # The queries of a row are packed as (head in its group, sequence that shares the row, position).
    place_a = ((head % group_a * shared_a + sequence % shared_a) * q_len + position).to(tl.int64)
    place_b = ((head % group_b * shared_b + sequence % shared_b) * q_len + position).to(tl.int64)
    row_a, head_a = (sequence // shared_a).to(tl.int64), (head // group_a).to(tl.int64)
    row_b, head_b = (sequence // shared_b).to(tl.int64), (head // group_b).to(tl.int64)
    log_a = tl.load(lse_a + row_a * lse_a_b + head_a * lse_a_h + place_a * lse_a_l, mask=row_ok, other=0.0)
    log_b = tl.load(lse_b + row_b * lse_b_b + head_b * lse_b_h + place_b * lse_b_l, mask=row_ok, other=0.0)
    a = tl.load(out_a + (row_a * a_b + head_a * a_h + place_a * a_l)[:, None] + dims[None, :], mask=ok, other=0.0)
    b = tl.load(out_b + (row_b * b_b + head_b * b_h + place_b * b_l)[:, None] + dims[None, :], mask=ok, other=0.0)

    top = tl.maximum(log_a, log_b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(log_a - base), tl.exp(log_b - base)
    total = weight_a + weight_b
    filled = total != 0  # true for NaN, which must come out
    divisor = tl.where(filled, total, 1.0)
    merged = (a.to(tl.float32) * weight_a[:, None] + b.to(tl.float32) * weight_b[:, None]) / divisor[:, None]
    tl.store(out + (rows.to(tl.int64) * DIM)[:, None] + dims[None, :], merged.to(out.dtype.element_ty), mask=ok)
    tl.store(lse + rows, tl.where(filled, top + tl.log(divisor), float("-inf")), mask=row_ok)


def merge_parts_triton(
    outs: Sequence[Tensor], lses: Sequence[Tensor], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`tatten.ops.states.merge_parts` of states as attention to packed queries leaves them.

    Each out is `[rows, kv_heads, group * sequences * q_len, d]` with dense d, for as many rows and kv_heads as its
    segment has; each lse is the same without d. `shape` is that of the merged out, `[batch, q_heads, q_len, d]`; it is
    contiguous. What is merged so far stays in float32.
    """
    batch, heads, q_len, dim = shape
    out, lse = outs[0], lses[0]
    block_d = power_of_2(dim)
    block_r = max(1, 1024 // block_d)
    n_rows = batch * heads * q_len
    for i in range(1, len(outs)):
        merged = out.new_empty(shape, dtype=dtype if i == len(outs) - 1 else torch.float32)
        merged_lse = lse.new_empty(shape[:3])
        _merge_pair_kernel[(ceil_div(n_rows, block_r),)](
            out,
            lse,
            outs[i],
            lses[i],
            merged,
            merged_lse,
            *out.stride()[:3],
            *outs[i].stride()[:3],
            *lse.stride(),
            *lses[i].stride(),
            batch // out.shape[0],
            batch // outs[i].shape[0],
            heads // out.shape[1],
            heads // outs[i].shape[1],
            heads,
            q_len,
            n_rows,
            DIM=dim,
            BLOCK_D=block_d,
            BLOCK_R=block_r,
            num_warps=2,
        )
        out, lse = merged, merged_lse
    return out, lse
