"""The kernel that scores the keys of an indexer for a few queries of each sequence, and reads each key once for them.

A program has a block of queries of one sequence with all of their heads, and every `splits`-th tile of its keys, so
that programs share the work evenly even if a mask leaves only the first keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import upcast

_TILES_AT_ONCE = tl.constexpr(32)  # bits of an int32


@triton.jit
def _load_masks(
    mask_base, stride_l, stride_s, first_tile, splits, kv_len, first_query, q_len, BLOCK_N: tl.constexpr, QUERIES
):
    """Load a bool mask for a program's next tiles: the keys that it leaves to any of the queries."""
    number = tl.arange(0, _TILES_AT_ONCE)
    keys = (first_tile + number * splits)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    at = mask_base + keys.to(tl.int64) * stride_s
    shown = tl.zeros([_TILES_AT_ONCE, BLOCK_N], tl.uint8)
    for i in tl.static_range(QUERIES):
        query_offset = tl.minimum(first_query + i, q_len - 1).to(tl.int64) * stride_l
        shown |= tl.load(at + query_offset, mask=keys < kv_len, other=0)
    return shown


@triton.jit
def _bits_of_tiles(shown):
    """Return a bit for each tile: 1 if it has a key for any of the queries."""
    has_key = tl.max(shown.to(tl.int32), axis=1) != 0
    return tl.sum(has_key.to(tl.int32) << tl.arange(0, _TILES_AT_ONCE), axis=0)


@triton.jit(do_not_specialize=["q_len", "q_blocks", "splits", "n_tiles"])
def _index_scores_kernel(
    query,  # [batch, q_len, HEADS, DIM]
    key,  # [batch, kv_len, DIM]
    weights,  # [batch, q_len, HEADS]
    mask,  # [batch, q_len, kv_len], in bytes if it is bool, or None
    key_scale,  # [batch, kv_len], or None
    out,  # [batch, q_len, kv_len], contiguous
    strides,
    scale,
    kv_len,
    q_len,
    q_blocks,
    splits,
    n_tiles,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERIES: tl.constexpr,
    PDL: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):
    query_b, query_l, query_h, query_d = strides[0]
    key_b, key_s, key_d = strides[1]
    weights_b, weights_l, weights_h = strides[2]
    BOOL: tl.constexpr = False if mask is None else mask.dtype.element_ty == tl.uint8
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first_query = tl.program_id(0) % q_blocks * QUERIES
    split = tl.program_id(0) // q_blocks % splits
    sequence = (tl.program_id(0) // q_blocks // splits).to(tl.int64)

    # Masks are loaded first and for many tiles at once, so that no key waits for the mask of its tile.
    if mask is not None:
        mask_b, mask_l, mask_s = strides[3]
        mask_base = mask + sequence * mask_b
    if BOOL:
        shown = _load_masks(mask_base, mask_l, mask_s, split, splits, kv_len, first_query, q_len, BLOCK_N, QUERIES)

    column = tl.arange(0, QUERIES * BLOCK_H)  # a head of a query
    head, position = (column % BLOCK_H).to(tl.int64), (first_query + column // BLOCK_H).to(tl.int64)
    column_ok = (head < HEADS) & (position < q_len)
    dims = tl.arange(0, BLOCK_D)
    query_at = query + sequence * query_b + position * query_l + head * query_h
    q = tl.load(
        query_at[:, None] + (dims.to(tl.int64) * query_d)[None, :],
        mask=column_ok[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    if FLOAT32_DOTS:
        q = q.to(tl.float32)
    q = tl.trans(q)
    weights_at = weights + sequence * weights_b + position * weights_l + head * weights_h
    weight = tl.load(weights_at, mask=column_ok, other=0.0).to(tl.float32)

    queries = first_query + tl.arange(0, QUERIES)
    in_tile = tl.arange(0, BLOCK_N)
    key_at = key + sequence * key_b + (in_tile.to(tl.int64) * key_s)[:, None] + (dims.to(tl.int64) * key_d)[None, :]
    tile_stride = tl.full([], BLOCK_N, tl.int64) * key_s
    out_at = out + (sequence * q_len + queries) * kv_len
    if key_scale is not None:
        scale_b, scale_s = strides[4]
        scale_base = key_scale + sequence * scale_b

    count = tl.cdiv(n_tiles - split, splits)
    at_once = count
    if BOOL:
        at_once = tl.minimum(count, _TILES_AT_ONCE)
    for first in tl.range(0, count, at_once):
        first_tile = split + first * splits
        if BOOL:
            bits = _bits_of_tiles(shown)
        for i in tl.range(0, tl.minimum(at_once, count - first)):
            tile = first_tile + i * splits
            keys = tile * BLOCK_N + in_tile
            key_ok = keys < kv_len
            ok = key_ok[:, None] & (queries < q_len)[None, :]
            if mask is not None:
                at = mask_base + (queries.to(tl.int64) * mask_l)[None, :] + (keys.to(tl.int64) * mask_s)[:, None]
                tile_mask = tl.load(at, mask=ok, other=0)
            if BOOL:
                key_ok = keys < tl.where((bits >> i) & 1 != 0, kv_len, 0)
            k = tl.load(key_at + tile * tile_stride, mask=key_ok[:, None] & (dims < DIM)[None, :], other=0.0)
            k = upcast(k, query.dtype.element_ty)
            if FLOAT32_DOTS:
                k = k.to(tl.float32)
            products = tl.dot(k, q, input_precision="ieee")
            if key_scale is not None:
                factors = tl.load(scale_base + keys.to(tl.int64) * scale_s, mask=key_ok, other=0.0).to(tl.float32)
                products *= (scale * factors)[:, None]
            else:
                products *= scale
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
            if HEADS < BLOCK_H:  # a key with inf makes NaN in the columns without a head
                products = tl.where((head < HEADS)[None, :], products, 0.0)
            by_query = tl.reshape(products * weight[None, :], (BLOCK_N, QUERIES, BLOCK_H))
            scores = tl.sum(by_query, axis=2)
            if mask is not None:
                if BOOL:
                    scores = tl.where(tile_mask != 0, scores, float("-inf"))
                else:
                    scores += tile_mask.to(tl.float32)
            tl.store(out_at[None, :] + keys.to(tl.int64)[:, None], scores, mask=ok)
        if BOOL:
            next_tile = first_tile + at_once * splits
            shown = _load_masks(
                mask_base, mask_l, mask_s, next_tile, splits, kv_len, first_query, q_len, BLOCK_N, QUERIES
            )
