"""Checks of the inputs of `tatten::bifurcated_attention`: segments, their rows, and how they fit each other."""

from __future__ import annotations

from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.validation import (
    check_batch_invariant,
    check_block_masks,
    check_call_no_grad,
    check_devices,
    check_key_value,
    check_kv_heads,
    check_mask,
    check_query,
    check_row_groups,
    check_rows,
    check_variant,
)


def check_segments_batch_invariant(call: AttentionCall) -> None:
    """Raise unless each sequence of checked segments can be computed as if it were alone."""
    check_batch_invariant(call)
    batch, last = call.query.shape[0], call.segments[-1]
    rows = last.key.shape[0]
    if last.row_groups is not None or rows != batch:
        stored = f"a batch of {rows}" + (" and `rows`" if last.row_groups is not None else "")
        raise ValueError(
            f"`keys[{len(call.segments) - 1}]`, the last segment, must be each sequence's own with `batch_invariant`: "
            f"a batch of {batch} without `rows`, got {stored}"
        )


def check_bifurcated_attention(call: AttentionCall) -> None:
    """Raise ValueError, TypeError or NotImplementedError unless the inputs fit `tatten::bifurcated_attention`."""
    check_query(call.query)
    check_call_no_grad(call)
    check_variant(call, call.query.dtype)
    for i, stored in enumerate(call.segments):
        _check_segment(call, stored, i)
    check_block_masks(call)


def _check_segment(call: AttentionCall, stored: KeyValue, i: int) -> None:
    query, key, value, mask, groups = call.query, stored.key, stored.value, stored.attn_mask, stored.row_groups
    batch, q_heads, q_len, _ = query.shape
    rows = key.shape[0] if key.dim() == 4 else batch
    if groups is not None:
        check_row_groups(groups, batch, f"row_groups[{i}]")
        if rows == 0:
            raise ValueError(f"`keys[{i}]` must have a batch of at least 1, got {rows}")
    elif rows == 0 or batch % rows:
        raise ValueError(
            f"`keys[{i}]` must have a batch that divides `query`'s {batch}, got {rows}: "
            f"or give `rows[{i}]`, the row that each sequence reads"
        )
    check_key_value(query, key, value, f"keys[{i}]", f"values[{i}]")
    want = call.segments[0].value.shape[3]
    if value.shape[3] != want:
        raise ValueError(f"`values[{i}]` must have the head_dim of `values[0]`, {want}, got {value.shape[3]}")
    if mask is not None:
        served = rows if mask.dim() == 4 and mask.shape[0] == rows else batch
        check_mask(mask, query.dtype, (served, q_heads, q_len, key.shape[2]), f"attn_masks[{i}]")


def check_rows_fit(rows: Tensor, query: Tensor, key: Tensor, segment: int) -> None:
    """Raise unless `rows` can give the row of a segment's `key` that each sequence of `query` reads."""
    check_query(query)
    shape, name = tuple(key.shape), f"rows[{segment}]"
    if len(shape) != 4 or shape[0] == 0:
        wanted = "[batch, heads, length, head_dim] with a batch of at least 1"
        raise ValueError(f"`keys[{segment}]` must be {wanted}, got shape {shape}")
    check_kv_heads(query, key, f"keys[{segment}]")
    check_rows(rows, query.shape[0], name)
    check_devices(query, **{name: rows})
