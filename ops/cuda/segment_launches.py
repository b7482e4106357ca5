"""Plan the launches for segments: the kernel and the tiles for each, and the launches that run side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda.combine import Partials
from tatten.ops.cuda.decode import SegmentLaunch, plan_segment
from tatten.ops.cuda.decode_grid import Place
from tatten.ops.cuda.gpu import has_large_shared_memory, has_wgmma, multiprocessors
from tatten.ops.cuda.heuristics import (
    MANY_KEYS,
    Tiles,
    packed_q_rows,
    programs_for,
    programs_for_whole_tiles,
    seqs_and_rows,
    splitting_pays,
    tiles_for,
)
from tatten.ops.cuda.levels import LevelsLaunch, choose_levels, plan_levels
from tatten.ops.cuda.recording import may_take_gluon
from tatten.ops.cuda.tile_space import TileSpace
from tatten.ops.cuda.tma import takes_tma
from tatten.ops.cuda.tuning import gpu_rates
from tatten.ops.sizes import ceil_div, power_of_2

# Tiles for short kv_rows beside the prefix kernel: an SM then runs several small programs at once.
SHORT_ROWS = Tiles(16, 64, 2, 2, 4)
SHARED_ROWS = 64  # packed queries of a tile of shared keys with `batch_invariant`, for any number of sequences


@dataclass(frozen=True)
class PrefixSegment:
    """A launch of the prefix kernel, for plain shared keys and many packed queries."""

    tile_space: TileSpace
    attend: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]

    def __call__(self, call: AttentionCall, stored: KeyValue) -> Partials:
        groups = None if stored.row_groups is None else stored.row_groups.contiguous()
        return Partials(*self.attend(call.query, stored.key, stored.value, groups), row_groups=groups)


AnyLaunch = SegmentLaunch | PrefixSegment | LevelsLaunch
Planned = Iterator[tuple[tuple[int, ...], AnyLaunch]]


def plan_launches(call: AttentionCall, max_and_sum: bool) -> Planned:
    """Plan launches in order, with their segments. The prefix kernel waits for earlier launches, so it comes first."""
    query, segments = call.query, call.segments
    # The segment that the fewest sequences share counts the sinks.
    with_sinks = max(range(len(segments)), key=lambda i: segments[i].key.shape[0])
    plain = {  # for all kernels
        i: x for i, x in enumerate(segments) if call.softcap is None and (call.sinks is None or i != with_sinks)
    }
    levels = choose_levels(query, {i: x.key for i, x in plain.items() if _takes_levels_kernel(call, x)})
    by_levels = levels.segments if levels else ()
    rest = [i for i in range(len(segments)) if i not in by_levels]
    candidates = [i for i in rest if i in plain] if len(segments) > 1 else []
    by_prefix = [i for i in candidates if _takes_prefix_kernel(call, segments[i])]
    by_decode = [i for i in rest if i not in by_prefix]
    programs: int | None = None
    decode_options: dict[str, Any] = {}
    if len(segments) == 2 and len(by_prefix) == 1:
        prefix, other = segments[by_prefix[0]], segments[by_decode[0]]
        sms, sms_left = multiprocessors(query.device), _sms_beside_prefix(query, prefix, other)
        if sms_left:
            programs = sms - sms_left
            tiles = SHORT_ROWS if other.key.shape[2] <= 512 else tiles_for(1, other.key.shape[3], 2)
            decode_options = {"tiles": tiles, "programs": sms_left * tiles.per_sm}
    for i in by_prefix:
        yield (i,), plan_prefix_segment(call, segments[i], programs)
    if levels:
        place = Place(len(by_levels) == len(segments), max_and_sum, beside_previous=bool(by_prefix))
        yield by_levels, plan_levels(call, [segments[i] for i in by_levels], levels.tile, place)
    for i in by_decode:
        beside_previous = i != by_decode[0] or bool(by_prefix or by_levels)
        place = Place(len(segments) == 1, max_and_sum, beside_previous, sinks=i == with_sinks)
        yield (i,), plan_segment(call, segments[i], place, **decode_options)


def plan_invariant_launches(call: AttentionCall, max_and_sum: bool) -> Planned:
    """Plan a decode launch for each segment, with tiles that do not depend on the sequences that share its keys.

    The last segment counts the sinks, as no other sequence shares it.
    """
    query, segments = call.query, call.segments
    for i, x in enumerate(segments):
        last, tiles = i == len(segments) - 1, None
        if not last:
            queries = query.shape[1] // x.key.shape[1] * query.shape[2]
            dim = max(16, power_of_2(max(query.shape[3], x.value.shape[3])))
            masked = x.attn_mask is not None
            tiles = tiles_for(
                max(SHARED_ROWS, queries),
                dim,
                query.element_size(),
                MANY_KEYS,
                has_block_list=masked,
                masked=masked,
                large_shared_memory=has_large_shared_memory(query.device),
            )
        place = Place(len(segments) == 1, max_and_sum, beside_previous=i > 0, sinks=last)
        yield (i,), plan_segment(call, x, place, tiles=tiles)


def _takes_levels_kernel(call: AttentionCall, x: KeyValue) -> bool:
    """Return True if the levels kernel can compute this."""
    query = call.query
    return (
        x.attn_mask is None
        and x.row_groups is None
        and x.key.shape[2] > 0
        and max(y.stride(3) * y.shape[3] for y in (query, x.key, x.value)) < 1 << 31
        and max(query.shape[3], x.value.shape[3]) <= 128
        and query.element_size() == 2
        and call.score_scale > 0
    )


def _takes_prefix_kernel(call: AttentionCall, x: KeyValue) -> bool:
    """Return True if the prefix kernel can compute this, and is faster. With many keys even a half-empty tile is."""
    query, dim, rates = call.query, call.query.shape[3], gpu_rates(call.query.device)
    packed = packed_q_rows(query, x.key, x.row_groups is not None)
    return (
        x.attn_mask is None
        and packed > rates.prefix_over_queries
        and x.key.shape[2] > (rates.prefix_over_keys if packed > 64 else rates.half_prefix_over_keys)
        and dim == x.value.shape[3]
        and dim in (64, 128)
        and query.is_cuda
        and has_wgmma(query.device)
        and query.stride(3) == 1
        and call.score_scale > 0
        and takes_tma(x.key)
        and takes_tma(x.value)
        and may_take_gluon("prefix_sm90")
    )


def _sms_beside_prefix(query: Tensor, prefix: KeyValue, beside: KeyValue) -> int:
    """Return the number of SMs to leave to the segment `beside` the prefix kernel's, or 0 to run one after the other.

    The prefix kernel is bound by arithmetic and fills an SM; the other segment is bound by memory. On an H200 they take
    125 us side by side and 144 us one after the other (256 sequences, 32/8 heads, 8192 and 256 keys). A few SMs are not
    worth the partials that they leave.
    """
    _, kv_heads, kv_len, head_dim = prefix.key.shape
    if beside.attn_mask is not None or beside.row_groups is not None or packed_q_rows(query, beside.key) > 16:
        return 0
    if beside.key.shape[2] <= 64:
        return 0  # bound by latency rather than by memory
    has_row_groups = prefix.row_groups is not None
    seqs, kv_rows = seqs_and_rows(query, prefix.key, has_row_groups)
    if has_row_groups:  # estimates their number; `kv_rows` was an upper bound
        kv_rows = max(prefix.key.shape[0], ceil_div(query.shape[0], seqs))
    q_blocks = ceil_div(packed_q_rows(query, prefix.key, has_row_groups), 128)
    tiles = q_blocks * kv_rows * kv_heads * ceil_div(kv_len, 128)
    rates, sms = gpu_rates(query.device), multiprocessors(query.device)
    prefix_us = tiles * head_dim / 128 * rates.prefix_tile_us
    beside_us = 2 * beside.key.numel() * beside.key.element_size() / rates.sm_bytes_per_us
    sms_left = round(sms * beside_us / (prefix_us + beside_us))
    return min(sms_left, sms - 1) if sms_left >= sms // 5 else 0


def plan_prefix_segment(call: AttentionCall, stored: KeyValue, programs: int | None = None) -> PrefixSegment:
    """Plan a segment as `plan_segment` does, for plain shared keys that the prefix kernel supports."""
    from tatten.ops.cuda.prefix_sm90 import BLOCK_M, BLOCK_N, plan_prefix_attention

    query, key, value, row_groups = call.query, stored.key, stored.value, stored.row_groups
    _, kv_heads, kv_len, _ = key.shape
    has_row_groups = row_groups is not None
    seqs_per_kv, kv_rows = seqs_and_rows(query, key, has_row_groups)
    q_blocks = ceil_div(packed_q_rows(query, key, has_row_groups), BLOCK_M)
    work_tiles = (1 if has_row_groups else kv_rows) * kv_heads * q_blocks
    if programs is None:
        most, n_tiles, rates = multiprocessors(query.device), ceil_div(kv_len, BLOCK_N), gpu_rates(query.device)
        n_states = query.shape[0] * query.shape[1] * query.shape[2]
        if has_row_groups:
            programs = most
        elif splitting_pays(work_tiles, n_tiles, rates.prefix_tile_us, n_states, most, rates):
            programs = programs_for(work_tiles, n_tiles, most)
        else:
            programs = programs_for_whole_tiles(work_tiles, n_tiles, most)
    sizes = 1, work_tiles, kv_len, kv_heads, seqs_per_kv, q_blocks, programs, BLOCK_M, BLOCK_N
    space = TileSpace(*sizes, row_groups=kv_rows if has_row_groups else 0)
    return PrefixSegment(
        space, plan_prefix_attention(query, key, value, call.score_scale, programs, row_groups, split=space.split)
    )
