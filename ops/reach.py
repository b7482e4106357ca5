"""The keys that lengths and a sliding window allow each query: as a mask, and as views of segments."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall
from tatten.ops.states import NEG_INF


def mask_of_reach(lens: Tensor, q_len: int, kv_len: int, window: int | None) -> Tensor:
    """Return the keys that length and window allow each query: bool `[sequences, 1, 1 or q_len, kv_len]`."""
    stop, keys = lens[:, None, None, None], torch.arange(kv_len, device=lens.device)
    if window is None:
        return keys < stop
    behind = stop - q_len + torch.arange(q_len, device=lens.device)[:, None] - keys  # from the query's own place
    return (behind >= 0) & (behind < window)


def narrow_mask(mask: Tensor | None, reach: Tensor) -> Tensor:
    """Return the part of a mask, bool or additive, that lies within reach; None stands for a mask that allows all."""
    if mask is None:
        return reach
    return mask & reach if mask.dtype == torch.bool else torch.where(reach, mask, NEG_INF)


def with_masks_of_window(call: AttentionCall) -> AttentionCall:
    """Narrow the mask of each segment to a window over all segments together. The queries are at its end.

    Block masks no longer hold, so they become None.
    """
    if call.window is None:
        return call
    left, segments = sum(x.key.shape[2] for x in call.segments), []
    for x in call.segments:
        # `left` counts this segment's keys and those after it: the queries are at their end.
        kv_len = x.key.shape[2]
        reach = mask_of_reach(torch.full((1,), left, device=x.key.device), call.query.shape[2], kv_len, call.window)
        segments.append(x._replace(attn_mask=narrow_mask(x.attn_mask, reach), block_mask=None))
        left -= kv_len
    return call._replace(segments=tuple(segments), window=None)


def within_window(call: AttentionCall) -> AttentionCall:
    """Narrow segments to a window over all of them together. The queries are at its end.

    Keys in no query's window are left out, by views. A mask narrows the others where queries differ. The block mask of
    a narrowed segment no longer holds, so it becomes None.
    """
    window, q_len = call.window, call.query.shape[2]
    if window is None:
        return call
    left, segments = sum(x.key.shape[2] for x in call.segments), []
    for x in call.segments:
        kv_len, mask = x.key.shape[2], x.attn_mask
        first = min(kv_len, max(0, left - q_len - window + 1))
        rest, stop = kv_len - first, left - first
        if first > 0:
            mask = None if mask is None else mask.expand(*mask.shape[:-1], kv_len).narrow(-1, first, rest)
            key, value = x.key.narrow(2, first, rest), x.value.narrow(2, first, rest)
            x = x._replace(key=key, value=value, attn_mask=mask, block_mask=None)
        if rest > 0 and (stop > window or stop - q_len < rest - 1):
            reach = mask_of_reach(torch.full((1,), stop, device=x.key.device), q_len, rest, window)
            x = x._replace(attn_mask=narrow_mask(mask, reach), block_mask=None)
        segments.append(x)
        left -= kv_len
    return call._replace(segments=tuple(segments), window=None)
