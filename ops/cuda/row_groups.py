"""Planning the launch that arranges sequences by the stored row that they read, once per step for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.combine import INTERPRETED
from tatten.ops.cuda.heuristics import capability
from tatten.ops.cuda.kernels.row_groups import _row_groups_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.row_groups import group_size
from tatten.ops.sizes import power_of_2


@dataclass(frozen=True)
class FindRowGroups:
    """Computes `tatten.ops.row_groups.row_groups_reference` for rows of the layout that it was planned for."""

    launch: Launch

    def __call__(self, rows: Tensor) -> Tensor:
        batch = rows.shape[0]
        ranks = torch.empty((2, batch), dtype=torch.int32, device=rows.device)
        row_groups = torch.empty((4, batch + 1), dtype=torch.int32, device=rows.device)
        self.launch(rows.contiguous(), ranks, row_groups)
        return row_groups


def plan_row_groups(rows: Tensor, kv_batch: int, queries: int) -> FindRowGroups:
    """Plan for checked integers `[B]`; the other arguments are those of `tatten.ops.row_groups.group_size`."""
    pdl = not INTERPRETED and capability(rows.device) >= (9, 0)
    launch = Launch(
        _row_groups_kernel,
        (1,),
        {"num_warps": 8, "launch_pdl": pdl},
        batch=rows.shape[0],
        kv_batch=kv_batch,
        size=group_size(rows.shape[0], kv_batch, queries),
        BLOCK=min(64, max(16, power_of_2(rows.shape[0]))),
        PDL=pdl,
    )
    return FindRowGroups(launch)
