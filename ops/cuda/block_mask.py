"""Plan the two launches that find the block structure of a mask, once per step for all layers that share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.kernels.block_mask import _bits_kernel, _list_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.layout import squeeze_broadcast
from tatten.ops.masks import mask_rows
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.validation import BLOCK_KEYS

WIDEST_GRID = 65535  # programs in a grid's second dim


@dataclass(frozen=True)
class FindBlockList:
    """Computes `tatten.ops.masks.block_list` for masks of the layout that it was planned for."""

    kv_rows: int
    writes: tuple[Dense, Dense]  # bits, block list
    find_bits: Launch
    make_list: Launch

    def __call__(self, attn_mask: Tensor, kv_lens: Tensor | None = None, block_table: Tensor | None = None) -> Tensor:
        mask = attn_mask.view(torch.uint8) if attn_mask.dtype == torch.bool else attn_mask
        bits, block_list = allocate(mask, *self.writes)
        self.find_bits(mask, kv_lens, block_table, bits)
        self.make_list(bits, block_list)
        return block_list


def plan_block_list(
    attn_mask: Tensor,
    kv_batch: int,
    *,
    kv_len: int | None = None,
    kv_lens: Tensor | None = None,
    q_len: int = 1,
    window: int | None = None,
    pages: tuple[Tensor, int, int] | None = None,
    every_block: bool = False,
) -> FindBlockList:
    """Plan the launches for a mask. `kv_lens`, `window` and entries that name no page may narrow it.

    Args:
        attn_mask, kv_batch, every_block: as for `tatten.ops.masks.block_list`.
        kv_len: the number of keys, for a mask that broadcasts over keys.
        kv_lens: as `tatten.decode_attention` takes them.
        q_len: the number of queries; needed only with a window, which ends at each query.
        window: as `tatten.decode_attention` takes it.
        pages: the block table, the number of pages and their size, if keys are in pages.
    """
    mask = squeeze_broadcast(attn_mask)
    kv_len = mask.shape[3] if kv_len is None else kv_len
    mask = mask.expand(*mask.shape[:3], kv_len)
    kv_rows = kv_batch if kv_lens is not None else mask_rows(attn_mask, kv_batch)
    n_blocks = ceil_div(kv_len, BLOCK_KEYS)
    seqs_per_kv = max(1, mask.shape[0] // kv_batch)
    # A program reads 64 queries of few blocks at a time, as each round of queries waits for its loads: 160 by 8 took
    # 21 us.
    n_queries = seqs_per_kv * mask.shape[1] * mask.shape[2]
    block_q = min(64, power_of_2(n_queries)) if n_queries > 4 else 1
    blocks_at_once = max(16 if block_q == 1 else 32 // block_q, power_of_2(max(1, ceil_div(n_blocks, WIDEST_GRID))))
    additive = mask.dtype != torch.bool
    find_bits = Launch(
        _bits_kernel,
        (kv_rows, ceil_div(n_blocks, blocks_at_once)),
        {},
        mask_strides=(0 if mask.shape[0] == 1 else mask.stride(0), *mask.stride()[1:]),
        table_strides=() if pages is None else pages[0].stride(),
        n_pages=0 if pages is None else pages[1],
        seqs_per_kv=seqs_per_kv,
        mask_heads=mask.shape[1],
        mask_q_len=mask.shape[2],
        q_len=q_len,
        kv_len=kv_len,
        window=window or 0,
        n_blocks=n_blocks,
        ADDITIVE=additive,
        HAS_LENS=kv_lens is not None,
        PAGE=0 if pages is None else pages[2],
        WINDOW=window is not None,
        BLOCK_KEYS=BLOCK_KEYS,
        BLOCKS_AT_ONCE=blocks_at_once,
        BLOCK_Q=block_q,
    )
    make_list = Launch(
        _list_kernel,
        (kv_rows,),
        {},
        n_blocks=n_blocks,
        n_queries=n_queries,
        ADDITIVE=additive,
        EVERY_BLOCK=every_block,
        BLOCKS_AT_ONCE=64 if n_blocks <= 64 else 1024,
    )
    shapes = (kv_rows, n_blocks, 4 if additive else 2), (kv_rows, n_blocks + 1, 2)
    bits, block_list = (Dense.of(shape, torch.int64) for shape in shapes)
    return FindBlockList(kv_rows, (bits, block_list), find_bits, make_list)
