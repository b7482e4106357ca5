"""The tables that the host writes for a step, in the memory that transformers moves to the device.

A block is a page of each layer of a group. Tables have the numbers of blocks, which the device multiplies by
`LayerGroup.stride` to get those of pages.

Decode steps use transformers' block table, int32 `[groups, batch, columns + STATE]`: the blocks of a request, then -1
for those that it does not have, how many tokens it has before the step, and the slot that the new one is written to.

Other steps use its read index, which has an integer for each key there, and one for each block here. Layers of full
attention have the blocks of all requests one after the other. Layers with a sliding window have for each request the
number of tokens before the step, then the blocks of its ring.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tatten.ops.sizes import ceil_div

STATE = 2  # columns of a row after its pages


@dataclass(frozen=True)
class LayerGroup:
    """The layers of one kind of attention, which have one table. A slot is a place for one token in a layer's pool.

    Attributes:
        page_size: the tokens of a page.
        n_pages: the pages of a layer's pool. It spans the pages of all layers.
        stride: the pages of the pool from the first one of a block to that of the next block.
        window: the tokens that a ring holds, or None. Token p is in place `p % window` of the ring.
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
        numbers = array("i", blocks)
        state = array("i", (past, self.slot(blocks, past)))
        if row.device.type == "cpu":  # an array of NumPy takes a fraction of the time of a tensor
            memory = row.numpy()
            memory[: len(numbers)], memory[-STATE:] = numbers, state
        else:
            row[: len(numbers)].copy_(torch.tensor(numbers, dtype=row.dtype), non_blocking=True)
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
    """Describe the layers of an allocator of transformers' cache, whose pages are known."""
    return LayerGroup(
        page_size=allocator.tokens_per_page,
        n_pages=min(pool.shape[0] for pools in allocator._kv_page_views.values() for pool in pools),
        stride=allocator.block_physical_stride // allocator.tokens_per_page,
        window=getattr(allocator, "sliding_window", None),
        trash=allocator.write_trash_index,
        shares=allocator.use_block_sharing,
    )
