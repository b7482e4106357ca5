"""The block structure of a mask in Triton: which blocks of 64 keys hold any that counts, and which keys those are.

It is found once per step for all layers that share the mask. The inner loop of attention then walks a list, and reads
neither keys, values nor mask of what is left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.masks import EXCLUDING_BIAS

_EXCLUDING = tl.constexpr(EXCLUDING_BIAS)


@triton.jit(do_not_specialize=["seqs_per_kv", "heads", "q_rows", "q_len", "kv_len", "window", "n_blocks"])
def _bits_kernel(
    mask,
    kv_lens,
    bits,
    mask_b,
    mask_h,
    mask_l,
    mask_s,
    seqs_per_kv,
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
    every query attends to all of them, with no bias. Of an additive mask two more: the keys whose bias is above
    `EXCLUDING_BIAS` for any query, and which of the first 63 queries have such a key."""
    WORDS: tl.constexpr = 4 if ADDITIVE else 2
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    keys = (blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]).to(tl.int64)[None]
    length = kv_len
    if HAS_LENS:
        length = tl.minimum(tl.maximum(tl.load(kv_lens + row), 0), kv_len).to(tl.int32)
    n_rows = seqs_per_kv * heads * q_rows
    used = tl.zeros([BLOCKS, BLOCK], tl.int32)
    full = (keys < length).to(tl.int32).reshape([BLOCKS, BLOCK])
    if ADDITIVE:
        above_any = tl.zeros([BLOCKS, BLOCK], tl.int32)
        queries = tl.zeros([BLOCKS], tl.int64)
    for i in range(0, n_rows, ROWS):
        place = i + tl.arange(0, ROWS).to(tl.int64)[:, None, None]  # of 64 bits: strides of a mask may be large
        row_ok = place < n_rows
        position = place % q_rows
        start = (row * seqs_per_kv + place // (heads * q_rows)) * mask_b
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
            above = ~(bias.to(tl.float32) <= _EXCLUDING)  # so that NaN counts
            above_any |= tl.max((within & above).to(tl.int32), axis=0)
            # Of a mask that stands for several queries only keys in the windows of all of them.
            has_one = tl.max((plain & above & (place < 63)).to(tl.int64), axis=2)
            queries |= tl.sum(has_one << tl.reshape(tl.minimum(place, 62), [ROWS, 1]), axis=0)
            within = within & (bias != float("-inf"))
            plain = plain & (bias == 0)
        else:
            within = within & (bias != 0)
            plain = plain & (bias != 0)
        used |= tl.max(within.to(tl.int32), axis=0)
        full &= tl.min((plain | ~row_ok).to(tl.int32), axis=0)
    words = tl.sum(used.to(tl.int64) << tl.arange(0, BLOCK).to(tl.int64)[None, :], axis=1)
    at = bits + WORDS * (row * n_blocks + blocks)
    tl.store(at, words, mask=blocks < n_blocks)
    tl.store(at + 1, tl.min(full, axis=1).to(tl.int64), mask=blocks < n_blocks)
    if ADDITIVE:
        words = tl.sum(above_any.to(tl.int64) << tl.arange(0, BLOCK).to(tl.int64)[None, :], axis=1)
        tl.store(at + 2, words, mask=blocks < n_blocks)
        tl.store(at + 3, queries, mask=blocks < n_blocks)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=["n_blocks", "n_queries"])
def _list_kernel(bits, listed, n_blocks, n_queries, ADDITIVE: tl.constexpr, BLOCKS: tl.constexpr):
    """A row's list, as `tatten.ops.masks.mask_blocks` describes it for the GPU."""
    WORDS: tl.constexpr = 4 if ADDITIVE else 2
    row = tl.program_id(0).to(tl.int64)
    bits += WORDS * row * n_blocks
    listed += row * (n_blocks + 1) * 2
    if ADDITIVE:  # only if each query has a key above it may those at `EXCLUDING_BIAS` be left out
        queries = tl.zeros([BLOCKS], tl.int64)
        for start in range(0, n_blocks, BLOCKS):
            blocks = start + tl.arange(0, BLOCKS)
            queries |= tl.load(bits + WORDS * blocks + 3, mask=blocks < n_blocks, other=0)
        each = (tl.full([], 1, tl.int64) << tl.minimum(n_queries, 63)) - 1
        leave_out = (n_queries < 64) & (tl.reduce(queries, 0, _either) == each)
        words_at = bits + tl.where(leave_out, 2, 0)
    else:
        words_at = bits
    count, run, end = 0, 0, -1
    broken = -1  # the last block so far that is not full
    for start in range(0, n_blocks, BLOCKS):
        blocks = start + tl.arange(0, BLOCKS)
        words = tl.load(words_at + WORDS * blocks, mask=blocks < n_blocks, other=0)
        full = tl.load(bits + WORDS * blocks + 1, mask=blocks < n_blocks, other=0)
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
        words = tl.load(words_at + WORDS * blocks, mask=blocks < n_blocks, other=0)
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
