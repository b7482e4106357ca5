"""The keys that a mask leaves, found in the graph: for `tatten.ops.decompositions`.

Eager mode (`tatten.ops.cpu.attention`) looks at the mask and decides; here the graph does. It reads two numbers, the
begin and the end of the keys that any sequence uses, and narrows keys and values to them, as views.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tatten.ops.call import KeyValue
from tatten.ops.cpu.attention import Scales
from tatten.ops.layout import fold_mask, squeeze_broadcast
from tatten.ops.masks import key_spans


@dataclass(frozen=True)
class UsedKeys:
    """Keys and values `[rows, kv_heads, length, d]` of the span that any row uses, with their mask.

    Attributes:
        inside: bool `[rows, length]`, or `[1, length]`: True for keys in the span of each row; None without a mask.
        scales: the scales of keys and of values in 8 bits, for each head or each key.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    inside: Tensor | None = None
    scales: Scales = (None, None)

    @property
    def without_poison(self) -> UsedKeys:
        """A copy with 0 outside the span of each row, where anything may be."""
        if self.inside is None:
            return self
        outside = ~self.inside[:, None, :, None]
        return UsedKeys(self.key.masked_fill(outside, 0.0), self.value.masked_fill(outside, 0.0), self.mask)


def used_in_blocks(query: Tensor, stored: KeyValue, least: int = 1) -> UsedKeys:
    """Return the used keys, at least `least` of them, of a segment whose rows serve aligned blocks of sequences.

    The mask is folded like `query`.
    """
    key, value, mask, (kv_batch, _, kv_len, _) = stored.key, stored.value, stored.attn_mask, stored.key.shape
    scales = stored.key_scale, stored.value_scale
    if mask is None or kv_len == 0:
        return UsedKeys(key, value, scales=scales)
    mask = fold_mask(mask.expand(*mask.shape[:-1], kv_len), query, kv_batch)
    spans = key_spans(mask) if stored.block_mask is None else stored.block_mask
    return _narrow(key, value, mask, spans, least, scales)


def used_by_rows(stored: KeyValue, rows: Tensor, least: int = 1) -> UsedKeys:
    """Return the used keys, at least `least` of them, of a segment in which each sequence reads any row.

    They are copied for each sequence.
    """
    key, value, mask, block_mask = stored.key, stored.value, stored.attn_mask, stored.block_mask
    kv_batch, kv_len = key.shape[0], key.shape[2]
    used = UsedKeys(key, value)
    if mask is not None and kv_len != 0:
        mask = mask.expand(*mask.shape[:-1], kv_len)
        if block_mask is None:
            block_mask = torch.ops.tatten.block_mask.default(mask, kv_batch, rows)
        mask = squeeze_broadcast(mask)
        if mask.shape[0] not in (1, rows.shape[0]):
            mask = mask.index_select(0, rows)
        spans = block_mask if block_mask.shape[0] == 1 else block_mask.index_select(0, rows)
        used = _narrow(key, value, mask, spans, least)
    return UsedKeys(used.key.index_select(0, rows), used.value.index_select(0, rows), used.mask, used.inside)


def _narrow(
    key: Tensor, value: Tensor, mask: Tensor, spans: Tensor, least: int, scales: Scales = (None, None)
) -> UsedKeys:
    """Narrow to the keys from the first to the last that any row of `spans`, in the form of `key_spans`, leaves.

    If there are fewer than `least`, others that the mask excludes are added.
    """
    kv_len = key.shape[2]
    start, stop = spans[:, 0], spans[:, 1]
    places = torch.arange(kv_len)
    if kv_len >= least:
        first = torch.where(start == stop, kv_len, start).amin().clamp(max=kv_len - least)
        begin, length = (cast(int, x.item()) for x in (first, (stop.amax() - first).clamp(min=least)))
        torch._check(begin >= 0)
        torch._check(length >= least)
        torch._check(begin <= kv_len)  # PyTorch can't derive it from the next if kv_len is dynamic
        torch._check(begin + length <= kv_len)
        key, value, mask = key.narrow(2, begin, length), value.narrow(2, begin, length), mask.narrow(3, begin, length)
        places = places.narrow(0, begin, length)
        key_scale, value_scale = (x if x is None or x.dim() == 1 else x.narrow(2, begin, length) for x in scales)
        scales = key_scale, value_scale
        torch._check(key.shape[2] != 0)  # PyTorch can't derive it if kv_len is dynamic
    return UsedKeys(key, value, mask, (places >= start[:, None]) & (places < stop[:, None]), scales)
