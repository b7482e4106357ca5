"""Planning attention to segments: a launch of the lean or the wide kernel for each, and one merge for every two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.combine import Combine, Partials, TileSpace, plan_combine
from tatten.ops.cuda.decode import Segment, plan_segment
from tatten.ops.cuda.heuristics import Tiles, capability, multiprocessors, packed_q_rows, programs_for, tiles_for
from tatten.ops.cuda.merge_states import MergePair, plan_merge_pair
from tatten.ops.cuda.tma import takes_tma
from tatten.ops.sizes import ceil_div

# Short kv_rows beside the prefix kernel: several small programs are under way on an SM.
SHORT_ROWS = Tiles(16, 64, 2, 2, 4)
# Measured on an H200: the prefix kernel's time for 128 packed queries by 128 keys of head_dim 128, and what an SM
# reads beside it.
PREFIX_TILE_US, SM_BYTES_PER_US = 2.2, 40e3


@dataclass(frozen=True)
class PrefixSegment:
    """A launch of the kernel in Gluon, on plain shared keys and many packed queries."""

    tile_space: TileSpace
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Partials:
        return Partials(*self.attend(query, key, value))


@dataclass(frozen=True)
class Segments:
    """`tatten::bifurcated_attention` of tensors that are laid out as those it was planned for."""

    segments: tuple[Segment | PrefixSegment, ...]
    merges: tuple[Combine, ...]  # of every two segments
    merge_pairs: tuple[MergePair, ...]  # of what is merged so far with the next two

    def __call__(
        self,
        query: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        attn_masks: Sequence[Tensor | None],
        blocks: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        states = []
        for i, merge in enumerate(self.merges):
            pair = range(2 * i, min(2 * i + 2, len(keys)))
            partials = [self.segments[j](query, keys[j], values[j], attn_masks[j], None, blocks[j]) for j in pair]
            states.append(merge(*partials))
        state = states[0]
        for merge_pair, other in zip(self.merge_pairs, states[1:], strict=True):
            state = merge_pair(*state, *other)
        return state


def plan_segments(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    blocks: Sequence[Tensor | None],
    scale: float,
) -> Segments:
    """The launches for checked inputs."""
    segments: list[Segment | PrefixSegment] = []
    merges: list[Combine] = []
    paired = any(mask is not None and mask.dtype != torch.bool for mask in attn_masks)
    chained = paired and len(keys) > 2
    sms_left = 0  # by a wide launch, to the segment after it
    for i, (key, value, mask, block) in enumerate(zip(keys, values, attn_masks, blocks, strict=True)):
        first, last = i % 2 == 0, i == len(keys) - 1
        segment: Segment | PrefixSegment
        if mask is None and not last and first and _takes_prefix_kernel(query, key, value, scale):
            sms_left = _sms_beside_prefix(query, key, keys[i + 1], attn_masks[i + 1])
            programs = multiprocessors(query.device) - sms_left if sms_left else None
            segment = plan_prefix_segment(query, key, value, scale, programs)
        else:
            tiles: Tiles | None = None
            if sms_left:
                tiles = SHORT_ROWS if key.shape[2] <= 512 else tiles_for(1, key.shape[3], 2)
            segment = plan_segment(
                query,
                key,
                value,
                mask,
                None,
                scale,
                block,
                whole=len(keys) == 1,
                paired=paired,
                follows=not first,
                tiles=tiles,
                programs=sms_left * tiles.per_sm if tiles is not None else None,
            )
            sms_left = 0
        segments.append(segment)
        if last or not first:
            spaces = [x.tile_space for x in segments[i - i % 2 :]]
            final = query.dtype if len(keys) <= 2 else None
            merges.append(plan_combine(query, value.shape[3], *spaces, dtype=final, max_and_sum=chained))
    n_states = query.shape[0] * query.shape[1] * query.shape[2]
    pairs = []
    for i in range(1, len(merges)):
        done = i == len(merges) - 1
        dtype = query.dtype if done else None
        pairs.append(plan_merge_pair(n_states, values[0].shape[3], dtype, max_and_sum=chained, final=done))
    return Segments(tuple(segments), tuple(merges), tuple(pairs))


def _takes_prefix_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    """Whether the prefix kernel can compute this, and is faster, which it is even with most of its 128 rows empty."""
    dim = query.shape[3]
    return (
        packed_q_rows(query, key) > 32
        and dim == value.shape[3]
        and dim in (64, 128)
        and query.is_cuda
        and capability(query.device) == (9, 0)
        and query.stride(3) == 1
        and scale > 0
        and takes_tma(key)
        and takes_tma(value)
    )


def _sms_beside_prefix(query: Tensor, key: Tensor, next_key: Tensor, next_mask: Tensor | None) -> int:
    """How many SMs to leave to the next segment while the wide kernel is at `key`, or 0 to run one after the other.

    The wide kernel is bound by arithmetic and fills an SM, the next one by memory. Side by side they take 125 us where
    one after the other takes 144 (256 sequences, 32/8 heads, 8192 and 256 keys); a few SMs are not worth their merges.
    """
    kv_batch, kv_heads, kv_len, head_dim = key.shape
    if next_mask is not None or packed_q_rows(query, next_key) > 16:
        return 0
    wide = (
        ceil_div(packed_q_rows(query, key), 128)
        * kv_batch
        * kv_heads
        * ceil_div(kv_len, 128)
        * head_dim
        / 128
        * PREFIX_TILE_US
    )
    beside = 2 * next_key.numel() * next_key.element_size() / SM_BYTES_PER_US
    sms = multiprocessors(query.device)
    sms_left = round(sms * beside / (wide + beside))
    return min(sms_left, sms - 1) if sms_left >= sms // 5 else 0


def plan_prefix_segment(
    query: Tensor, key: Tensor, value: Tensor, scale: float, programs: int | None = None
) -> PrefixSegment:
    """As `plan_segment`, for plain shared keys that the wide kernel takes."""
    from tatten.ops.cuda.prefix_sm90 import BLOCK_M, BLOCK_N, plan_prefix_attention

    kv_batch, kv_heads, kv_len, _ = key.shape
    q_blocks = ceil_div(packed_q_rows(query, key), BLOCK_M)
    work_tiles = kv_batch * kv_heads * q_blocks
    programs = programs or programs_for(work_tiles, ceil_div(kv_len, BLOCK_N), multiprocessors(query.device))
    seqs_per_kv = query.shape[0] // kv_batch
    tile_space = TileSpace(1, work_tiles, kv_len, kv_heads, seqs_per_kv, q_blocks, programs, BLOCK_M, BLOCK_N)
    return PrefixSegment(tile_space, plan_prefix_attention(query, key, value, scale, programs))
