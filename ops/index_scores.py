"""The public function that scores the keys of an indexer, in eager mode and in `torch.compile`."""

from __future__ import annotations

import torch
from torch import Tensor

import tatten.ops.library  # noqa: F401  (defines torch.ops.tatten)
from tatten.ops.argument_names import names_arguments
from tatten.ops.validation import check_tensors


@names_arguments
def index_scores(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    scale: float = 1.0,
    attn_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
) -> Tensor:
    """Score all keys of an indexer for a few queries per sequence, in one pass over the keys.

    Sparse attention picks the keys with the highest scores, as DeepSeek-V3.2 (arXiv 2512.02556) does:

        scores[b, l, s] = sum over heads h of weights[b, l, h] * relu(scale * query[b, l, h] @ key[b, s])

    Products and sums are in float32. The order of a sum is not the order in which a program without this op adds, so
    two keys whose scores are equal up to rounding may change places.

    Args:
        query: `[batch, q_length, index_heads, dim]`, float16, bfloat16, float32 or float64, any strides.
        key: `[batch, kv_length, dim]`, in `query`'s dtype, int8 or float8_e4m3fn, any strides. All heads share a key.
        weights: `[batch, q_length, index_heads]`, float16, bfloat16, float32 or `query`'s dtype, any strides. They may
            be negative.
        scale: factor of the products.
        attn_mask: `[1 or batch, 1 or q_length, kv_length]`, any strides: bool, where False makes a score -inf, or a
            bias in the dtypes of `weights`, which is added to the sum. A key that a bool mask excludes for all queries
            of a sequence may hold anything, NaN included.
        key_scale: `[batch, kv_length]` or `[batch, kv_length, 1]`, float32 or `query`'s dtype, any strides, with keys
            in 8 bits only: key `s` represents `key[b, s] * key_scale[b, s]`. Default: 1.

    Returns:
        `[batch, q_length, kv_length]`, contiguous, in float32 (float64 for float64 queries).

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        NotImplementedError: gradients are required.

    Examples:
        >>> import torch, tatten
        >>> query, weights = torch.randn(2, 1, 16, 64), torch.randn(2, 1, 16)  # one new token, 16 index heads
        >>> key = torch.randn(2, 4096, 64)  # a static cache of index keys, partly filled
        >>> mask = torch.arange(4096) < torch.tensor([1000, 3000])[:, None, None]
        >>> scores = tatten.index_scores(query, key, weights, scale=64**-0.5, attn_mask=mask)
        >>> scores.topk(512).indices.shape
        torch.Size([2, 1, 512])
    """
    check_tensors(query=query, key=key, weights=weights)
    scores: Tensor = torch.ops.tatten.index_scores.default(
        query, key, weights, scale=scale, attn_mask=attn_mask, key_scale=key_scale
    )
    return scores
