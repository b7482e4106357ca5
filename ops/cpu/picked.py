"""Attention to picked keys on a CPU: a tile of them at a time is gathered, so that no other key is read.

Each query of a sequence has picks of its own. All query heads that share them are rows of one product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cpu import thresholds
from tatten.ops.cpu.batch_invariant import attend_each
from tatten.ops.layout import squeeze_broadcast, upcast
from tatten.ops.masks import used_and_plain
from tatten.ops.picks import key_indices
from tatten.ops.picks_validation import check_distinct, check_picks
from tatten.ops.row_groups import rows_of
from tatten.ops.states import NEG_INF, State, accumulator_dtype
from tatten.ops.validation import check_kv_lens


class PickedKeys(NamedTuple):
    """The keys of a segment that count for some query heads of one query.

    Attributes:
        stored: the row and the kv heads of the segment that they read: `[kv_heads, kv_length, d]`.
        keys: int64 `[n]`; None stands for all keys.
        bias: `[1 or query heads, n]`, what is added to their scores, in the dtype of sums; None stands for 0.
    """

    stored: KeyValue
    keys: Tensor | None
    bias: Tensor | None

    def tiles(self, most: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield the keys and the values of up to `most` picks in `dtype`, and their biases."""
        n = self.stored.key.shape[1] if self.keys is None else self.keys.shape[0]
        for start in range(0, n, most):
            tile = slice(start, start + most)
            key, value = _gathered(self.stored, tile if self.keys is None else self.keys[tile], dtype)
            yield key, value, None if self.bias is None else self.bias[:, tile]


