"""The levels kernel: attention of packed queries to several levels of a tree, one after the other.

A launch for one level leaves a float32 state for each query, which takes longer than a short level's keys. Here the
queries that share a row of the finest level stay in registers while they go through it and its ancestors, and leave one
state. An ancestor is read again for each row below it, mostly from the L2. So the kernel suits short levels and many
queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import finish_state, fold_tile, store_lse


@triton.jit(
    do_not_specialize=["work_tiles", "seqs_per_kv", "kv_heads", "heads_per_kv", "q_len", "q_blocks"],
)
def _levels_kernel(
    query,
    keys,
    values,
    out,
    lse,
    query_strides,
    key_strides,
    value_strides,
    kv_lens,
    rows_below,
    scale,
    seqs_per_kv,
    kv_heads,
    heads_per_kv,
    q_len,
    q_blocks,
    LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_AND_SUM: tl.constexpr,
    PDL: tl.constexpr,
    WAIT_LAST: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):
    """Compute one work tile: a block of the queries that read one kv head of a row of the finest level.

    `rows_below[i]` is the number of rows of the finest level that share a row of level i.
    """
    if PDL:
        if not WAIT_LAST:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    query_b, query_h, query_l, query_d = query_strides
    work_tile = tl.program_id(0)
    row = work_tile // (kv_heads * q_blocks)
    kv_head = (work_tile // q_blocks % kv_heads).to(tl.int64)
    q_row = work_tile % q_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ok = q_row < heads_per_kv * seqs_per_kv * q_len
    position = (q_row % q_len).to(tl.int64)
    sequence = row.to(tl.int64) * seqs_per_kv + q_row // q_len % seqs_per_kv
    head = kv_head * heads_per_kv + q_row // (q_len * seqs_per_kv)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q = tl.load(
        query + (sequence * query_b + head * query_h + position * query_l)[:, None] + (dims * query_d)[None, :],
        mask=q_ok[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    if FLOAT32_DOTS:
        q = q.to(tl.float32)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for level in tl.static_range(LEVELS):
        key_b, key_h, key_s, key_d = key_strides[level]
        value_b, value_h, value_s, value_d = value_strides[level]
        kv_row = (row // rows_below[level]).to(tl.int64)
        key, value = (
            keys[level] + kv_row * key_b + kv_head * key_h,
            values[level] + kv_row * value_b + kv_head * value_h,
        )
        for start in range(0, kv_lens[level], BLOCK_N):
            at = start + tl.arange(0, BLOCK_N)
            ok = at < kv_lens[level]
            at = at.to(tl.int64)
            k = tl.load(
                key + (at * key_s)[None, :] + (dims * key_d)[:, None],
                mask=ok[None, :] & (dims < HEAD_DIM)[:, None],
                other=0.0,
            ).to(q.dtype)
            v = tl.load(
                value + (at * value_s)[:, None] + (value_dims * value_d)[None, :],
                mask=ok[:, None] & (value_dims < VALUE_DIM)[None, :],
                other=0.0,
            ).to(q.dtype)
            scores = tl.dot(q, k, input_precision="ieee")
            scores = tl.where(ok[None, :], scores, float("-inf"))
            acc, row_max, row_sum = fold_tile(acc, row_max, row_sum, scores, v, scale, True)
    row_max *= scale
    acc, log_sum = finish_state(acc, row_max, row_sum)
    state = (sequence * (kv_heads * heads_per_kv) + head) * q_len + position
    store_lse(lse, state, log_sum, row_max, row_sum, q_ok, MAX_AND_SUM)
    tl.store(
        out + state[:, None] * VALUE_DIM + value_dims[None, :],
        acc,
        mask=q_ok[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
    if PDL and WAIT_LAST:
        # All programs wait: with `end_after_previous_launch`, ptxas takes 145 registers instead of 128.
        tl.extra.cuda.gdc_wait()
