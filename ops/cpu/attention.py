"""Attention on a CPU: PyTorch's own flash kernel, called with packed query heads and only the keys that count.

All queries that read a kv head are rows of one call, so that keys and values are read once per kv head: not once per
query head, nor once per sequence where sequences share them. The kernel gets the span of keys between the first and the
last one that the mask and the lengths leave.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cpu import thresholds
from tatten.ops.cpu.batch_invariant import attend_each
from tatten.ops.cpu.flash import additive, attend, attend_by_products
from tatten.ops.cpu.one_call import attend_at_once
from tatten.ops.cpu.pages import attend_pages
from tatten.ops.cpu.picked import attend_picks
from tatten.ops.layout import over_keys, pack_gqa, pack_mask, squeeze_broadcast
from tatten.ops.masks import Span, key_spans
from tatten.ops.reach import mask_of_reach, narrow_mask
from tatten.ops.sizes import ceil_div
from tatten.ops.state_validation import check_stack
from tatten.ops.states import NEG_INF, State, accumulator_dtype, merge, merge_each
from tatten.ops.validation import check_batch_invariant, check_decode_attention, check_kv_lens, check_provider

AttendKernel = Callable[..., State]  # with the arguments of `attend`; for keys in 8 bits, `Scales` come first
Scales = tuple[Tensor | None, Tensor | None]  # of keys and of values, each per head or per key


def decode_attention(call: AttentionCall) -> State:
    query, (stored,) = call.query, call.segments
    in_order = stored.indices is None and stored.block_table is None
    if call.plain and in_order and call.provider in ("auto", "cpu"):
        state = attend_at_once(query, stored, call.scale)
        if state is not None:
            return state
    check_provider(call.provider, query.device)
    check_decode_attention(call)
    if call.batch_invariant:
        check_batch_invariant(call)
    if stored.block_table is not None:
        return with_sinks(call, *attend_pages(call, decode_attention))
    dtype = query.dtype
    if stored.indices is not None:
        out, lse = with_sinks(call, *attend_picks(call))
        return out.to(dtype), lse
    # Keys in 8 bits are upcast, as PyTorch has no such products on a CPU. So are keys in 16 bits with
    # `batch_invariant`: the order of their sums may depend on the batch.
    upcasts = stored.key.dtype != dtype or (call.batch_invariant and dtype.itemsize == 2)
    if upcasts:
        query = query.to(accumulator_dtype(dtype))
        call = call._replace(query=query, segments=(with_mask_in(stored, query.dtype),))
    out, lse = attend_variant(call, kernel_of(call, upcasts), upcasts)
    return out.to(dtype).contiguous(), lse.contiguous()


def with_mask_in(stored: KeyValue, dtype: torch.dtype) -> KeyValue:
    """Return the segment with its mask, if additive, converted to `dtype`."""
    mask = stored.attn_mask
    if mask is None or mask.dtype == torch.bool:
        return stored
    return stored._replace(attn_mask=squeeze_broadcast(mask).to(dtype))


def attend_variant(call: AttentionCall, kernel: AttendKernel, upcasts: bool = False) -> State:
    """Return the state over the sinks and the keys that mask, lengths and window leave; `kernel` attends to the keys.

    `upcasts`: the kernel takes `Scales`. With `batch_invariant` each sequence gets its own span of keys, whatever spans
    the others have.
    """
    (stored,), q_len, window, separately = call.segments, call.query.shape[2], call.window, call.batch_invariant
    lens, kv_len, spans = check_kv_lens(call), stored.key.shape[2], None
    if lens is not None or window is not None:
        lens = [kv_len] if lens is None else lens
        if window is not None:  # first drops the keys that no window reaches
            first = max(0, min(lens) - q_len - window + 1)
            stored, lens = _keys_from(stored, first), [n - first for n in lens]
        reach, spans = _reach(lens, q_len, stored.key.shape[2], window)
        if stored.attn_mask is not None:
            reach = narrow_mask(stored.attn_mask, reach)
            spans = spans_of(reach, stored.key.shape[2])
        stored = stored._replace(attn_mask=reach)
    elif stored.attn_mask is not None:
        spans = spans_of(stored.attn_mask, kv_len, stored.block_mask)
    out, lse = attend_keys(call.query, stored, spans, call.score_scale, kernel, upcasts, separately)
    return with_sinks(call, out, lse)


def with_sinks(call: AttentionCall, out: Tensor, lse: Tensor) -> State:
    """Return the state over the keys of `(out, lse)` and the sinks of a call, if it has any."""
    if call.sinks is None:
        return out, lse
    if not call.batch_invariant:
        return merge_sinks(out, lse, call.sinks)
    # Vectorised functions round the last numbers of a tensor differently from the others.
    each = zip(out.split(1), lse.split(1), strict=True)
    outs, lses = zip(*(merge_sinks(*state, call.sinks) for state in each), strict=True)
    return torch.cat(outs), torch.cat(lses)


def _keys_from(stored: KeyValue, first: int) -> KeyValue:
    """Leave out the keys before `first`. For latents, `value` holds their rope here, which is narrowed alike."""
    mask, kv_len, keys = stored.attn_mask, stored.key.shape[2], slice(first, None)
    key_scale, value_scale = _scales_of((stored.key_scale, stored.value_scale), keys=keys)
    return stored._replace(
        key=stored.key[:, :, keys],
        value=stored.value[:, :, keys],
        attn_mask=None if mask is None else mask.expand(*mask.shape[:-1], kv_len)[..., keys],
        key_scale=key_scale,
        value_scale=value_scale,
    )


def merge_states(out: Tensor, lse: Tensor, *, batch_invariant: bool = False) -> State:
    check_stack(out, lse)
    return merge_each(out, lse) if batch_invariant else merge(out, lse)


def spans_of(mask: Tensor, kv_len: int, block_mask: Tensor | None = None) -> list[Span]:
    """Return the span of keys that a mask leaves in each row of the KV, from its `block_mask` if that is given."""
    data = key_spans(mask.expand(*mask.shape[:-1], kv_len)) if block_mask is None else block_mask
    return list(map(Span._make, data.tolist()))


def _reach(lens: list[int], q_len: int, kv_len: int, window: int | None) -> tuple[Tensor, list[Span]]:
    """Return the keys that length and window leave to each query: as a mask, and as the span of each sequence."""
    if window is None:
        spans = [Span(0, n, True) for n in lens]
    else:
        spans = [Span(max(0, n - q_len - window + 1), n, q_len == 1 or n == 0) for n in lens]
    return mask_of_reach(torch.tensor(lens), q_len, kv_len, window), spans


def attend_keys(
    query: Tensor,
    stored: KeyValue,
    spans: list[Span] | None,
    scale: float,
    kernel: AttendKernel = attend,
    upcasts: bool = False,
    separately: bool = False,
) -> State:
    """Return the state over the keys that a mask leaves, in spans: one for each sequence, or one for all of them.

    `upcasts`: the kernel takes `Scales`. `separately`: spans are not joined.
    """
    batch, q_heads, q_len, _ = query.shape
    key, value, mask, scales = stored.key, stored.value, stored.attn_mask, (stored.key_scale, stored.value_scale)
    kv_heads = key.shape[1]
    q_rows = pack_gqa(query, kv_heads)

    def bound(sequences: slice = slice(None), keys: slice = slice(None)) -> AttendKernel:
        return functools.partial(kernel, _scales_of(scales, sequences, keys=keys)) if upcasts else kernel

    def attend_run(sequences: slice, span: Span, some_empty: bool) -> State:
        """Return the state of sequences over a span of keys; `some_empty`: some sequence has no key at all."""
        length = span.stop - span.start
        q, k, v = q_rows, key.narrow(2, span.start, length), value.narrow(2, span.start, length)
        if sequences.stop - sequences.start < batch:
            q, k, v = q[sequences], k[sequences], v[sequences]
        kernel = bound(sequences, slice(span.start, span.stop))
        if mask is None or span.full:
            return kernel(q, k, v, None, scale, some_empty)
        run_mask = squeeze_broadcast(mask)
        run_mask = run_mask[sequences if run_mask.shape[0] > 1 else slice(0, 1), :, :, span.start : span.stop]
        run_mask = additive(pack_mask(run_mask, q_heads, kv_heads, q_len), query.dtype)
        # If all queries share a mask, each of them has a key in a span that is not empty.
        return kernel(q, k, v, run_mask, scale, some_empty or run_mask.shape[1:3] != (1, 1))

    if mask is None or spans is None:
        out, lse = bound()(q_rows, key, value, None, scale, False)
    else:
        pair_bytes = (key.shape[3] + value.shape[3]) * kv_heads * key.element_size()
        out, lse = _attend_runs(attend_run, spans, batch, pair_bytes, separately)
    return out.reshape(batch, q_heads, q_len, out.shape[3]), lse.reshape(batch, q_heads, q_len)


def _attend_runs(
    attend_run: Callable[[slice, Span, bool], State], spans: list[Span], batch: int, pair_bytes: int, separately: bool
) -> State:
    """Return the state of each sequence over its own span, in few calls where reading more keys costs less.

    `pair_bytes`: the bytes of a key and its value.
    """
    some_empty = any(span.empty for span in spans)
    runs = _runs(spans, batch)
    if len(runs) == 1:
        return attend_run(*runs[0], some_empty)
    start, stop = min(span.start for span in spans if not span.empty), max(span.stop for span in spans)
    wasted = sum(stop - start - (span.stop - span.start) for span in spans)
    if not separately and wasted * pair_bytes < len(runs) * thresholds.CPU.run_bytes:
        state = attend_run(slice(0, batch), Span(start, stop, False), some_empty)
        # If unused keys of a sequence hold NaN or inf, the kernel's -inf in the mask does not undo that.
        if not math.isnan(state[0].sum().item()):
            return state
    outs, lses = zip(*(attend_run(*run, some_empty) for run in runs), strict=True)
    return torch.cat(outs), torch.cat(lses)


def _runs(spans: list[Span], batch: int) -> list[tuple[slice, Span]]:
    """Cut the batch into runs of sequences with the same span of keys."""
    if spans.count(spans[0]) == len(spans):
        return [(slice(0, batch), spans[0])]
    runs = []
    for span, group in itertools.groupby(range(batch), key=spans.__getitem__):
        sequences = list(group)
        runs.append((slice(sequences[0], sequences[-1] + 1), span))
    return runs


def kernel_of(call: AttentionCall, upcasts: bool = False) -> AttendKernel:
    """Return the kernel for a call's soft cap and `batch_invariant`; `upcasts`: it upcasts keys and values first."""
    kernel: AttendKernel = attend_each if call.batch_invariant else attend
    if call.softcap is not None:
        kernel = functools.partial(attend_by_products, softcap=call.softcap)
    if upcasts:
        kernel = functools.partial(_attend_upcast, kernel)
    return kernel


