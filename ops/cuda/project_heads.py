"""`tatten::project_heads` on CUDA: one launch, in which the tensor cores multiply the weight unchanged.

A float32 number of `x` is split into two in bfloat16: the rounded number and its residue. Together they have 16 bits or
more, while TF32 would have 11.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.gpu import has_early_launches, has_large_shared_memory, multiprocessors
from tatten.ops.cuda.launcher import Launch, by_layout, on_device_of
from tatten.ops.project_heads import check_project_heads
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.validation import check_no_grad

LINE = 64  # 16-bit numbers in a cache line


class Blocks(NamedTuple):
    """The outputs of a program, `block_rows` by `block_c` columns; it sums `block_k` products at a time."""

    block_rows: int
    block_c: int
    block_k: int
    num_warps: int


FEW, MANY = Blocks(32, 64, 128, 4), Blocks(64, 128, 64, 8)
FEW_SHORT, MANY_SHORT = Blocks(32, 64, 64, 4), Blocks(64, 128, 128, 4)  # for sums of up to 128 products


def project_heads(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    check_no_grad("project_heads", x=x, weight=weight)  # a plan may stem from tensors without gradients
    return on_device_of(x, plan_project_heads(x, weight, out_dtype), x, weight)


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
def plan_project_heads(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    out_dtype = check_project_heads(x, weight, out_dtype)
    batch, heads, q_len, rank = x.shape
    columns, rows = weight.shape[1], batch * q_len
    writes = Dense.of((batch, heads, q_len, columns), out_dtype)
    if 0 in (*x.shape, columns):
        return lambda x, weight: weight.new_zeros(writes.shape, dtype=out_dtype)

    from tatten.ops.cuda.combine import INTERPRETED
    from tatten.ops.cuda.kernels.project_heads import _project_heads_kernel

    line_c, line_k = (LINE, 1) if weight.stride(1) == 1 else (1, LINE)  # prefetches go by cache lines
    blocks = _blocks(rows, heads, columns, rank, multiprocessors(x.device))
    pdl = not INTERPRETED and has_early_launches(x.device)
    stages = 4 if has_large_shared_memory(x.device) else 3  # 128 KiB, or 64 KiB, which all GPUs have
    launch = Launch(
        _project_heads_kernel,
        (_programs(blocks, rows, heads, columns),),
        {"num_warps": blocks.num_warps, "num_stages": stages, "launch_pdl": pdl},
        x_strides=x.stride(),
        weight_strides=weight.stride(),
        rows=rows,
        q_len=q_len,
        heads=heads,
        RANK=rank,
        COLUMNS=columns,
        BLOCK_ROWS=min(blocks.block_rows, max(16, power_of_2(rows))),
        BLOCK_C=blocks.block_c,
        BLOCK_K=min(blocks.block_k, max(16, power_of_2(rank))),
        LINE_C=line_c,
        LINE_K=line_k,
        LINES_OF_K=power_of_2(ceil_div(rank, line_k)),
        HALVES=x.dtype == torch.float32,
        PDL=pdl,
        FLOAT32_DOTS=INTERPRETED,  # bf16 dots are garbage in the interpreter (Triton 3.6 to 3.9)
    )
    return ProjectHeads(launch, writes)


def _blocks(rows: int, heads: int, columns: int, rank: int, multiprocessors: int) -> Blocks:
    """Choose the larger blocks for many rows, if they give programs to half of the GPU.

    The larger blocks took 12.8 us on an H200 for 64 rows of 128 heads, and `FEW` took 17.6; for 128 rows of 16 heads,
    which are 32 programs, they took 8.8 us, and `FEW` 5.4. The break-even point between these was not measured. Sums of
    128 products, for 128 heads with 512 columns on an H100, took 7.1 us with `FEW_SHORT` and 9.4 with `FEW` for 8 rows,
    and 10.4 with `MANY_SHORT` and 12.7 with `MANY` for 64 rows.
    """
    many = rows > FEW.block_rows and 2 * _programs(MANY, rows, heads, columns) >= multiprocessors
    if rank <= 128:
        return MANY_SHORT if many else FEW_SHORT
    return MANY if many else FEW


def _programs(blocks: Blocks, rows: int, heads: int, columns: int) -> int:
    return ceil_div(columns, blocks.block_c) * heads * ceil_div(rows, blocks.block_rows)
