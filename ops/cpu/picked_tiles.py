"""Attention of a few query heads to picked keys, which are gathered one tile at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tatten.ops.call import KeyValue
from tatten.ops.cpu import thresholds
from tatten.ops.cpu.batch_invariant import attend_each
from tatten.ops.layout import over_keys
from tatten.ops.sizes import ceil_div
from tatten.ops.states import NEG_INF, State


class PickedKeys(NamedTuple):
    """The keys of a segment that count for some query heads of one query.

    Attributes:
        stored: the row and the kv heads of the segment that these query heads read: `[kv_heads, kv_length, d]`.
        keys: int64 `[n]`; None stands for all keys.
        bias: `[1 or query heads, n]`, added to their scores; None stands for 0.
    """

    stored: KeyValue
    keys: Tensor | None
    bias: Tensor | None

    @property
    def length(self) -> int:
        return self.stored.key.shape[1] if self.keys is None else self.keys.shape[0]


class GatheredKeys(NamedTuple):
    """Keys `[kv_heads, n, d]` in the dtype of sums; `rope` is a part of a key that lies elsewhere."""

    key: Tensor
    rope: Tensor | None
    value: Tensor
    bias: Tensor | None


class Scratch:
    """Memory for the rows of one tile, reused for the next tile."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def tiles(self, picked: PickedKeys, most: int) -> Iterator[GatheredKeys]:
        """Gather the keys in tiles of about equal size, up to `most` keys. A tile is valid until the next one."""
        stored, keys, bias = picked
        size = ceil_div(picked.length, ceil_div(picked.length, most)) if picked.length else 1
        for start in range(0, picked.length, size):
            tile = slice(start, start + size)
            at = tile if keys is None else keys[tile]
            key = self._gather("key", stored.key, at, stored.key_scale)
            rope = None if stored.rope is None else self._gather("rope", stored.rope, at, None)
            value = key if rope is not None else self._gather("value", stored.value, at, stored.value_scale)
            yield GatheredKeys(key, rope, value, None if bias is None else bias[:, tile].to(self.dtype))

    def _gather(self, name: str, x: Tensor, keys: Tensor | slice, scale: Tensor | None) -> Tensor:
        """Return rows of `x`, upcast and scaled."""
        if isinstance(keys, slice):
            rows = x[:, keys]
        else:
            shape = x.shape[0], keys.shape[0], x.shape[2]
            rows = torch.index_select(x, 1, keys, out=self._memory_for(name, x.dtype, shape))
        if x.dtype != self.dtype:
            rows = self._memory_for(name, self.dtype, rows.shape).copy_(rows)
        if scale is not None:
            rows *= over_keys(scale if scale.dim() == 1 else scale[:, keys])
        return rows

    def _memory_for(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        n = shape[0] * shape[1] * shape[2]
        memory = self._memory.get((name, dtype))
        if memory is None or memory.numel() < n:
            memory = self._memory[name, dtype] = torch.empty(n, dtype=dtype)
        return memory[:n].view(*shape)


def attend_tiles(query: Tensor, segments: Sequence[PickedKeys], softcap: float | None, scratch: Scratch) -> State:
    """Return the state of scaled queries `[heads, d]`, in the dtype of sums, over the keys of all segments."""
    row_max = query.new_full((query.shape[0], 1), NEG_INF)
    row_sum, out = torch.zeros_like(row_max), query.new_zeros((query.shape[0], segments[0].stored.value.shape[2]))
    for picked in segments:
        kv_heads, _, head_dim = picked.stored.key.shape
        key_bytes = (
            kv_heads
            * query.element_size()
            * (query.shape[1] if picked.stored.rope is not None else head_dim + out.shape[1])
        )
        most = max(1, thresholds.CPU.block_bytes * torch.get_num_threads() // key_bytes)
        q = query.unflatten(0, (kv_heads, -1))
        for key, rope, value, bias in scratch.tiles(picked, most):
            scores = torch.bmm(q[..., :head_dim], key.transpose(1, 2))
            if rope is not None:
                scores.baddbmm_(q[..., head_dim:], rope.transpose(1, 2))
            scores = scores.flatten(0, 1)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if bias is not None:
                scores = torch.where(bias == NEG_INF, NEG_INF, scores + bias)
            # The maximum and the sum are kept apart: with a large bias, an lse no longer tells how many keys there are.
            new_max = torch.maximum(row_max, scores.amax(dim=1, keepdim=True))
            base = torch.where(new_max == NEG_INF, 0.0, new_max)
            alpha, p = torch.exp(row_max - base), torch.exp(scores - base)
            row_max, row_sum = new_max, row_sum * alpha + p.sum(dim=1, keepdim=True)
            out = torch.baddbmm((out * alpha).unflatten(0, (kv_heads, -1)), p.unflatten(0, (kv_heads, -1)), value)
            out = out.flatten(0, 1)
    return out / torch.where(row_sum == 0, 1.0, row_sum), (row_max + torch.log(row_sum)).squeeze(1)


def attend_alone(query: Tensor, segments: Sequence[PickedKeys]) -> State:
    """Like `attend_tiles`, with the same bits for any number of threads: one call of the kernel on a copy of all keys.

    Each segment has one kv head.
    """
    zero, keys, values, biases = query.new_zeros((1, 1)), [], [], []
    bias_rows = max(1 if x.bias is None else x.bias.shape[0] for x in segments)
    for picked in segments:
        for key, rope, value, bias in Scratch(query.dtype).tiles(picked, picked.length):
            keys.append(key if rope is None else torch.cat((key, rope), dim=2))
            values.append(value)
            biases.append((zero if bias is None else bias).expand(bias_rows, key.shape[1]))
    if not keys:
        value_dim = segments[0].stored.value.shape[2]
        return query.new_zeros((query.shape[0], value_dim)), query.new_full(query.shape[:1], NEG_INF)
    mask = None if all(x.bias is None for x in segments) else torch.cat(biases, dim=1)[None, None]
    key, value = torch.cat(keys, dim=1), torch.cat(values, dim=1)
    out, lse = attend_each(query[None, None], key[None], value[None], mask, 1.0, True)
    return out[0, 0], lse[0, 0]
