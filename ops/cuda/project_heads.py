"""`tatten::project_heads` on CUDA: one launch, which reads the weight once for up to 32 or 64 rows.

`x` is taken as the sum of two numbers in the dtype of the weight, whose 16 bits or more are at least as exact as what
TF32 would leave of it, and the tensor cores take both beside the weight as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.heuristics import capability, has_large_shared_memory, multiprocessors
from tatten.ops.cuda.launcher import Launch, by_layout, on_device_of
from tatten.ops.project_heads import check_project_heads
from tatten.ops.sizes import ceil_div, power_of_2

LINE = 64  # numbers of 16 bits that come from memory at once


class Blocks(NamedTuple):
    """What a program computes: columns of rows, of which it adds up `ranks` at a time."""

    rows: int
    columns: int
    ranks: int
    warps: int


# 128 heads of 128 columns and rank 512, H200: FEW takes 8.7 us for 8 rows, MANY 8.7 too; for 64 rows 17.6 and 12.8, for
# 512 108 and 79. Of 16 heads, which MANY makes few programs of, 128 rows take 5.4 and 8.8.
FEW, MANY, STAGES = Blocks(32, 64, 128, 4), Blocks(64, 128, 64, 8), 4


def project_heads(x: Tensor, weight: Tensor) -> Tensor:
    return on_device_of(x, plan_project_heads(x, weight), x, weight)


@dataclass(frozen=True)
class ProjectHeads:
    """Computes the op for tensors of the layout that it was planned for."""

    launch: Launch
    writes: Dense

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        (out,) = allocate(x, self.writes)
        self.launch(x, weight, out)
        return out


@by_layout
def plan_project_heads(x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    check_project_heads(x, weight)
    batch, heads, q_len, rank = x.shape
    columns, rows = weight.shape[1], batch * q_len
    writes = Dense.of((batch, heads, q_len, columns), weight.dtype)
    if 0 in (*x.shape, columns):
        return lambda x, weight: weight.new_zeros(writes.shape)

    from tatten.ops.cuda.combine import INTERPRETED
    from tatten.ops.cuda.kernels.project_heads import _project_heads_kernel

    blocks = _blocks(rows, heads, columns, multiprocessors(x.device))
    stages = STAGES if has_large_shared_memory(x.device) else 2
    pdl = not INTERPRETED and capability(x.device) >= (9, 0)
    launch = Launch(
        _project_heads_kernel,
        (_programs(blocks, rows, heads, columns),),
        {"num_warps": blocks.warps, "num_stages": stages, "launch_pdl": pdl},
        x_strides=x.stride(),
        weight_strides=weight.stride(),
        rows=rows,
        q_len=q_len,
        heads=heads,
        RANK=rank,
        COLUMNS=columns,
        BLOCK_ROWS=min(blocks.rows, max(16, power_of_2(rows))),
        BLOCK_C=blocks.columns,
        BLOCK_K=min(blocks.ranks, max(16, power_of_2(rank))),
        LINES=power_of_2(ceil_div(rank, LINE)),
        PDL=pdl,
        FLOAT32_DOTS=INTERPRETED,
    )
    return ProjectHeads(launch, writes)


def _programs(blocks: Blocks, rows: int, heads: int, columns: int) -> int:
    return ceil_div(columns, blocks.columns) * heads * ceil_div(rows, blocks.rows)


def _blocks(rows: int, heads: int, columns: int, multiprocessors: int) -> Blocks:
    """Choose as measured on an H200: large ones where there are many rows, and programs for half of the GPU or more."""
    return MANY if rows > FEW.rows and 2 * _programs(MANY, rows, heads, columns) >= multiprocessors else FEW
