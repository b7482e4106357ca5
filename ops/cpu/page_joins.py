"""Short sequences over pages on a CPU: copy the pages of several at once, and attend to all of them in one call.

A call costs as much as reading several short sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cpu import thresholds
from tatten.ops.cpu.page_copies import Room, copy_sequences, page_bytes
from tatten.ops.layout import squeeze_broadcast
from tatten.ops.masks import Span
from tatten.ops.pages import named_pages


class Join(NamedTuple):
    """Sequences that attend in one call, or a sequence alone.

    Attributes:
        sequences: their indices.
        masked: whether the call has the mask. Without it, lengths and the window exclude all keys outside of the spans.
    """

    sequences: list[int]
    masked: bool = False

    def padded(self, n_pages: Sequence[int]) -> int:
        """Return the number of pages of the call: each sequence counts as the one with most pages, of `n_pages`."""
        return len(self.sequences) * max(n_pages[b] for b in self.sequences)


def gains(q_heads: int, kv_heads: int, q_len: int) -> bool:
    """Return True if sequences gain by a joint call. Calls of many queries compute more than they read."""
    return q_heads // kv_heads * q_len < thresholds.CPU.packed_rows


def joins_of(call: AttentionCall, spans: list[Span], most_pages: int) -> list[Join]:
    """Put sequences that have keys into joins: short ones of similar length together.

    A join without the mask has spans that begin with a page, or with a window. The columns of a mask are those of keys
    from the first page on, so the spans of a masked join begin in that page.

    Args:
        call: the call.
        spans: the keys of each sequence.
        most_pages: the most pages of a join of two sequences or more, padding included.
    """
    (stored,), page = call.segments, call.segments[0].key.shape[2]
    # One call at least gives the state its dtype.
    with_keys = [b for b, span in enumerate(spans) if span.start < span.stop] or [0]
    _, q_heads, q_len, _ = call.query.shape
    if call.latent or call.batch_invariant or not gains(q_heads, stored.key.shape[1], q_len):
        return [Join([b]) for b in with_keys]
    most_keys = stored.kv_len if call.softcap is None else thresholds.CPU.capped_bytes * page // page_bytes(stored)
    plain, masked, alone = [], [], []
    for b in with_keys:
        span, in_first_page = spans[b], spans[b].start < page
        needs_mask = stored.attn_mask is not None and not (span.full and span.start % page == 0)
        if span.stop - span.start > most_keys:
            alone.append(b)
        elif not needs_mask and (call.window is not None or span.start % page == 0):
            plain.append(b)
        elif needs_mask and in_first_page:
            masked.append(b)
        else:
            alone.append(b)
    joins = [Join([b]) for b in alone]
    for sequences, is_masked in ((plain, False), (masked, True)):
        joins += [Join(x, is_masked) for x in _similar(sequences, spans, stored, most_pages)]
    return joins


def _similar(sequences: list[int], spans: list[Span], stored: KeyValue, most_pages: int) -> Iterator[list[int]]:
    """Divide sequences into lists of similar length, in which keys of no span cost less than calls of their own."""
    page, bytes_of_key = stored.key.shape[2], page_bytes(stored) // stored.key.shape[2]
    together: list[int] = []
    used = 0
    for b in sorted(sequences, key=lambda b: _end(spans[b], page)):
        n, used = len(together) + 1, used + spans[b].stop - spans[b].start
        wasted = n * _end(spans[b], page) - used
        if together and (
            n * spans[b].n_pages(page) > most_pages or wasted * bytes_of_key > n * thresholds.CPU.run_bytes
        ):
            yield together
            together, used = [], spans[b].stop - spans[b].start
        together.append(b)
    if together:
        yield together


def _end(span: Span, page: int) -> int:
    """Return the end of a span, counted from the beginning of its first page."""
    return span.stop - span.start // page * page


def call_of_join(call: AttentionCall, join: Join, spans: list[Span], room: Room) -> AttentionCall | None:
    """Return the call over copies of the pages of a join, without sinks, or None if an entry names no page.

    The copies are valid until the next one.
    """
    (stored,), page = call.segments, call.segments[0].key.shape[2]
    table = stored.block_table
    assert table is not None
    joined = [spans[b] for b in join.sequences]
    rows, firsts = torch.tensor(join.sequences), torch.tensor([span.start // page for span in joined])[:, None]
    counts = torch.tensor([span.n_pages(page) for span in joined])[:, None]
    columns = torch.arange(int(counts.max()))
    # A sequence's first page stands for pages beyond its own. It seldom has NaN in unused memory, with which
    # `attend_keys` computes each sequence again.
    entries = table[rows[:, None], firsts + torch.where(columns < counts, columns, 0)]
    pages, named = named_pages(entries, stored.key.shape[0])
    if not named.all():
        return None
    copies, mask = copy_sequences(stored, pages, room), stored.attn_mask
    if mask is not None and join.masked:
        mask = squeeze_broadcast(mask.expand(*mask.shape[:-1], stored.kv_len))[..., : copies.key.shape[2]]
        copies = copies._replace(attn_mask=mask[rows] if mask.shape[0] > 1 else mask)
    lens = torch.tensor([_end(span, page) for span in joined])
    return call._replace(query=call.query[rows], segments=(copies._replace(kv_lens=lens),), sinks=None)
