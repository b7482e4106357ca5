"""The block structure of a mask in Triton: which blocks of 64 keys hold any that counts, and which keys those are.

It is found once per step for all layers that share the mask. The inner loop of attention then walks a list, and reads
neither keys, values nor mask of what is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tatten.ops.launching import Launch
from tatten.ops.masks import mask_rows
from tatten.ops.packing import squeeze_broadcast
from tatten.ops.sizes import ceil_div
from tatten.ops.validate import BLOCK_KEYS


@triton.jit(do_not_specialize=["seqs_of_row", "heads", "q_rows", "q_len", "kv_len", "window", "n_blocks"])
def _bits_kernel(
    mask,
    kv_lens,
    bits,
    mask_b,
    mask_h,
    mask_l,
    mask_s,
    seqs_of_row,
    heads,
    q_rows,
    q_len,
    kv_len,
    window,
    n_blocks,
    ADDITIVE: tl.constexpr,
    HAS_LENS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """For `BLOCKS` blocks of a row of the KV two words: the keys that any of its queries attends to, as bits, and 1 if
    every query attends to all of them, with no bias."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    keys = (blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]).to(tl.int64)[None]
    length = kv_len
    if HAS_LENS:
        length = tl.minimum(tl.maximum(tl.load(kv_lens + row), 0), kv_len).to(tl.int32)
    n_rows = seqs_of_row * heads * q_rows
    used = tl.zeros([BLOCKS, BLOCK], tl.int32)
    full = (keys < length).to(tl.int32).reshape([BLOCKS, BLOCK])
    for i in range(0, n_rows, ROWS):
        place = i + tl.arange(0, ROWS).to(tl.int64)[:, None, None]  # of 64 bits: strides of a mask may be large
        row_ok = place < n_rows
        position = place % q_rows
        start = (row * seqs_of_row + place // (heads * q_rows)) * mask_b
        start += place // q_rows % heads * mask_h + position * mask_l
        within = row_ok & (keys < length)
        plain = within
        if WINDOW:
            # A mask of one row stands for all queries, whose windows reach from the first one's to the last one's.
            first = length - q_len + position.to(tl.int32)
            last = tl.where(q_rows == q_len, first, length - 1)
            within = within & (keys <= last) & (keys > first - window)
            plain = plain & (keys <= first) & (keys > last - window)
        bias = tl.load(mask + start + keys * mask_s, mask=within, other=0)
        if ADDITIVE:
            within = within & (bias != float("-inf"))
            plain = plain & (bias == 0)
        else:
            within = within & (bias != 0)
            plain = plain & (bias != 0)
        used |= tl.max(within.to(tl.int32), axis=0)
        full &= tl.min((plain | ~row_ok).to(tl.int32), axis=0)
    words = tl.sum(used.to(tl.int64) << tl.arange(0, BLOCK).to(tl.int64)[None, :], axis=1)
    at = bits + 2 * (row * n_blocks + blocks)
    tl.store(at, words, mask=blocks < n_blocks)
    tl.store(at + 1, tl.min(full, axis=1).to(tl.int64), mask=blocks < n_blocks)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["n_blocks"])
