"""Attention "tatten" on one device: the ops compute decode steps, and transformers computes all other calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tatten.integrations.transformers.config import eager_attention, made_for_sdpa
from tatten.integrations.transformers.masks import blocks_of
from tatten.ops.decode import decode_attention
from tatten.ops.states import NEG_INF
from tatten.ops.validation import FLOAT_DTYPES, widest_on_cuda
from tatten.passes.eligible import DEFAULT_MAX_Q_LEN


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention by `tatten.decode_attention`, by SDPA, or by the model's eager function.

    The op computes a decode step in eager mode with a mask, and any decode step with soft caps or sinks. SDPA computes
    other calls without soft caps, sinks or weights: without a mask it reads each key once, and in a compiled graph the
    backend rewrites it. The model's function computes the rest.

    Args:
        position_bias, softcap, s_aux: arguments of some models; `s_aux` are sinks.
        indices: the keys that each query attends to, `[batch, q_length, selected]`. The mask narrows them.
    """
    if indices is not None:
        attention_mask = narrow_to_indices(indices, attention_mask, key.shape[2])
    causal = query.shape[2] > 1 and attention_mask is None
    if causal and is_causal is None:
        # None may stand for no mask, as in Splinter, or for a causal mask, in models that are made for SDPA.
        is_causal = getattr(module, "is_causal", None)
        is_causal = made_for_sdpa(module.config) if is_causal is None else is_causal
    causal = causal and bool(is_causal)
    plain = softcap is None and s_aux is None
    # The op has no sinks that differ between queries (`sinks`).
    weights = bool(kwargs.get("output_attentions")) or kwargs.get("sinks") is not None
    if plain:
        masked = attention_mask is not None or position_bias is not None
        decodes = masked and not torch.compiler.is_compiling()
    else:
        decodes = True
    decodes = decodes and not causal and not weights and dropout == 0
    if decodes and fits(query, key, value, attention_mask, position_bias, s_aux):
        out = decode(query, key, value, attention_mask, position_bias, scaling, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    if plain and not weights:
        kwargs["position_bias"] = position_bias
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, causal, **kwargs
        )
        return result
    if causal:
        attention_mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        additive = torch.zeros_like(attention_mask, dtype=query.dtype)
        attention_mask = additive.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    kwargs |= {"dropout": dropout, "scaling": scaling, "position_bias": position_bias, "softcap": softcap}
    eager_result: tuple[Tensor, Tensor] = eager_attention(module)(module, query, key, value, attention_mask, **kwargs)
    return eager_result


def fits(query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None) -> bool:
    """Return True if `tatten.decode_attention` takes these tensors unchanged, and no gradient is wanted."""
    tensors = [query, key, value, *(x for x in others if x is not None)]
    device = query.device
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    if torch.is_autocast_enabled(device.type) or any(x.device != device for x in tensors):
        return False
    if not query.dtype == key.dtype == value.dtype or query.dtype not in FLOAT_DTYPES:
        return False
    if not query.shape[0] == key.shape[0] == value.shape[0] or query.shape[1] % key.shape[1]:
        return False
    widest = max(query.shape[3], value.shape[3])
    if device.type == "cuda":
        decodable = query.dtype != torch.float64 and widest <= widest_on_cuda(query.dtype)
    else:
        decodable = device.type == "cpu"
    return decodable and query.shape[2] <= DEFAULT_MAX_Q_LEN


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    position_bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Call `tatten.decode_attention`, with the position bias added to the mask."""
    blocks = None if attn_mask is None or torch.compiler.is_compiling() else blocks_of(attn_mask)
    if position_bias is not None:
        attn_mask, blocks = biased(attn_mask, position_bias), None
    if sinks is not None and sinks.dtype != query.dtype:
        sinks = sinks.float()
    return decode_attention(
        query, key, value, attn_mask=attn_mask, block_mask=blocks, scale=scale, softcap=softcap, sinks=sinks
    )


def narrow_to_indices(indices: Tensor, attn_mask: Tensor | None, kv_len: int) -> Tensor:
    """Narrow a mask, bool or additive, to the keys that `indices` selects for each query."""
    if attn_mask is None:
        raise ValueError(
            "`attention_mask` must come with `indices`, which may select keys that are not visible, got None"
        )
    selected = indices.new_zeros(*indices.shape[:2], kv_len, dtype=torch.bool).scatter(-1, indices.long(), True)
    selected = selected.unsqueeze(1)
    if attn_mask.dtype == torch.bool:
        return attn_mask & selected
    return attn_mask.masked_fill(~selected, torch.finfo(attn_mask.dtype).min)


def biased(attn_mask: Tensor | None, position_bias: Tensor) -> Tensor:
    """Add a bias to a mask, bool or additive."""
    if attn_mask is None:
        return position_bias
    if attn_mask.dtype == torch.bool:
        return torch.where(attn_mask, position_bias, NEG_INF)
    return position_bias + attn_mask
