"""The kernel for calls with `indices`: attention to the picked keys alone, which it gathers.

A program has one query of one sequence, a block of the query heads that share a kv head, and a split of the picks. It
leaves a partial state for each head, or the output if there is one split. Each query has picks of its own, so queries
are not packed. Without indices, all keys of a segment are picks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.decode import INTERPRETED
from tatten.ops.cuda.kernels.online_softmax import (
    finish_state,
    fold_tile,
    halves_of,
    scores_of,
    store_lse,
)
from tatten.ops.cuda.kernels.tiles import load_scales, score_tile

_SIZES = ["n_picks", "kv_len", "q_len", "heads_per_kv", "kv_heads", "head_blocks", "seqs_per_kv", "tiles", "splits"]


@triton.jit
def keys_of_picks(picks, stride, at, n_picks, kv_len, length, INDEX_BLOCK: tl.constexpr):
    """Return the keys at positions `at` among all picked keys, and which of them exist and are below `length`.

    Without picks, `n_picks` is the number of keys, and the key at a position is the position.
    """
    ok = at < n_picks * INDEX_BLOCK
    keys = at
    if picks is not None:
        index = tl.load(picks + (at // INDEX_BLOCK).to(tl.int64) * stride, mask=ok, other=-1)
        ok = ok & (index >= 0) & (index < tl.cdiv(kv_len, INDEX_BLOCK))
        keys = tl.where(ok, index, 0).to(tl.int32) * INDEX_BLOCK + at % INDEX_BLOCK
    return keys, ok & (keys < length)


@triton.jit
def bias_of_keys(mask_base, at_heads, keys, stride, ok):
    """Return the bias of keys, and which of the keys that are `ok` the mask leaves.

    The bias of a bool mask is not used.
    """
    bias = tl.load(mask_base + at_heads + keys.to(tl.int64) * stride, mask=ok, other=0)
    if mask_base.dtype.element_ty == tl.uint8:
        return bias, ok & (bias != 0)
    else:
        bias = bias.to(tl.float32)
        return bias, ok & (bias != float("-inf"))


@triton.jit(do_not_specialize=[*_SIZES, "first_split", "all_splits"])
def _picked_kernel(
    query,
    key,
    value,
    indices,
    mask,
    kv_lens,
    rows,
    sinks,
    key_scale,
    value_scale,
    rope,
    out,
    lse,
    strides,
    scale,
    softcap,
    n_picks,
    kv_len,
    q_len,
    heads_per_kv,
    kv_heads,
    head_blocks,
    seqs_per_kv,
    tiles,
    splits,
    first_split,
    all_splits,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr,
    LATENT: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    MASK_HEADS: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    MAX_AND_SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    query_strides, key_strides, value_strides, rope_strides, mask_strides, index_strides = strides
    query_b, query_h, query_l, query_d = query_strides
    key_b, key_h, key_s, key_d = key_strides
    value_b, value_h, value_s, value_d = value_strides
    mask_r, mask_b, mask_h, mask_l, mask_s = mask_strides
    index_b, index_h, index_l, index_s = index_strides
    HEAD_DIM: tl.constexpr = DIMS[0]
    VALUE_DIM: tl.constexpr = DIMS[1]
    ROPE_DIM: tl.constexpr = DIMS[2]
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM) if HEAD_DIM > 16 else 16
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(VALUE_DIM) if VALUE_DIM > 16 else 16
    BLOCK_R: tl.constexpr = triton.next_power_of_2(ROPE_DIM) if ROPE_DIM > 16 else 16
    BLOCK_M: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    KEY_SCALE: tl.constexpr = SCALES[0]
    VALUE_SCALE: tl.constexpr = SCALES[1]
    MASK: tl.constexpr = 0 if mask is None else 1 if mask.dtype.element_ty == tl.uint8 else 2
    HALVES: tl.constexpr = query.dtype != value.dtype if LATENT else False
    UNSCALED: tl.constexpr = POSITIVE_SCALE and MASK != 2 and not SOFTCAP and not KEY_SCALE
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits % (kv_heads * head_blocks)
    row = tl.program_id(0) // splits // (kv_heads * head_blocks)
    kv_head = (block // head_blocks).to(tl.int64)
    sequence = (row // q_len).to(tl.int64)
    position = (row % q_len).to(tl.int64)
    kv_row = sequence // seqs_per_kv
    if rows is not None:
        kv_row = tl.load(rows + sequence).to(tl.int64)
    head_in_kv = block % head_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    head_ok = head_in_kv < heads_per_kv
    head = kv_head * heads_per_kv + head_in_kv

    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    if INT64_OFFSETS:  # keys stored transposed have kv_length as the stride of head_dim
        offset_dims, offset_value_dims = dims.to(tl.int64), value_dims.to(tl.int64)
    else:
        offset_dims, offset_value_dims = dims, value_dims
    q_base = query + sequence * query_b + position * query_l
    q = tl.load(
        q_base + (head * query_h)[:, None] + (offset_dims * query_d)[None, :],
        mask=head_ok[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    if HALVES:
        q, q_rest = halves_of(q, value.dtype.element_ty)
        if INTERPRETED:
            q_rest = q_rest.to(tl.float32)
    if INTERPRETED:
        q = q.to(tl.float32)
    if ROPE_DIM:
        rope_dims = tl.arange(0, BLOCK_R)
        rope_b, rope_h, rope_l, rope_q_d = rope_strides[0]
        q_rope = tl.load(
            rope[0]
            + sequence * rope_b
            + position * rope_l
            + (head * rope_h)[:, None]
            + (rope_dims * rope_q_d)[None, :],
            mask=head_ok[:, None] & (rope_dims < ROPE_DIM)[None, :],
            other=0.0,
        )
        if INTERPRETED:
            q_rope = q_rope.to(tl.float32)
        rope_base = rope[1] + kv_row * rope_strides[1][0]

    length = kv_len
    if kv_lens is not None:
        length = tl.minimum(tl.maximum(tl.load(kv_lens + sequence), 0), kv_len).to(tl.int32)
    key_base = key + kv_row * key_b + kv_head * key_h
    value_base = value + kv_row * value_b + kv_head * value_h
    if MASK:
        mask_base = mask + kv_row * mask_r + sequence * mask_b + position * mask_l
    picks = None
    if indices is not None:
        picks = indices + sequence * index_b + kv_head * index_h + position * index_l
    score_scale = scale
    if KEY_SCALE == 1:
        score_scale *= tl.load(key_scale + kv_head).to(tl.float32)
    if KEY_SCALE == 2:
        key_scale_base = key_scale + (kv_row * kv_heads + kv_head) * kv_len
    if VALUE_SCALE == 2:
        value_scale_base = value_scale + (kv_row * kv_heads + kv_head) * kv_len

    # An operand that this variant lacks is replaced by another one, which is not read.
    operands = (
        (q, q_rest if HALVES else q, q_rope if ROPE_DIM else q),
        (
            key_base,
            value_base,
            rope_base if ROPE_DIM else key_base,
            key_scale_base if KEY_SCALE == 2 else key_base,
        ),
        (
            key_s,
            key_d,
            value_s,
            value_d,
            rope_strides[1][2] if ROPE_DIM else key_s,
            rope_strides[1][3] if ROPE_DIM else key_d,
        ),
        (offset_dims, offset_value_dims, rope_dims if ROPE_DIM else offset_dims),
        (0, 0),
    )
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # noqa: SIM102 (known when this is compiled)
        if split + first_split == 0:
            row_max = tl.load(sinks + head, mask=head_ok, other=float("-inf")).to(tl.float32)
            row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
            if UNSCALED:
                row_max = row_max / scale
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    at = split * tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    keys, valid = keys_of_picks(picks, index_s, at, n_picks, kv_len, length, INDEX_BLOCK)
    if MASK and not MASK_HEADS:
        bias, valid = bias_of_keys(mask_base, 0, keys, mask_s, valid)
    for i in tl.range(0, tiles):
        ok = valid[None, :]
        if MASK and MASK_HEADS:
            ok = ok & head_ok[:, None]
            biases, ok = bias_of_keys(mask_base, (head * mask_h)[:, None], keys[None, :], mask_s, ok)
            # Keys that no head attends to may be NaN: they are not loaded.
            valid = valid & (tl.max(ok.to(tl.int32), axis=0) > 0)
        products, v = score_tile(
            operands,
            key,
            value,
            0,
            keys.to(tl.int64),
            valid,
            HEAD_DIM,
            VALUE_DIM,
            ROPE_DIM,
            LATENT,
            HALVES,
            KEY_SCALE,
            False,
            0,
            None,
            (0, 0, 0, 0, 1),
        )
        scores = scores_of(products, score_scale, softcap, UNSCALED, SOFTCAP)
        if MASK == 2:
            scores += biases if MASK_HEADS else bias[None, :]
        scores = tl.where(ok, scores, float("-inf"))
        v_scale = None
        if VALUE_SCALE == 2:
            v_scale = load_scales(value_scale_base, keys, valid)
        acc, row_max, row_sum = fold_tile(acc, row_max, row_sum, scores, v, scale, UNSCALED, v_scale)
        # The picks of the next tile are fetched one tile ahead, so that no row waits for its index and its mask.
        at = (split * tiles + i + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
        at = tl.where(i + 1 < tiles, at, n_picks * INDEX_BLOCK)
        keys, valid = keys_of_picks(picks, index_s, at, n_picks, kv_len, length, INDEX_BLOCK)
        if MASK and not MASK_HEADS:
            bias, valid = bias_of_keys(mask_base, 0, keys, mask_s, valid)
    if UNSCALED:
        row_max *= scale
    acc, log_sum = finish_state(acc, row_max, row_sum)
    if VALUE_SCALE == 1:
        acc = tl.where(row_sum[:, None] != 0, acc * tl.load(value_scale + kv_head).to(tl.float32), acc)
    state = (sequence * (kv_heads * heads_per_kv) + head) * q_len + position
    state = state * all_splits + first_split + split
    store_lse(lse, state, log_sum, row_max, row_sum, head_ok, MAX_AND_SUM)
    tl.store(
        out + state[:, None] * VALUE_DIM + value_dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=head_ok[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
