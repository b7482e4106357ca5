"""The kernel that scores the keys of an indexer for a few queries of each sequence, and reads each key once for them.

A program has a block of queries of one sequence with all of their heads, and every `splits`-th tile of its keys, so
that programs share the work evenly also where a mask leaves only the first keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import upcast


@triton.jit
def _mask_of_tile(at_queries, keys, stride, key_ok, query_ok, BOOL: tl.constexpr):
    """Load the mask of a tile, `[keys, queries]`: a bias, or 0 and 1. Return it with the keys that are to be read."""
    ok = key_ok[:, None] & query_ok[None, :]
    mask = tl.load(at_queries[None, :] + keys.to(tl.int64)[:, None] * stride, mask=ok, other=0)
    if BOOL:
        key_ok = tl.max((mask != 0).to(tl.int32), axis=1) != 0
    return mask, key_ok


@triton.jit(do_not_specialize=["kv_len", "q_len", "q_blocks", "splits", "n_tiles"])
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
    (query_b, query_l, query_h, query_d), (key_b, key_s, key_d), (weights_b, weights_l, weights_h) = strides[:3]
    BOOL: tl.constexpr = False if mask is None else mask.dtype.element_ty == tl.uint8
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first_query = tl.program_id(0) % q_blocks * QUERIES
    split = tl.program_id(0) // q_blocks % splits
    sequence = (tl.program_id(0) // q_blocks // splits).to(tl.int64)

    column = tl.arange(0, QUERIES * BLOCK_H)  # a head of a query
    head, of_query = (column % BLOCK_H).to(tl.int64), (first_query + column // BLOCK_H).to(tl.int64)
    column_ok = (head < HEADS) & (of_query < q_len)
    dims = tl.arange(0, BLOCK_D)
    q = tl.load(
        query
        + sequence * query_b
        + (of_query * query_l + head * query_h)[:, None]
        + (dims.to(tl.int64) * query_d)[None, :],
        mask=column_ok[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    if FLOAT32_DOTS:
        q = q.to(tl.float32)
    q = tl.trans(q)
    weight = tl.load(
        weights + sequence * weights_b + of_query * weights_l + head * weights_h, mask=column_ok, other=0.0
    ).to(tl.float32)

    queries = first_query + tl.arange(0, QUERIES)
    query_ok = queries < q_len
    in_tile = tl.arange(0, BLOCK_N)
    in_keys = key + sequence * key_b + (in_tile.to(tl.int64) * key_s)[:, None] + (dims.to(tl.int64) * key_d)[None, :]
    tile_stride = tl.full([], BLOCK_N, tl.int64) * key_s
    out_rows = out + (sequence * q_len + queries) * kv_len
    if mask is not None:
        mask_b, mask_l, mask_s = strides[3]
        at_queries = mask + sequence * mask_b + queries.to(tl.int64) * mask_l
    keys = split * BLOCK_N + in_tile
    key_ok = keys < kv_len
    if mask is not None:
        shown, key_ok = _mask_of_tile(at_queries, keys, mask_s, key_ok, query_ok, BOOL)
    for i in tl.range(split, n_tiles, splits):
        keys = i * BLOCK_N + in_tile
        k = tl.load(in_keys + i * tile_stride, mask=key_ok[:, None] & (dims < DIM)[None, :], other=0.0)
        k = upcast(k, query.dtype.element_ty)
        if FLOAT32_DOTS:
            k = k.to(tl.float32)
        products = tl.dot(k, q, input_precision="ieee")
        if key_scale is not None:
            scale_b, scale_s = strides[4]
            factors = tl.load(key_scale + sequence * scale_b + keys.to(tl.int64) * scale_s, mask=key_ok, other=0.0).to(
                tl.float32
            )
            products *= (scale * factors)[:, None]
        else:
            products *= scale
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if HEADS < BLOCK_H:  # a key with inf has NaN in the columns without a head
            products = tl.where((head < HEADS)[None, :], products, 0.0)
        weighted = products * weight[None, :]
        scores = tl.sum(tl.reshape(weighted, (BLOCK_N, QUERIES, BLOCK_H)), axis=2)
        if mask is not None:
            if BOOL:
                scores = tl.where(shown != 0, scores, float("-inf"))
            else:
                scores += shown.to(tl.float32)
        at = out_rows[None, :] + keys.to(tl.int64)[:, None]
        tl.store(at, scores, mask=(keys < kv_len)[:, None] & query_ok[None, :])
        # The mask of the next tile is fetched one tile ahead, so that no key waits for it.
        keys = (i + splits) * BLOCK_N + in_tile
        key_ok = keys < kv_len
        if mask is not None:
            shown, key_ok = _mask_of_tile(at_queries, keys, mask_s, key_ok, query_ok, BOOL)
