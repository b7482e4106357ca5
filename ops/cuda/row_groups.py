"""Plan the launch that arranges sequences by the stored row that they read, once per step for all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.combine import INTERPRETED
from tatten.ops.cuda.gpu import has_early_launches
from tatten.ops.cuda.kernels.row_groups import _row_groups_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.row_groups import group_size, row_groups_reference
from tatten.ops.sizes import power_of_2

MOST_SORTED = 1024  # sequences that one program sorts


@dataclass(frozen=True)
class FindRowGroups:
    """Computes `tatten.ops.row_groups.row_groups_reference` for rows of the layout that it was planned for."""

    launch: Launch
    writes: Dense

    def __call__(self, rows: Tensor) -> Tensor:
        (row_groups,) = allocate(rows, self.writes)
        self.launch(rows.contiguous(), row_groups)
        return row_groups


def plan_row_groups(rows: Tensor, kv_batch: int, queries: int) -> Callable[[Tensor], Tensor]:
    """Plan for checked integers `[B]`; the other arguments are those of `tatten.ops.row_groups.group_size`."""
    batch = rows.shape[0]
    size = group_size(batch, kv_batch, queries)
    if batch > MOST_SORTED:
        return lambda rows: row_groups_reference(rows, kv_batch, size)
    pdl = not INTERPRETED and has_early_launches(rows.device)
    block = max(16, power_of_2(batch))
    launch = Launch(
        _row_groups_kernel,
        (1,),
        {"num_warps": max(1, block // 128), "launch_pdl": pdl},
        batch=batch,
        kv_batch=kv_batch,
        size=size,
        BLOCK=block,
        PDL=pdl,
    )
    return FindRowGroups(launch, Dense.of((4, batch + 1), torch.int32))