def _attend_upcast(
    kernel: AttendKernel,
    scales: Scales,
    q_rows: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    some_empty: bool,
) -> State:
    """Upcast keys and values a few heads at a time, and run `kernel` on them while they are in the cache."""
    batch, kv_heads, kv_len, _ = key.shape
    threads = torch.get_num_threads()
    head_bytes = max(1, kv_len * (key.shape[3] + value.shape[3]) * q_rows.element_size())
    pairs = threads * max(1, thresholds.CPU.block_bytes // head_bytes)
    block_sequences, block_heads = max(1, pairs // kv_heads), min(pairs, kv_heads)
    if mask is not None:
        mask = mask.expand(batch, kv_heads, -1, -1)
    states = []
    for b in range(0, batch, block_sequences):
        for h in range(0, kv_heads, block_heads):
            at = slice(b, b + block_sequences), slice(h, h + block_heads)
            block_scales = _scales_of(scales, *at)
            k, v = (upcast(x[at], f, q_rows.dtype) for x, f in zip((key, value), block_scales, strict=True))
            states.append(kernel(q_rows[at], k, v, None if mask is None else mask[at], scale, some_empty))
    per_row = ceil_div(kv_heads, block_heads)
    rows = [states[i : i + per_row] for i in range(0, len(states), per_row)]
    out, lse = (torch.cat([torch.cat([state[i] for state in row], dim=1) for row in rows]) for i in (0, 1))
    return out, lse


def _scales_of(
    scales: Scales, sequences: slice = slice(None), heads: slice = slice(None), keys: slice = slice(None)
) -> Scales:
    """Return the scales of a slice of sequences, heads and keys."""
    key, value = (x if x is None else x[heads] if x.dim() == 1 else x[sequences, heads, keys] for x in scales)
    return key, value


def upcast(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the values that keys or values in 8 bits represent. `factor`: a number for each head, or for each key."""
    x = x.to(dtype)
    return x if factor is None else x * over_keys(factor.to(dtype))


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> State:
    """Merge with the state `(0, sink)` of each head. Unlike `merge`, this propagates NaN."""
    merged_lse = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))
    alpha = torch.exp(lse - torch.where(merged_lse == NEG_INF, 0.0, merged_lse))
    return (out * alpha.unsqueeze(-1)).to(out.dtype), merged_lse
