"""Planning attention to segments: a launch of the decode or prefix kernel for each, and one combine for every two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tatten.ops.cuda.combine import Combine, Partials, TileSpace, plan_combine
from tatten.ops.cuda.decode import Segment, plan_segment
from tatten.ops.cuda.heuristics import (
    Tiles,
    capability,
    multiprocessors,
    packed_q_rows,
    programs_for,
    seqs_and_rows,
    tiles_for,
)
from tatten.ops.cuda.merge_states import MergePair, plan_merge_pair
from tatten.ops.cuda.tma import takes_tma
from tatten.ops.sizes import ceil_div
from tatten.ops.states import State

# Short kv_rows beside the prefix kernel: several small programs are under way on an SM.
SHORT_ROWS = Tiles(16, 64, 2, 2, 4)
# Measured on an H200: the prefix kernel's time for 128 packed queries by 128 keys of head_dim 128, and what an SM
# reads beside it.
PREFIX_TILE_US, SM_BYTES_PER_US = 2.2, 40e3


@dataclass(frozen=True)
class PrefixSegment:
    """A launch of the prefix kernel, for plain shared keys and many packed queries."""

    tile_space: TileSpace
    attend: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, row_groups: Tensor | None = None
    ) -> Partials:
        return Partials(*self.attend(query, key, value, row_groups), row_groups=row_groups)


class Inputs(NamedTuple):
    """The tensors of one segment."""

    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    block_mask: Tensor | None
    row_groups: Tensor | None


@dataclass(frozen=True)
class SegmentPair:
    """Launches for two segments, or for a last one alone, and the combine of their partials."""

    launches: tuple[Segment | PrefixSegment, ...]
    combine: Combine

    def __call__(self, query: Tensor, pair: Sequence[Inputs]) -> State:
        return self.combine(
            *[
                launch(query, x.key, x.value, x.attn_mask, None, x.block_mask, row_groups=x.row_groups)
                for launch, x in zip(self.launches, pair, strict=True)
            ]
        )


@dataclass(frozen=True)
class Segments:
    """Computes `tatten::bifurcated_attention` for tensors of the layout that it was planned for."""

    pairs: tuple[SegmentPair, ...]
    merges: tuple[MergePair, ...]  # each merges what there is so far with the state of the next pair

    def __call__(
        self,
        query: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        attn_masks: Sequence[Tensor | None],
        block_masks: Sequence[Tensor | None],
        row_groups: Sequence[Tensor | None] | None = None,
    ) -> State:
        row_groups = row_groups or [None] * len(keys)
        pairs = zip(self.pairs, _in_pairs(keys, values, attn_masks, block_masks, row_groups), strict=True)
        state, *others = [launch(query, pair) for launch, pair in pairs]
        for merge, other in zip(self.merges, others, strict=True):
            state = merge(*state, *other)
        return state


def plan_segments(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    block_masks: Sequence[Tensor | None],
    scale: float,
    row_groups: Sequence[Tensor | None] | None = None,
) -> Segments:
    """Plan the launches for checked inputs."""
    row_groups = row_groups or [None] * len(keys)
    additive = any(mask is not None and mask.dtype != torch.bool for mask in attn_masks)
    pairs = _in_pairs(keys, values, attn_masks, block_masks, row_groups)
    final = len(pairs) == 1
    planned = [_plan_pair(query, pair, scale, final=final, max_and_sum=additive) for pair in pairs]
    n_states, value_dim = query.shape[0] * query.shape[1] * query.shape[2], values[0].shape[3]
    merges = []
    for i in range(1, len(pairs)):
        final = i == len(pairs) - 1
        dtype = query.dtype if final else None
        merges.append(plan_merge_pair(n_states, value_dim, dtype, max_and_sum=additive, final=final))
    return Segments(tuple(planned), tuple(merges))


def _in_pairs(*of_segments: Sequence[Tensor | None]) -> list[list[Inputs]]:
    inputs = [Inputs(*x) for x in zip(*of_segments, strict=True)]  # type: ignore[arg-type]
    return [inputs[i : i + 2] for i in range(0, len(inputs), 2)]


def _plan_pair(query: Tensor, pair: Sequence[Inputs], scale: float, *, final: bool, max_and_sum: bool) -> SegmentPair:
    """Plan the launches for two segments, or for a last one alone, and their combine.

    `final`: there are no other pairs to merge its result with. `max_and_sum`: partial states, and those to be merged,
    have maximum and sum instead of their lse.
    """

    def plan(x: Inputs, **options: Any) -> Segment:
        whole = final and len(pair) == 1
        given = query, x.key, x.value, x.attn_mask, None, scale, x.block_mask
        return plan_segment(*given, row_groups=x.row_groups, whole=whole, max_and_sum=max_and_sum, **options)

    first, second = pair[0], pair[1] if len(pair) == 2 else None
    launches: tuple[Segment | PrefixSegment, ...]
    if second is None:
        launches = (plan(first),)
    elif not _takes_prefix_kernel(query, first, scale):
        launches = plan(first), plan(second, follows=True)
    else:
        sms, sms_left = multiprocessors(query.device), _sms_beside_prefix(query, first, second)
        beside: dict[str, Any] = {}
        if sms_left:
            tiles = SHORT_ROWS if second.key.shape[2] <= 512 else tiles_for(1, second.key.shape[3], 2)
            beside = {"tiles": tiles, "programs": sms_left * tiles.per_sm}
        programs = sms - sms_left if sms_left else None
        prefix = plan_prefix_segment(query, first.key, first.value, scale, programs, first.row_groups)
        launches = prefix, plan(second, follows=True, **beside)
    spaces = [launch.tile_space for launch in launches]
    dtype, merged = query.dtype if final else None, max_and_sum and not final
    combine = plan_combine(query, first.value.shape[3], *spaces, dtype=dtype, max_and_sum=merged)
    return SegmentPair(launches, combine)


def _takes_prefix_kernel(query: Tensor, x: Inputs, scale: float) -> bool:
    """Whether the prefix kernel can compute this, and is faster, which it is even with most of its 128 rows empty."""
    dim = query.shape[3]
    return (
        x.attn_mask is None
        and packed_q_rows(query, x.key, x.row_groups is not None) > 32
        and dim == x.value.shape[3]
        and dim in (64, 128)
        and query.is_cuda
        and capability(query.device) == (9, 0)
        and query.stride(3) == 1
        and scale > 0
        and takes_tma(x.key)
        and takes_tma(x.value)
    )


def _sms_beside_prefix(query: Tensor, prefix: Inputs, beside: Inputs) -> int:
    """The number of SMs to leave to the segment `beside` the one of the prefix kernel, or 0 to run one after the other.

    The prefix kernel is bound by arithmetic and fills an SM; the other segment is bound by memory. On an H200 they take
    125 us side by side and 144 us one after the other (256 sequences, 32/8 heads, 8192 and 256 keys). A few SMs are not
    worth the partials that they leave.
    """
    _, kv_heads, kv_len, head_dim = prefix.key.shape
    if beside.attn_mask is not None or beside.row_groups is not None or packed_q_rows(query, beside.key) > 16:
        return 0
    has_row_groups = prefix.row_groups is not None
    _, kv_rows = seqs_and_rows(query, prefix.key, has_row_groups)
    q_blocks = ceil_div(packed_q_rows(query, prefix.key, has_row_groups), 128)
    tiles = q_blocks * kv_rows * kv_heads * ceil_div(kv_len, 128)
    prefix_us = tiles * head_dim / 128 * PREFIX_TILE_US
    beside_us = 2 * beside.key.numel() * beside.key.element_size() / SM_BYTES_PER_US
    sms = multiprocessors(query.device)
    sms_left = round(sms * beside_us / (prefix_us + beside_us))
    return min(sms_left, sms - 1) if sms_left >= sms // 5 else 0


def plan_prefix_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    programs: int | None = None,
    row_groups: Tensor | None = None,
) -> PrefixSegment:
    """Plan a segment as `plan_segment` does, for plain shared keys that the prefix kernel takes."""
    from tatten.ops.cuda.prefix_sm90 import BLOCK_M, BLOCK_N, plan_prefix_attention

    _, kv_heads, kv_len, _ = key.shape
    has_row_groups = row_groups is not None
    seqs_per_kv, kv_rows = seqs_and_rows(query, key, has_row_groups)
    q_blocks = ceil_div(packed_q_rows(query, key, has_row_groups), BLOCK_M)
    work_tiles = (1 if has_row_groups else kv_rows) * kv_heads * q_blocks
    if programs is None:
        most = multiprocessors(query.device)
        programs = most if has_row_groups else programs_for(work_tiles, ceil_div(kv_len, BLOCK_N), most)
    sizes = 1, work_tiles, kv_len, kv_heads, seqs_per_kv, q_blocks, programs, BLOCK_M, BLOCK_N
    attend = plan_prefix_attention(query, key, value, scale, programs, row_groups)
    return PrefixSegment(TileSpace(*sizes, has_row_groups=has_row_groups), attend)
