"""The tables that the host writes for a step: numbers of pages, in the memory that transformers moves to the device.

Decode steps use transformers' block table, int32 `[groups, batch, columns + STATE]`: the pages of a request, from -1 on
unused, then how many tokens it has before the step, and the slot that the new one is written to.

Other steps use its read index, which has an integer for each key there, and one for each page here. Layers of full
attention have the pages of all requests one after the other. Layers with a sliding window have for each request the
number of tokens before the step, then the pages of its ring that hold any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tatten.ops.sizes import ceil_div

STATE = 2  # columns of a row after its pages


@dataclass(frozen=True)
class Group:
    """The layers of one kind of attention, which have one table. A slot is a place for one token in a layer's pool.

    Attributes:
        page_size: the tokens of a page.
        n_pages: the pages of a layer's pool. It spans the pages of all layers.
        stride: the number of pages from a block to the next.
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

    def pages(self, blocks: list[int]) -> list[int]:
        return [block * self.stride for block in blocks]

    def slot(self, blocks: list[int], position: int) -> int:
        """Return the slot of the token at a position of a request."""
        place = position if self.window is None else position % self.window
        return blocks[place // self.page_size] * self.stride * self.page_size + place % self.page_size

    def ring_pages(self, past: int) -> int:
        """Return how many pages of a ring the read index has; `steps.py` counts the same on the device."""
        assert self.window is not None
        held = min(past, self.window - 1)
        if held == 0:
            return 0
        return ceil_div(self.window if held == self.window - 1 else held, self.page_size)

    def fill_row(self, row: Tensor, blocks: list[int], past: int) -> None:
        """Write the row of a request with `past` tokens and a new one to the block table."""
        row[: len(blocks)].copy_(torch.tensor(self.pages(blocks), dtype=row.dtype), non_blocking=True)
        state = torch.tensor([past, self.slot(blocks, past)], dtype=row.dtype)
        row[-STATE:].copy_(state, non_blocking=True)

    def extend_reads(self, reads: list[int], blocks: list[int], past: int, new: int) -> None:
        """Append the pages of a request with `past` tokens and `new` ones to the read index."""
        if self.window is None:
            n = ceil_div(past + new, self.page_size)
        else:
            n = self.ring_pages(past)
            reads.append(past)
        if len(blocks) < n:
            raise RuntimeError(f"a request of {past + new} tokens must have {n} blocks, got {len(blocks)}")
        reads.extend(self.pages(blocks[:n]))


def group_of(allocator: Any) -> Group:
    """Describe the layers of an allocator of transformers' cache, whose pages are known."""
    return Group(
        page_size=allocator.tokens_per_page,
        n_pages=min(pool.shape[0] for pools in allocator._kv_page_views.values() for pool in pools),
        stride=allocator.block_physical_stride // allocator.tokens_per_page,
        window=getattr(allocator, "sliding_window", None),
        trash=allocator.write_trash_index,
        shares=allocator.use_block_sharing,
    )
