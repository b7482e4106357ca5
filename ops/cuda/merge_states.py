"""Planning the merge of attention states in one launch each: N stacked ones, and two apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.kernels.merge_states import _merge_pair_kernel, _merge_states_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.sizes import ceil_div, power_of_2


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
        Launch(
            _merge_states_kernel, (rows,), out.shape[0], rows, DIM=dim, BLOCK_D=power_of_2(dim), BLOCK_N=8, num_warps=2
        )
    )


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
