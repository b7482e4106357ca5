"""Short sequences over pages on a CPU: copy the pages of several at once, and attend to all of them in one call.

A call has a cost of its own, in which the kernel could read the keys of several short sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tatten.ops.call import AttentionCall
from tatten.ops.cpu import thresholds
from tatten.ops.cpu.page_copies import Room, copy_batch
from tatten.ops.layout import squeeze_broadcast
from tatten.ops.masks import Span
from tatten.ops.pages import named_pages
from tatten.ops.sizes import ceil_div


def n_pages_of(span: Span, page: int) -> int:
    """Return the number of pages that hold a span of keys."""
    return ceil_div(span.stop, page) - span.start // page


def batches_of(
    sequences: Sequence[int], n_pages: Sequence[int], most_pages: int, page_bytes: int
) -> Iterator[list[int]]:
    """Put sequences of similar length into batches. A batch is padded to its longest sequence.

    Args:
        sequences: the sequences.
        n_pages: the number of pages of each sequence of the call.
        most_pages: the most pages of a batch of two sequences or more, padding included.
        page_bytes: the bytes of a page of keys and values.
    """
    batch: list[int] = []
    used = 0
    for b in sorted(sequences, key=n_pages.__getitem__):
        padded = (len(batch) + 1) * n_pages[b]
        wasted = (padded - used - n_pages[b]) * page_bytes
        if batch and (padded > most_pages or wasted > (len(batch) + 1) * thresholds.CPU.run_bytes):
            yield batch
            batch, used = [], 0
        batch.append(b)
        used += n_pages[b]
    if batch:
        yield batch


def call_of_batch(call: AttentionCall, batch: list[int], spans: list[Span], room: Room) -> AttentionCall | None:
    """Return the call over copies of the pages of a batch, without sinks, or None if an entry names no page.

    The copies are valid until the next one. With a mask that does not leave all keys of the spans, all spans begin in
    the first page.
    """
    (stored,), page = call.segments, call.segments[0].key.shape[2]
    table = stored.block_table
    assert table is not None
    firsts = [spans[b].start // page for b in batch]
    counts = torch.tensor([n_pages_of(spans[b], page) for b in batch])[:, None]
    rows, first_pages = torch.tensor(batch), torch.tensor(firsts)[:, None]
    columns = torch.arange(int(counts.max()))
    # A sequence's first page stands for pages beyond its own: it is in the cache, and seldom has NaN in unused memory.
    entries = table[rows[:, None], first_pages + torch.where(columns < counts, columns, 0)]
    pages, named = named_pages(entries, stored.key.shape[0])
    if not named.all():
        return None
    lens = torch.tensor([spans[b].stop - first * page for b, first in zip(batch, firsts, strict=True)])
    copies = copy_batch(stored, pages, room)
    mask = stored.attn_mask
    if mask is not None and not all(spans[b].full for b in batch):
        mask = squeeze_broadcast(mask.expand(*mask.shape[:-1], stored.kv_len))[..., : copies.key.shape[2]]
        copies = copies._replace(attn_mask=mask[rows] if mask.shape[0] > 1 else mask)
    return call._replace(query=call.query[rows], segments=(copies._replace(kv_lens=lens),), sinks=None)
