"""Attention over pages on a CPU: each sequence's pages are copied, in order, and its queries attend to the copy.

One copy is in memory at a time. PyTorch's kernel takes no table, and a call for each page would merge a state for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tatten.ops.call import Attend, AttentionCall, KeyValue
from tatten.ops.layout import squeeze_broadcast
from tatten.ops.masks import Span
from tatten.ops.pages import as_filled, heads_first, named_pages
from tatten.ops.reach import narrow_mask
from tatten.ops.sizes import ceil_div
from tatten.ops.states import State
from tatten.ops.validation import check_kv_lens


def attend_pages(call: AttentionCall, attend: Attend) -> State:
    """Return the state of each sequence over its pages; `attend` computes the call over a copy. The call is valid."""
    (stored,), spans = call.segments, _spans_in_pages(call)
    page = stored.key.shape[2]
    most = max(ceil_div(span.stop, page) - span.start // page for span in spans)
    room = {name: _room_for(getattr(stored, name), most) for name in ("key", "value", "key_scale", "value_scale")}
    states = [attend(_of_sequence(call, b, span, room)) for b, span in enumerate(spans)]
    out, lse = (torch.cat(x) for x in zip(*states, strict=True))
    return out, lse


def _spans_in_pages(call: AttentionCall) -> list[Span]:
    """Return the keys of each sequence that its length and the window leave, or a block mask where neither counts."""
    (stored,), (batch, _, q_len, _), window = call.segments, call.query.shape, call.window
    lens, page = check_kv_lens(call), stored.key.shape[2]
    if lens is None and window is None and stored.block_mask is not None:
        spans = list(map(Span._make, stored.block_mask.tolist()))
        return spans if len(spans) == batch else spans * batch
    lens = [stored.kv_len] * batch if lens is None else lens
    # The window is narrowed in a call of the sequence's own, which counts from the end of its keys.
    firsts = [0 if window is None else max(0, n - q_len - window + 1) // page * page for n in lens]
    return [Span(first, n, False) for first, n in zip(firsts, lens, strict=True)]


def _room_for(pool: Tensor | None, pages: int) -> Tensor | None:
    """Return memory for pages of a pool; None for scales that are not in pages."""
    if pool is None or pool.dim() == 1:
        return None
    return pool.new_empty((pages, *heads_first(pool).shape[1:]))


def _of_sequence(call: AttentionCall, b: int, span: Span, room: dict[str, Tensor | None]) -> AttentionCall:
    """Return the call of one sequence over a copy of the pages that hold its span of keys; the copy is in `room`."""
    (stored,) = call.segments
    table, page = stored.block_table, stored.key.shape[2]
    assert table is not None
    first = span.start // page
    pages, named = named_pages(table[b, first : ceil_div(span.stop, page)], stored.key.shape[0])
    all_named, keys = bool(named.all()), slice(span.start - first * page, span.stop - first * page)

    def copied(name: str) -> Any:
        x, copy = getattr(stored, name), room[name]
        if copy is None:  # scales of heads, or none
            return x
        copy = copy[: len(pages)]
        torch.index_select(heads_first(x), 0, pages, out=copy)
        if not all_named:
            as_filled(copy)[~named] = 0
        return heads_first(copy.flatten(0, 1)[None, keys])

    mask = None if span.full else stored.attn_mask
    if mask is not None:
        mask = squeeze_broadcast(mask.expand(*mask.shape[:-1], stored.kv_len))
        mask = (mask[b : b + 1] if mask.shape[0] > 1 else mask)[..., span.start : span.stop]
    if not all_named:
        mask = narrow_mask(mask, named.repeat_interleave(page)[None, None, None, keys])
    scales = {name: copied(name) for name in ("key_scale", "value_scale")}
    own = KeyValue(copied("key"), copied("value"), mask, **scales)
    return call._replace(query=call.query[b : b + 1], segments=(own,))
