"""The tables that the host writes for a step, in the memory that transformers copies to the device.

A block is one page of each layer of a group. Tables contain numbers of blocks. The device multiplies them by
`LayerGroup.stride` to get numbers of pages.

Decode steps use the block table of transformers, int32 `[groups, batch, columns + STATE]`. A row contains the blocks of
a request, padded with -1, the number of its tokens before the step, and the slot that the new token is written to.

Other steps use the read index of transformers, with an integer for each block in place of one for each key. Layers of
full attention have the blocks of all requests one after the other. Layers with a sliding window have for each request
the number of tokens before the step, then the blocks of its ring.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tatten.ops.sizes import ceil_div

STATE = 2  # columns of a row after its blocks


class StepTables(NamedTuple):
    """The tables of a layer group in one step, on the device.

    Attributes:
        rows: the rows of the block table in a decode step; the other attributes are those of other steps.
        reads: the read index; empty if no request has keys from earlier steps.
        slots: int64 `[tokens]`: the slot of the pool that each new token is written to.
        starts, key_starts: int32 `[batch + 1]`: where the tokens and the keys of each request begin.
        most_new, longest: upper bounds of the new tokens and of the keys of a request.
    """

    rows: Tensor | None = None
    reads: Tensor | None = None
    slots: Tensor | None = None
    starts: Tensor | None = None
    key_starts: Tensor | None = None
    most_new: int = 0
    longest: int = 0


@dataclass(frozen=True)
class LayerGroup:
    """The layers of one kind of attention, which share one table. A slot is a place for one token in a layer's pool.

    Attributes:
        page_size: number of tokens of a page.
        n_pages: number of pages of a layer's pool. It spans the pages of all layers.
        stride: distance in pages between a layer's pages of two consecutive blocks.
        window: number of tokens that a ring holds, or None. Token p is in place `p % window` of the ring.
        trash: the slot that padding is written to.
        shares: whether requests may have blocks in common.
    """

    page_size: int
    n_pages: int
    stride: int
    window: int | None
    trash: int
    shares: bool

    def slot(self, blocks: list[int], position: int) -> int:
        """Return the slot of the token at a position of a request."""
        place = position if self.window is None else position % self.window
        return blocks[place // self.page_size] * self.stride * self.page_size + place % self.page_size

    def fill_row(self, row: Tensor, blocks: list[int], past: int) -> None:
        """Write the row of a request with `past` tokens and a new one to the block table."""
        block_numbers = array("i", blocks)
        state = array("i", (past, self.slot(blocks, past)))
        if row.device.type == "cpu":  # NumPy assigns in a fraction of a tensor's time
            memory = row.numpy()
            memory[: len(block_numbers)], memory[-STATE:] = block_numbers, state
        else:
            row[: len(block_numbers)].copy_(torch.tensor(block_numbers, dtype=row.dtype), non_blocking=True)
            row[-STATE:].copy_(torch.tensor(state, dtype=row.dtype), non_blocking=True)

    def extend_reads(self, reads: list[int], blocks: list[int], past: int, new: int) -> None:
        """Append the blocks of a request with `past` tokens and `new` ones to the read index."""
        tokens = past + new
        if self.window is not None:
            tokens = min(tokens, self.window)
            reads.append(past)
        n = ceil_div(tokens, self.page_size)
        if len(blocks) < n:
            raise RuntimeError(f"a request of {past + new} tokens must have {n} blocks, got {len(blocks)}")
        reads.extend(blocks[:n])


def group_of(allocator: Any) -> LayerGroup:
    """Describe the layers of an allocator of transformers' cache. The cache must have allocated its pools."""
    return LayerGroup(
        page_size=allocator.tokens_per_page,
        n_pages=min(pool.shape[0] for pools in allocator._kv_page_views.values() for pool in pools),
        stride=allocator.block_physical_stride // allocator.tokens_per_page,
        window=getattr(allocator, "sliding_window", None),
        trash=allocator.write_trash_index,
        shares=allocator.use_block_sharing,
    )
