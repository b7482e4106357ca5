"""Kernels that finish calls with `indices`: the combine of partial states, and states for which all keys count."""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import finish_state, fold_states


@triton.jit(do_not_specialize=["splits"])
def _combine_splits_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PARTIALS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine the partial states of one output state, `splits` in a row, for a block of columns."""
    column_blocks: tl.constexpr = (VALUE_DIM + BLOCK_DV - 1) // BLOCK_DV
    state = (tl.program_id(0) // column_blocks).to(tl.int64)
    dims = tl.program_id(0) % column_blocks * BLOCK_DV + tl.arange(0, BLOCK_DV)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for i in range(0, splits, PARTIALS):
        nth = (i + tl.arange(0, PARTIALS))[:, None]
        at = state * splits + nth
        acc, row_max, row_sum = fold_states(
            acc, row_max, row_sum, partial_out, partial_lse, at, nth < splits, dims, VALUE_DIM, True
        )
    acc, log_sum = finish_state(acc, row_max, row_sum)
    at = state + tl.zeros([1], tl.int64)
    tl.store(lse + at, log_sum)
    tl.store(
        out + at[:, None] * VALUE_DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=(dims < VALUE_DIM)[None, :]
    )


@triton.jit
def _weigh_rest(
    keys, ok, picks, index_s, mask_base, mask_s, n_picks, kv_len, rest, INDEX_BLOCK: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Return the bias of each key: that of the mask if it is picked, else `rest`; -inf if it is not `ok`."""
    named = tl.zeros(keys.shape, tl.int32)
    for i in range(0, n_picks, BLOCK_P):
        at = i + tl.arange(0, BLOCK_P)
        index = tl.load(picks + at.to(tl.int64) * index_s, mask=at < n_picks, other=-1)
        named = tl.maximum(named, tl.max((index[:, None] == (keys // INDEX_BLOCK)[None, :]).to(tl.int32), axis=0))
    bias = tl.zeros(keys.shape, tl.float32)
    if mask_base is not None:
        bias = tl.load(mask_base + keys.to(tl.int64) * mask_s, mask=ok & (named > 0), other=0).to(tl.float32)
    bias = tl.where(named > 0, bias, rest)
    return tl.where(ok, bias, float("-inf"))


@triton.jit(do_not_specialize=["n_picks", "kv_len", "q_heads", "heads_per_kv", "q_len", "seqs_per_kv"])
def _rest_kernel(
    value,
    indices,
    mask,
    kv_lens,
    value_scale,
    out,
    lse,
    strides,
    rest,
    n_picks,
    kv_len,
    q_heads,
    heads_per_kv,
    q_len,
    seqs_per_kv,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
):
    """Compute a state again if no pick has a bias above `rest / 2`: keys that are not picked then count, too.

    Scores are at most a rounding error beside a bias of this size, so the keys with the largest bias have equal
    weights. In a decode step no sequence in use has such a state, and the program returns after reading the lse.
    Otherwise it is slow, because it compares each key with each pick.
    """
    state = tl.program_id(0).to(tl.int64)
    if tl.load(lse + state) <= rest / 2:
        value_strides, mask_strides, index_strides = strides
        value_b, value_h, value_s, value_d = value_strides
        mask_r, mask_b, mask_h, mask_l, mask_s = mask_strides
        index_b, index_h, index_l, index_s = index_strides
        position = state % q_len
        head = state // q_len % q_heads
        sequence = state // q_len // q_heads
        kv_row, kv_head = sequence // seqs_per_kv, head // heads_per_kv
        picks = indices + sequence * index_b + kv_head * index_h + position * index_l
        mask_base = None
        if mask is not None:
            mask_base = mask + kv_row * mask_r + sequence * mask_b + head * mask_h + position * mask_l
        length = kv_len
        if kv_lens is not None:
            length = tl.minimum(tl.maximum(tl.load(kv_lens + sequence), 0), kv_len).to(tl.int32)
        most = float("-inf")
        for start in range(0, length, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            bias = _weigh_rest(
                keys, keys < length, picks, index_s, mask_base, mask_s, n_picks, kv_len, rest, INDEX_BLOCK, 64
            )
            most = tl.maximum(most, tl.max(bias, axis=0))
        dims = tl.arange(0, BLOCK_DV)
        acc = tl.zeros([BLOCK_DV], tl.float32)
        count = 0.0
        for start in range(0, length, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            bias = _weigh_rest(
                keys, keys < length, picks, index_s, mask_base, mask_s, n_picks, kv_len, rest, INDEX_BLOCK, 64
            )
            ok = (bias == most) & (bias != float("-inf"))
            at = kv_row * value_b + kv_head * value_h + (keys.to(tl.int64) * value_s)[:, None]
            at += (dims.to(tl.int64) * value_d)[None, :]
            v = tl.load(value + at, mask=ok[:, None] & (dims < VALUE_DIM)[None, :], other=0.0).to(tl.float32)
            if VALUE_SCALE == 2:
                per_key = value_scale + (kv_row * (q_heads // heads_per_kv) + kv_head) * kv_len
                v *= tl.load(per_key + keys, mask=ok, other=0.0).to(tl.float32)[:, None]
            acc += tl.sum(v, axis=0)
            count += tl.sum(ok.to(tl.float32), axis=0)
        if VALUE_SCALE == 1:
            acc *= tl.load(value_scale + kv_head).to(tl.float32)
        acc = acc / tl.where(count == 0.0, 1.0, count)
        tl.store(out + state * VALUE_DIM + dims, acc.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
        tl.store(lse + state, tl.where(count == 0.0, float("-inf"), most + tl.log(tl.where(count == 0.0, 1.0, count))))
