"""`tatten::latent_attention` on a CPU: all heads against the latents in place, a block of keys at a time.

A latent is the value of a key and the key's first part. The other part of the key, its rope, lies elsewhere. No copy
joins the two. Latents in low precision are upcast to float32 one block at a time, and the block stays in the cache.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall
from tatten.ops.cpu import thresholds
from tatten.ops.cpu.attention import attend_variant, with_sinks
from tatten.ops.cpu.batch_invariant import attend_each
from tatten.ops.cpu.pages import attend_pages
from tatten.ops.cpu.picked import attend_picks
from tatten.ops.latent_validation import check_latent_attention, check_latent_batch_invariant
from tatten.ops.layout import fold_mask, fold_sequences, unfold_sequences
from tatten.ops.states import NEG_INF, State, accumulator_dtype


def latent_attention(call: AttentionCall) -> State:
    check_latent_attention(call)
    if call.batch_invariant:
        check_latent_batch_invariant(call)
    (stored,), dtype = call.segments, call.query.dtype
    if stored.indices is not None:
        state = attend_picks(call)
    elif stored.block_table is not None:
        state = attend_pages(call._replace(out_dtype=accumulator_dtype(dtype)), _attend_in_order)
    else:
        return _attend_in_order(call)
    out, lse = with_sinks(call, *state)
    return out.to(call.out_dtype or dtype), lse


def _attend_in_order(call: AttentionCall) -> State:
    """Return the state over latents in order; there may be none."""
    query, (stored,), out_dtype = call.query, call.segments, call.out_dtype or call.query.dtype
    batch, (kv_batch, _, kv_len, _), mask = query.shape[0], stored.key.shape, stored.attn_mask
    if mask is not None and kv_batch < batch:
        mask = fold_mask(mask.expand(*mask.shape[:-1], kv_len), query, kv_batch)
    query, key_rope = query_and_rope(call)
    kernel = _attend_each if call.batch_invariant else functools.partial(_attend_in_groups, softcap=call.softcap)
    stored = stored._replace(value=key_rope, attn_mask=mask)  # the kernels take a rope in the place of values
    scale = call.score_scale
    call = call._replace(query=fold_sequences(query, kv_batch), segments=(stored,), scale=scale)
    out, lse = attend_variant(call, kernel)
    out, lse = unfold_sequences(out, batch), unfold_sequences(lse, batch)
    return out.to(out_dtype).contiguous(), lse.contiguous()


def query_and_rope(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return both parts of the queries as one tensor, in float32 if one is, and the rope of the keys.

    The rope has width 0 if there is none.
    """
    stored = call.segments[0]
    if call.query_rope is None or stored.rope is None:
        return call.query, stored.key[..., :0]
    return torch.cat((call.query, call.query_rope), dim=3), stored.rope


def _attend_each(
    q_rows: Tensor, latent: Tensor, rope: Tensor, mask: Tensor | None, scale: float, some_empty: bool
) -> State:
    """Like `_attend_in_groups`, for each sequence as if it were alone: by PyTorch's kernel, which takes copies."""
    acc = accumulator_dtype(q_rows.dtype)
    value = latent.to(acc)
    key, mask = torch.cat((value, rope.to(acc)), dim=3), None if mask is None else mask.to(acc)
    return attend_each(q_rows.to(acc), key, value, mask, scale, some_empty)


def _attend_in_groups(
    q_rows: Tensor,
    latent: Tensor,
    rope: Tensor,
    mask: Tensor | None,
    scale: float,
    some_empty: bool,
    softcap: float | None,
) -> State:
    """Return the state, not rounded, of packed queries `[b, 1, q_rows, rank + width]`, with an additive mask.

    As many sequences are computed together as fill one block for all cores. `some_empty` is unused:
    `tatten.ops.cpu.flash.attend` has it.
    """
    batch, kv_len = latent.shape[0], latent.shape[2]
    key_bytes = q_rows.shape[3] * accumulator_dtype(q_rows.dtype).itemsize
    block_keys = max(1, thresholds.CPU.block_bytes * torch.get_num_threads() // key_bytes)
    size = max(1, block_keys // max(1, kv_len))
    mask = None if mask is None else mask.expand(batch, -1, -1, kv_len)
    states = []
    for start in range(0, batch, size):
        group = slice(start, start + size)
        group_mask = None if mask is None else mask[group]
        states.append(_attend(q_rows[group], latent[group], rope[group], group_mask, scale, softcap, block_keys))
    if len(states) == 1:
        return states[0]
    outs, lses = zip(*states, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _attend(
    q_rows: Tensor,
    latent: Tensor,
    rope: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    block_keys: int,
) -> State:
    acc = accumulator_dtype(q_rows.dtype)
    q_latent, q_rope = (q_rows[:, 0].to(acc) * scale).split((latent.shape[3], rope.shape[3]), dim=2)
    row_max = q_latent.new_full((*q_latent.shape[:2], 1), NEG_INF)
    row_sum, out = torch.zeros_like(row_max), torch.zeros_like(q_latent)
    for start in range(0, latent.shape[2], block_keys):
        block = slice(start, start + block_keys)
        keys = latent[:, 0, block].to(acc)
        scores = q_latent @ keys.transpose(1, 2)
        if rope.shape[3]:
            scores.baddbmm_(q_rope, rope[:, 0, block].to(acc).transpose(1, 2))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores += mask[:, 0, :, block]
        # The maximum and the sum are kept apart: with a large bias, an lse no longer tells how many keys there are.
        new_max = torch.maximum(row_max, scores.amax(dim=2, keepdim=True))
        base = torch.where(new_max == NEG_INF, 0.0, new_max)
        alpha, p = torch.exp(row_max - base), torch.exp(scores - base)
        row_max, row_sum = new_max, row_sum * alpha + p.sum(dim=2, keepdim=True)
        out = torch.baddbmm(out * alpha, p, keys)
    out = out / torch.where(row_sum == 0, 1.0, row_sum)
    return out.unsqueeze(1), (row_max + torch.log(row_sum)).squeeze(2).unsqueeze(1)
