"""The ops on a CPU: PyTorch's own flash kernel, on packed query heads and on the keys that count.

The kernel is given one row per query that reads a kv head, so that keys and values are read once per kv head and not
once per query head, nor once per sequence where sequences share them; and only the span of keys between the first and
the last that the mask and the lengths leave over.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tatten.ops.cpu import thresholds
from tatten.ops.cpu.flash import additive, attend, coarse_sequences, empty_state
from tatten.ops.layout import (
    fold_mask,
    fold_sequences,
    pack_gqa,
    pack_mask,
    squeeze_broadcast,
    unfold_sequences,
)
from tatten.ops.masks import mask_spans
from tatten.ops.states import NEG_INF, accumulator_dtype, combine_partials, merge
from tatten.ops.validation import (
    check_bifurcated_attention,
    check_decode_attention,
    check_kv_lens,
    check_provider,
    check_stack,
)
from tatten.ops.variant import AttentionVariant


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    kv_lens: Tensor | None,
    scale: float | None,
    spans: Tensor | None,
    variant: AttentionVariant,
    provider: str,
) -> tuple[Tensor, Tensor]:
    check_provider(provider, query.device)
    check_decode_attention(query, key, value, attn_mask, kv_lens, variant)
    window, softcap, sinks, key_scale, value_scale = variant
    scale = query.shape[3] ** -0.5 if scale is None else scale
    dtype = query.dtype
    if key.dtype != dtype:  # float8, for which PyTorch has no products on a CPU
        query = query.to(accumulator_dtype(dtype))
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = squeeze_broadcast(attn_mask).to(query.dtype)
    mask, bounds, q_len, kv_len = attn_mask, None, query.shape[2], key.shape[2]
    if kv_lens is not None or window is not None:
        lens = [kv_len] if kv_lens is None else check_kv_lens(kv_lens, kv_len)
        if window is not None:  # keys behind every window are left out before anything is computed for them
            first = max(0, min(lens) - q_len - window + 1)
            key, value = key[:, :, first:], value[:, :, first:]
            mask = None if mask is None else mask.expand(*mask.shape[:-1], kv_len)[..., first:]
            lens = [n - first for n in lens]
        within, bounds = _within(lens, q_len, key.shape[2], window)
        if mask is not None:
            within = mask & within if mask.dtype == torch.bool else torch.where(within, mask, NEG_INF)
            bounds = None
        mask, spans = within, None
    out, lse = _attend_keys(query, key, value, mask, spans, scale, bounds, softcap, (key_scale, value_scale))
    if sinks is not None:
        out, lse = _with_sinks(out, lse, sinks)
    return out.to(dtype).contiguous(), lse.contiguous()


def bifurcated_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    spans: Sequence[Tensor | None],
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    check_bifurcated_attention(query, keys, values, attn_masks, spans)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    batch = query.shape[0]
    outs, lses = [], []
    for key, value, mask, span in zip(keys, values, attn_masks, spans, strict=True):
        rows = key.shape[0]
        if key.shape[2] == 0:
            mask = None
        if mask is not None:
            mask = fold_mask(mask.expand(*mask.shape[:-1], key.shape[2]), query, rows)
        out, lse = _attend_keys(fold_sequences(query, rows), key, value, mask, span, scale)
        outs.append(unfold_sequences(out, batch))
        lses.append(unfold_sequences(lse, batch))
    out, lse = combine_partials(outs, lses)
    if len(keys) > 1 and any(mask is not None and mask.dtype != torch.bool for mask in attn_masks):
        for b in coarse_sequences(lse):
            at = slice(b, b + 1)
            key, value, mask = _in_one(query, keys, values, attn_masks, b)
            out[at], lse[at] = _attend_keys(query[at], key, value, mask, None, scale)
    return out.contiguous(), lse.contiguous()


def _in_one(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], attn_masks: Sequence[Tensor | None], b: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All segments of sequence `b` as one key, one value and one additive mask, each with a batch of one.

    Of each only the span that its mask leaves over: what lies outside may be NaN.
    """
    batch, q_heads, q_len, _ = query.shape
    dtype, kv_heads = accumulator_dtype(query.dtype), math.lcm(*(key.shape[1] for key in keys))
    own_keys, own_values, biases = [], [], []
    for key, value, mask in zip(keys, values, attn_masks, strict=True):
        row = b * key.shape[0] // batch
        bias = query.new_zeros((1, 1, 1, 1), dtype=dtype)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            at = 0 if mask.shape[0] == 1 else b if mask.shape[0] == batch else row
            bias = additive(mask[at : at + 1], query.dtype)
        bias = bias.to(dtype).expand(1, q_heads, q_len, key.shape[2])
        start, stop, _ = mask_spans(bias).tolist()[0]
        repeats = kv_heads // key.shape[1]
        own_keys.append(key[row, :, start:stop].repeat_interleave(repeats, dim=0))
        own_values.append(value[row, :, start:stop].repeat_interleave(repeats, dim=0))
        biases.append(bias[..., start:stop])
    return torch.cat(own_keys, dim=1)[None], torch.cat(own_values, dim=1)[None], torch.cat(biases, dim=3)


