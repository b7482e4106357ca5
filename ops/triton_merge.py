"""Merging N stacked states in one Triton kernel, in the order of dim 0."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    PARTIALS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DIM

    highest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    states = tl.arange(0, BLOCK_N).to(tl.int64)
    for _ in range(0, n_states, BLOCK_N):
        log_sums = tl.load(lse + states * rows + row, mask=states < n_states, other=float("-inf"))
        if not PARTIALS:
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
        if not PARTIALS:
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


def merge_states_triton(
    out: Tensor, lse: Tensor, out_dtype: torch.dtype | None = None, partials: bool = False
) -> tuple[Tensor, Tensor]:
    """`tatten.ops.states.merge` for checked inputs `[n, ..., d]` and `[n, ...]` whose lse is float32."""
    out, lse = out.contiguous(), lse.contiguous()
    merged_out = out.new_empty(out.shape[1:], dtype=out_dtype or out.dtype)
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
            BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_N=8,
            PARTIALS=partials,
            num_warps=2,
        )
    return merged_out, merged_lse
