"""`tatten::bifurcated_attention` on a CPU: PyTorch's kernel, once for all sequences that share rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.ops.cpu.attention import Kernel, attend_keys, kernel_of, merge_sinks, spans_of
from tatten.ops.cpu.flash import additive, coarse_sequences
from tatten.ops.cpu.rows import runs_of
from tatten.ops.layout import fold_mask, fold_sequences, unfold_sequences
from tatten.ops.reach import segments_in_window
from tatten.ops.row_groups import rows_of_segments
from tatten.ops.states import State, accumulator_dtype, combine_partials
from tatten.ops.validation import check_bifurcated_attention, check_segments_batch_invariant
from tatten.ops.variant import AttentionVariant


def bifurcated_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    block_masks: Sequence[Tensor | None],
    scale: float | None,
    row_groups: Sequence[Tensor | None] | None,
    variant: AttentionVariant,
    batch_invariant: bool,
) -> State:
    row_groups = row_groups or [None] * len(keys)
    check_bifurcated_attention(query, keys, values, attn_masks, block_masks, row_groups, variant)
    if batch_invariant:
        check_segments_batch_invariant(query, keys, row_groups, variant)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    rows = rows_of_segments(row_groups, query, keys)
    if variant.window is not None:
        segments = list(zip(keys, values, attn_masks, block_masks, strict=True))
        narrowed = segments_in_window(variant.window, query.shape[2], segments)
        keys, values, attn_masks, block_masks = zip(*narrowed, strict=True)
    if not batch_invariant:
        out, lse = _attend(query, keys, values, attn_masks, block_masks, rows, scale, variant, batch_invariant)
        return out.contiguous(), lse.contiguous()
    # A sequence depends on no others where it is alone. How products in 16 bits add up may depend on the threads.
    acc = accumulator_dtype(query.dtype)
    outs, lses = [], []
    for b in range(query.shape[0]):
        sequence = _sequence(query, keys, values, attn_masks, rows, b, acc)
        no_masks = no_rows = [None] * len(keys)
        out, lse = _attend(*sequence, no_masks, no_rows, scale, variant, batch_invariant)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs).to(query.dtype), torch.cat(lses)


def _attend(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    block_masks: Sequence[Tensor | None],
    rows: Sequence[Tensor | None],
    scale: float,
    variant: AttentionVariant,
    batch_invariant: bool,
) -> State:
    """The state over the sinks and all segments, which have been narrowed to the window."""
    kernel = kernel_of(variant, upcasts=False, batch_invariant=batch_invariant)
    outs, lses = [], []
    for key, value, mask, block_mask, own_rows in zip(keys, values, attn_masks, block_masks, rows, strict=True):
        if key.shape[2] == 0:
            mask = None
        if own_rows is None:
            out, lse = _attend_blocks(query, key, value, mask, block_mask, scale, kernel)
        else:
            out, lse = _attend_rows(query, key, value, mask, block_mask, scale, kernel, own_rows)
        outs.append(out)
        lses.append(lse)
    out, lse = combine_partials(outs, lses)
    if len(keys) > 1 and any(mask is not None and mask.dtype != torch.bool for mask in attn_masks):
        for b in coarse_sequences(lse):
            at = slice(b, b + 1)
            key, value, mask = _concatenate(query, keys, values, attn_masks, rows, b)
            out[at], lse[at] = attend_keys(query[at], key, value, mask, spans_of(mask, key.shape[2]), scale, kernel)
    return (out, lse) if variant.sinks is None else merge_sinks(out, lse, variant.sinks)


def _sequence(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    rows: Sequence[Tensor | None],
    b: int,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor | None]]:
    """The query, keys, values and masks of sequence `b`, each with a batch of one, in `dtype`."""
    own_keys, own_values, own_masks = [], [], []
    for key, value, mask, own_rows in zip(keys, values, attn_masks, rows, strict=True):
        kv_row = _row_of(query, key, own_rows, b)
        own_keys.append(key[kv_row : kv_row + 1].to(dtype))
        own_values.append(value[kv_row : kv_row + 1].to(dtype))
        mask = None if mask is None else _mask_of(query, mask, kv_row, b)
        own_masks.append(mask if mask is None or mask.dtype == torch.bool else mask.to(dtype))
    return query[b : b + 1].to(dtype), own_keys, own_values, own_masks


def _row_of(query: Tensor, key: Tensor, rows: Tensor | None, b: int) -> int:
    """The row of a segment that sequence `b` reads."""
    return b * key.shape[0] // query.shape[0] if rows is None else int(rows[b])


def _mask_of(query: Tensor, mask: Tensor, kv_row: int, b: int) -> Tensor:
    """The mask of sequence `b`, which reads `kv_row`, of rank 4 with a batch of one."""
    mask = mask[(None,) * (4 - mask.dim())]
    at = 0 if mask.shape[0] == 1 else b if mask.shape[0] == query.shape[0] else kv_row
    return mask[at : at + 1]


def _attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    block_mask: Tensor | None,
    scale: float,
    kernel: Kernel,
) -> State:
    """The state of each sequence over a segment whose rows serve aligned blocks of sequences."""
    batch, kv_batch, kv_len = query.shape[0], key.shape[0], key.shape[2]
    spans = None
    if mask is not None:
        mask = fold_mask(mask.expand(*mask.shape[:-1], kv_len), query, kv_batch)
        spans = spans_of(mask, kv_len, block_mask)
    out, lse = attend_keys(fold_sequences(query, kv_batch), key, value, mask, spans, scale, kernel)
    return unfold_sequences(out, batch), unfold_sequences(lse, batch)


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    block_mask: Tensor | None,
    scale: float,
    kernel: Kernel,
    rows: Tensor,
) -> State:
    """The state of each sequence over the row of a segment that it reads, a run of rows at a time."""
    batch, kv_batch = query.shape[0], key.shape[0]
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    lse = query.new_empty(query.shape[:3], dtype=accumulator_dtype(query.dtype))
    per_sequence = mask is not None and mask.dim() == 4 and mask.shape[0] == batch
    per_row = mask is not None and mask.dim() == 4 and mask.shape[0] == kv_batch and not per_sequence
    for run in runs_of(rows, kv_batch):
        sequences, stored = run.sequences.flatten(), slice(run.start, run.stop)
        own_mask, own_block_mask = mask, block_mask
        if mask is not None and (per_sequence or per_row):
            own_mask = mask.index_select(0, sequences) if per_sequence else mask[stored]
        if block_mask is not None and block_mask.shape[0] > 1:
            own_block_mask = block_mask[stored]
        own_query = query.index_select(0, sequences)
        own = _attend_blocks(own_query, key[stored], value[stored], own_mask, own_block_mask, scale, kernel)
        for whole, part in zip((out, lse), own, strict=True):
            whole[run.sequences[run.real]] = part[run.real.flatten()]
    return out, lse


def _concatenate(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    rows: Sequence[Tensor | None],
    b: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """All segments of sequence `b` as one key, one value and one additive mask, each with a batch of one.

    Each segment gives only the span that its mask leaves over: what lies outside may be NaN.
    """
    _, q_heads, q_len, _ = query.shape
    dtype, kv_heads = accumulator_dtype(query.dtype), math.lcm(*(key.shape[1] for key in keys))
    own_keys, own_values, biases = [], [], []
    for key, value, mask, own_rows in zip(keys, values, attn_masks, rows, strict=True):
        kv_row = _row_of(query, key, own_rows, b)
        bias = query.new_zeros((1, 1, 1, 1), dtype=dtype)
        if mask is not None:
            bias = additive(_mask_of(query, mask, kv_row, b), query.dtype)
        bias = bias.to(dtype).expand(1, q_heads, q_len, key.shape[2])
        (span,) = spans_of(bias, key.shape[2])
        repeats = kv_heads // key.shape[1]
        own_keys.append(key[kv_row, :, span.start : span.stop].repeat_interleave(repeats, dim=0))
        own_values.append(value[kv_row, :, span.start : span.stop].repeat_interleave(repeats, dim=0))
        biases.append(bias[..., span.start : span.stop])
    return torch.cat(own_keys, dim=1)[None], torch.cat(own_values, dim=1)[None], torch.cat(biases, dim=3)
