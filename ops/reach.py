"""The keys that lengths and a sliding window allow each query: as a mask, and as views of segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tatten.ops.states import NEG_INF

# The key, value, mask and block mask of a segment.
MaskedSegment = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def mask_of_reach(lens: Tensor, q_len: int, kv_len: int, window: int | None) -> Tensor:
    """Return the keys that length and window allow each query: bool `[sequences, 1, 1 or q_len, kv_len]`."""
    stop, keys = lens[:, None, None, None], torch.arange(kv_len, device=lens.device)
    if window is None:
        return keys < stop
    behind = stop - q_len + torch.arange(q_len, device=lens.device)[:, None] - keys  # from the query's own place
    return (behind >= 0) & (behind < window)


def narrow_mask(mask: Tensor, reach: Tensor) -> Tensor:
    """Return the part of a mask, bool or additive, that lies within reach."""
    return mask & reach if mask.dtype == torch.bool else torch.where(reach, mask, NEG_INF)


def masks_of_window(
    window: int, q_len: int, keys: Sequence[Tensor], attn_masks: Sequence[Tensor | None]
) -> Iterator[Tensor]:
    """Narrow the mask of each segment to a window over all segments together. The queries are at its end."""
    left = sum(key.shape[2] for key in keys)
    for key, mask in zip(keys, attn_masks, strict=True):
        # `left` counts the keys of later segments too: they only move the queries away.
        reach = mask_of_reach(torch.full((1,), left, device=key.device), q_len, key.shape[2], window)
        yield reach if mask is None else narrow_mask(mask, reach)
        left -= key.shape[2]


def segments_in_window(window: int, q_len: int, segments: Sequence[MaskedSegment]) -> Iterator[MaskedSegment]:
    """Narrow segments to a window over all of them together. The queries are at its end.

    Keys in no query's window are left out, by views. A mask narrows the others where queries differ. The block mask of
    a narrowed segment no longer holds, so it becomes None.
    """
    left = sum(key.shape[2] for key, *_ in segments)
    for key, value, mask, block_mask in segments:
        kv_len = key.shape[2]
        first = min(kv_len, max(0, left - q_len - window + 1))
        rest, stop = kv_len - first, left - first
        if first > 0:
            key, value, block_mask = key.narrow(2, first, rest), value.narrow(2, first, rest), None
            mask = None if mask is None else mask.expand(*mask.shape[:-1], kv_len).narrow(-1, first, rest)
        if rest > 0 and (stop > window or stop - q_len < rest - 1):
            reach = mask_of_reach(torch.full((1,), stop, device=key.device), q_len, rest, window)
            mask, block_mask = reach if mask is None else narrow_mask(mask, reach), None
        yield key, value, mask, block_mask
        left -= kv_len
