"""Copies of pages on a CPU: heads first, as PyTorch's kernel is fastest, in memory that the next copy uses again."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.call import KeyValue
from tatten.ops.pages import as_fillable, in_order

Room = dict[Tensor, Tensor]  # memory for copies of pages, by pool


def page_bytes(stored: KeyValue) -> int:
    """Return the bytes of the keys and values in a page."""
    _, kv_heads, page, head_dim = stored.key.shape
    return page * kv_heads * (head_dim + stored.value.shape[3]) * stored.key.element_size()


def room_for(stored: KeyValue, pages: int) -> Room:
    """Return memory for this number of pages of each pool."""
    operands = stored.key, stored.value, stored.key_scale, stored.value_scale, stored.rope
    pools = [x for x in operands if x is not None and x.dim() > 1]  # not scales of heads
    return {x: x.new_empty((x.shape[1], pages, *x.shape[2:])) for x in pools}


def _copy(pool: Tensor, pages: Tensor, room: Room) -> Tensor:
    """Copy pages of a pool `[pages, kv_heads, page, ...]` to `room`, as `[kv_heads, len(pages), page, ...]`."""
    copy = room[pool][:, : len(pages)]
    torch.index_select(pool, 0, pages, out=copy.transpose(0, 1))
    return copy


def copy_pages(stored: KeyValue, pages: Tensor, named: Tensor, keys: slice, room: Room) -> KeyValue:
    """Copy pages to `room`, and return some of their keys, without a mask. It is valid until the next copy.

    Args:
        stored: keys in pages.
        pages, named: the pages, and which entries name one, as `named_pages` returns them. Keys of other entries are 0.
        keys: the keys to return, counted from the first one of `pages`.
        room: memory for at least as many pages.
    """
    all_named = bool(named.all())

    def copied(pool: Tensor) -> Tensor:
        copy = _copy(pool, pages, room)
        if not all_named:
            as_fillable(copy)[:, ~named] = 0
        return copy.flatten(1, 2)[None, :, keys]

    return in_order(stored, copied)._replace(attn_mask=None, kv_lens=None)


def copy_sequences(stored: KeyValue, pages: Tensor, room: Room) -> KeyValue:
    """Copy the pages of several sequences to `room`, without a mask. The copy is valid until the next one.

    Args:
        stored: keys in pages.
        pages: int64 `[sequences, n]`, all of them in the pool.
        room: memory for at least as many pages.
    """

    def copied(pool: Tensor) -> Tensor:
        copy = _copy(pool, pages.flatten(), room)
        return copy.view(copy.shape[0], *pages.shape, *copy.shape[2:]).flatten(2, 3).transpose(0, 1)

    return in_order(stored, copied)._replace(attn_mask=None, kv_lens=None)


def keys_between(stored: KeyValue, start: int, stop: int) -> KeyValue:
    """Return keys `start` to `stop - 1` of keys in order, with their columns of the mask and their scales."""

    def between(x: Tensor | None, dim: int) -> Tensor | None:
        return x if x is None or x.dim() == 1 else x.narrow(dim, start, stop - start)

    key, value = stored.key.narrow(2, start, stop - start), stored.value.narrow(2, start, stop - start)
    mask, scales = between(stored.attn_mask, 3), (between(stored.key_scale, 2), between(stored.value_scale, 2))
    return KeyValue(key, value, mask, key_scale=scales[0], value_scale=scales[1])
