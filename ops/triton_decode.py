"""Split-KV decode attention in Triton: the portable CUDA path, for any mask and any strides.

Program (b * kv_heads + h, split, tile) attends with one tile of packed query rows to key blocks `split`,
`split + n_splits`, ... of kv head h: dealing the blocks out in turn keeps the splits even when a mask leaves only one
end of a static cache over. A block that the mask excludes for all rows costs its mask and nothing else. Lengths stay on
the device. FlashDecoding (Dao et al. 2023) with a merge in a second kernel.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tatten.ops.packing import squeeze_broadcast
from tatten.ops.states import accumulator_dtype
from tatten.ops.triton_merge import merge_states_triton

NO_MASK, BOOL_MASK, ADDITIVE_MASK = 0, 1, 2

# Enough programs in flight to cover memory latency without pipelining, which the branch on the mask prevents (H200).
PROGRAMS_PER_SM = 4


@triton.jit(do_not_specialize=["kv_len", "n_splits"])
def _decode_kernel(
    query,
    key,
    value,
    mask,
    kv_lens,
    out,
    lse,
    query_b,
    query_h,
    query_l,
    query_d,
    key_b,
    key_h,
    key_s,
    key_d,
    value_b,
    value_h,
    value_s,
    value_d,
    mask_b,
    mask_h,
    mask_l,
    mask_s,
    scale,
    kv_len,
    n_splits,
    batch,
    kv_heads,
    group,
    q_len,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
    MASK_PER_ROW: tl.constexpr,
    HAS_LENS: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    pair = tl.program_id(0)
    split = tl.program_id(1)
    b = (pair // kv_heads).to(tl.int64)
    kv_head = (pair % kv_heads).to(tl.int64)

    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < group * q_len
    heads = kv_head * group + rows // q_len
    positions = (rows % q_len).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_DV)
    if WIDE:  # keys stored transposed have kv_length as the stride of head_dim
        dims = dims.to(tl.int64)
        value_dims = value_dims.to(tl.int64)

    q = tl.load(
        query + b * query_b + (heads * query_h + positions * query_l)[:, None] + (dims * query_d)[None, :],
        mask=row_ok[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)

    length = kv_len
    if HAS_LENS:
        length = tl.minimum(tl.maximum(tl.load(kv_lens + b), 0), kv_len).to(tl.int32)

    key += b * key_b + kv_head * key_h
    value += b * value_b + kv_head * value_h
    if MASK:
        if MASK_PER_ROW:
            mask += b * mask_b + (heads * mask_h + positions * mask_l)[:, None]
        else:
            mask += b * mask_b

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    keys = (split * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    for _ in range(split * BLOCK_N, length, n_splits * BLOCK_N):
        within = keys < length
        if MASK_PER_ROW:
            bias = tl.load(mask + (keys * mask_s)[None, :], mask=row_ok[:, None] & within[None, :], other=0)
            valid = (bias != 0 if MASK == 1 else bias != float("-inf")) & row_ok[:, None] & within[None, :]
            used = tl.max(valid.to(tl.int32), axis=0) > 0
        elif MASK:
            bias = tl.load(mask + keys * mask_s, mask=within, other=0)
            used = (bias != 0 if MASK == 1 else bias != float("-inf")) & within
            valid = used[None, :]
            bias = bias[None, :]
        else:
            used = within
            valid = used[None, :]

        # Loads of K and V are masked by `used`, so what is excluded is not read even inside a block, and may be NaN.
        if tl.max(used.to(tl.int32), axis=0) > 0:
            k = tl.load(
                key + (keys * key_s)[None, :] + (dims * key_d)[:, None],
                mask=used[None, :] & (dims < HEAD_DIM)[:, None],
                other=0.0,
            )
            v = tl.load(
                value + (keys * value_s)[:, None] + (value_dims * value_d)[None, :],
                mask=used[:, None] & (value_dims < VALUE_DIM)[None, :],
                other=0.0,
            )
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(q, k, input_precision="ieee") * scale
            if MASK == 2:
                scores += bias.to(tl.float32)
            scores = tl.where(valid, scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, axis=1))
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            # Subtract before going to base 2: a bias of finfo.min times log2(e) would overflow to -inf.
            decay = tl.exp2((highest - base) * LOG2E)
            weights = tl.exp2((scores - base[:, None]) * LOG2E)
            total = total * decay + tl.sum(weights, axis=1)
            acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = new_highest
        keys += n_splits * BLOCK_N

    filled = total != 0  # true for NaN, which must come out
    acc = acc / tl.where(filled, total, 1.0)[:, None]
    log_sum = tl.where(filled, highest + tl.log(tl.where(filled, total, 1.0)), float("-inf"))
    states = ((split.to(tl.int64) * batch + b) * kv_heads * group + heads) * q_len + positions
    tl.store(lse + states, log_sum, mask=row_ok)
    tl.store(
        out + states[:, None] * VALUE_DIM + value_dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=row_ok[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


# bf16 dots are garbage in the interpreter (Triton 3.6 to 3.9).
INTERPRETED = not isinstance(_decode_kernel, triton.JITFunction)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def tile_sizes(rows: int, dim: int, element_size: int) -> tuple[int, int, int]:
    """`(BLOCK_M, BLOCK_N, num_warps)` for packed rows and a padded head_dim: as large as sm_90's registers hold."""
    fp32 = element_size == 4
    block_m = min(max(16, triton.next_power_of_2(rows)), 64, max(16, (2048 if fp32 else 16384) // dim))
    block_n = 32 if fp32 or dim > 128 else 64
    num_warps = 8 if fp32 or dim > 256 or block_m * dim > 8192 else 4
    return block_m, block_n, num_warps


def decode_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    kv_lens: Tensor | None,
    scale: float,
    *,
    n_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel on inputs that were checked. `n_splits` is chosen from the shape unless given."""
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len, value_dim = key.shape[1], key.shape[2], value.shape[3]
    group = q_heads // kv_heads

    block_d, block_dv = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    block_m, block_n, num_warps = tile_sizes(group * q_len, max(block_d, block_dv), query.element_size())
    tiles = triton.cdiv(group * q_len, block_m)
    if n_splits is None:
        wanted = triton.cdiv(PROGRAMS_PER_SM * _multiprocessors(query.device), batch * kv_heads * tiles)
        n_splits = max(1, min(wanted, kv_len // (2 * block_n)))

    mask_kind, per_row, mask = NO_MASK, False, query
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if attn_mask is not None:
        mask_kind = BOOL_MASK if attn_mask.dtype == torch.bool else ADDITIVE_MASK
        mask = squeeze_broadcast(attn_mask)
        per_row = mask.shape[1] != 1 or mask.shape[2] != 1
        mask = mask.view(torch.uint8) if mask_kind == BOOL_MASK else mask
        mask_strides = mask.expand(batch, q_heads, q_len, kv_len).stride()

    partial_dtype = query.dtype if n_splits == 1 else torch.float32
    out = query.new_empty((n_splits, batch, q_heads, q_len, value_dim), dtype=partial_dtype)
    lse = query.new_empty((n_splits, batch, q_heads, q_len), dtype=accumulator_dtype(query.dtype))
    _decode_kernel[(batch * kv_heads, n_splits, tiles)](
        query,
        key,
        value,
        mask,
        query if kv_lens is None else kv_lens,
        out,
        lse,
        *query.stride(),
        *key.stride(),
        *value.stride(),
        *mask_strides,
        scale,
        kv_len,
        n_splits,
        batch,
        kv_heads,
        group,
        q_len,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        MASK=mask_kind,
        MASK_PER_ROW=per_row,
        HAS_LENS=kv_lens is not None,
        WIDE=max(x.stride(3) * x.shape[3] for x in (query, key, value)) >= 1 << 31,
        UPCAST=INTERPRETED,
        num_warps=num_warps,
        num_stages=2,
    )
    if n_splits == 1:
        return out[0], lse[0]
    return merge_states_triton(out, lse, out_dtype=query.dtype, partials=True)
