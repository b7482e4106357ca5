"""Plan merges of attention states, one launch each."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.kernels.merge_states import _merge_states_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.sizes import power_of_2


@dataclass(frozen=True)
class MergeStates:
    """Merges stacked states as `tatten.ops.states.merge` does, for the layout that it was planned for."""

    launch: Launch
    writes: tuple[Dense, Dense]  # out, lse

    def __call__(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        merged_out, merged_lse = allocate(out, *self.writes)
        self.launch(out.contiguous(), lse.contiguous(), merged_out, merged_lse)
        return merged_out, merged_lse


def plan_merge_states(out: Tensor, lse: Tensor) -> MergeStates:
    """Plan the merge of checked `out` `[n, ..., d]`, not empty, and `lse` `[n, ...]` in float32."""
    dim, n_states = out.shape[-1], lse.numel() // lse.shape[0]
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
    return MergeStates(launch, (Dense.of(tuple(out.shape[1:]), out.dtype), Dense.of(tuple(lse.shape[1:]), lse.dtype)))
