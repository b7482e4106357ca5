"""Views that every implementation shares: query heads packed into rows, and masks without their broadcast dims."""

from __future__ import annotations

from torch import Tensor


def pack_heads(query: Tensor, kv_heads: int) -> Tensor:
    """`[batch, q_heads, q_len, d]` to `[batch, kv_heads, group * q_len, d]`: the queries that read one kv head."""
    batch, q_heads, q_len, head_dim = query.shape
    if q_heads == kv_heads:
        return query
    return query.reshape(batch, kv_heads, q_heads // kv_heads * q_len, head_dim)


def squeeze_broadcast(mask: Tensor) -> Tensor:
    """The 4-D mask with every stride-0 dimension narrowed to size 1, so that no element is looked at twice."""
    mask = mask[(None,) * (4 - mask.dim())]
    for dim in range(3):
        if mask.shape[dim] != 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def pack_mask(mask: Tensor, q_heads: int, kv_heads: int, q_len: int) -> Tensor:
    """`[b, h, l, s]` with sizes or ones to what broadcasts over packed scores `[batch, kv_heads, group * q_len, s]`."""
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return mask
    group = q_heads // kv_heads
    heads = kv_heads if mask.shape[1] == q_heads else 1
    mask = mask.unflatten(1, (heads, -1))
    return mask.expand(-1, heads, group, q_len, -1).flatten(2, 3)
