"""`tatten::index_scores` in plain PyTorch: for all keys at once, and on a CPU for one tile of keys after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.index_scores_validation import check_index_scores
from tatten.ops.states import NEG_INF, accumulator_dtype

TILE_BYTES = 1 << 20  # of a tile's keys and products in float32, which stay in a core's cache


def index_scores(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    scale: float = 1.0,
    attn_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
) -> Tensor:
    """Compute the op for tiles of keys of one sequence. Keys that a bool mask excludes for all queries are not read."""
    check_index_scores(query, key, weights, attn_mask, key_scale)
    dtype = accumulator_dtype(query.dtype)
    batch, q_len, heads, dim = query.shape
    kv_len, tile = key.shape[1], max(16, TILE_BYTES // (dtype.itemsize * (q_len * heads + dim)))
    out = query.new_empty((batch, q_len, kv_len), dtype=dtype)
    wide = query.to(dtype), weights.to(dtype)
    for b in range(batch):
        for start in range(0, kv_len, tile):
            keys = slice(start, start + tile)
            mask = None if attn_mask is None else attn_mask[b if attn_mask.shape[0] > 1 else 0, None, :, keys]
            if mask is not None and mask.dtype == torch.bool and not mask.any():
                out[b, :, keys] = NEG_INF
                continue
            sequence = slice(b, b + 1)
            factors = None if key_scale is None else key_scale[sequence, keys]
            out[sequence, :, keys] = scores_of_keys(
                wide[0][sequence], key[sequence, keys], wide[1][sequence], scale, mask, factors
            )
    return out


def scores_of_keys(
    query: Tensor, key: Tensor, weights: Tensor, scale: float, attn_mask: Tensor | None, key_scale: Tensor | None
) -> Tensor:
    """Compute the op's formula for checked arguments, on any device, with the products of all heads in memory."""
    dtype = accumulator_dtype(query.dtype)
    batch, q_len, heads, dim = query.shape
    kv_len = key.shape[1]
    rows = query.to(dtype).reshape(batch, q_len * heads, dim)
    factors: float | Tensor = scale
    if key_scale is not None:
        factors = scale * key_scale.reshape(batch, 1, kv_len).to(dtype)
    products = torch.relu((rows @ key.to(dtype).transpose(1, 2)) * factors)
    by_query = products.reshape(batch * q_len, heads, kv_len)
    scores = (weights.to(dtype).reshape(batch * q_len, 1, heads) @ by_query).reshape(batch, q_len, kv_len)
    if attn_mask is None:
        return scores
    return torch.where(attn_mask, scores, NEG_INF) if attn_mask.dtype == torch.bool else scores + attn_mask.to(dtype)
