"""The reference for every implementation: attention and its lse in float64, in readable code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tatten.ops.layout import over_keys
from tatten.ops.states import NEG_INF
from tatten.ops.variant import PLAIN, AttentionVariant


def decode_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    kv_lens: Tensor | None = None,
    scale: float | None = None,
    variant: AttentionVariant = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of `tatten::decode_attention`, both float64, on the inputs' device.

    A key that is excluded for all queries of its kv head is not used: its key and value may be NaN.
    """
    window, softcap, sinks, key_scale, value_scale = variant
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    query, key, value = query.double(), key.double(), value.double()
    if key_scale is not None:
        key = key * over_keys(key_scale.double())
    if value_scale is not None:
        value = value * over_keys(value_scale.double())

    valid = torch.ones(batch, q_heads, q_len, kv_len, dtype=torch.bool, device=query.device)
    places = torch.arange(kv_len, device=query.device)
    stop = places.new_full((batch,), kv_len) if kv_lens is None else kv_lens.clamp(0, kv_len)
    stop = stop[:, None, None, None]
    valid &= places < stop
    if window is not None:
        behind = stop - q_len + torch.arange(q_len, device=query.device)[:, None] - places
        valid &= (behind >= 0) & (behind < window)
    bias = torch.zeros((), dtype=torch.float64, device=query.device)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            valid &= attn_mask
        else:
            valid &= attn_mask != NEG_INF
            bias = attn_mask.double()

    group = q_heads // kv_heads
    used = valid.unflatten(1, (kv_heads, group)).flatten(2, 3).any(dim=2).unsqueeze(-1)  # [batch, kv_heads, kv_len, 1]
    key = torch.where(used, key, 0.0).repeat_interleave(group, dim=1)
    value = torch.where(used, value, 0.0).repeat_interleave(group, dim=1)

    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(valid, scores + bias, NEG_INF)
    if sinks is not None:  # a column without a value
        sink = sinks.double()[:, None, None].expand(batch, q_heads, q_len, 1)
        scores, value = torch.cat((scores, sink), dim=3), F.pad(value, (0, 0, 0, 1))
    row_max = scores.amax(dim=-1, keepdim=True) if scores.shape[3] else scores.new_full((*scores.shape[:3], 1), NEG_INF)
    weights = torch.exp(scores - torch.where(row_max == NEG_INF, 0.0, row_max))
    row_sum = weights.sum(dim=-1, keepdim=True)
    out = weights @ value / torch.where(row_sum == 0, 1.0, row_sum)
    return out, (row_max + torch.log(row_sum)).squeeze(-1)


def latent_attention_reference(
    query: Tensor,
    query_rope: Tensor | None,
    latent: Tensor,
    key_rope: Tensor | None,
    attn_mask: Tensor | None = None,
    kv_lens: Tensor | None = None,
    *,
    scale: float,
    variant: AttentionVariant = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of `tatten::latent_attention`, both float64: all heads' key begins with their value."""
    key = latent if key_rope is None else torch.cat((latent, key_rope), dim=3)
    query = query if query_rope is None else torch.cat((query, query_rope), dim=3)
    key, latent = (x.repeat_interleave(query.shape[0] // x.shape[0], dim=0) for x in (key, latent))
    return decode_attention_reference(query, key, latent, attn_mask, kv_lens, scale, variant)


def bifurcated_attention_reference(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None] | None = None,
    scale: float | None = None,
    rows: Sequence[Tensor | None] | None = None,
    variant: AttentionVariant = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of `tatten::bifurcated_attention`, both float64; each sequence has a copy of its segments."""
    batch, q_heads, q_len, _ = query.shape
    attn_masks = [None] * len(keys) if attn_masks is None else attn_masks
    rows = [None] * len(keys) if rows is None else rows
    whole: dict[str, list[Tensor]] = {"key": [], "value": [], "mask": []}
    for key, value, mask, own_rows in zip(keys, values, attn_masks, rows, strict=True):
        if own_rows is None:  # aligned blocks of sequences
            own_rows = torch.arange(batch, device=query.device) // (batch // key.shape[0])
        for name, x in (("key", key), ("value", value)):
            whole[name].append(x.index_select(0, own_rows).repeat_interleave(q_heads // x.shape[1], dim=1))
        bias = torch.zeros((), dtype=torch.float64, device=query.device)
        if mask is not None:
            bias = torch.where(mask, 0.0, NEG_INF).double() if mask.dtype == torch.bool else mask.double()
            if bias.dim() == 4 and bias.shape[0] not in (1, batch):
                bias = bias.index_select(0, own_rows)
        whole["mask"].append(bias.expand(batch, q_heads, q_len, key.shape[2]))
    key, value, mask = (torch.cat(parts, dim=-1 if name == "mask" else 2) for name, parts in whole.items())
    return decode_attention_reference(query, key, value, mask, scale=scale, variant=variant)
