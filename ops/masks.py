"""What a mask leaves over, found once for all layers that share it."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.layout import squeeze_broadcast
from tatten.ops.sizes import ceil_div
from tatten.ops.states import NEG_INF
from tatten.ops.validation import BLOCK_KEYS

# A key with a bias as low as this has a weight of exactly 0 beside any with a higher one: near the end of float32 the
# next bias is 1e31 above, and scores do not differ by that. Models write padding as `finfo.min` of float32 and
# bfloat16; -65504, that of float16, is no such bound.
EXCLUDING_BIAS = torch.finfo(torch.float32).min / 2


def used_and_plain(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which keys count for any query, and which do for all of them, with no bias.

    Queries whose keys all have a bias of at most `EXCLUDING_BIAS` average them: then those keys count.

    Args:
        mask: bool or additive, `[rows, queries, kv_length]`.

    Returns:
        Two bool tensors `[rows, kv_length]`.
    """
    if mask.dtype == torch.bool:
        return (mask[:, 0], mask[:, 0]) if mask.shape[1] == 1 else (mask.any(dim=1), mask.all(dim=1))
    above = ~(mask <= EXCLUDING_BIAS)  # so that NaN counts
    each_has_one = above.any(dim=2).all(dim=1)
    used = torch.where(each_has_one[:, None, None], above, mask != NEG_INF)
    return used.any(dim=1), (mask == 0).all(dim=1)


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
    used, plain = used_and_plain(mask.flatten(1, 2))
    places = torch.arange(kv_len, device=mask.device)
    start = torch.where(used, places, kv_len).amin(dim=1)
    stop = torch.where(used, places + 1, 0).amax(dim=1)
    start = torch.minimum(start, stop)
    full = plain.sum(dim=1) == stop - start
    return torch.stack((start, stop, full.to(torch.int64)), dim=1).expand(rows, -1).contiguous()


def mask_rows(attn_mask: Tensor, kv_batch: int) -> int:
    """How many rows `mask_blocks` finds: that of the shape, so that it is known before the mask is."""
    return 1 if attn_mask.dim() < 4 or attn_mask.shape[0] == 1 else kv_batch


def mask_blocks(attn_mask: Tensor, batch: int, kv_batch: int, q_len: int) -> Tensor:
    """`tatten::mask_blocks`: for each row of the KV the blocks of 64 keys of which any of its queries attends to some.

    Plain PyTorch; `tatten.ops.cuda.block_mask` does the same on a GPU, but lists keys at `EXCLUDING_BIAS` where a mask
    has rows of its own for more than 63 queries of one row of the KV.

    Args:
        attn_mask: bool or additive, `[batch or kv_batch or 1, heads or 1, q_length or 1, kv_length]`, or of lower rank.
        batch: the number of sequences.
        kv_batch: the batch of the KV, where sequences share its rows; divides `batch`.
        q_len: the number of queries of a sequence.

    Returns:
        int64 `[kv_batch or 1, n_blocks + 1, 2]`: first how many blocks are not empty, and the length of the longest run
        of full ones, that is, where all queries attend to all of 64 keys, with no bias. Then for each block its number
        and its keys as bits: those of the run, the others that are not empty, the empty ones, each in order.
    """
    rows = mask_rows(attn_mask, kv_batch)
    mask = squeeze_broadcast(attn_mask)
    mask = mask.unflatten(0, (kv_batch, -1)) if mask.shape[0] == batch else mask.unsqueeze(1)
    used, plain = (x.expand(rows, -1) for x in used_and_plain(mask.flatten(1, 3)))
    n_blocks = ceil_div(used.shape[1], BLOCK_KEYS)
    padding = 0, n_blocks * BLOCK_KEYS - used.shape[1]
    used, plain = (torch.nn.functional.pad(x, padding).unflatten(1, (n_blocks, -1)) for x in (used, plain))
    words = (used.to(torch.int64) << torch.arange(BLOCK_KEYS, device=used.device)).sum(dim=2)
    some, full = words != 0, plain.all(dim=2)
    numbers = torch.arange(n_blocks, device=used.device)
    run_lengths = numbers - torch.where(full, -1, numbers).cummax(dim=1).values  # of the run that ends at each block
    run, end = run_lengths.amax(dim=1, keepdim=True), run_lengths.argmax(dim=1, keepdim=True)
    in_run = (numbers > end - run) & (numbers <= end)
    order = torch.argsort(some.to(torch.int8) + in_run.to(torch.int8), dim=1, descending=True, stable=True)
    listed = attn_mask.new_zeros((rows, n_blocks + 1, 2), dtype=torch.int64)
    listed[:, 0] = torch.cat((some.sum(dim=1, keepdim=True), run), dim=1)
    listed[:, 1:, 0] = order
    listed[:, 1:, 1] = words.gather(1, order)
    return listed
