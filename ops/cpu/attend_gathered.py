"""Attention to picked keys as a graph, for `tatten.ops.decompositions`. It copies the picked keys of each query."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.layout import squeeze_broadcast
from tatten.ops.picks import key_indices
from tatten.ops.row_groups import rows_of
from tatten.ops.states import NEG_INF, State, accumulator_dtype


def attend_gathered(call: AttentionCall) -> State:
    """Return the state over the picked keys of all segments, in the dtype of sums, without sinks.

    A segment without picks gives all of its keys. Lengths are clamped, and `rest_bias` is ignored.
    """
    query = call.query if call.query_rope is None else torch.cat((call.query, call.query_rope), dim=3)
    query = query.to(accumulator_dtype(call.query.dtype))
    gathered = [_gather(call, query, x) for x in call.segments if x.key.shape[2] != 0]
    row_max = query.new_full((*query.shape[:3], 1), NEG_INF)
    for scores, _ in gathered:
        row_max = torch.maximum(row_max, scores.amax(dim=3, keepdim=True)) if scores.shape[3] else row_max
    base = torch.where(row_max == NEG_INF, 0.0, row_max)
    row_sum, out = torch.zeros_like(row_max), query.new_zeros((*query.shape[:3], call.segments[0].value.shape[3]))
    for scores, value in gathered:
        p = torch.exp(scores - base)
        row_sum = row_sum + p.sum(dim=3, keepdim=True)
        out = out + _by_heads(_by_queries(p, value.shape[1]) @ value)
    return out / torch.where(row_sum == 0, 1.0, row_sum), (row_max + torch.log(row_sum)).squeeze(3)


def _gather(call: AttentionCall, query: Tensor, stored: KeyValue) -> tuple[Tensor, Tensor]:
    """Return scores `[batch, q_heads, q_len, n]` and the values, `[batch, kv_heads, q_len or 1, n, d]`, of n keys."""
    batch, (kv_batch, kv_heads, kv_len, _), device = query.shape[0], stored.key.shape, query.device
    rows = rows_of(query, stored)
    rows = torch.arange(batch, device=device) // (batch // kv_batch) if rows is None else rows
    indices = torch.arange(kv_len, device=device).expand(batch, 1, 1, kv_len)
    if stored.indices is not None:
        indices = key_indices(stored.indices, kv_len, call.index_block)
    lens = kv_len if stored.kv_lens is None else stored.kv_lens[:, None, None, None]
    live = (indices >= 0) & (indices < kv_len) & (indices < lens)
    keys = torch.where(live, indices, 0)
    live, bias = _masked(query, stored, rows, keys, live)
    used = live.unflatten(1, (kv_heads, -1)).any(dim=2) if live.shape[1] > kv_heads else live
    used = (used if keys.shape[2] == used.shape[2] else used.any(dim=2, keepdim=True)).unsqueeze(4)

    def gather(x: Tensor, scale: Tensor | None = None) -> Tensor:
        heads = torch.arange(x.shape[1], device=device)[:, None, None]
        copy = x[rows[:, None, None, None], heads, keys].to(query.dtype)
        if scale is not None:
            factors = scale[heads] if scale.dim() == 1 else scale[rows[:, None, None, None], heads, keys]
            copy = copy * factors.unsqueeze(-1).to(query.dtype)
        return torch.where(used, copy, 0.0)

    key, value = gather(stored.key, stored.key_scale), gather(stored.value, stored.value_scale)
    if stored.rope is not None:
        key = torch.cat((key, gather(stored.rope)), dim=4)
    scores = _by_heads(_by_queries(query, kv_heads) @ key.transpose(3, 4)) * call.score_scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    live = live.repeat_interleave(query.shape[1] // live.shape[1], dim=1) if live.shape[1] > 1 else live
    return torch.where(live, scores if bias is None else scores + bias, NEG_INF), value


def _masked(query: Tensor, stored: KeyValue, rows: Tensor, keys: Tensor, live: Tensor) -> tuple[Tensor, Tensor | None]:
    """Narrow `live` to the keys that the mask leaves, and return the bias of an additive mask."""
    mask, (batch, q_heads, q_len, _) = stored.attn_mask, query.shape
    if mask is None:
        return live, None
    mask = squeeze_broadcast(mask.expand(*mask.shape[:-1], stored.key.shape[2]))
    if mask.shape[1] > 1 and keys.shape[1] > 1:
        keys, live = (x.repeat_interleave(q_heads // x.shape[1], dim=1) for x in (keys, live))
    elif mask.shape[1] == 1 and keys.shape[1] > 1:
        mask = mask.expand(-1, keys.shape[1], -1, -1)
    sequences = torch.arange(batch, device=keys.device) if mask.shape[0] == batch else rows
    first, heads, queries = (
        torch.arange(n, device=keys.device) if mask.shape[dim] > 1 else torch.zeros(1, dtype=torch.int64)
        for dim, n in ((0, batch), (1, mask.shape[1]), (2, q_len))
    )
    first = sequences if mask.shape[0] > 1 else first
    picked_mask: Tensor = mask[first[:, None, None, None], heads[:, None, None], queries[:, None], keys]
    if picked_mask.dtype == torch.bool:
        return live & picked_mask, None
    bias = picked_mask.to(query.dtype)
    live = live & (picked_mask != NEG_INF)
    if bias.shape[1] > 1:
        bias = bias.repeat_interleave(q_heads // bias.shape[1], dim=1)
    return live, bias


def _by_queries(x: Tensor, kv_heads: int) -> Tensor:
    """View `[batch, q_heads, q_len, n]` as `[batch, kv_heads, q_len, group, n]`."""
    grouped: Tensor = x.unflatten(1, (kv_heads, -1))
    return grouped.transpose(2, 3)


def _by_heads(x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(1, 2)
