"""Views that all implementations share: query heads packed into q_rows, sequences folded into queries, and masks."""

from __future__ import annotations

from torch import Tensor

BATCH, HEADS, LENGTH, HEAD_DIM = range(4)  # the dims of queries, keys and values


def over_keys(scale: Tensor) -> Tensor:
    """View a scale of heads `[kv_heads]`, or of keys `[..., kv_heads, kv_len]`, so that it broadcasts over keys."""
    return scale[:, None, None] if scale.dim() == 1 else scale.unsqueeze(-1)


def pack_gqa(query: Tensor, kv_heads: int) -> Tensor:
    """Pack `[batch, q_heads, q_len, d]` to `[batch, kv_heads, group * q_len, d]`: the queries that read one kv head."""
    batch, q_heads, q_len, head_dim = query.shape
    if q_heads == kv_heads:
        return query
    return query.reshape(batch, kv_heads, q_heads // kv_heads * q_len, head_dim)


def squeeze_broadcast(mask: Tensor) -> Tensor:
    """Narrow every stride-0 dimension of a mask to size 1, so that no element is read twice. The result is 4-D."""
    mask = mask.expand(*(1,) * (4 - mask.dim()), *mask.shape)
    for dim in range(3):
        if mask.shape[dim] != 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def pack_mask(mask: Tensor, q_heads: int, kv_heads: int, q_len: int) -> Tensor:
    """Reshape a mask `[b, h, l, s]` so that it broadcasts over packed scores `[batch, kv_heads, group * q_len, s]`."""
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return mask
    group = q_heads // kv_heads
    if mask.shape[1] == 1:  # no views: Inductor would ask for a length that is only known at run time
        return mask if group == 1 else mask.repeat(1, 1, group, 1)
    mask = mask.unflatten(1, (kv_heads, group))
    return mask.expand(-1, -1, -1, q_len, -1).flatten(2, 3)


def fold_sequences(query: Tensor, batch: int) -> Tensor:
    """Fold `[B, heads, q_len, d]` to `[batch, heads, B // batch * q_len, d]`: the queries of sequences that share a KV.

    Row `j` of the result holds the queries of sequences `j * B // batch` and following, in order.
    """
    if batch == query.shape[0]:
        return query
    return query.reshape(batch, -1, *query.shape[1:]).transpose(1, 2).flatten(2, 3)


def unfold_sequences(x: Tensor, batch: int) -> Tensor:
    """Undo `fold_sequences` for an out `[b, heads, queries, d]` or an lse `[b, heads, queries]`, as a view."""
    seqs_per_kv = batch // x.shape[0]
    return x if seqs_per_kv == 1 else x.unflatten(2, (seqs_per_kv, -1)).transpose(1, 2).flatten(0, 1)


def fold_mask(mask: Tensor, query: Tensor, batch: int) -> Tensor:
    """Fold a mask like its queries. Its batch is 1, `batch`, or the number of sequences."""
    seqs_per_kv, q_len = query.shape[0] // batch, query.shape[2]
    mask = squeeze_broadcast(mask)
    if seqs_per_kv == 1 or (mask.shape[0] != query.shape[0] and mask.shape[2] == 1):
        return mask
    rows, heads, _, kv_len = mask.shape
    per_sequence = rows == query.shape[0]
    mask = mask.unflatten(0, (batch, seqs_per_kv)).transpose(1, 2) if per_sequence else mask.unsqueeze(2)
    return mask.expand(-1, heads, seqs_per_kv, q_len, kv_len).flatten(2, 3)
