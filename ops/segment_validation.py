"""Checks of the inputs of `tatten::bifurcated_attention`: segments, their rows, and how they fit each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.ops.row_validation import check_row_groups, check_rows
from tatten.ops.validation import (
    check_batch_invariant,
    check_block_mask,
    check_devices,
    check_key_value,
    check_kv_heads,
    check_mask,
    check_no_grad,
    check_query,
    check_variant,
)
from tatten.ops.variant import AttentionVariant


def check_segments(keys: Sequence[Tensor], **given: Sequence[object]) -> None:
    """Raise ValueError unless each of the sequences given has as many entries as `keys`."""
    for name, entries in given.items():
        if len(entries) != len(keys):
            raise ValueError(f"`{name}` must have one entry for each of the {len(keys)} `keys`, got {len(entries)}")


def check_segments_no_grad(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    variant: AttentionVariant,
) -> None:
    """`check_no_grad` of `tatten::bifurcated_attention`."""
    if torch.is_grad_enabled():
        named = {"query": query, "sinks": variant.sinks}
        for name, tensors in (("keys", keys), ("values", values), ("attn_masks", attn_masks)):
            named |= {f"{name}[{i}]": x for i, x in enumerate(tensors) if x is not None}
        check_no_grad("bifurcated_attention", **named)


def check_segments_batch_invariant(
    query: Tensor, keys: Sequence[Tensor], row_groups: Sequence[Tensor | None], variant: AttentionVariant
) -> None:
    """Raise unless each sequence of checked segments can be computed as if it were alone."""
    check_batch_invariant("auto", query.device, variant)
    batch, rows = query.shape[0], keys[-1].shape[0]
    if row_groups[-1] is not None or rows != batch:
        given = f"a batch of {rows}" + (" and `rows`" if row_groups[-1] is not None else "")
        raise ValueError(
            f"`keys[{len(keys) - 1}]`, the last segment, must be each sequence's own with `batch_invariant`: "
            f"a batch of {batch} without `rows`, got {given}"
        )


def check_bifurcated_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    block_masks: Sequence[Tensor | None],
    row_groups: Sequence[Tensor | None],
    variant: AttentionVariant,
) -> None:
    """Raise ValueError, TypeError or NotImplementedError unless the inputs fit `tatten::bifurcated_attention`."""
    check_segments(keys, values=values, attn_masks=attn_masks, block_masks=block_masks, row_groups=row_groups)
    if not keys:
        raise ValueError("`keys` must hold at least one segment, got none")
    check_query(query)
    batch, q_heads, q_len, _ = query.shape
    check_segments_no_grad(query, keys, values, attn_masks, variant)
    check_variant(query, variant, query.dtype)
    for i, (key, value, mask) in enumerate(zip(keys, values, attn_masks, strict=True)):
        rows, groups = key.shape[0] if key.dim() == 4 else batch, row_groups[i]
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
        if value.shape[3] != values[0].shape[3]:
            want = values[0].shape[3]
            raise ValueError(f"`values[{i}]` must have the head_dim of `values[0]`, {want}, got {value.shape[3]}")
        block_mask = block_masks[i]
        if block_mask is not None:
            check_block_mask(block_mask, rows, key.shape[2], query.device, f"block_masks[{i}]")
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
