"""Attention over the keys that a mask leaves, as a graph, for `tatten.ops.decompositions`.

Eager mode (`tatten.ops.cpu.attention`) reads the mask on the host. Here the graph reads two numbers, the begin and the
end of the keys that any sequence uses, and narrows keys and values to them, as views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tatten.ops.call import KeyValue
from tatten.ops.cpu.attention import Scales
from tatten.ops.cpu.flash import additive, attend_in_one_call, empty_state
from tatten.ops.layout import fold_mask, fold_sequences, pack_gqa, pack_mask, squeeze_broadcast, unfold_sequences
from tatten.ops.masks import key_spans
from tatten.ops.moved import moved
from tatten.ops.states import NEG_INF, State, accumulator_dtype


@dataclass(frozen=True)
class UsedKeys:
    """Keys and values `[rows, kv_heads, length, d]` of the span that any row uses, with their mask.

    Attributes:
        inside: bool `[rows, length]`, or `[1, length]`: True for keys in the span of each row; None without a mask.
        scales: the scales of keys and of values in 8 bits, for each head or each key.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    inside: Tensor | None = None
    scales: Scales = (None, None)

    @property
    def without_poison(self) -> UsedKeys:
        """A copy with 0 outside the span of each row, where keys may be NaN."""
        if self.inside is None:
            return self
        outside = ~self.inside[:, None, :, None]
        return UsedKeys(self.key.masked_fill(outside, 0.0), self.value.masked_fill(outside, 0.0), self.mask)


def _assert_length(stored: KeyValue, least: int) -> None:
    """Add an assertion to the graph if the length of a segment is dynamic: at least one key, or `least` with a mask.

    Tracing decides branches on the length by the example. PyTorch's flash kernel ends the process if there is no key.
    """
    kv_len: int | torch.SymInt = stored.key.shape[2]
    if not isinstance(kv_len, torch.SymInt):
        return
    if stored.attn_mask is None:
        least = 1
    message = f"a segment of dynamic length must have at least {least} key{'s' * (least > 1)} in a decomposed program"
    try:  # `torch._check` is settled by the example's length, and leaves no node
        torch.ops.aten._assert_scalar.default(kv_len >= least, message)
    except Exception as error:  # of any kind: it's private API
        moved("torch.ops.aten._assert_scalar", error, "decomposed programs don't check the lengths of segments")


def used_in_blocks(query: Tensor, stored: KeyValue, least: int = 1) -> UsedKeys:
    """Return the used keys, at least `least` of them, of a segment whose rows serve aligned blocks of sequences.

    The mask is folded like `query`.
    """
    key, value, mask, (kv_batch, _, kv_len, _) = stored.key, stored.value, stored.attn_mask, stored.key.shape
    scales = stored.key_scale, stored.value_scale
    _assert_length(stored, least)
    if mask is None or kv_len == 0:
        return UsedKeys(key, value, scales=scales)
    mask = fold_mask(mask.expand(*mask.shape[:-1], kv_len), query, kv_batch)
    spans = key_spans(mask) if stored.block_mask is None else stored.block_mask
    return _narrow(key, value, mask, spans, least, scales)


def used_by_rows(stored: KeyValue, rows: Tensor, least: int = 1) -> UsedKeys:
    """Return the used keys, at least `least` of them, of a segment in which each sequence reads any row.

    They are copied for each sequence.
    """
    key, value, mask, block_mask = stored.key, stored.value, stored.attn_mask, stored.block_mask
    kv_batch, kv_len = key.shape[0], key.shape[2]
    _assert_length(stored, least)
    used = UsedKeys(key, value)
    if mask is not None and kv_len != 0:
        mask = mask.expand(*mask.shape[:-1], kv_len)
        if block_mask is None:
            block_mask = torch.ops.tatten.block_mask.default(mask, kv_batch, rows)
        mask = squeeze_broadcast(mask)
        if mask.shape[0] not in (1, rows.shape[0]):
            mask = mask.index_select(0, rows)
        spans = block_mask if block_mask.shape[0] == 1 else block_mask.index_select(0, rows)
        used = _narrow(key, value, mask, spans, least)
    return UsedKeys(used.key.index_select(0, rows), used.value.index_select(0, rows), used.mask, used.inside)


def _narrow(
    key: Tensor, value: Tensor, mask: Tensor, spans: Tensor, least: int, scales: Scales = (None, None)
) -> UsedKeys:
    """Narrow to the keys from the first to the last that any row of `spans`, in the form of `key_spans`, leaves.

    If there are fewer than `least`, others that the mask excludes are added.
    """
    kv_len = key.shape[2]
    start, stop = spans[:, 0], spans[:, 1]
    places = torch.arange(kv_len)
    if kv_len >= least:
        first = torch.where(start == stop, kv_len, start).amin().clamp(max=kv_len - least)
        begin, length = (cast(int, x.item()) for x in (first, (stop.amax() - first).clamp(min=least)))
        torch._check(begin >= 0)
        torch._check(length >= least)
        torch._check(begin <= kv_len)  # PyTorch can't derive it from the next if kv_len is dynamic
        torch._check(begin + length <= kv_len)
        key, value, mask = key.narrow(2, begin, length), value.narrow(2, begin, length), mask.narrow(3, begin, length)
        places = places.narrow(0, begin, length)
        key_scale, value_scale = (x if x is None or x.dim() == 1 else x.narrow(2, begin, length) for x in scales)
        scales = key_scale, value_scale
        torch._check(key.shape[2] != 0)  # PyTorch can't derive it if kv_len is dynamic
    return UsedKeys(key, value, mask, (places >= start[:, None]) & (places < stop[:, None]), scales)


