"""Merging states in one Triton kernel each: N stacked ones, and two apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tatten.ops.launching import Launch
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.triton_line import store_lse


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


@dataclass(frozen=True)
class MergeStates:
    """`tatten.ops.states.merge` of states that are laid out as those it was planned for."""

    launch: Launch

    def __call__(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        merged_out, merged_lse = out.new_empty(out.shape[1:]), lse.new_empty(lse.shape[1:])
        self.launch(out.contiguous(), lse.contiguous(), merged_out, merged_lse)
        return merged_out, merged_lse


def plan_merge_states(out: Tensor, lse: Tensor) -> MergeStates:
    """For checked inputs `[n, ..., d]`, not empty, and `[n, ...]` in float32."""
    dim, rows = out.shape[-1], lse[0].numel()
    return MergeStates(
        Launch(_merge_kernel, (rows,), out.shape[0], rows, DIM=dim, BLOCK_D=power_of_2(dim), BLOCK_N=8, num_warps=2)
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
    total = weight_a + weight_b
    filled = total != 0  # true for NaN, which must come out
    divisor = tl.where(filled, total, 1.0)
    merged = (a.to(tl.float32) * weight_a[:, None] + b.to(tl.float32) * weight_b[:, None]) / divisor[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=all_ok)
    log_sum = tl.where(filled, top + tl.log(divisor), float("-inf"))
    store_lse(lse, states, log_sum, top, total, ok, PAIRED and not FINAL)


@dataclass(frozen=True)
class MergePair:
    """Two states of one shape, dense, merged in `dtype`: default theirs. NaN in a part comes from NaN in keys.

    `paired`: they have maximum and sum instead of their lse, as the result has unless it is `final`.
    """

    launch: Launch
    dtype: torch.dtype | None
    paired: bool = False
    final: bool = True

    def __call__(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        shape = lse_a.shape[:-1] if self.paired and self.final else lse_a.shape
        out, lse = out_a.new_empty(out_a.shape, dtype=self.dtype), lse_a.new_empty(shape)
        self.launch(out_a, lse_a, out_b, lse_b, out, lse)
        return out, lse


def plan_merge_pair(
    n_states: int, dim: int, dtype: torch.dtype | None = None, *, paired: bool = False, final: bool = True
) -> MergePair:
    """For so many float32 states of head_dim `dim`."""
    block_d = power_of_2(dim)
    block_r = max(1, 1024 // block_d)
    grid = (ceil_div(n_states, block_r),)
    constants = {"DIM": dim, "BLOCK_D": block_d, "BLOCK_R": block_r, "PAIRED": paired, "FINAL": final}
    return MergePair(Launch(_merge_pair_kernel, grid, n_states, **constants, num_warps=2), dtype, paired, final)
