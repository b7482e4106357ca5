"""Planning the two launches that find the block structure of a mask, once per step for all layers that share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.kernels.block_mask import _bits_kernel, _list_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.layout import squeeze_broadcast
from tatten.ops.masks import mask_rows
from tatten.ops.sizes import ceil_div
from tatten.ops.validation import BLOCK_KEYS


@dataclass(frozen=True)
class FindBlockList:
    """`tatten.ops.masks.block_list` for masks that are laid out as the one it was planned for."""

    rows: int
    n_blocks: int
    words: int  # of each block, as `_bits_kernel` says
    find_bits: Launch
    make_list: Launch

    def __call__(self, attn_mask: Tensor, kv_lens: Tensor | None = None) -> Tensor:
        mask = attn_mask.view(torch.uint8) if attn_mask.dtype == torch.bool else attn_mask
        bits = torch.empty((self.rows, self.n_blocks, self.words), dtype=torch.int64, device=mask.device)
        block_list = torch.empty((self.rows, self.n_blocks + 1, 2), dtype=torch.int64, device=mask.device)
        self.find_bits(mask, mask if kv_lens is None else kv_lens, bits)
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
) -> FindBlockList:
    """Plan the launches for masks like this one, narrowed by `kv_lens` and `window` where they are given.

    `kv_len` is for a mask that broadcasts over keys. Only a window, which ends at each query, asks for `q_len`.
    """
    mask = squeeze_broadcast(attn_mask)
    kv_len = mask.shape[3] if kv_len is None else kv_len
    mask = mask.expand(*mask.shape[:3], kv_len)
    rows = kv_batch if kv_lens is not None else mask_rows(attn_mask, kv_batch)
    n_blocks = ceil_div(kv_len, BLOCK_KEYS)
    seqs_per_kv = max(1, mask.shape[0] // kv_batch)
    # The same number of keys for a program: one row of the mask after the other would wait for each.
    n_queries = seqs_per_kv * mask.shape[1] * mask.shape[2]
    rows_at_once, at_once = (8, 4) if n_queries > 4 else (1, 16)
    additive = mask.dtype != torch.bool
    find_bits = Launch(
        _bits_kernel,
        (rows, ceil_div(n_blocks, at_once)),
        0 if mask.shape[0] == 1 else mask.stride(0),
        *mask.stride()[1:],
        seqs_per_kv,
        mask.shape[1],
        mask.shape[2],
        q_len,
        kv_len,
        window or 0,
        n_blocks,
        ADDITIVE=additive,
        HAS_LENS=kv_lens is not None,
        WINDOW=window is not None,
        BLOCK=BLOCK_KEYS,
        BLOCKS=at_once,
        ROWS=rows_at_once,
    )
    blocks = 64 if n_blocks <= 64 else 1024
    make_list = Launch(_list_kernel, (rows,), n_blocks, n_queries, ADDITIVE=additive, BLOCKS=blocks)
    return FindBlockList(rows, n_blocks, 4 if additive else 2, find_bits, make_list)