def attend_used(query: Tensor, used: UsedKeys, scale: float) -> State:
    """Return the state of each sequence over the rows of a segment, which serve aligned blocks of sequences."""
    kv_batch, kv_heads, value_dim = used.key.shape[0], used.key.shape[1], used.value.shape[3]
    folded = fold_sequences(query, kv_batch)
    q_rows, mask = pack_gqa(folded, kv_heads), _packed_mask(folded, used)
    if mask is not None:
        out, lse = _attend_masked(q_rows, used, mask, scale)
    elif not _has_keys(used):
        out, lse = empty_state(q_rows, value_dim)
    else:
        out, lse = attend_in_one_call(q_rows, used.key, used.value, None, scale, False)
    out, lse = out.reshape(*folded.shape[:3], value_dim), lse.reshape(folded.shape[:3])
    return unfold_sequences(out, query.shape[0]), unfold_sequences(lse, query.shape[0])


def _has_keys(used: UsedKeys) -> bool:
    return used.mask is not None or used.key.shape[2] != 0  # known without sizes that depend on the mask's data


def _packed_mask(folded: Tensor, used: UsedKeys) -> Tensor | None:
    if used.mask is None:
        return None
    return additive(pack_mask(used.mask, folded.shape[1], used.key.shape[1], folded.shape[2]), folded.dtype)


def _attend_masked(q_rows: Tensor, used: UsedKeys, mask: Tensor, scale: float) -> State:
    def attend(q_rows: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> State:
        out, lse = attend_in_one_call(q_rows, key, value, mask, scale, True)
        # For a query without any key the kernel may return NaN.
        return out.masked_fill((lse == NEG_INF).unsqueeze(-1), 0.0), lse

    out, lse = attend(q_rows, used.key, used.value, mask)
    if used.inside is None or used.inside.shape[0] == 1:
        return out, lse
    # If unused keys of a row hold NaN or inf, the kernel's -inf in the mask does not undo that. These rows, mostly
    # none, are selected instead of branched on: for a torch.cond, AOTInductor reads a branch's operands by the strides
    # at export, and may have laid them out in another way.
    poisoned = out.isnan().flatten(1).any(dim=1).nonzero().squeeze(1)
    poisoned_q_rows, key, value, inside = (
        x.index_select(0, poisoned) for x in (q_rows, used.key, used.value, used.inside)
    )
    clean = UsedKeys(key, value, inside=inside).without_poison
    poisoned_mask = mask if mask.shape[0] == 1 else mask.index_select(0, poisoned)
    repeated = attend(poisoned_q_rows, clean.key, clean.value, poisoned_mask)
    return out.index_copy(0, poisoned, repeated[0]), lse.index_copy(0, poisoned, repeated[1])


def attend_jointly(query: Tensor, segments: Sequence[UsedKeys], scale: float, softcap: float | None = None) -> State:
    """Return the state over all segments with one maximum and one sum, in plain PyTorch.

    It is for calls that PyTorch's kernel can't compute, and for additive masks: with a large bias, the lse of a segment
    no longer tells how many keys it has.
    """
    acc, batch = accumulator_dtype(query.dtype), query.shape[0]
    row_max = query.new_full((*query.shape[:3], 1), NEG_INF, dtype=acc)
    scores, values = [], []
    for used in (segment for segment in segments if _has_keys(segment)):
        folded = fold_sequences(query, used.key.shape[0])
        q_rows, mask = pack_gqa(folded, used.key.shape[1]), _packed_mask(folded, used)
        key, value = _operands_of_products(used)
        logits = torch.bmm(q_rows.flatten(0, 1).to(acc), key.to(acc)).unflatten(0, q_rows.shape[:2]) * scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logits = logits if mask is None else torch.where(mask == NEG_INF, NEG_INF, logits + mask)
        scores.append(logits)
        values.append(value.to(acc))
        segment_max = logits.amax(dim=-1).reshape(folded.shape[:3])
        row_max = torch.maximum(row_max, unfold_sequences(segment_max, batch).unsqueeze(-1))
    row_sum, out = torch.zeros_like(row_max), query.new_zeros((*query.shape[:3], segments[0].value.shape[3]), dtype=acc)
    finite_max = torch.where(row_max == NEG_INF, 0.0, row_max)
    for logits, value in zip(scores, values, strict=True):
        folded_max = fold_sequences(finite_max, logits.shape[0])
        p = torch.exp(logits - pack_gqa(folded_max, logits.shape[1]))
        segment_out = torch.bmm(p.flatten(0, 1), value).reshape(*folded_max.shape[:3], value.shape[2])
        row_sum = row_sum + unfold_sequences(p.sum(dim=-1).reshape(folded_max.shape[:3]), batch).unsqueeze(-1)
        out = out + unfold_sequences(segment_out, batch)
    out = out / torch.where(row_sum == 0, 1.0, row_sum)
    return out.to(query.dtype), (row_max + torch.log(row_sum)).squeeze(-1)


def _operands_of_products(used: UsedKeys) -> tuple[Tensor, Tensor]:
    """Return keys `[rows * kv_heads, d, length]` and values `[rows * kv_heads, length, d]`, with 0 for unused keys.

    A copy is made in the shape of the product: for views of it, Inductor asks for a length that is only known at run
    time.
    """
    rows, kv_heads = used.key.shape[:2]
    key, value = used.key.flatten(0, 1).transpose(1, 2), used.value.flatten(0, 1)
    if used.inside is None:
        return key, value
    outside = ~used.inside[:, None].expand(rows, kv_heads, -1).flatten(0, 1)
    return key.masked_fill(outside.unsqueeze(1), 0.0), value.masked_fill(outside.unsqueeze(2), 0.0)
