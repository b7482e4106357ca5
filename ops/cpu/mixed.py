"""Mixed batches on a CPU: a step of the sequences with equally few queries, then each other sequence over its pages.

More than `FEW` queries without a window take PyTorch's kernel twice: once over the keys before the new tokens, which
all of them see, and once over the new tokens, with its causal flag. Other sequences go through blocks of queries, so
that no mask has all queries and all keys.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tatten.ops.call import DECODE, AttentionCall, KeyValue
from tatten.ops.cpu.attention import decode_attention, merge_sinks, upcast
from tatten.ops.cpu.page_copies import Room, copy_pages, keys_between, room_for
from tatten.ops.cpu.page_joins import gains
from tatten.ops.many_queries import attend_many, unsupported_reason
from tatten.ops.mixed_batch import MixedCall, check_mixed, read_lengths
from tatten.ops.pages import named_pages
from tatten.ops.sizes import ceil_div
from tatten.ops.states import NEG_INF, State, accumulator_dtype, combine_partials
from tatten.ops.validation import check_batch_invariant

FEW = 16  # sequences with equally many queries, up to this number, share calls
BLOCK = 64  # queries of a masked call of another sequence


def paged_attention(call: MixedCall) -> State:
    check_mixed(call)
    each = call.one_query_each()
    if call.batch_invariant:
        check_batch_invariant(each)
    (stored,), (starts, lens) = each.segments, read_lengths(call)
    q_lens = [stop - start for start, stop in itertools.pairwise(starts)]
    n_tokens, q_heads, _ = call.query.shape
    out = call.query.new_zeros((n_tokens, q_heads, call.value.shape[3]))
    lse = call.query.new_full((n_tokens, q_heads), NEG_INF, dtype=accumulator_dtype(call.query.dtype))
    first = torch.tensor(starts[:-1])
    kv_heads = call.key.shape[2]
    together = {n for n in q_lens if n == 1 or (1 < n <= FEW and gains(q_heads, kv_heads, n))}
    for few in sorted(together):
        sequences = torch.tensor([b for b, q_len in enumerate(q_lens) if q_len == few])
        places = first[sequences, None] + torch.arange(few)
        if few == 1 and call.shared_pages is not None:
            out[places], lse[places] = _attend_decodes(call, first, sequences)
        else:
            out[places], lse[places] = _attend_few(call, places, sequences)
    chunks = [b for b, q_len in enumerate(q_lens) if q_len > 0 and q_len not in together]
    first_pages = {b: _first_page(call, q_lens[b], lens[b]) for b in chunks}
    room = room_for(stored, max((ceil_div(lens[b], call.key.shape[1]) - first_pages[b] for b in chunks), default=0))
    for b in chunks:
        tokens = slice(starts[b], starts[b + 1])
        keys = _in_order(stored, b, first_pages[b], lens[b], room)
        state = _attend_sequence(call, call.query[tokens], keys)
        out[tokens], lse[tokens] = state[0][0].transpose(0, 1), state[1][0].T
    return out, lse


def _attend_decodes(call: MixedCall, first: Tensor, sequences: Tensor) -> State:
    """Return the state of the sequences with one query each, which read shared pages once.

    `shared_pages` numbers the sequences of the whole batch: the others stay in the call, with a length of 0.

    Args:
        first: int64 `[batch]`: the first query of each sequence.
        sequences: int64 `[n]`: those with one query.

    Returns:
        `[n, 1, q_heads, value_dim]` and `[n, 1, q_heads]`.
    """
    query = call.query[first.clamp(max=call.query.shape[0] - 1)].unsqueeze(2)  # the last ones may have no queries
    lens = torch.zeros_like(call.kv_lens).index_copy_(0, sequences, call.kv_lens[sequences])
    out, lse = decode_attention(call.sequences(query, call.block_table, lens, call.shared_pages))
    return out[sequences].transpose(1, 2), lse[sequences].transpose(1, 2)


def _attend_few(call: MixedCall, tokens: Tensor, sequences: Tensor) -> State:
    """Return the state of sequences with equally many queries.

    Args:
        tokens: int64 `[n, queries]`: the queries of each sequence.
        sequences: int64 `[n]`.

    Returns:
        `[n, queries, q_heads, value_dim]` and `[n, queries, q_heads]`.
    """
    table, lens, window = call.block_table[sequences], call.kv_lens[sequences], call.window
    if tokens.shape[1] > 1:
        every_key = max(1, int(lens.max()))  # as a window, it leaves causal attention
        window = every_key if window is None else min(window, every_key)
    query = call.query[tokens].transpose(1, 2)
    out, lse = decode_attention(call._replace(window=window).sequences(query, table, lens))
    return out.transpose(1, 2), lse.transpose(1, 2)


def _first_page(call: MixedCall, q_len: int, length: int) -> int:
    """Return the first page of a sequence that any query's window reaches."""
    return 0 if call.window is None else max(0, length - q_len - call.window + 1) // call.key.shape[1]


