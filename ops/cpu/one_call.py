"""Plain calls that the kernel answers at once, in few lines of Python: more lines would take as long as a short call.

`tatten.ops.cpu.attention` checks and computes all other calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.call import KeyValue
from tatten.ops.cpu import thresholds
from tatten.ops.cpu.flash import attend_in_one_call, splits_of
from tatten.ops.states import State
from tatten.ops.validation import FLOAT_DTYPES


def attend_at_once(query: Tensor, stored: KeyValue, scale: float | None) -> State | None:
    """Return the state over all keys, or over one span that a length or a bool mask leaves to all queries alike.

    The result is None if a check fails or the kernel needs help; nothing raises, and no tensor was written.
    """
    key, value, attn_mask, kv_lens, block_mask, _, key_scale, value_scale, *_ = stored
    shape, kv_shape, dtype = query.shape, key.shape, query.dtype
    if not (
        len(shape) == len(kv_shape) == 4
        and value.shape == kv_shape
        and 0 not in shape
        and 0 not in kv_shape
        and shape[0] == kv_shape[0]
        and shape[1] % kv_shape[1] == 0
        and shape[3] == kv_shape[3]
        and key.dtype is dtype
        and value.dtype is dtype
        and dtype in FLOAT_DTYPES
        and key_scale is None
        and value_scale is None
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    ):
        return None
    batch, q_heads, q_len, head_dim = shape
    kv_heads, length = kv_shape[1:3]
    q_rows = q_heads // kv_heads * q_len
    if dtype.itemsize == 2 and q_rows >= thresholds.CPU.packed_rows:
        return None
    span: tuple[int, int] | None = None
    if attn_mask is None and block_mask is None:
        span = (0, length) if kv_lens is None else _span_of_one_length(kv_lens, batch, length)
    elif attn_mask is not None and block_mask is not None and kv_lens is None:
        span = _span_of_all(attn_mask, block_mask, batch, length)
    if span is None:
        return None
    start, stop = span
    if stop - start < length:
        length = stop - start
        key, value = key[:, :, start:stop], value[:, :, start:stop]
    if splits_of(key, value) > 1:
        return None
    rows_shape: tuple[int, ...] = (batch, kv_heads, q_rows, head_dim)
    if q_rows > q_len and all(batch == 1 or x.stride(0) == kv_heads * x.stride(1) for x in (key, value)):
        # Each (sequence, kv head) is a batch of its own, so that the kernel writes in the order of the output.
        rows_shape, kv_rows_shape = (batch * kv_heads, 1, q_rows, head_dim), (batch * kv_heads, 1, length, head_dim)
        key, value = key.view(kv_rows_shape), value.view(kv_rows_shape)
    scale = head_dim**-0.5 if scale is None else scale
    if q_rows == q_len:
        out, lse = attend_in_one_call(query, key, value, None, scale, False)
        return out.contiguous(), lse.contiguous()
    out, lse = attend_in_one_call(query.reshape(rows_shape), key, value, None, scale, False)
    return out.reshape(batch, q_heads, q_len, head_dim), lse.reshape(batch, q_heads, q_len)


def _span_of_all(attn_mask: Tensor, block_mask: Tensor, batch: int, kv_len: int) -> tuple[int, int] | None:
    """Return the start and the stop of the keys that all queries attend to, if no query attends to others, or None."""
    if (
        attn_mask.dtype is not torch.bool
        or attn_mask.shape not in ((1, 1, 1, kv_len), (batch, 1, 1, kv_len))
        or block_mask.dtype is not torch.int64
        or block_mask.shape not in ((1, 3), (batch, 3))
    ):
        return None
    spans = block_mask.tolist()
    first = spans[0]
    start, stop, full = first
    return (start, stop) if full and start < stop and spans.count(first) == len(spans) else None


def _span_of_one_length(kv_lens: Tensor, batch: int, kv_len: int) -> tuple[int, int] | None:
    """Return the span of the first keys if all sequences have as many of them, or None."""
    if kv_lens.dtype not in (torch.int32, torch.int64) or kv_lens.shape != (batch,) or not kv_lens.is_cpu:
        return None
    lens = kv_lens.tolist()
    return (0, lens[0]) if 0 < lens[0] <= kv_len and lens.count(lens[0]) == batch else None
