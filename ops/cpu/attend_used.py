"""Attention over the used keys of one or several segments, as a graph: for `tatten.ops.decompositions`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.ops.cpu.flash import additive, attend_in_one_call, empty_state
from tatten.ops.cpu.used_keys import UsedKeys
from tatten.ops.layout import fold_sequences, pack_gqa, pack_mask, unfold_sequences
from tatten.ops.states import NEG_INF, State, accumulator_dtype


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
        # The kernel's output for a query without any key may be NaN.
        return out.masked_fill((lse == NEG_INF).unsqueeze(-1), 0.0), lse

    out, lse = attend(q_rows, used.key, used.value, mask)
    if used.inside is None or used.inside.shape[0] == 1:
        return out, lse
    # If a row's own unused keys hold NaN or inf, the kernel's -inf in the mask does not undo that. These rows, mostly
    # none, are selected instead of branched on: for a torch.cond, AOTInductor reads a branch's operands by the strides
    # at export, and may have laid them out in another way.
    poisoned = out.isnan().flatten(1).any(dim=1).nonzero().squeeze(1)
    own_q_rows, key, value, inside = (x.index_select(0, poisoned) for x in (q_rows, used.key, used.value, used.inside))
    clean = UsedKeys(key, value, inside=inside).without_poison
    own_mask = mask if mask.shape[0] == 1 else mask.index_select(0, poisoned)
    again = attend(own_q_rows, clean.key, clean.value, own_mask)
    return out.index_copy(0, poisoned, again[0]), lse.index_copy(0, poisoned, again[1])


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
        key, value = _as_products_take_them(used)
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


def _as_products_take_them(used: UsedKeys) -> tuple[Tensor, Tensor]:
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
