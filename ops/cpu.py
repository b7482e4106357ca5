"""Decode attention on a CPU: PyTorch's own flash kernel, on packed query heads and on the keys that count.

The kernel returns the lse. It is given one row per query that reads a kv head, so that keys and values are read once
per kv head and not once per query head, and only the span of keys between the first and the last that the mask and
the lengths leave over.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tatten.ops.masks import mask_spans
from tatten.ops.packing import pack_heads, pack_mask, squeeze_broadcast
from tatten.ops.states import NEG_INF, accumulator_dtype, merge
from tatten.ops.validate import check_decode_attention, check_kv_lens, check_stack

# Below this many bytes of K and V for each extra piece, the merge costs more than an idle core (2-core Xeon, measured).
SPLIT_BYTES = 1 << 20
# Sequences with spans of their own go to the kernel one by one, unless reading this much more for each is cheaper.
RUN_BYTES = 1 << 18


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    kv_lens: Tensor | None = None,
    scale: float | None = None,
    spans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_decode_attention(query, key, value, attn_mask, kv_lens)
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len, value_dim = key.shape[1], key.shape[2], value.shape[3]
    scale = head_dim**-0.5 if scale is None else scale
    mask, bounds = attn_mask, [[0, kv_len, 1]]
    if kv_lens is not None:
        bounds = [[0, n, 1] for n in check_kv_lens(kv_lens, kv_len)]
        mask = _cut_off(attn_mask, kv_lens, kv_len)
    if attn_mask is not None and mask is not None:
        if spans is None or kv_lens is not None:
            spans = mask_spans(mask.expand(*mask.shape[:-1], kv_len))
        bounds = spans.tolist()
    rows = pack_heads(query, kv_heads)
    some_empty = [0, 0, 1] in bounds

    def attend(run: slice, start: int, stop: int, full: int) -> tuple[Tensor, Tensor]:
        """The state of the sequences `run` over the keys `[start, stop)`; `full` if the mask says nothing there."""
        k, v = key.narrow(2, start, stop - start), value.narrow(2, start, stop - start)
        part = (rows, k, v) if run.stop - run.start == batch else (rows[run], k[run], v[run])
        run_mask = None
        if mask is not None and not full:
            run_mask = squeeze_broadcast(mask)
            run_mask = run_mask[run if run_mask.shape[0] > 1 else slice(0, 1), :, :, start:stop]
            run_mask = _additive(pack_mask(run_mask, q_heads, kv_heads, q_len), query.dtype)
        # Where all queries share a mask, a span that is not empty leaves none of them without a key.
        return _attend(*part, run_mask, scale, some_empty or (run_mask is not None and run_mask.shape[1:3] != (1, 1)))

    runs = _runs(bounds, batch)
    state = attend(*runs[0]) if len(runs) == 1 else None
    if state is None:
        start, stop = min(b[0] for b in bounds if b[1]), max(b[1] for b in bounds)
        wasted = sum(stop - start - (b[1] - b[0]) for b in bounds)
        if wasted * kv_heads * (head_dim + value_dim) * key.element_size() < len(runs) * RUN_BYTES:
            state = attend(slice(0, batch), start, stop, 0)
            # Where a sequence's own unused keys hold NaN or inf, the kernel's -inf in the mask does not undo that.
            if math.isnan(state[0].sum().item()):
                state = None
    if state is None:
        outs, lses = zip(*(attend(*run) for run in runs), strict=True)
        state = torch.cat(outs), torch.cat(lses)
    out, lse = state
    if q_heads != kv_heads:
        out, lse = out.reshape(batch, q_heads, q_len, value_dim), lse.reshape(batch, q_heads, q_len)
    return out.contiguous(), lse.contiguous()


def _runs(bounds: list[list[int]], batch: int) -> list[tuple[slice, int, int, int]]:
    """The batch in order, cut where the span of keys changes: the sequences, and start, stop and full of their span."""
    if bounds.count(bounds[0]) == len(bounds):
        start, stop, full = bounds[0]
        return [(slice(0, batch), start, stop, full)]
    runs = []
    for (start, stop, full), group in itertools.groupby(range(batch), key=bounds.__getitem__):
        run = list(group)
        runs.append((slice(run[0], run[-1] + 1), start, stop, full))
    return runs


def _cut_off(mask: Tensor | None, kv_lens: Tensor, kv_len: int) -> Tensor:
    """The mask without the keys behind each sequence's length."""
    within = (torch.arange(kv_len) < kv_lens.unsqueeze(1))[:, None, None]
    if mask is None:
        return within
    return mask & within if mask.dtype == torch.bool else torch.where(within, mask, NEG_INF)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as the flash kernel takes it: additive, 4-D, dense in its last dimension."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, NEG_INF)
    if dtype == torch.float64:  # beside lower precision the kernel takes float32; beside float64 it would misread it
        mask = mask.double()
    return mask if mask.stride(3) == 1 else mask.contiguous()


