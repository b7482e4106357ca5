"""Attention over pages on a CPU: each sequence's pages are copied, in order, and its queries attend to the copy.

One copy is in memory at a time. PyTorch's kernel takes no table, and a call for each page would merge a state for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.call import Attend, AttentionCall
from tatten.ops.layout import squeeze_broadcast
from tatten.ops.pages import as_filled, heads_first, in_order, named_pages
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
    most = max(ceil_div(n, page) - first for n, first in zip(lens, first_pages, strict=True))
    pools = [x for x in (*stored[:2], stored.key_scale, stored.value_scale, stored.rope) if x is not None]
    room = {x: x.new_empty((most, *heads_first(x).shape[1:])) for x in pools if x.dim() > 1}
    states = [attend(_of_sequence(call, b, first_pages[b], lens[b], room)) for b in range(batch)]
    out, lse = (torch.cat(x) for x in zip(*states, strict=True))
    return out, lse


def _of_sequence(call: AttentionCall, b: int, first: int, length: int, room: dict[Tensor, Tensor]) -> AttentionCall:
    """Return the call of one sequence over a copy of its pages from page `first` on; the copy is in `room`."""
    (stored,) = call.segments
    table, page = stored.block_table, stored.key.shape[2]
    assert table is not None
    pages, named = named_pages(table[b, first : ceil_div(length, page)], stored.key.shape[0])
    all_named, start = bool(named.all()), first * page

    def copied(x: Tensor) -> Tensor:
        copy = room[x][: len(pages)]
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
    own = in_order(stored, copied)._replace(attn_mask=mask, kv_lens=None)
    rope = None if call.query_rope is None else call.query_rope[b : b + 1]
    return call._replace(query=call.query[b : b + 1], query_rope=rope, segments=(own,))
