"""Memory layout and work split of the push merge: arithmetic on sizes only, shared by its host and device code.

Ranks exchange states through symmetric memory: a buffer on each rank, mapped into the address space of all ranks. It is
an array of channels, one for each program of the kernel, and a channel is

    flags   int64 [MAX_RANKS]: flag i is the last epoch whose rows rank i has delivered; padded to `FLAG_BYTES`
    slots   [2 parities][n ranks] of `SLOT_BYTES`: up to `ROW_BYTES` of `out` in its dtype, then `LSE_ROWS` float32 lse
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tatten.ops.sizes import ceil_div, power_of_2

MAX_RANKS = 8  # the GPUs of a node; the kernel unrolls its loops over ranks
FLAG_BYTES = 128  # keeps flags and slots on separate cache lines
ROW_BYTES, LSE_ROWS = 8192, 32  # the most that a program can hold in registers
SLOT_BYTES = ROW_BYTES + 4 * LSE_ROWS
CHANNEL_BYTES = FLAG_BYTES + 2 * MAX_RANKS * SLOT_BYTES

# Bytes that a rank can send in the time of one more round between ranks: 3 us at 400 GB/s, estimated and not measured.
# Two rounds send 2 (n - 1) / n times the payload, and one round n - 1 times: two pay off if they save more than this.
ROUND_BYTES = 1_200_000


@dataclass(frozen=True)
class PushPlan:
    """The division of the rows of a state among ranks; a row is one query of one head.

    A share holds the rows that one rank merges: all rows, or every n-th run of consecutive rows. Each program merges
    `block_rows` rows of the share. A share of more than `programs` blocks takes several launches.

    Attributes:
        ranks: size of the group.
        rows: rows of the state on each rank.
        merged_rows: rows of the result on each rank.
        share: rows of a share.
        run: consecutive rows of the state in a share.
        scatter: True if each rank has a share of its own.
        gather: True if a second round sends the merged rows of each rank to all others.
        block_rows: rows that a program merges, a power of 2.
        programs: the most programs of a launch, each with its own channel.
        num_warps: warps of a program.
    """

    ranks: int
    rows: int
    merged_rows: int
    share: int
    run: int
    scatter: bool
    gather: bool
    block_rows: int
    programs: int
    num_warps: int

    @property
    def blocks(self) -> int:
        """The blocks of a share, over all launches."""
        return ceil_div(self.share, self.block_rows)


def plan_push(shape: Sequence[int], element_size: int, ranks: int, scatter_heads: bool, programs: int) -> PushPlan:
    """Plan the merge of an `out` of this shape.

    The shape is any `[..., head_dim]`, or `[batch, heads, q_length, head_dim]` if heads are scattered.
    """
    rows, dim = math.prod(shape[:-1]), shape[-1]
    saved = (ranks - 1) * (ranks - 2) / ranks * rows * (dim * element_size + 4)
    gather = not scatter_heads and saved > ROUND_BYTES
    share, run = rows, rows
    if scatter_heads:
        share, run = rows // ranks, shape[1] // ranks * shape[2]
    elif gather:
        share = run = ceil_div(rows, ranks)
    row_bytes = power_of_2(dim) * element_size
    max_block_rows = min(LSE_ROWS, ROW_BYTES // row_bytes)
    block_rows = min(max_block_rows, power_of_2(ceil_div(share, programs)))
    num_warps = max(1, min(8, block_rows * row_bytes // 512))  # 16 bytes for each thread
    merged_rows = share if scatter_heads else rows
    return PushPlan(
        ranks, rows, merged_rows, share, run, scatter_heads or gather, gather, block_rows, programs, num_warps
    )
