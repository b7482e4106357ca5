"""What launches of the lean kernel leave of their rows, and planning the merge of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tatten.ops.cuda.heuristics import capability
from tatten.ops.cuda.kernels.combine import _combine_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.validation import BLOCK_KEYS

INTERPRETED = not isinstance(_combine_kernel, triton.JITFunction)


@dataclass(frozen=True)
class TileSpace:
    """How the rows of a launch lie on the line of tiles: what the merge of its partials goes by.

    `rows` are those of each of `groups`, whose rows are equally long. `listed`: the tiles are blocks of a mask.
    `paired`: states to be merged have maximum and sum instead of their lse: see
    `tatten.ops.cuda.kernels.tile_scheduler.store_lse`.
    """

    groups: int
    rows: int
    kv_len: int
    kv_heads: int
    seqs_per_kv: int
    m_blocks: int
    programs: int
    block_m: int
    block_n: int
    window: int | None = None
    has_lens: bool = False
    listed: bool = False
    paired: bool = False

    @property
    def split(self) -> bool:
        """Whether any row may have been done by several programs."""
        return self.groups > 1 or self.listed or self.rows % self.programs != 0

    @property
    def int64_tiles(self) -> bool:
        """Whether places on the line, times programs, need 64 bits."""
        line = self.groups * self.rows * max(1, ceil_div(self.kv_len, self.block_n))
        return line * self.programs >= 1 << 31

    @property
    def blocks_stride(self) -> int:
        """Of the lists of blocks of two rows of K."""
        return 2 * (ceil_div(self.kv_len, BLOCK_KEYS) + 1) if self.listed else 0


class Partials(NamedTuple):
    """What a launch without merge leaves: the states of whole rows, partial ones, and what says how many there are."""

    out: Tensor
    lse: Tensor
    partial_out: Tensor
    partial_lse: Tensor
    kv_lens: Tensor | None = None
    blocks: Tensor | None = None


@dataclass(frozen=True)
class Combine:
    """The states that the partials of one or two launches add up to; of two in `dtype`, default that of their states.

    `paired`: they are to be merged in their turn, and have maximum and sum instead of their lse.
    """

    launch: Launch | None
    dtype: torch.dtype | None
    paired: bool = False

    def __call__(self, first: Partials, second: Partials | None = None) -> tuple[Tensor, Tensor]:
        out, lse = first.out, first.lse
        if self.launch is None:
            return out, lse
        if second is not None:
            shape = (*out.shape[:3], 2) if self.paired else out.shape[:3]
            out, lse = out.new_empty(out.shape, dtype=self.dtype), lse.new_empty(shape)
        self.launch(out, lse, *_pointers(first), *_pointers(second or first))
        return out, lse


def _pointers(x: Partials) -> list[Tensor]:
    return [x.out if y is None else y for y in x]


def _sizes(x: TileSpace) -> tuple[int, ...]:
    return x.blocks_stride, x.groups, x.rows, x.kv_len, x.kv_heads, x.seqs_per_kv, x.m_blocks, x.programs


def _warps(partials: int, dim: int) -> int:
    if dim > 128:  # what a thread holds
        return min(8, max(1, partials * dim // 1024))
    return 1 if partials <= 8 else 2


def plan_combine(
    query: Tensor,
    value_dim: int,
    first: TileSpace,
    second: TileSpace | None = None,
    *,
    dtype: torch.dtype | None = None,
    paired: bool = False,
    overlap: bool = True,
) -> Combine:
    """The merge of a launch on `first`, and of one on `second`, of attention of `query` to values of `value_dim`."""
    if second is None and not first.split:
        return Combine(None, dtype, paired)
    batch, q_heads, q_len, _ = query.shape
    a, b = first, second or first
    block_dv = max(16, power_of_2(value_dim))
    overlap = overlap and not INTERPRETED and capability(query.device) >= (9, 0)
    # Of a ragged batch one row may have all partials.
    most = max(32 if x.groups > 1 else x.programs // x.rows + 2 for x in (a, b))
    partials = min(64, power_of_2(most))
    launch = Launch(
        _combine_kernel,
        (batch * q_heads * q_len,),
        q_heads,
        q_len,
        *_sizes(a),
        *_sizes(b),
        a.window or 0,
        VALUE_DIM=value_dim,
        BLOCK_DV=block_dv,
        BLOCK_M_A=a.block_m,
        BLOCK_N_A=a.block_n,
        GROUPS_A=power_of_2(a.groups),
        HAS_LENS_A=a.has_lens,
        LISTED_A=a.listed,
        PAIRED_A=a.paired,
        BLOCK_M_B=b.block_m,
        BLOCK_N_B=b.block_n,
        GROUPS_B=power_of_2(b.groups),
        HAS_LENS_B=b.has_lens,
        LISTED_B=b.listed,
        PAIRED_B=b.paired,
        WINDOW=a.window is not None,
        INT64_TILES=a.int64_tiles or b.int64_tiles,
        TWO=second is not None,
        PAIRED_OUT=paired,
        PARTIALS=partials,
        OVERLAP=overlap,
        num_warps=_warps(partials, block_dv),
        launch_pdl=overlap,
    )
    return Combine(launch, dtype, paired)
