"""The CUDA implementations: checks, the device to launch on, and who computes what."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.ops.providers import cudnn_attention, fa3_attention, fastest, flash_attention, why_not
from tatten.ops.reference import bifurcated_attention_reference, decode_attention_reference
from tatten.ops.states import merge
from tatten.ops.validate import (
    check_bifurcated_attention,
    check_cuda_head_dims,
    check_decode_attention,
    check_devices,
    check_provider,
    check_spans,
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
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    provider: str = "auto",
) -> tuple[Tensor, Tensor]:
    check_devices(query, key=key, value=value, attn_mask=attn_mask, kv_lens=kv_lens, spans=spans, sinks=sinks)
    check_decode_attention(query, key, value, attn_mask, kv_lens, window=window, softcap=softcap, sinks=sinks)
    check_cuda_head_dims(query, value)
    check_provider(provider, query.device)
    if spans is not None:
        check_spans(spans, query.shape[0], key.shape[2], query.device)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    plain = all(x is None for x in (attn_mask, kv_lens, window, softcap, sinks))
    if provider == "auto" and query.dtype == torch.float64:  # for checking models, not for speed: no kernel of its own
        return decode_attention_reference(
            query, key, value, attn_mask, kv_lens, scale, window=window, softcap=softcap, sinks=sinks
        )
    if provider == "auto":
        provider = fastest(query, key, value) if plain else "triton"
    reason = why_not(provider, query, key, value, plain)
    if reason is not None:
        raise NotImplementedError(f"`provider` {provider!r} can't compute this: {reason}")
    if provider == "cudnn":
        return cudnn_attention(query, key, value, scale)
    if provider == "flash":
        return flash_attention(query, key, value, scale)
    if provider == "fa3":
        return fa3_attention(query, key, value, scale)

    from tatten.ops.lean import lean_attention

    if kv_lens is not None or window is not None or attn_mask is None:
        spans = None  # the others change what the mask leaves
    with torch.cuda.device(query.device):
        return lean_attention(
            query, key, value, attn_mask, kv_lens, scale, spans, window=window, softcap=softcap, sinks=sinks
        )


def bifurcated_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    spans: Sequence[Tensor | None],
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    for name, tensors in (("keys", keys), ("values", values), ("attn_masks", attn_masks), ("spans", spans)):
        check_devices(query, **{f"{name}[{i}]": x for i, x in enumerate(tensors)})
    check_bifurcated_attention(query, keys, values, attn_masks, spans)
    check_cuda_head_dims(query, values[0])
    if query.dtype == torch.float64:
        out, lse = bifurcated_attention_reference(query, keys, values, attn_masks, scale)
        return out.contiguous(), lse.contiguous()

    from tatten.ops.lean_segments import lean_segments

    scale = query.shape[3] ** -0.5 if scale is None else scale
    with torch.cuda.device(query.device):
        return lean_segments(query, keys, values, attn_masks, spans, scale)


def mask_blocks(attn_mask: Tensor, batch: int, kv_batch: int, q_len: int) -> Tensor:
    from tatten.ops.triton_mask import mask_blocks_triton

    with torch.cuda.device(attn_mask.device):
        return mask_blocks_triton(attn_mask, batch, kv_batch, q_len)


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    check_stack(out, lse)
    if out.dtype == torch.float64 or out.numel() == 0:
        return merge(out, lse)
    from tatten.ops.triton_merge import merge_states_triton

    with torch.cuda.device(out.device):
        return merge_states_triton(out, lse)
