"""The CUDA implementations: checks, the device to launch on, and who computes what."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.reference import decode_attention_reference
from tatten.ops.states import merge
from tatten.ops.validate import MAX_CUDA_HEAD_DIM, check_decode_attention, check_devices, check_stack


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    kv_lens: Tensor | None = None,
    scale: float | None = None,
    spans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_devices(query, key, value, attn_mask, kv_lens)
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


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    check_stack(out, lse)
    if out.dtype == torch.float64 or out.numel() == 0:
        return merge(out, lse)
    from tatten.ops.triton_merge import merge_states_triton

    with torch.cuda.device(out.device):
        return merge_states_triton(out, lse)
