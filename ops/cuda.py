"""The CUDA implementations: checks, the device to launch on, and who computes what."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.ops.packing import fold_mask, fold_sequences, pack_heads, unfold_sequences
from tatten.ops.reference import bifurcated_attention_reference, decode_attention_reference
from tatten.ops.states import merge
from tatten.ops.validate import (
    MAX_CUDA_HEAD_DIM,
    check_bifurcated_attention,
    check_decode_attention,
    check_devices,
    check_stack,
)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    kv_lens: Tensor | None = None,
    scale: float | None = None,
    spans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_devices(query, key=key, value=value, attn_mask=attn_mask, kv_lens=kv_lens)
    check_decode_attention(query, key, value, attn_mask, kv_lens)
    widest = max(query.shape[3], value.shape[3])
    if widest > MAX_CUDA_HEAD_DIM and query.dtype != torch.float64:
        raise NotImplementedError(f"`key` and `value` must have head_dim <= {MAX_CUDA_HEAD_DIM} on CUDA, got {widest}")
    if spans is not None:
        raise NotImplementedError("`spans` must be None on CUDA, where the kernel finds them, got a tensor")
    if query.dtype == torch.float64:  # for checking models, not for speed: no kernel of its own
        return decode_attention_reference(query, key, value, attn_mask, kv_lens, scale)
    from tatten.ops.triton_decode import decode_attention_triton

    scale = query.shape[3] ** -0.5 if scale is None else scale
    with torch.cuda.device(query.device):
        return decode_attention_triton(query, key, value, attn_mask, kv_lens, scale)


def bifurcated_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    spans: Sequence[Tensor | None],
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    for name, tensors in (("keys", keys), ("values", values), ("attn_masks", attn_masks)):
        check_devices(query, **{f"{name}[{i}]": x for i, x in enumerate(tensors)})
    check_bifurcated_attention(query, keys, values, attn_masks, spans)
    widest = max(query.shape[3], values[0].shape[3])
    if widest > MAX_CUDA_HEAD_DIM and query.dtype != torch.float64:
        raise NotImplementedError(
            f"`keys` and `values` must have head_dim <= {MAX_CUDA_HEAD_DIM} on CUDA, got {widest}"
        )
    if any(span is not None for span in spans):
        raise NotImplementedError("`spans` must be None on CUDA, where the kernel finds them, got a tensor")
    if query.dtype == torch.float64:
        out, lse = bifurcated_attention_reference(query, keys, values, attn_masks, scale)
        return out.contiguous(), lse.contiguous()
    from tatten.ops.triton_decode import decode_attention_triton
    from tatten.ops.triton_merge import merge_parts_triton
    from tatten.ops.triton_pack import pack_queries_triton

    scale = query.shape[3] ** -0.5 if scale is None else scale
    outs, lses = [], []
    with torch.cuda.device(query.device):
        for key, value, mask in zip(keys, values, attn_masks, strict=True):
            folded = fold_sequences(query, key.shape[0])
            rows = folded.shape[1] // key.shape[1] * folded.shape[2]
            if mask is None and _flash_takes(key, value) and _flash_pays(rows, key):
                own = key.shape[0] == query.shape[0] and query.stride(3) == 1  # then packing is a view
                packed = pack_heads(query, key.shape[1]) if own else pack_queries_triton(query, *key.shape[:2])
                state = torch.ops.aten._scaled_dot_product_flash_attention.default(packed, key, value, scale=scale)
                out, lse = state[:2]
            else:
                mask = None if mask is None or key.shape[2] == 0 else fold_mask(mask, query, key.shape[0])
                out, lse = decode_attention_triton(folded, key, value, mask, None, scale)
            outs.append(out)
            lses.append(lse)
        if len(outs) > 1:
            return merge_parts_triton(outs, lses, (*query.shape[:3], values[0].shape[3]))
    # One segment: undo the packing, then the folding.
    out, lse = out.reshape(*folded.shape[:3], -1), lse.reshape(folded.shape[:3])
    return unfold_sequences(out, query.shape[0]).contiguous(), unfold_sequences(lse, query.shape[0]).contiguous()


def _flash_takes(key: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's FlashAttention-2, which splits the keys where heads are few, computes this state."""
    head_dim = key.shape[3]
    return (
        key.dtype in (torch.float16, torch.bfloat16)
        and key.shape[2] > 0
        and head_dim == value.shape[3] <= 256
        and head_dim % 8 == 0
        and key.stride(3) == value.stride(3) == 1
    )


def _flash_pays(rows: int, key: Tensor) -> bool:
    """Whether PyTorch's kernel is faster than ours for `rows` packed queries (H200, bfloat16, 32/8 and 32/32 heads).

    It streams a long KV of few heads better; ours has less to start, and wastes less of a tile on few queries.
    """
    pairs, kv_len = key.shape[0] * key.shape[1], key.shape[2]
    if rows <= 16:
        return kv_len > 512 and pairs < 512 and pairs * kv_len > 1 << 16
    return pairs * kv_len * rows > 1 << 21


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    check_stack(out, lse)
    if out.dtype == torch.float64 or out.numel() == 0:
        return merge(out, lse)
    from tatten.ops.triton_merge import merge_states_triton

    with torch.cuda.device(out.device):
        return merge_states_triton(out, lse)