def attend_picks(call: AttentionCall) -> State:
    """Return the state over the picked keys of all segments, in the dtype of sums, without sinks.

    A segment without picks gives all of its keys. The call is valid but for its picks.
    """
    check_picks(call)
    check_distinct(call)
    lens, (batch, q_heads, q_len, _), acc = check_kv_lens(call), call.query.shape, accumulator_dtype(call.query.dtype)
    query = call.query if call.query_rope is None else torch.cat((call.query, call.query_rope), dim=3)
    query = query.to(acc) * call.score_scale
    rows = [_rows(call.query, stored) for stored in call.segments]
    groups = _head_groups(call)
    out = query.new_empty((batch, q_heads, q_len, call.segments[0].value.shape[3]))
    lse = query.new_empty((batch, q_heads, q_len))
    for b, i, group in itertools.product(range(batch), range(q_len), range(groups)):
        heads = slice(q_heads // groups * group, q_heads // groups * (group + 1))
        own = [
            _own(stored, call, b, i, heads, its_rows[b]) for stored, its_rows in zip(call.segments, rows, strict=True)
        ]
        kv_lens = [x.key.shape[1] if lens is None else lens[b] for x in own]
        picked = [_picked(x, call.index_block, n) for x, n in zip(own, kv_lens, strict=True)]
        state = _attend(call, query[b, heads, i], picked)
        if call.rest_bias is not None:
            alone = state[1] <= call.rest_bias / 2
            if alone.any():
                everything = [_with_rest(x, call, n) for x, n in zip(own, kv_lens, strict=True)]
                of_all = _attend(call, query[b, heads, i], everything)
                state = torch.where(alone[:, None], of_all[0], state[0]), torch.where(alone, of_all[1], state[1])
        out[b, heads, i], lse[b, heads, i] = state
    return out, lse


def _rows(query: Tensor, stored: KeyValue) -> list[int]:
    """Return the row of a segment that each sequence reads."""
    rows, batch, kv_batch = rows_of(query, stored), query.shape[0], stored.key.shape[0]
    return [b * kv_batch // batch for b in range(batch)] if rows is None else rows.tolist()


def _head_groups(call: AttentionCall) -> int:
    """Return the number of parts of the query heads that are computed apart.

    Where some have picks of their own, or each sequence is computed as if it were alone, a part reads one kv head.
    """
    shared = all(x.indices is None or x.indices.shape[1] == 1 for x in call.segments)
    return 1 if shared and not call.batch_invariant else math.lcm(*(x.key.shape[1] for x in call.segments))


def _own(stored: KeyValue, call: AttentionCall, b: int, i: int, heads: slice, row: int) -> KeyValue:
    """Return the views of a segment that some heads of query `i` of sequence `b` read.

    The mask becomes `[1 or heads, kv_length]`, and the indices `[picks]`.
    """
    batch, q_heads = call.query.shape[:2]
    _, all_kv_heads, kv_len, _ = stored.key.shape
    group = q_heads // all_kv_heads
    kv_heads = slice(heads.start // group, (heads.stop - 1) // group + 1)
    mask, picks = stored.attn_mask, stored.indices
    if mask is not None:
        mask = squeeze_broadcast(mask.expand(*mask.shape[:-1], kv_len))
        sequence = 0 if mask.shape[0] == 1 else b if mask.shape[0] == batch else row
        mask = mask[sequence, heads if mask.shape[1] > 1 else slice(0, 1), i if mask.shape[2] > 1 else 0]
    if picks is not None:
        picks = picks[b, kv_heads.start if picks.shape[1] > 1 else 0, i]
    scales = (
        x if x is None else x[kv_heads] if x.dim() == 1 else x[row, kv_heads]
        for x in (stored.key_scale, stored.value_scale)
    )
    key_scale, value_scale = scales
    return KeyValue(
        stored.key[row, kv_heads],
        stored.value[row, kv_heads],
        mask,
        key_scale=key_scale,
        value_scale=value_scale,
        rope=None if stored.rope is None else stored.rope[row],
        indices=picks,
    )


def _picked(own: KeyValue, index_block: int, kv_len: int) -> PickedKeys:
    """Return the keys that count among the picks, of which only the first `kv_len` may."""
    if own.indices is None:
        if own.attn_mask is None and kv_len == own.key.shape[1]:
            return PickedKeys(own, None, None)
        return _counting(own, torch.arange(kv_len), own.attn_mask)
    keys = key_indices(own.indices, own.key.shape[1], index_block)
    return _counting(own, keys[(keys >= 0) & (keys < kv_len)], own.attn_mask)


def _with_rest(own: KeyValue, call: AttentionCall, kv_len: int) -> PickedKeys:
    """Return all of the first `kv_len` keys, of which those that no pick names have the bias `rest_bias`."""
    assert own.indices is not None
    assert call.rest_bias is not None
    keys = key_indices(own.indices, own.key.shape[1], call.index_block)
    keys = keys[(keys >= 0) & (keys < kv_len)]
    mask = own.key.new_zeros((1, own.key.shape[1]), dtype=torch.float64) if own.attn_mask is None else own.attn_mask
    bias = torch.full(mask.shape, call.rest_bias, dtype=torch.float64)
    bias[:, keys] = mask[:, keys].double()
    return _counting(own, torch.arange(kv_len), bias)


def _counting(own: KeyValue, keys: Tensor, mask: Tensor | None) -> PickedKeys:
    """Return those of the keys that the mask leaves to any query head."""
    if mask is None:
        return PickedKeys(own, keys, None)
    mask = mask.index_select(1, keys)
    used, plain = (x[0] for x in used_and_plain(mask.unsqueeze(0)))
    keys, mask = keys[used], mask[:, used]
    if plain[used].all():
        return PickedKeys(own, keys, None)
    return PickedKeys(own, keys, torch.where(mask, 0.0, NEG_INF) if mask.dtype == torch.bool else mask)


def _gathered(own: KeyValue, keys: Tensor | slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy some keys, with their rope, and values, and return what they represent in `dtype`."""

    def gather(x: Tensor, scale: Tensor | None) -> Tensor:
        some = x[:, keys] if isinstance(keys, slice) else x.index_select(1, keys)
        if scale is not None and scale.dim() == 2:
            scale = scale[:, keys]
        return upcast(some, scale, dtype)

    key = gather(own.key, own.key_scale)
    if own.rope is not None:
        return torch.cat((key, gather(own.rope, None)), dim=2), key
    return key, gather(own.value, own.value_scale)


def _attend(call: AttentionCall, query: Tensor, segments: Sequence[PickedKeys]) -> State:
    """Return the state of the scaled queries `[heads, d]` of some heads over the keys of all segments."""
    if call.batch_invariant:
        return _attend_alone(query, segments)
    row_max = query.new_full((query.shape[0], 1), NEG_INF)
    row_sum, out = torch.zeros_like(row_max), query.new_zeros((query.shape[0], segments[0].stored.value.shape[2]))
    for picked in segments:
        kv_heads = picked.stored.key.shape[0]
        key_bytes = kv_heads * (query.shape[1] + out.shape[1]) * query.element_size()
        most = max(1, thresholds.CPU.block_bytes * torch.get_num_threads() // key_bytes)
        for key, value, bias in picked.tiles(most, query.dtype):
            q = query.unflatten(0, (kv_heads, -1))
            scores = (q @ key.transpose(1, 2)).flatten(0, 1)
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            if bias is not None:
                scores = torch.where(bias == NEG_INF, NEG_INF, scores + bias.to(scores.dtype))
            # The maximum and the sum are kept apart: with a large bias, an lse no longer tells how many keys there are.
            new_max = torch.maximum(row_max, scores.amax(dim=1, keepdim=True))
            base = torch.where(new_max == NEG_INF, 0.0, new_max)
            alpha, p = torch.exp(row_max - base), torch.exp(scores - base)
            row_max, row_sum = new_max, row_sum * alpha + p.sum(dim=1, keepdim=True)
            out = out * alpha + (p.unflatten(0, (kv_heads, -1)) @ value).flatten(0, 1)
    return out / torch.where(row_sum == 0, 1.0, row_sum), (row_max + torch.log(row_sum)).squeeze(1)


def _attend_alone(query: Tensor, segments: Sequence[PickedKeys]) -> State:
    """Like `_attend`, with the same bits for any number of threads: a copy of all picks in one call of the kernel."""
    tiles = [tile for picked in segments for tile in picked.tiles(picked.stored.key.shape[1] + 1, query.dtype)]
    if not tiles:
        value_dim = segments[0].stored.value.shape[2]
        return query.new_zeros((query.shape[0], value_dim)), query.new_full(query.shape[:1], NEG_INF)
    keys, values, biases = zip(*tiles, strict=True)
    bias = None
    if any(x is not None for x in biases):
        n_rows = max(1 if x is None else x.shape[0] for x in biases)
        zeros = query.new_zeros((1, 1))
        some = [
            (zeros if x is None else x.to(query.dtype)).expand(n_rows, key.shape[1])
            for x, key in zip(biases, keys, strict=True)
        ]
        bias = torch.cat(some, dim=1)[None, None]
    out, lse = attend_each(query[None, None], torch.cat(keys, 1)[None], torch.cat(values, 1)[None], bias, 1.0, True)
    return out[0, 0], lse[0, 0]