def _attend(
    rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, some_empty: bool
) -> tuple[Tensor, Tensor]:
    """The state of packed queries `[b, kv_heads, rows, d]` over all keys given, with an additive mask."""
    batch, kv_heads, n_rows, head_dim = rows.shape
    kv_len, value_dim = key.shape[2], value.shape[3]
    if kv_len == 0:  # the flash kernel dies of a division by zero
        acc = accumulator_dtype(rows.dtype)
        return rows.new_zeros(batch, kv_heads, n_rows, value_dim), rows.new_full(
            (batch, kv_heads, n_rows), NEG_INF, dtype=acc
        )

    if head_dim != value_dim:  # the kernel wants one head_dim; zeros change neither scores nor the columns we keep
        rows, key = (F.pad(x, (0, max(0, value_dim - head_dim))) for x in (rows, key))
        value = F.pad(value, (0, max(0, head_dim - value_dim)))
    if rows.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        # The kernel reads with stride 1 in the last dimension whatever the tensor says.
        rows, key, value = rows.contiguous(), key.contiguous(), value.contiguous()

    pieces = _pieces(key, value)
    if pieces == 1:
        out, lse = _flash(rows, key, value, mask, scale, some_empty)
    else:
        out, lse = _attend_in_pieces(rows, key, value, mask, scale, pieces)
    return (out if head_dim == value_dim else out[..., :value_dim]), lse


def _flash(
    rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, some_empty: bool = True
) -> tuple[Tensor, Tensor]:
    """The kernel. `some_empty`: the mask may leave a query without any key."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        rows, key, value, 0.0, False, attn_mask=mask, scale=scale
    )
    if mask is not None and some_empty:
        # A query without any key gets out = 0 from the kernel, but lse = 0 too.
        lse = lse.masked_fill((mask == NEG_INF).all(dim=-1), NEG_INF)
    return out, lse


def _pieces(key: Tensor, value: Tensor) -> int:
    """Into how many pieces to cut the keys so that every core has work: the kernel runs (batch, head) pairs at once.

    1 where nothing is gained, or where (batch, head) is not one dimension in memory.
    """
    batch, kv_heads, kv_len, head_dim = key.shape
    threads, pairs = torch.get_num_threads(), batch * kv_heads
    if pairs % threads == 0:
        return 1
    if batch > 1 and kv_heads > 1 and any(x.stride(0) != kv_heads * x.stride(1) for x in (key, value)):
        return 1
    most = min(2 * threads, 2 * pairs * kv_len * head_dim * key.element_size() // SPLIT_BYTES)

    def busy(pieces: int) -> float:
        rounds = -(-pairs * pieces // threads)
        return pairs * pieces / (rounds * threads)

    return next((pieces for pieces in range(1, most + 1) if busy(pieces) > 0.9), 1)


def _attend_in_pieces(
    rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, pieces: int
) -> tuple[Tensor, Tensor]:
    """`_flash` over keys cut in equal pieces, which take the place of heads; what is left over is one more state."""
    batch, kv_heads = key.shape[:2]
    rows, key, value = (x.flatten(0, 1) for x in (rows, key, value))
    if mask is not None:
        mask = mask.expand(batch, kv_heads, -1, key.shape[1]).flatten(0, 1)
    size = key.shape[1] // pieces
    done = size * pieces

    out, lse = _flash(
        rows.unsqueeze(1).expand(-1, pieces, -1, -1),
        key[:, :done].unflatten(1, (pieces, size)),
        value[:, :done].unflatten(1, (pieces, size)),
        None if mask is None else mask[..., :done].unflatten(2, (pieces, size)).transpose(1, 2),
        scale,
    )
    outs, lses = list(out.unbind(1)), list(lse.unbind(1))
    if done < key.shape[1]:
        rest_mask = None if mask is None else mask[:, None, :, done:]
        out, lse = _flash(rows[:, None], key[:, None, done:], value[:, None, done:], rest_mask, scale)
        outs.append(out.squeeze(1))
        lses.append(lse.squeeze(1))
    out, lse = merge(torch.stack(outs), torch.stack(lses), partials=True)
    return out.unflatten(0, (batch, kv_heads)), lse.unflatten(0, (batch, kv_heads))


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    check_stack(out, lse)
    return merge(out, lse)
