"""Plan how the decode kernel reads a mask: by its block list, and the mask itself if the list is not enough."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.call import KeyValue
from tatten.ops.cuda.block_mask import FindBlockList, plan_block_list
from tatten.ops.cuda.kernels.decode import ADDITIVE_MASK, BOOL_MASK, NO_MASK
from tatten.ops.layout import squeeze_broadcast


@dataclass(frozen=True)
class MaskPlan:
    """The way in which a launch reads masks of one layout.

    Attributes:
        groups: the number of groups of kv_rows with their own lengths, as in `tatten.ops.cuda.tile_space.TileSpace`.
        has_block_list: the tiles of a group are the listed blocks of a mask.
        find_blocks: finds the block list of a mask that comes without one.
        kind: the way to read the mask itself: not at all, as bool or as an additive mask.
        strides: the strides of a mask that is read, over kv_rows, sequences, heads, queries and keys.
    """

    groups: int
    has_block_list: bool
    find_blocks: FindBlockList | None = None
    kind: int = NO_MASK
    strides: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)

    def __call__(
        self,
        attn_mask: Tensor | None,
        kv_lens: Tensor | None,
        block_mask: Tensor | None,
        block_table: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the mask as the kernel reads it, or None, and its block list."""
        if attn_mask is not None and self.find_blocks is not None:
            block_mask = self.find_blocks(attn_mask, kv_lens, block_table)
        listed = block_mask if self.has_block_list else None
        if attn_mask is None or self.kind == NO_MASK:
            return None, listed
        return attn_mask.view(torch.uint8) if self.kind == BOOL_MASK else attn_mask, listed


def plan_mask(query: Tensor, stored: KeyValue, window: int | None = None) -> MaskPlan:
    """Plan for checked inputs. A block mask is ignored if lengths or a window narrow the mask.

    If any sequence may read any row, a mask comes with its block mask.
    """
    attn_mask, kv_lens, block_mask = stored.attn_mask, stored.kv_lens, stored.block_mask
    if kv_lens is not None or window is not None or attn_mask is None:
        block_mask = None
    batch, q_heads, q_len, _ = query.shape
    kv_batch, kv_len = stored.kv_batch, stored.kv_len
    groups = block_mask.shape[0] if block_mask is not None else 1 if kv_lens is None else kv_batch
    if attn_mask is None or kv_len == 0:
        return MaskPlan(groups, block_mask is not None)
    mask = squeeze_broadcast(attn_mask)
    find_blocks = None
    if block_mask is None:
        table, key = stored.block_table, stored.key
        find_blocks = plan_block_list(
            mask,
            kv_batch,
            kv_len=kv_len,
            kv_lens=kv_lens,
            q_len=q_len,
            window=window,
            pages=None if table is None else (table, key.shape[0], key.shape[2]),
        )
        groups = find_blocks.kv_rows
    per_sequence = mask.shape[0] == batch and (stored.row_groups is not None or batch != kv_batch)
    one_per_kv_row = mask.shape[0] == 1 or not per_sequence
    if mask.dtype == torch.bool and mask.shape[1] == 1 and mask.shape[2] == 1 and one_per_kv_row:
        return MaskPlan(groups, True, find_blocks)  # the bits of the list are the whole mask
    b, h, n, s = mask.expand(mask.shape[0], q_heads, q_len, kv_len).stride()
    kv_rows, sequences = (0, 0) if mask.shape[0] == 1 else (0, b) if per_sequence else (b, 0)
    kind = BOOL_MASK if mask.dtype == torch.bool else ADDITIVE_MASK
    return MaskPlan(groups, True, find_blocks, kind, (kv_rows, sequences, h, n, s))