def _attend_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spans: Tensor | None,
    scale: float,
    bounds: list[list[int]] | None = None,
    softcap: float | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """The state over the keys that the mask leaves; `bounds` are the `mask_spans` of each row, if known, as a list."""
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len, value_dim = key.shape[1], key.shape[2], value.shape[3]
    rows = pack_gqa(query, kv_heads)
    kernel = attend if softcap is None else functools.partial(_attend_capped, softcap=softcap)
    if key.dtype != query.dtype:
        kernel = functools.partial(_attend_upcast, kernel, scales)
    if mask is None:
        out, lse = kernel(rows, key, value, None, scale, False)
        return out.reshape(batch, q_heads, q_len, value_dim), lse.reshape(batch, q_heads, q_len)
    if bounds is None:
        bounds = (mask_spans(mask.expand(*mask.shape[:-1], kv_len)) if spans is None else spans).tolist()
    some_empty = [0, 0, 1] in bounds

    def attend_run(run: slice, start: int, stop: int, full: int) -> tuple[Tensor, Tensor]:
        """The state of the rows `run` over the keys `[start, stop)`; `full` if the mask says nothing there."""
        k, v = key.narrow(2, start, stop - start), value.narrow(2, start, stop - start)
        part = (rows, k, v) if run.stop - run.start == batch else (rows[run], k[run], v[run])
        run_mask = None
        if not full:
            run_mask = squeeze_broadcast(mask)
            run_mask = run_mask[run if run_mask.shape[0] > 1 else slice(0, 1), :, :, start:stop]
            run_mask = additive(pack_mask(run_mask, q_heads, kv_heads, q_len), query.dtype)
        # Where all queries share a mask, a span that is not empty leaves none of them without a key.
        return kernel(*part, run_mask, scale, some_empty or (run_mask is not None and run_mask.shape[1:3] != (1, 1)))

    runs = _runs(bounds, batch)
    state = attend_run(*runs[0]) if len(runs) == 1 else None
    if state is None:
        start, stop = min(b[0] for b in bounds if b[1]), max(b[1] for b in bounds)
        wasted = sum(stop - start - (b[1] - b[0]) for b in bounds)
        if wasted * kv_heads * (head_dim + value_dim) * key.element_size() < len(runs) * thresholds.CPU.run_bytes:
            state = attend_run(slice(0, batch), start, stop, 0)
            # Where a row's own unused keys hold NaN or inf, the kernel's -inf in the mask does not undo that.
            if math.isnan(state[0].sum().item()):
                state = None
    if state is None:
        outs, lses = zip(*(attend_run(*run) for run in runs), strict=True)
        state = torch.cat(outs), torch.cat(lses)
    out, lse = state
    if q_heads != kv_heads:
        out, lse = out.reshape(batch, q_heads, q_len, value_dim), lse.reshape(batch, q_heads, q_len)
    return out, lse


def _runs(bounds: list[list[int]], batch: int) -> list[tuple[slice, int, int, int]]:
    """The batch in order, cut where the span of keys changes: the sequences, and start, stop and full of their span."""
    if bounds.count(bounds[0]) == len(bounds):
        start, stop, full = bounds[0]
        return [(slice(0, batch), start, stop, full)]
    runs = []
    for (start, stop, full), group in itertools.groupby(range(batch), key=bounds.__getitem__):
        run = list(group)
        runs.append((slice(run[0], run[-1] + 1), start, stop, full))
    return runs


def _within(lens: list[int], q_len: int, kv_len: int, window: int | None) -> tuple[Tensor, list[list[int]]]:
    """The keys that length and window leave to each query, as a mask, and its `mask_spans` as a list."""
    stop, keys = torch.tensor(lens)[:, None, None, None], torch.arange(kv_len)
    if window is None:
        return keys < stop, [[0, n, 1] for n in lens]
    behind = stop - q_len + torch.arange(q_len)[:, None] - keys  # how far from the query's own place
    bounds = [[max(0, n - q_len - window + 1), n, int(q_len == 1 or n == 0)] for n in lens]
    return (behind >= 0) & (behind < window), bounds


def _attend_capped(
    rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, some_empty: bool, softcap: float
) -> tuple[Tensor, Tensor]:
    """`attend` with scores `softcap * tanh(score / softcap)`, which PyTorch's kernel has not: plain, not fast.

    `some_empty` is there for `attend`'s sake: a query without any key comes out right anyway.
    """
    if key.shape[2] == 0:
        return empty_state(rows, value.shape[3])
    acc = accumulator_dtype(rows.dtype)
    scores = softcap * torch.tanh(rows.to(acc) @ key.to(acc).transpose(2, 3) * (scale / softcap))
    value = value.to(acc)
    if mask is not None:
        excluded = mask == NEG_INF
        scores = torch.where(excluded, NEG_INF, scores + mask)
        value = value.masked_fill(excluded.all(dim=2).unsqueeze(-1), 0.0)  # which may be NaN, and 0 * NaN is NaN
    # Not by the lse, in which the number of keys is lost beside a large bias.
    row_max = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - torch.where(row_max == NEG_INF, 0.0, row_max))
    row_sum = weights.sum(dim=-1, keepdim=True)
    out = weights @ value / torch.where(row_sum == 0, 1.0, row_sum)
    return out.to(rows.dtype), (row_max + torch.log(row_sum)).squeeze(-1)


def _attend_upcast(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    scales: tuple[Tensor | None, Tensor | None],
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: object,
) -> tuple[Tensor, Tensor]:
    """`kernel` on the keys and values that those in float8 stand for: only what it reads is upcast."""
    wide = (x.to(rows.dtype) for x in (key, value))
    key, value = (x if f is None else x * f.to(x.dtype)[:, None, None] for x, f in zip(wide, scales, strict=True))
    return kernel(rows, key, value, *rest)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Merged with the state `(0, sink)` of each head. Not by `merge`, which drops NaN: here it must come out."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))
    weight = torch.exp(lse - torch.where(total == NEG_INF, 0.0, total))
    return (out * weight.unsqueeze(-1)).to(out.dtype), total


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    check_stack(out, lse)
    return merge(out, lse)