def _attend_sequence(call: MixedCall, query: Tensor, stored: KeyValue) -> State:
    """Return the state `[1, q_heads, queries, value_dim]` of a sequence's queries, two or more."""
    query = query.transpose(0, 1)[None]
    q_len = query.shape[2]
    kv_len = stored.key.shape[2]
    keyless = max(0, q_len - kv_len)  # the first queries, of negative positions
    window = kv_len if call.window is None else min(call.window, kv_len)
    causal = call._replace(window=max(1, window))
    if q_len - keyless <= FEW or not _takes_flash(call, query[:, :, keyless:], stored, window):
        blocks = [_attend_block(causal, query[:, :, i : i + BLOCK], stored, q_len - i) for i in range(0, q_len, BLOCK)]
        return torch.cat([x for x, _ in blocks], dim=2), torch.cat([x for _, x in blocks], dim=2)
    out, lse = _attend_chunk(call, query[:, :, keyless:], stored)
    if keyless:
        out = torch.cat((out.new_zeros(1, out.shape[1], keyless, out.shape[3]), out), dim=2)
        lse = torch.cat((lse.new_full((1, lse.shape[1], keyless), NEG_INF), lse), dim=2)
    return (out, lse) if call.sinks is None else merge_sinks(out, lse, call.sinks)


def _in_order(stored: KeyValue, b: int, first: int, length: int, room: Room) -> KeyValue:
    """Copy the pages of a sequence from page `first` on; keys of entries that name no page are masked."""
    assert stored.block_table is not None
    n_pages, _, page, _ = stored.key.shape
    pages, named = named_pages(stored.block_table[b, first : ceil_div(length, page)], n_pages)
    n = length - first * page
    mask = None if named.all() else named.repeat_interleave(page)[None, None, None, :n]
    return copy_pages(stored, pages, named, slice(n), room)._replace(attn_mask=mask)


def _takes_flash(call: MixedCall, query: Tensor, stored: KeyValue, window: int) -> bool:
    """Return True if PyTorch's kernel computes a causal chunk: it takes neither a window nor a soft cap.

    The kernel sets masked scores to -inf before it scales them, so the scale must be positive.
    """
    every_key = window == stored.key.shape[2] and stored.attn_mask is None
    plain = call.softcap is None and not call.batch_invariant and call.score_scale > 0
    return every_key and plain and query.shape[3] == stored.value.shape[3] and unsupported_reason(query, query) is None


def _attend_block(call: MixedCall, query: Tensor, stored: KeyValue, left: int) -> State:
    """Return the state of a block of queries, whose first query is the `left`-th from the end of the sequence."""
    seen = keys_between(stored, 0, max(0, stored.key.shape[2] - left + query.shape[2]))
    softmax = call.scale, call.window, call.softcap, call.sinks
    return decode_attention(AttentionCall(DECODE, query, (seen,), *softmax, batch_invariant=call.batch_invariant))


def _attend_chunk(call: MixedCall, query: Tensor, stored: KeyValue) -> State:
    """Return the state of at most as many queries as keys, without sinks: over past keys, then over the new tokens."""
    dtype, key, value = call.query.dtype, stored.key, stored.value
    if key.dtype != dtype:  # PyTorch has no products in 8 bits
        query = query.to(accumulator_dtype(dtype))
        key, value = upcast(key, stored.key_scale, query.dtype), upcast(value, stored.value_scale, query.dtype)
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    past = key.shape[2] - query.shape[2]
    parts = [attend_many(query, key[:, :, past:], value[:, :, past:], True, call.score_scale)]
    if past:
        parts.insert(0, attend_many(query, key[:, :, :past], value[:, :, :past], False, call.score_scale))
    out, lse = combine_partials(*zip(*parts, strict=True))
    return out.to(dtype), lse