def _list_kernel(bits, listed, n_blocks, BLOCKS: tl.constexpr):
    """A row's list, as `tatten.ops.masks.mask_blocks` describes it."""
    row = tl.program_id(0).to(tl.int64)
    bits += 2 * row * n_blocks
    listed += row * (n_blocks + 1) * 2
    count, run, end = 0, 0, -1
    broken = -1  # the last block so far that is not full
    for start in range(0, n_blocks, BLOCKS):
        blocks = start + tl.arange(0, BLOCKS)
        words = tl.load(bits + 2 * blocks, mask=blocks < n_blocks, other=0)
        full = tl.load(bits + 2 * blocks + 1, mask=blocks < n_blocks, other=0)
        count += tl.sum((words != 0).to(tl.int32), axis=0)
        last_broken = tl.maximum(tl.associative_scan(tl.where(full > 0, -1, blocks), 0, _larger), broken)
        broken = tl.max(last_broken, axis=0)
        lengths = blocks - last_broken  # of the run that ends at each block
        longest = tl.max(lengths, axis=0)
        first_end = tl.min(tl.where(lengths == longest, blocks, n_blocks), axis=0)
        end = tl.where(longest > run, first_end, end)
        run = tl.maximum(longest, run)
    n_others, n_empty = run, count
    for start in range(0, n_blocks, BLOCKS):
        blocks = start + tl.arange(0, BLOCKS)
        words = tl.load(bits + 2 * blocks, mask=blocks < n_blocks, other=0)
        in_run = (blocks > end - run) & (blocks <= end)
        other = ((words != 0) & ~in_run).to(tl.int32)
        empty = ((words == 0) & (blocks < n_blocks)).to(tl.int32)
        place = tl.where(other > 0, n_others + tl.cumsum(other, axis=0), n_empty + tl.cumsum(empty, axis=0))
        place = tl.where(in_run, blocks - (end - run), place)
        tl.store(listed + 2 * place, blocks.to(tl.int64), mask=blocks < n_blocks)
        tl.store(listed + 2 * place + 1, words, mask=blocks < n_blocks)
        n_others += tl.sum(other, axis=0)
        n_empty += tl.sum(empty, axis=0)
    tl.store(listed, count)
    tl.store(listed + 1, run)


@dataclass(frozen=True)
class MaskBlocks:
    """`tatten.ops.masks.mask_blocks` of masks that are laid out as the one it was planned for."""

    rows: int
    n_blocks: int
    find_bits: Launch
    make_list: Launch

    def __call__(self, attn_mask: Tensor, kv_lens: Tensor | None = None) -> Tensor:
        mask = attn_mask.view(torch.uint8) if attn_mask.dtype == torch.bool else attn_mask
        bits = torch.empty((self.rows, self.n_blocks, 2), dtype=torch.int64, device=mask.device)
        listed = torch.empty((self.rows, self.n_blocks + 1, 2), dtype=torch.int64, device=mask.device)
        self.find_bits(mask, mask if kv_lens is None else kv_lens, bits)
        self.make_list(bits, listed)
        return listed


def plan_mask_blocks(
    attn_mask: Tensor,
    batch: int,
    kv_batch: int,
    q_len: int,
    kv_len: int | None = None,
    kv_lens: Tensor | None = None,
    window: int | None = None,
) -> MaskBlocks:
    """With `kv_lens` and `window`, of what they leave of the mask. `kv_len` is for one that broadcasts over keys."""
    mask = squeeze_broadcast(attn_mask)
    kv_len = mask.shape[3] if kv_len is None else kv_len
    mask = mask.expand(*mask.shape[:3], kv_len)
    rows = kv_batch if kv_lens is not None else mask_rows(attn_mask, kv_batch)
    n_blocks = ceil_div(kv_len, BLOCK_KEYS)
    seqs_of_row = batch // kv_batch if mask.shape[0] == batch else 1
    # The same number of keys for a program: one row of the mask after the other would wait for each.
    rows_at_once, at_once = (8, 4) if seqs_of_row * mask.shape[1] * mask.shape[2] > 4 else (1, 16)
    find_bits = Launch(
        _bits_kernel,
        (rows, ceil_div(n_blocks, at_once)),
        0 if mask.shape[0] == 1 else mask.stride(0),
        *mask.stride()[1:],
        seqs_of_row,
        mask.shape[1],
        mask.shape[2],
        q_len,
        kv_len,
        window or 0,
        n_blocks,
        ADDITIVE=mask.dtype != torch.bool,
        HAS_LENS=kv_lens is not None,
        WINDOW=window is not None,
        BLOCK=BLOCK_KEYS,
        BLOCKS=at_once,
        ROWS=rows_at_once,
    )
    make_list = Launch(_list_kernel, (rows,), n_blocks, BLOCKS=64 if n_blocks <= 64 else 1024)
    return MaskBlocks(rows, n_blocks, find_bits, make_list)
