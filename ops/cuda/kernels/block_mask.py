"""Kernels that find the block structure of a mask: its blocks of 64 keys that count, and their keys as bits.

They run once per step for all layers that share the mask. The inner loop of attention then walks a list of blocks, and
reads no keys, values or mask of other blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.masks import EXCLUDING_BIAS

_EXCLUDING = tl.constexpr(EXCLUDING_BIAS)


_SIZES = ["n_pages", "seqs_per_kv", "mask_heads", "mask_q_len", "q_len", "kv_len", "window", "n_blocks"]


@triton.jit(do_not_specialize=_SIZES)
def _bits_kernel(
    mask,
    kv_lens,
    block_table,
    bits,
    mask_strides,
    table_strides,
    n_pages,
    seqs_per_kv,
    mask_heads,
    mask_q_len,
    q_len,
    kv_len,
    window,
    n_blocks,
    ADDITIVE: tl.constexpr,
    HAS_LENS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Write two words for each of `BLOCKS_AT_ONCE` blocks of a kv_row.

    The words are the keys that any of its queries attends to, as bits, and 1 if every query attends to all of them,
    with no bias. An additive mask gives two more: the keys whose bias is above `EXCLUDING_BIAS` for any query, as bits,
    and the queries among the first 63 that have such a key.
    """
    mask_b, mask_h, mask_l, mask_s = mask_strides
    WORDS: tl.constexpr = 4 if ADDITIVE else 2
    kv_row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    keys = (blocks[:, None] * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)[None, :]).to(tl.int64)[None]
    length = kv_len
    if HAS_LENS:
        length = tl.minimum(tl.maximum(tl.load(kv_lens + kv_row), 0), kv_len).to(tl.int32)
    exists = keys < length
    if PAGE:  # a key without a page does not count, whatever its bias is
        table_b, table_s = table_strides
        entries = tl.load(block_table + kv_row * table_b + keys // PAGE * table_s, mask=exists, other=-1)
        exists = exists & (entries >= 0) & (entries < n_pages)
    n_q_rows = seqs_per_kv * mask_heads * mask_q_len
    used = tl.zeros([BLOCKS_AT_ONCE, BLOCK_KEYS], tl.int32)
    full = exists.to(tl.int32).reshape([BLOCKS_AT_ONCE, BLOCK_KEYS])
    if ADDITIVE:
        above_any = tl.zeros([BLOCKS_AT_ONCE, BLOCK_KEYS], tl.int32)
        queries = tl.zeros([BLOCKS_AT_ONCE], tl.int64)
    for i in range(0, n_q_rows, BLOCK_Q):
        q_row = i + tl.arange(0, BLOCK_Q).to(tl.int64)[:, None, None]  # 64 bits, as strides of a mask may be large
        q_ok = q_row < n_q_rows
        position = q_row % mask_q_len
        start = (kv_row * seqs_per_kv + q_row // (mask_heads * mask_q_len)) * mask_b
        start += q_row // mask_q_len % mask_heads * mask_h + position * mask_l
        within = q_ok & exists
        plain = within
        if WINDOW:
            # A mask with one query stands for all; their windows reach from the first one's to the last one's.
            first = length - q_len + position.to(tl.int32)
            last = tl.where(mask_q_len == q_len, first, length - 1)
            within = within & (keys <= last) & (keys > first - window)
            plain = plain & (keys <= first) & (keys > last - window)
        bias = tl.load(mask + start + keys * mask_s, mask=within, other=0)
        if ADDITIVE:
            above = ~(bias.to(tl.float32) <= _EXCLUDING)  # true for NaN too
            above_any |= tl.max((within & above).to(tl.int32), axis=0)
            # If the mask stands for several queries, only keys in the windows of all of them count here.
            has_key = tl.max((plain & above & (q_row < 63)).to(tl.int64), axis=2)
            queries |= tl.sum(has_key << tl.reshape(tl.minimum(q_row, 62), [BLOCK_Q, 1]), axis=0)
            within = within & (bias != float("-inf"))
            plain = plain & (bias == 0)
        else:
            within = within & (bias != 0)
            plain = plain & (bias != 0)
        used |= tl.max(within.to(tl.int32), axis=0)
        full &= tl.min((plain | ~q_ok).to(tl.int32), axis=0)
    words = tl.sum(used.to(tl.int64) << tl.arange(0, BLOCK_KEYS).to(tl.int64)[None, :], axis=1)
    at = bits + WORDS * (kv_row * n_blocks + blocks)
    tl.store(at, words, mask=blocks < n_blocks)
    tl.store(at + 1, tl.min(full, axis=1).to(tl.int64), mask=blocks < n_blocks)
    if ADDITIVE:
        words = tl.sum(above_any.to(tl.int64) << tl.arange(0, BLOCK_KEYS).to(tl.int64)[None, :], axis=1)
        tl.store(at + 2, words, mask=blocks < n_blocks)
        tl.store(at + 3, queries, mask=blocks < n_blocks)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=["n_blocks", "n_queries"])
def _list_kernel(
    bits,
    block_list,
    n_blocks,
    n_queries,
    ADDITIVE: tl.constexpr,
    EVERY_BLOCK: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
):
    """Write the block list of a kv_row, which `tatten.ops.masks.BlockList` describes."""
    WORDS: tl.constexpr = 4 if ADDITIVE else 2
    kv_row = tl.program_id(0).to(tl.int64)
    bits += WORDS * kv_row * n_blocks
    block_list += kv_row * (n_blocks + 1) * 2
    if ADDITIVE:  # keys at `EXCLUDING_BIAS` may be left out only if each query has one above it
        queries = tl.zeros([BLOCKS_AT_ONCE], tl.int64)
        for start in range(0, n_blocks, BLOCKS_AT_ONCE):
            blocks = start + tl.arange(0, BLOCKS_AT_ONCE)
            queries |= tl.load(bits + WORDS * blocks + 3, mask=blocks < n_blocks, other=0)
        all_queries = (tl.full([], 1, tl.int64) << tl.minimum(n_queries, 63)) - 1
        leave_out = (n_queries < 64) & (tl.reduce(queries, 0, _either) == all_queries)
        words_at = bits + tl.where(leave_out, 2, 0)
    else:
        words_at = bits
    count, run, end = 0, 0, -1
    last_not_full = -1  # the last block so far that is not full
    for start in range(0, 0 if EVERY_BLOCK else n_blocks, BLOCKS_AT_ONCE):
        blocks = start + tl.arange(0, BLOCKS_AT_ONCE)
        words = tl.load(words_at + WORDS * blocks, mask=blocks < n_blocks, other=0)
        full = tl.load(bits + WORDS * blocks + 1, mask=blocks < n_blocks, other=0)
        count += tl.sum((words != 0).to(tl.int32), axis=0)
        not_full_before = tl.maximum(tl.associative_scan(tl.where(full > 0, -1, blocks), 0, _larger), last_not_full)
        last_not_full = tl.max(not_full_before, axis=0)
        lengths = blocks - not_full_before  # of the run of full blocks that ends at each block
        longest = tl.max(lengths, axis=0)
        first_end = tl.min(tl.where(lengths == longest, blocks, n_blocks), axis=0)
        end = tl.where(longest > run, first_end, end)
        run = tl.maximum(longest, run)
    n_others, n_empty = run, count
    for start in range(0, n_blocks, BLOCKS_AT_ONCE):
        blocks = start + tl.arange(0, BLOCKS_AT_ONCE)
        words = tl.load(words_at + WORDS * blocks, mask=blocks < n_blocks, other=0)
        in_run = (blocks > end - run) & (blocks <= end)
        listed = (blocks < n_blocks) if EVERY_BLOCK else (words != 0)
        other = (listed & ~in_run).to(tl.int32)
        empty = (~listed & (blocks < n_blocks)).to(tl.int32)
        entry = tl.where(other > 0, n_others + tl.cumsum(other, axis=0), n_empty + tl.cumsum(empty, axis=0))
        entry = tl.where(in_run, blocks - (end - run), entry)
        tl.store(block_list + 2 * entry, blocks.to(tl.int64), mask=blocks < n_blocks)
        tl.store(block_list + 2 * entry + 1, words, mask=blocks < n_blocks)
        n_others += tl.sum(other, axis=0)
        n_empty += tl.sum(empty, axis=0)
    tl.store(block_list, n_blocks if EVERY_BLOCK else count)
    tl.store(block_list + 1, run)
