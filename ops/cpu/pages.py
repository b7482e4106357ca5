"""Attention over pages on a CPU: each sequence's pages are copied, in order, and its queries attend to the copy.

Pages that sequences share are copied once for all of them. One copy is in memory at a time. PyTorch's kernel takes no
table, and a call for each page would merge a state for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tatten.ops.call import Attend, AttentionCall, KeyValue
from tatten.ops.cpu.shared_pages import groups_of, merge_groups
from tatten.ops.layout import squeeze_broadcast
from tatten.ops.page_runs import OWN
from tatten.ops.pages import as_filled, heads_first, named_pages, sharing
from tatten.ops.reach import narrow_mask
from tatten.ops.sizes import ceil_div
from tatten.ops.states import State
from tatten.ops.validation import check_kv_lens


def attend_pages(call: AttentionCall, attend: Attend) -> State:
    """Return the state of each sequence over its pages; `attend` computes the call over a copy. The call is valid."""
    (stored,), (batch, _, q_len, _) = call.segments, call.query.shape
    lens, page = check_kv_lens(call), stored.key.shape[2]
    assert lens is not None
    first_pages = [0 if call.window is None else max(0, n - q_len - call.window + 1) // page for n in lens]
    shared = sharing(call)
    groups = [] if shared is None else groups_of(shared, stored.kv_len)
    if shared is not None:
        first_pages = [min(key, n) // page for key, n in zip(shared[OWN, :batch].tolist(), lens, strict=True)]
    spans = [*zip(first_pages, lens, strict=True), *((x.start // page, x.stop) for x in groups)]
    most = max(ceil_div(n, page) - first for first, n in spans)
    room = {name: _room_for(getattr(stored, name), most) for name in ("key", "value", "key_scale", "value_scale")}
    states = []
    for b in range(batch):
        own = _copied_keys(call, b, first_pages[b], lens[b], room)
        states.append(attend(call._replace(query=call.query[b : b + 1], segments=(own,))))
    out, lse = (torch.cat(x) for x in zip(*states, strict=True))
    if groups:
        copies = ((x, _copied_keys(call, x.leader, x.start // page, x.stop, room)) for x in groups)
        out, lse = merge_groups(call, out, lse, copies, attend)
    return out, lse


def _room_for(pool: Tensor | None, pages: int) -> Tensor | None:
    """Return memory for pages of a pool; None for scales that are not in pages."""
    if pool is None or pool.dim() == 1:
        return None
    return pool.new_empty((pages, *heads_first(pool).shape[1:]))


def _copied_keys(call: AttentionCall, b: int, first: int, length: int, room: dict[str, Tensor | None]) -> KeyValue:
    """Return the keys of sequence b from page `first` on, up to `length`; the copy is in `room`."""
    (stored,) = call.segments
    table, page = stored.block_table, stored.key.shape[2]
    assert table is not None
    pages, named = named_pages(table[b, first : ceil_div(length, page)], stored.key.shape[0])
    all_named, start = bool(named.all()), first * page

    def copied(name: str) -> Any:
        x, copy = getattr(stored, name), room[name]
        if copy is None:  # scales of heads, or none
            return x
        copy = copy[: len(pages)]
        torch.index_select(heads_first(x), 0, pages, out=copy)
        if not all_named:
            as_filled(copy)[~named] = 0
        return heads_first(copy.flatten(0, 1)[None, : length - start])

    mask = stored.attn_mask
    if mask is not None:
        mask = squeeze_broadcast(mask.expand(*mask.shape[:-1], stored.kv_len))
        mask = (mask[b : b + 1] if mask.shape[0] > 1 else mask)[..., start:length]
    if not all_named:
        mask = narrow_mask(mask, named.repeat_interleave(page)[None, None, None, : length - start])
    scales = {name: copied(name) for name in ("key_scale", "value_scale")}
    return KeyValue(copied("key"), copied("value"), mask, **scales)
