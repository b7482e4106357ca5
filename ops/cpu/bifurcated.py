"""`tatten::bifurcated_attention` on a CPU: PyTorch's kernel, once for all sequences that share rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.ops.cpu.attention import AttendKernel, attend_keys, kernel_of, merge_sinks, spans_of
from tatten.ops.cpu.flash import additive, coarse_sequences
from tatten.ops.cpu.rows import runs_of
from tatten.ops.layout import fold_mask, fold_sequences, unfold_sequences
from tatten.ops.reach import segments_in_window
from tatten.ops.row_groups import rows_of_segments
from tatten.ops.segment_validation import check_bifurcated_attention, check_segments_batch_invariant
from tatten.ops.states import State, accumulator_dtype, combine_partials
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
    dtype, acc = query.dtype, accumulator_dtype(query.dtype)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    rows, kernel = rows_of_segments(row_groups, query, keys), kernel_of(variant, False, batch_invariant)
    if variant.window is not None:
        segments = list(zip(keys, values, attn_masks, block_masks, strict=True))
        narrowed = segments_in_window(variant.window, query.shape[2], segments)
        keys, values, attn_masks, block_masks = zip(*narrowed, strict=True)
    additive_masks = any(mask is not None and mask.dtype != torch.bool for mask in attn_masks)
    if batch_invariant:
        check_segments_batch_invariant(query, keys, row_groups, variant)
        query, keys, values = query.to(acc), [x.to(acc) for x in keys], [x.to(acc) for x in values]
        attn_masks = [x if x is None or x.dtype == torch.bool else x.to(acc) for x in attn_masks]

    states = []
    for key, value, mask, block_mask, own_rows in zip(keys, values, attn_masks, block_masks, rows, strict=True):
        if key.shape[2] == 0:
            mask = None
        if batch_invariant:
            states.append(_attend_each(query, key, value, mask, scale, kernel, own_rows))
        elif own_rows is None:
            states.append(_attend_blocks(query, key, value, mask, block_mask, scale, kernel))
        else:
            states.append(_attend_rows(query, key, value, mask, block_mask, scale, kernel, own_rows))

    def combine(first: int, stop: int) -> State:
        """Return the state of some sequences over the sinks and all segments."""
        out, lse = combine_partials(*zip(*[(x[first:stop], y[first:stop]) for x, y in states], strict=True))
        for b in coarse_sequences(lse) if additive_masks and len(keys) > 1 else ():
            at, own = slice(b, b + 1), slice(first + b, first + b + 1)
            key, value, mask = _concatenate(query, keys, values, attn_masks, rows, first + b)
            out[at], lse[at] = attend_keys(query[own], key, value, mask, spans_of(mask, key.shape[2]), scale, kernel)
        return (out, lse) if variant.sinks is None else merge_sinks(out, lse, variant.sinks)

    if not batch_invariant:
        out, lse = combine(0, query.shape[0])
        return out.contiguous(), lse.contiguous()
    # Vectorised functions round the last numbers of a tensor differently from the others.
    outs, lses = zip(*(combine(b, b + 1) for b in range(query.shape[0])), strict=True)
    return torch.cat(outs).to(dtype), torch.cat(lses)


def _attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    block_mask: Tensor | None,
    scale: float,
    kernel: AttendKernel,
    separately: bool = False,
) -> State:
    """Return the state of each sequence over a segment whose rows serve aligned blocks of sequences."""
    batch, kv_batch, kv_len = query.shape[0], key.shape[0], key.shape[2]
    spans = None
    if mask is not None:
        mask = fold_mask(mask.expand(*mask.shape[:-1], kv_len), query, kv_batch)
        spans = spans_of(mask, kv_len, block_mask)
    folded = fold_sequences(query, kv_batch)
    out, lse = attend_keys(folded, key, value, mask, spans, scale, kernel, separately=separately)
    return unfold_sequences(out, batch), unfold_sequences(lse, batch)


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    block_mask: Tensor | None,
    scale: float,
    kernel: AttendKernel,
    rows: Tensor,
) -> State:
    """Return the state of each sequence over the row of a segment that it reads, a run of rows at a time."""
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


def _attend_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    kernel: AttendKernel,
    rows: Tensor | None,
) -> State:
    """Return the state of each sequence over the row of a segment that it reads, as if it were alone."""
    batch, kv_batch = query.shape[0], key.shape[0]
    if rows is None and kv_batch == batch:
        return _attend_blocks(query, key, value, mask, None, scale, kernel, separately=True)
    row_of = torch.arange(batch) * kv_batch // batch if rows is None else rows
    out, lse = query.new_empty((*query.shape[:3], value.shape[3])), query.new_empty(query.shape[:3])
    for stored in row_of.unique().tolist():
        sequences, row = (row_of == stored).nonzero().flatten(), slice(stored, stored + 1)
        own_query, own_mask, spans = query[sequences], mask, None
        if mask is not None:
            of_rows = mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, key.shape[2])
            own_mask = of_rows if of_rows.shape[0] == 1 else of_rows[sequences if of_rows.shape[0] == batch else row]
            spans = spans_of(own_mask, key.shape[2])
        own_key, own_value = (x[row].expand(len(sequences), -1, -1, -1) for x in (key, value))
        out[sequences], lse[sequences] = attend_keys(
            own_query, own_key, own_value, own_mask, spans, scale, kernel, separately=True
        )
    return out, lse


def _concatenate(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    rows: Sequence[Tensor | None],
    b: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all segments of sequence `b` as one key, one value and one additive mask, each with a batch of one.

    Each segment gives only the span that its mask leaves: keys outside it may be NaN.
    """
    batch, q_heads, q_len, _ = query.shape
    dtype, kv_heads = accumulator_dtype(query.dtype), math.lcm(*(key.shape[1] for key in keys))
    own_keys, own_values, biases = [], [], []
    for key, value, mask, own_rows in zip(keys, values, attn_masks, rows, strict=True):
        kv_row = b * key.shape[0] // batch if own_rows is None else int(own_rows[b])
        bias = query.new_zeros((1, 1, 1, 1), dtype=dtype)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            at = 0 if mask.shape[0] == 1 else b if mask.shape[0] == batch else kv_row
            bias = additive(mask[at : at + 1], query.dtype)
        bias = bias.to(dtype).expand(1, q_heads, q_len, key.shape[2])
        (span,) = spans_of(bias, key.shape[2])
        repeats = kv_heads // key.shape[1]
        own_keys.append(key[kv_row, :, span.start : span.stop].repeat_interleave(repeats, dim=0))
        own_values.append(value[kv_row, :, span.start : span.stop].repeat_interleave(repeats, dim=0))
        biases.append(bias[..., span.start : span.stop])
    return torch.cat(own_keys, dim=1)[None], torch.cat(own_values, dim=1)[None], torch.cat(biases, dim=3)
