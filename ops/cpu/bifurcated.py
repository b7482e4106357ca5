"""`tatten::bifurcated_attention` on a CPU: PyTorch's kernel, once for all sequences that share rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cpu.attention import (
    AttendKernel,
    attend_keys,
    kernel_of,
    merge_sinks,
    spans_of,
    with_mask_in,
    with_sinks,
)
from tatten.ops.cpu.flash import additive, coarse_sequences
from tatten.ops.cpu.picked import attend_picks
from tatten.ops.cpu.rows import runs_of
from tatten.ops.layout import fold_mask, fold_sequences, unfold_sequences
from tatten.ops.reach import within_window
from tatten.ops.row_groups import rows_of
from tatten.ops.segment_validation import check_bifurcated_attention, check_segments_batch_invariant
from tatten.ops.states import State, accumulator_dtype, combine_partials


def bifurcated_attention(call: AttentionCall) -> State:
    check_bifurcated_attention(call)
    if call.has_picks:
        if call.batch_invariant:
            check_segments_batch_invariant(call)
        out, lse = with_sinks(call, *attend_picks(call))
        return out.to(call.query.dtype), lse
    dtype, acc, scale = call.query.dtype, accumulator_dtype(call.query.dtype), call.score_scale
    rows, kernel = [rows_of(call.query, x) for x in call.segments], kernel_of(call)
    call = within_window(call)
    additive_masks = any(x.attn_mask is not None and x.attn_mask.dtype != torch.bool for x in call.segments)
    if call.batch_invariant:
        check_segments_batch_invariant(call)
        call = call._replace(query=call.query.to(acc), segments=tuple(_upcast(x, acc) for x in call.segments))
    query, segments = call.query, call.segments

    states = []
    for stored, segment_rows in zip(segments, rows, strict=True):
        if stored.key.shape[2] == 0:
            stored = stored._replace(attn_mask=None)
        if call.batch_invariant:
            states.append(_attend_each(query, stored, scale, kernel, segment_rows))
        elif segment_rows is None:
            states.append(_attend_blocks(query, stored, scale, kernel))
        else:
            states.append(_attend_rows(query, stored, scale, kernel, segment_rows))

    def combine(first: int, stop: int) -> State:
        """Return the state of sequences `first` to `stop - 1` over the sinks and all segments."""
        out, lse = combine_partials(*zip(*[(x[first:stop], y[first:stop]) for x, y in states], strict=True))
        for b in coarse_sequences(lse) if additive_masks and len(segments) > 1 else ():
            at, sequence = slice(b, b + 1), slice(first + b, first + b + 1)
            joined = _concatenate(query, segments, rows, first + b)
            assert joined.attn_mask is not None
            spans = spans_of(joined.attn_mask, joined.key.shape[2])
            out[at], lse[at] = attend_keys(query[sequence], joined, spans, scale, kernel)
        return (out, lse) if call.sinks is None else merge_sinks(out, lse, call.sinks)

    if not call.batch_invariant:
        out, lse = combine(0, query.shape[0])
        return out.contiguous(), lse.contiguous()
    # Vectorised functions round the last numbers of a tensor differently from the others.
    outs, lses = zip(*(combine(b, b + 1) for b in range(query.shape[0])), strict=True)
    return torch.cat(outs).to(dtype), torch.cat(lses)


def _upcast(stored: KeyValue, dtype: torch.dtype) -> KeyValue:
    return with_mask_in(stored, dtype)._replace(key=stored.key.to(dtype), value=stored.value.to(dtype))


def _attend_blocks(
    query: Tensor, stored: KeyValue, scale: float, kernel: AttendKernel, separately: bool = False
) -> State:
    """Return the state of each sequence over a segment whose rows serve aligned blocks of sequences."""
    batch, kv_batch, kv_len, mask = query.shape[0], stored.key.shape[0], stored.key.shape[2], stored.attn_mask
    spans = None
    if mask is not None:
        mask = fold_mask(mask.expand(*mask.shape[:-1], kv_len), query, kv_batch)
        spans = spans_of(mask, kv_len, stored.block_mask)
        stored = stored._replace(attn_mask=mask)
    out, lse = attend_keys(fold_sequences(query, kv_batch), stored, spans, scale, kernel, separately=separately)
    return unfold_sequences(out, batch), unfold_sequences(lse, batch)


def _attend_rows(query: Tensor, stored: KeyValue, scale: float, kernel: AttendKernel, rows: Tensor) -> State:
    """Return the state of each sequence over the row of a segment that it reads, a run of rows at a time."""
    batch, kv_batch, mask, block_mask = query.shape[0], stored.key.shape[0], stored.attn_mask, stored.block_mask
    out = query.new_empty((*query.shape[:3], stored.value.shape[3]))
    lse = query.new_empty(query.shape[:3], dtype=accumulator_dtype(query.dtype))
    per_sequence = mask is not None and mask.dim() == 4 and mask.shape[0] == batch
    per_row = mask is not None and mask.dim() == 4 and mask.shape[0] == kv_batch and not per_sequence
    for run in runs_of(rows, kv_batch):
        sequences, at = run.sequences.flatten(), slice(run.start, run.stop)
        part = stored._replace(key=stored.key[at], value=stored.value[at])
        if mask is not None and (per_sequence or per_row):
            part = part._replace(attn_mask=mask.index_select(0, sequences) if per_sequence else mask[at])
        if block_mask is not None and block_mask.shape[0] > 1:
            part = part._replace(block_mask=block_mask[at])
        state = _attend_blocks(query.index_select(0, sequences), part, scale, kernel)
        for result, x in zip((out, lse), state, strict=True):
            result[run.sequences[run.real]] = x[run.real.flatten()]
    return out, lse


def _attend_each(query: Tensor, stored: KeyValue, scale: float, kernel: AttendKernel, rows: Tensor | None) -> State:
    """Return the state of each sequence over the row of a segment that it reads, as if it were alone."""
    batch, kv_batch, kv_len, mask = query.shape[0], stored.key.shape[0], stored.key.shape[2], stored.attn_mask
    if rows is None and kv_batch == batch:
        return _attend_blocks(query, stored._replace(block_mask=None), scale, kernel, separately=True)
    row_of = torch.arange(batch) * kv_batch // batch if rows is None else rows
    out, lse = query.new_empty((*query.shape[:3], stored.value.shape[3])), query.new_empty(query.shape[:3])
    for row_index in row_of.unique().tolist():
        sequences, row = (row_of == row_index).nonzero().flatten(), slice(row_index, row_index + 1)
        key, value = (x[row].expand(len(sequences), -1, -1, -1) for x in (stored.key, stored.value))
        part, spans = stored._replace(key=key, value=value), None
        if mask is not None:
            row_mask = mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, kv_len)
            row_mask = (
                row_mask if row_mask.shape[0] == 1 else row_mask[sequences if row_mask.shape[0] == batch else row]
            )
            part, spans = part._replace(attn_mask=row_mask), spans_of(row_mask, kv_len)
        out[sequences], lse[sequences] = attend_keys(query[sequences], part, spans, scale, kernel, separately=True)
    return out, lse


def _concatenate(query: Tensor, segments: Sequence[KeyValue], rows: Sequence[Tensor | None], b: int) -> KeyValue:
    """Return all segments of sequence `b` as one, with an additive mask and a batch of one.

    Each segment gives only the span that its mask leaves: keys outside it may be NaN.
    """
    batch, q_heads, q_len, _ = query.shape
    dtype, kv_heads = accumulator_dtype(query.dtype), math.lcm(*(x.key.shape[1] for x in segments))
    keys, values, biases = [], [], []
    for (key, value, mask, *_), segment_rows in zip(segments, rows, strict=True):
        kv_row = b * key.shape[0] // batch if segment_rows is None else int(segment_rows[b])
        bias = query.new_zeros((1, 1, 1, 1), dtype=dtype)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            at = 0 if mask.shape[0] == 1 else b if mask.shape[0] == batch else kv_row
            bias = additive(mask[at : at + 1], query.dtype)
        bias = bias.to(dtype).expand(1, q_heads, q_len, key.shape[2])
        (span,) = spans_of(bias, key.shape[2])
        repeats = kv_heads // key.shape[1]
        keys.append(key[kv_row, :, span.start : span.stop].repeat_interleave(repeats, dim=0))
        values.append(value[kv_row, :, span.start : span.stop].repeat_interleave(repeats, dim=0))
        biases.append(bias[..., span.start : span.stop])
    return KeyValue(torch.cat(keys, dim=1)[None], torch.cat(values, dim=1)[None], torch.cat(biases, dim=3))
