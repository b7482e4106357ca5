"""What a mask leaves over, found once for all layers that share it."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.packing import squeeze_broadcast
from tatten.ops.states import NEG_INF


def mask_spans(attn_mask: Tensor, batch: int | None = None) -> Tensor:
    """`tatten::mask_spans`: for each row of the KV the span of keys that any of its queries attends to.

    Plain PyTorch, which Inductor fuses into a kernel or two.

    Args:
        attn_mask: bool or additive, `[sequences or 1, heads or 1, q_length or 1, kv_length]`, or of lower rank.
        batch: the batch of the KV, where sequences share its rows: each row then gets the span of all that read it.
            Default: the number of sequences.

    Returns:
        int64 `[batch or 1, 3]`: the first key, the place after the last one (both 0 if there is none), and whether
        every query attends to all keys between them with no bias, so that the mask need not be looked at again.
    """
    rows = attn_mask.shape[0] if attn_mask.dim() == 4 else 1
    mask = squeeze_broadcast(attn_mask)
    if batch is not None and mask.shape[0] not in (1, batch):
        mask = mask.unflatten(0, (batch, -1)).flatten(1, 2)
    if batch is not None and rows != 1:
        rows = batch
    kv_len = mask.shape[3]
    if kv_len == 0:
        return attn_mask.new_zeros((rows, 3), dtype=torch.int64)
    used = mask if mask.dtype == torch.bool else mask != NEG_INF
    places = torch.arange(kv_len, device=mask.device)
    start = torch.where(used, places, kv_len).amin(dim=(1, 2, 3))
    stop = torch.where(used, places + 1, 0).amax(dim=(1, 2, 3))
    start = torch.minimum(start, stop)
    plain = used if mask.dtype == torch.bool else mask == 0
    full = plain.sum(dim=(1, 2, 3)) == (stop - start) * (mask.shape[1] * mask.shape[2])
    return torch.stack((start, stop, full.to(torch.int64)), dim=1).expand(rows, -1).contiguous()
