"""Attention to picked keys on a CPU: find the keys that count. `tatten.ops.cpu.picked_tiles` attends to them.

Each query of a sequence has picks of its own. All query heads that share them are computed together.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cpu.picked_tiles import PickedKeys, Scratch, attend_alone, attend_tiles
from tatten.ops.layout import squeeze_broadcast
from tatten.ops.masks import used_and_plain
from tatten.ops.picks import check_distinct, key_indices
from tatten.ops.picks_validation import check_picks
from tatten.ops.row_groups import rows_of
from tatten.ops.states import NEG_INF, State, accumulator_dtype
from tatten.ops.validation import check_kv_lens


def attend_picks(call: AttentionCall) -> State:
    """Return the state over the picked keys of all segments, in the dtype of sums, without sinks.

    A segment without picks gives all of its keys. The call is valid but for its picks.
    """
    check_picks(call)
    check_distinct(call)
    lens, (batch, q_heads, q_len, _), acc = check_kv_lens(call), call.query.shape, accumulator_dtype(call.query.dtype)
    query = call.query if call.query_rope is None else torch.cat((call.query, call.query_rope), dim=3)
    query = query.to(acc) * call.score_scale
    rows, groups, scratch = [_rows(call.query, x) for x in call.segments], _head_groups(call), Scratch(acc)
    out = query.new_empty((batch, q_heads, q_len, call.segments[0].value.shape[3]))
    lse = query.new_empty((batch, q_heads, q_len))

    def attend(q: Tensor, picked: list[PickedKeys]) -> State:
        return attend_alone(q, picked) if call.batch_invariant else attend_tiles(q, picked, call.softcap, scratch)

    for b, i, group in itertools.product(range(batch), range(q_len), range(groups)):
        heads = slice(q_heads // groups * group, q_heads // groups * (group + 1))
        segments = [
            _read(call, x, segment_rows[b], b, i, heads) for x, segment_rows in zip(call.segments, rows, strict=True)
        ]
        kv_lens = [x.key.shape[1] if lens is None else lens[b] for x in segments]
        q = query[b, heads, i]
        picked = [_picked(x, n, call.index_block) for x, n in zip(segments, kv_lens, strict=True)]
        state = attend(q, picked)
        if call.rest_bias is not None:
            all_excluded = state[1] <= call.rest_bias / 2
            if all_excluded.any():
                over_all = attend(q, [_with_rest(segments[0], kv_lens[0], call.index_block, call.rest_bias)])
                state = (
                    torch.where(all_excluded[:, None], over_all[0], state[0]),
                    torch.where(all_excluded, over_all[1], state[1]),
                )
        out[b, heads, i], lse[b, heads, i] = state
    return out, lse


def _rows(query: Tensor, stored: KeyValue) -> list[int]:
    """Return the row of a segment that each sequence reads."""
    rows, batch, kv_batch = rows_of(query, stored), query.shape[0], stored.key.shape[0]
    return [b * kv_batch // batch for b in range(batch)] if rows is None else rows.tolist()


def _head_groups(call: AttentionCall) -> int:
    """Return the number of parts of the query heads that are computed apart.

    Each part reads one kv head if heads have picks or masks of their own, as a key that one head excludes may be NaN.
    The same holds with `batch_invariant`.
    """

    def by_head(x: Tensor | None) -> bool:
        return x is not None and squeeze_broadcast(x).shape[1] > 1

    apart = call.batch_invariant or any(by_head(x.indices) or by_head(x.attn_mask) for x in call.segments)
    return math.lcm(*(x.key.shape[1] for x in call.segments)) if apart else 1


def _read(call: AttentionCall, stored: KeyValue, row: int, b: int, i: int, heads: slice) -> KeyValue:
    """Return the views of a segment that a slice of heads of query `i` of sequence `b` reads.

    The mask becomes `[1 or heads, kv_length]`, and the indices `[picks]`.
    """
    batch, q_heads = call.query.shape[:2]
    kv_len, group = stored.key.shape[2], q_heads // stored.key.shape[1]
    kv_heads = slice(heads.start // group, (heads.stop - 1) // group + 1)
    mask, picks = stored.attn_mask, stored.indices
    if mask is not None:
        mask = squeeze_broadcast(mask.expand(*mask.shape[:-1], kv_len))
        sequence = 0 if mask.shape[0] == 1 else b if mask.shape[0] == batch else row
        mask = mask[sequence, heads if mask.shape[1] > 1 else slice(0, 1), i if mask.shape[2] > 1 else 0]
    if picks is not None:
        picks = picks[b, kv_heads.start if picks.shape[1] > 1 else 0, i]
    key_scale, value_scale = (
        x if x is None else x[kv_heads] if x.dim() == 1 else x[row, kv_heads]
        for x in (stored.key_scale, stored.value_scale)
    )
    return KeyValue(
        stored.key[row, kv_heads],
        stored.value[row, kv_heads],
        mask,
        key_scale=key_scale,
        value_scale=value_scale,
        rope=None if stored.rope is None else stored.rope[row],
        indices=picks,
    )


def _picked(stored: KeyValue, kv_len: int, index_block: int) -> PickedKeys:
    """Return the picked keys that count, among the first `kv_len` keys."""
    if stored.indices is None:
        if stored.attn_mask is None:
            return PickedKeys(stored, None, None)
        return _counting(stored, torch.arange(kv_len), stored.attn_mask)
    return _counting(stored, _named(stored.indices, stored, kv_len, index_block), stored.attn_mask)


def _named(indices: Tensor, stored: KeyValue, kv_len: int, index_block: int) -> Tensor:
    keys = key_indices(indices, stored.key.shape[1], index_block)
    inside = (keys >= 0) & (keys < kv_len)
    return keys if inside.all() else keys[inside]


def _with_rest(stored: KeyValue, kv_len: int, index_block: int, rest_bias: float) -> PickedKeys:
    """Return all of the first `kv_len` keys, where those that no pick names have the bias `rest_bias`."""
    assert stored.indices is not None
    keys, mask = _named(stored.indices, stored, kv_len, index_block), stored.attn_mask
    bias = torch.full((1 if mask is None else mask.shape[0], kv_len), rest_bias, dtype=torch.float64)
    bias[:, keys] = 0.0 if mask is None else mask[:, keys].double()
    return _counting(stored, torch.arange(kv_len), bias)


def _counting(stored: KeyValue, keys: Tensor, mask: Tensor | None) -> PickedKeys:
    """Return the keys, among `keys`, that the mask leaves to any query head."""
    if mask is None:
        return PickedKeys(stored, keys, None)
    mask = mask.index_select(1, keys)
    used, plain = (x[0] for x in used_and_plain(mask.unsqueeze(0)))
    keys, mask = keys[used], mask[:, used]
    if plain[used].all():
        return PickedKeys(stored, keys, None)
    return PickedKeys(stored, keys, torch.where(mask, 0.0, NEG_INF) if mask.dtype == torch.bool else mask)
