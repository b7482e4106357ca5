"""Attention over pages on a CPU: copy a tile of a sequence's keys at a time, heads first, and attend to it.

PyTorch's kernel takes no table. The copy of a tile stays in the cache until the kernel has read it, and the kernel is
fastest where the keys of a head lie side by side. Pages that sequences share are copied once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tatten.ops.call import Attend, AttentionCall, KeyValue
from tatten.ops.cpu import thresholds
from tatten.ops.cpu.page_copies import Room, copy_pages, page_bytes, room_for
from tatten.ops.cpu.page_joins import call_of_join, joins_of
from tatten.ops.cpu.shared_pages import Group, choose_groups, merge_groups
from tatten.ops.layout import squeeze_broadcast
from tatten.ops.masks import Span
from tatten.ops.pages import named_pages, sharing
from tatten.ops.reach import mask_of_reach, narrow_mask
from tatten.ops.sizes import ceil_div
from tatten.ops.states import NEG_INF, State, combine_partials
from tatten.ops.validation import check_kv_lens


def attend_pages(call: AttentionCall, attend: Attend) -> State:
    """Return the state of each sequence over its pages, without sinks; `attend` computes the calls over copies.

    The call is valid.
    """
    (stored,), (spans, groups) = call.segments, _own_parts(call, _spans(call))
    page, group_spans = stored.key.shape[2], [Span(x.start, x.stop, full=False) for x in groups]
    n_pages, most_pages = [span.n_pages(page) for span in spans], _pages_in_the_cache(stored)
    tile = max(n_pages) if _at_once(call) else min(max(n_pages), most_pages)
    joins = joins_of(call, spans, most_pages)
    padded = [join.padded(n_pages) for join in joins if len(join.sequences) > 1]
    room = room_for(stored, max([tile, *padded, *(span.n_pages(page) for span in group_spans)]))
    states: list[State] = []
    for join in joins:
        joint = call_of_join(call, join, spans, room) if len(join.sequences) > 1 else None
        if joint is not None:
            states.append(attend(joint))
            continue
        for b in join.sequences:
            sequence_call = _sequence(call, b)
            parts = [attend(sequence_call._replace(segments=(keys,))) for keys in _tiles(call, b, spans[b], tile, room)]
            states.append(combine_partials(*zip(*parts, strict=True)))
    out, lse = (torch.cat(x) for x in zip(*states, strict=True))
    sequences = [b for join in joins for b in join.sequences]
    if sequences != list(range(len(spans))):
        out, lse = _spread(out, lse, sequences, len(spans))
    if not groups:
        return out, lse
    shared_keys = (
        (x, next(_tiles(call, x.leader, span, span.n_pages(page), room)))
        for x, span in zip(groups, group_spans, strict=True)
    )
    return merge_groups(call, out, lse, shared_keys, attend)


def _own_parts(call: AttentionCall, spans: list[Span]) -> tuple[list[Span], list[Group]]:
    """Return the span of each sequence's own part, and the groups of sequences that share the keys before."""
    shared = sharing(call)
    if shared is None:
        return spans, []
    groups, own_starts = choose_groups(shared, [span.stop for span in spans], call.segments[0])
    own = [span._replace(start=min(start, span.stop)) for span, start in zip(spans, own_starts, strict=True)]
    return own, groups


def _spread(out: Tensor, lse: Tensor, sequences: list[int], batch: int) -> State:
    """Return the state of `batch` sequences from that of `sequences`. The others have no keys."""
    rows = torch.tensor(sequences)
    all_out, all_lse = out.new_zeros(batch, *out.shape[1:]), lse.new_full((batch, *lse.shape[1:]), NEG_INF)
    return all_out.index_copy_(0, rows, out), all_lse.index_copy_(0, rows, lse)


def _spans(call: AttentionCall) -> list[Span]:
    """Return the keys of each sequence that its length and the window leave; without both, those of the block mask."""
    (stored,), (batch, _, q_len, _), window = call.segments, call.query.shape, call.window
    lens = check_kv_lens(call)
    if lens is None and window is None and stored.block_mask is not None:
        spans = [Span(start, stop, bool(full)) for start, stop, full in stored.block_mask.tolist()]
        return spans if len(spans) == batch else spans * batch
    lens = [stored.kv_len] * batch if lens is None else lens
    starts = [0 if window is None else max(0, n - q_len - window + 1) for n in lens]
    return [Span(start, n, full=False) for start, n in zip(starts, lens, strict=True)]


def _sequence(call: AttentionCall, b: int) -> AttentionCall:
    """Return the call with the queries of one sequence, without window and sinks: masks stand for the window."""
    rope = None if call.query_rope is None else call.query_rope[b : b + 1]
    return call._replace(query=call.query[b : b + 1], query_rope=rope, window=None, sinks=None)


def _at_once(call: AttentionCall) -> bool:
    """Return True if all keys of a sequence must be one tile.

    With a large bias, merging tiles by their lse is not exact. With `batch_invariant`, no sum may depend on the number
    of threads, as the size of tiles does. The products with latents take blocks that stay in the cache anyway.
    """
    mask = call.segments[0].attn_mask
    return call.latent or call.batch_invariant or (mask is not None and mask.dtype != torch.bool)


def _pages_in_the_cache(stored: KeyValue) -> int:
    return max(1, thresholds.CPU.block_bytes * torch.get_num_threads() // page_bytes(stored))


def _tiles(call: AttentionCall, b: int, span: Span, most: int, room: Room) -> Iterator[KeyValue]:
    """Cut the keys of a sequence into tiles of about equal size, of at most `most` pages each, copied to `room`.

    A tile is valid until the next one.
    """
    (stored,), page = call.segments, call.segments[0].key.shape[2]
    table, first = stored.block_table, span.start // page
    assert table is not None
    pages, named = named_pages(table[b, first : ceil_div(span.stop, page)], stored.key.shape[0])
    mask = _mask_of(call, b, span, None if named.all() else named.repeat_interleave(page))
    size = ceil_div(len(pages), ceil_div(len(pages), most)) if len(pages) else 1
    for i in range(0, max(1, len(pages)), size):
        tile = slice(i, i + size)
        begin = (first + i) * page  # the first key of the tile's first page
        start, stop = max(begin, span.start), min(begin + size * page, span.stop)
        keys = copy_pages(stored, pages[tile], named[tile], slice(start - begin, stop - begin), room)
        yield keys._replace(attn_mask=None if mask is None else mask[..., start - span.start : stop - span.start])


def _mask_of(call: AttentionCall, b: int, span: Span, named: Tensor | None) -> Tensor | None:
    """Return the mask of a sequence for its span of keys, from the mask of the call, the window and the named pages.

    `named`: bool, for each key of the pages that hold the span; None if all are named.
    """
    (stored,), q_len, page = call.segments, call.query.shape[2], call.segments[0].key.shape[2]
    n, mask = span.stop - span.start, None if span.full else stored.attn_mask
    if mask is not None:
        mask = squeeze_broadcast(mask.expand(*mask.shape[:-1], stored.kv_len))
        mask = (mask[b : b + 1] if mask.shape[0] > 1 else mask)[..., span.start : span.stop]
    if named is not None:
        mask = narrow_mask(mask, named[None, None, None, span.start % page :][..., :n])
    if call.window is not None and q_len > 1:
        mask = narrow_mask(mask, mask_of_reach(torch.tensor([n]), q_len, n, call.window))
    return mask
