"""Attention with its lse, and scores of an indexer, in float64: all implementations are compared to these."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.kernel_signatures import bifurcated_kernel, decode_kernel, latent_kernel
from tatten.ops.layout import over_keys
from tatten.ops.mixed_batch import MixedCall, as_decode, mixed_kernel, of_tokens
from tatten.ops.pages import gather_pages
from tatten.ops.picks import picked_mask
from tatten.ops.row_groups import rows_of
from tatten.ops.states import NEG_INF, State


def attention_reference(call: AttentionCall) -> State:
    """Return the state `(out, lse)` of any attention op, both in float64, on the device of the inputs.

    `provider`, `batch_invariant`, `out_dtype` and block masks are ignored. Each sequence gets a copy of the keys that
    it reads. If a key is excluded for all queries that read its kv head, the key and its value may be NaN: they are not
    used.
    """
    if call.segments[0].block_table is not None:
        call = gather_pages(call)
    batch, q_heads, q_len, _ = call.query.shape
    query = call.query.double()
    if call.query_rope is not None:
        query = torch.cat((query, call.query_rope.double()), dim=3)
    copies = zip(*(_copied(call, stored) for stored in call.segments), strict=True)
    key, value, valid, bias = (torch.cat(x, dim) for x, dim in zip(copies, (2, 2, 3, 3), strict=True))
    if call.window is not None:  # the last query is at the last key in use, the others just before it
        last = _lengths(call, call.segments[0]) if len(call.segments) == 1 else valid.shape[3]
        places, queries = (torch.arange(n, device=query.device) for n in (valid.shape[3], q_len))
        behind = last - q_len + queries[:, None] - places
        valid = valid & (behind >= 0) & (behind < call.window)
    by_segment = zip(valid.split([x.key.shape[2] for x in call.segments], dim=3), call.segments, strict=True)
    used = torch.cat([_used(x, stored.key.shape[1]) for x, stored in by_segment], dim=2)
    key, value = torch.where(used, key, 0.0), torch.where(used, value, 0.0)
    scores = query @ key.transpose(2, 3) * call.score_scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = torch.where(valid, scores + bias, NEG_INF)
    if call.sinks is not None:  # a column without a value
        sink = call.sinks.double()[:, None, None].expand(batch, q_heads, q_len, 1)
        scores, value = torch.cat((scores, sink), dim=3), F.pad(value, (0, 0, 0, 1))
    row_max = scores.amax(dim=-1, keepdim=True) if scores.shape[3] else scores.new_full((*scores.shape[:3], 1), NEG_INF)
    weights = torch.exp(scores - torch.where(row_max == NEG_INF, 0.0, row_max))
    row_sum = weights.sum(dim=-1, keepdim=True)
    out = weights @ value / torch.where(row_sum == 0, 1.0, row_sum)
    return out, (row_max + torch.log(row_sum)).squeeze(-1)


def _copied(call: AttentionCall, stored: KeyValue) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return key and value of each sequence and query head, the keys that mask and lengths allow, and the bias.

    The last two are `[batch, q_heads, q_len, kv_len]`.
    """
    batch, q_heads, q_len, _ = call.query.shape
    kv_batch, kv_heads, kv_len, _ = stored.key.shape
    key, value = stored.key.double(), stored.value.double()
    if stored.key_scale is not None:
        key = key * over_keys(stored.key_scale.double())
    if stored.value_scale is not None:
        value = value * over_keys(stored.value_scale.double())
    if stored.rope is not None:
        key = torch.cat((key, stored.rope.double()), dim=3)
    rows = rows_of(call.query, stored)
    if rows is None:  # aligned blocks of sequences
        rows = torch.arange(batch, device=key.device) // (batch // kv_batch)
    key, value = (x.index_select(0, rows).repeat_interleave(q_heads // kv_heads, dim=1) for x in (key, value))

    valid = torch.arange(kv_len, device=key.device) < _lengths(call, stored)
    bias, mask = torch.zeros((), dtype=torch.float64, device=key.device), stored.attn_mask
    if mask is not None:
        if mask.dim() == 4 and mask.shape[0] not in (1, batch):
            mask = mask.index_select(0, rows)
        valid = valid & (mask if mask.dtype == torch.bool else mask != NEG_INF)
        bias = bias if mask.dtype == torch.bool else mask.double()
    shape = batch, q_heads, q_len, kv_len
    valid, bias = valid.expand(shape), bias.expand(shape)
    if stored.indices is None:
        return key, value, valid, bias
    picked, rest = picked_mask(stored.indices, kv_len, call.index_block, q_heads), call.rest_bias
    if rest is None:
        return key, value, valid & picked, bias
    # The weight of the other keys is exactly 0 beside any key whose bias is far above `rest_bias`.
    alone = ~(valid & picked & (bias > rest / 2)).any(dim=3, keepdim=True)
    others = alone & (torch.arange(kv_len, device=key.device) < _lengths(call, stored))
    return key, value, torch.where(picked, valid, others), torch.where(picked, bias, rest)


def _used(valid: Tensor, kv_heads: int) -> Tensor:
    """Return the keys that at least one query of their kv head attends to: bool `[batch, q_heads, kv_len, 1]`."""
    used: Tensor = valid.unflatten(1, (kv_heads, -1)).any(dim=3).any(dim=2)
    return used.repeat_interleave(valid.shape[1] // kv_heads, dim=1).unsqueeze(-1)


def _lengths(call: AttentionCall, stored: KeyValue) -> Tensor:
    """Return the number of keys in use of each sequence, `[batch, 1, 1, 1]`, clamped to the keys that exist."""
    batch, kv_len = call.query.shape[0], stored.key.shape[2]
    lens = torch.full((batch,), kv_len, device=stored.key.device) if stored.kv_lens is None else stored.kv_lens
    return lens.clamp(0, kv_len)[:, None, None, None]


decode_attention_reference = decode_kernel(attention_reference)
bifurcated_attention_reference = bifurcated_kernel(attention_reference)
latent_attention_reference = latent_kernel(attention_reference)


def mixed_reference(call: MixedCall) -> State:
    """Return the state of a mixed batch in float64, on the device of the inputs: each token is a sequence."""
    tokens, padding = as_decode(call)
    return of_tokens(attention_reference(tokens), padding)


paged_attention_reference = mixed_kernel(mixed_reference)


def index_scores_reference(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    scale: float = 1.0,
    attn_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
) -> Tensor:
    """Return the scores of `tatten::index_scores` in float64, on the device of the inputs."""
    key = key.double()
    if key_scale is not None:
        key = key * key_scale.double().reshape(*key.shape[:2], 1)
    products = scale * torch.einsum("blhd,bsd->blhs", query.double(), key)
    scores = torch.einsum("blh,blhs->bls", weights.double(), products.relu())
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return torch.where(attn_mask, scores, NEG_INF)
    return scores + attn_mask.double()
