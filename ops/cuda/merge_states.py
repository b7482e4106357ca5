"""Planning merges of attention states, one launch each: of N stacked ones, and of two that lie apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.kernels.merge_states import _merge_pair_kernel, _merge_states_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.sizes import ceil_div, power_of_2


@dataclass(frozen=True)
class MergeStates:
    """Merges stacked states, as `tatten.ops.states.merge` does, of the layout that it was planned for."""

    launch: Launch

    def __call__(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        merged_out, merged_lse = out.new_empty(out.shape[1:]), lse.new_empty(lse.shape[1:])
        self.launch(out.contiguous(), lse.contiguous(), merged_out, merged_lse)
        return merged_out, merged_lse


def plan_merge_states(out: Tensor, lse: Tensor) -> MergeStates:
    """Plan the merge of checked `out` `[n, ..., d]`, not empty, and `lse` `[n, ...]` in float32."""
    dim, n_states = out.shape[-1], lse[0].numel()
    launch = Launch(
        _merge_states_kernel,
        (n_states,),
        {"num_warps": 2},
        n_stacked=out.shape[0],
        n_states=n_states,
        DIM=dim,
        BLOCK_D=power_of_2(dim),
        BLOCK_N=8,
    )
    return MergeStates(launch)


@dataclass(frozen=True)
class MergePair:
    """Merges two dense states of one shape to `dtype`, by default theirs. NaN in a state comes from NaN in keys.

    `max_and_sum`: the states have maximum and sum instead of their lse, and so has the result unless it is `final`.
    """

    launch: Launch
    dtype: torch.dtype | None
    max_and_sum: bool = False
    final: bool = True

    def __call__(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        shape = lse_a.shape[:-1] if self.max_and_sum and self.final else lse_a.shape
        out, lse = out_a.new_empty(out_a.shape, dtype=self.dtype), lse_a.new_empty(shape)
        self.launch(out_a, lse_a, out_b, lse_b, out, lse)
        return out, lse


def plan_merge_pair(
    n_states: int, dim: int, dtype: torch.dtype | None = None, *, max_and_sum: bool = False, final: bool = True
) -> MergePair:
    """Plan the merge of two times `n_states` float32 states of head_dim `dim`."""
    block_d = power_of_2(dim)
    block_states = max(1, 1024 // block_d)
    launch = Launch(
        _merge_pair_kernel,
        (ceil_div(n_states, block_states),),
        {"num_warps": 2},
        n_states=n_states,
        DIM=dim,
        BLOCK_D=block_d,
        BLOCK_STATES=block_states,
        MAX_AND_SUM=max_and_sum,
        FINAL=final,
    )
    return MergePair(launch, dtype, max_and_sum, final)
