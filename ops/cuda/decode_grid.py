"""The grid of the decode kernel: the sizes of its tiles, and the number of programs that share them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda.gpu import has_large_shared_memory, multiprocessors
from tatten.ops.cuda.heuristics import (
    MANY_KEYS,
    Tiles,
    combining_pays,
    latent_tiles_for,
    programs_for,
    programs_for_whole_tiles,
    seqs_and_rows,
    splitting_pays,
    tiles_for,
)
from tatten.ops.cuda.kernels.decode import ADDITIVE_MASK, NO_MASK
from tatten.ops.cuda.kernels.tile_scheduler import MOST_CHUNKS
from tatten.ops.cuda.mask_plan import MaskPlan
from tatten.ops.cuda.page_tiles import page_table, resized_tiles
from tatten.ops.cuda.recording import may_limit_registers
from tatten.ops.cuda.tile_space import TileSpace
from tatten.ops.cuda.tuning import gpu_rates
from tatten.ops.page_runs import group_sizes
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.validation import BLOCK_KEYS

LEAST_CHUNK = 1024  # keys of a chunk; a multiple of every `block_n`
# The keys of a margin. Microseconds without and with margins, on an H100 with 32 query heads to 8 kv heads: 64
# sequences of 128 to 4096 keys 140 and 121, in pages of 64 153 and 125; 16 of 128 to 2048 keys with a mask 38 and 30;
# 256 of 128 to 8192 keys and 64 query heads, in pages of 64, 758 and 679. On an H200, in pages of 64: 48 of 128 to 4096
# keys and 16 without keys 140 and 76; own parts of 16 to 2048 keys of 64 sequences that share 8192 104 and 75.
MARGIN_KEYS = 128
# Programs go through the heads of a sequence in step if the table and the pool have room for this many bytes.
# Microseconds with 1, 2, 4 and 8 lanes, on an H200 with 8 kv heads: 32 of 1024 to 65536 keys in pages of 16 473, 471,
# 466, 465, in pages of 256 459, 463, 454, 453; 128 x 4096 keys 516, 514, 515, 509. With 0.5 GiB there is no gain: 16 x
# 8192 136, 137, 137, 135; 32 x 4096 150, 152, 151, 153.
LEAST_BYTES_IN_STEP = 1 << 30


@dataclass(frozen=True)
class Place:
    """The place of a launch among those of a call.

    Attributes:
        final: there are no other segments, so that whole work tiles are final.
        max_and_sum: partial states have maximum and sum instead of their lse, because of an additive mask elsewhere.
        beside_previous: this launch reads nothing that the previous launch, or work on the stream since, has written.
            The two then run side by side.
        sinks: the launch counts the call's sinks.
    """

    final: bool = True
    max_and_sum: bool = False
    beside_previous: bool = False
    sinks: bool = True


def _seqs_and_rows(query: Tensor, stored: KeyValue) -> tuple[int, int]:
    if stored.block_table is not None:
        return (1 if stored.row_groups is None else group_sizes(query.shape[0])[0]), query.shape[0]
    return seqs_and_rows(query, stored.key, stored.row_groups is not None)


def _packed_q_rows(query: Tensor, stored: KeyValue) -> int:
    return query.shape[1] // stored.key.shape[1] * _seqs_and_rows(query, stored)[0] * query.shape[2]


def choose_tiles(call: AttentionCall, stored: KeyValue, mask: MaskPlan) -> Tiles:
    """Choose the sizes of tiles; with `batch_invariant` they do not depend on the number of sequences and keys."""
    query, key, value = call.query, stored.key, stored.value
    kv_batch, kv_len = stored.kv_batch, stored.kv_len
    packed = _packed_q_rows(query, stored)
    block_d, block_dv = (max(16, power_of_2(x.shape[3])) for x in (query, value))
    large_shared_memory = has_large_shared_memory(query.device)
    if call.latent:
        return latent_tiles_for(
            packed,
            block_d,
            value.element_size(),
            MANY_KEYS if call.batch_invariant else kv_batch * kv_len / multiprocessors(query.device),
            halves=query.dtype != value.dtype,
            has_block_list=mask.has_block_list,
            large_shared_memory=large_shared_memory,
            paged=stored.block_table is not None,
        )
    narrow = key.element_size() == 1
    return tiles_for(
        packed,
        max(block_d, block_dv),
        query.element_size(),
        MANY_KEYS if call.batch_invariant else kv_len,
        has_block_list=mask.has_block_list,
        # Row groups of pages take registers for the stop of each sequence.
        masked=mask.kind != NO_MASK
        or call.window is not None
        or (narrow and stored.kv_lens is not None)
        or (stored.block_table is not None and stored.row_groups is not None),
        narrow=narrow,
        page=0 if stored.block_table is None else key.shape[2],
        large_shared_memory=large_shared_memory,
    )


def shortened(tiles: Tiles, space: TileSpace, query: Tensor, kv_bytes: int, paged: bool) -> Tiles:
    """Return tiles of half as many keys for a launch whose programs share work tiles, if these are faster.

    An SM has room for the shared memory of one program with tiles of 128 keys and 2 stages, so that two programs per SM
    run one after the other. With tiles of 64 keys and 3 stages, 1 x 4096 takes 11.3 us instead of 12.1, 1 x 32768 49.4
    instead of 51.5 and 16 x 8192 177 instead of 180 (H100, `benchmarks/decode.py`, 32/8 heads of 128). They are taken
    if one program per SM divides the work tiles evenly.

    An SM keeps its split between shared memory and L1 while launches overlap, so the loads of the linear layers after
    attention have little room if attention takes much. For heads of 64, the programs that fit on an SM take 213 KiB
    with tiles of 128 keys and 3 stages, and 63 with 64 keys and 2 stages. The latter are taken for up to 8192 keys in
    order, with a block list or lengths, and fewer than 16 work tiles, on GPUs with the shared memory of Hopper. With
    1000 of 8192 keys, a layer of Llama-3.2-1B then takes 40.5 us instead of 44.4. Attention alone takes 5.8 us instead
    of 6.5 with a mask, and 5.5 instead of 5.9 with a length. With a length of 4096, it takes 7.9 us instead of 7.8
    (H200).

    Args:
        tiles: the tiles of `tiles_for`.
        space: the tile space with these tiles.
        query: the query.
        kv_bytes: the bytes of keys and values.
        paged: whether keys are in pages. Narrow heads in pages keep their tiles, as others were not measured.
    """
    work_tiles, sms = space.groups * space.work_tiles, multiprocessors(query.device)
    shares_work_tiles = space.split and not space.chunk and not space.row_groups
    # An additive mask takes registers: 3 stages spill.
    shares_work_tiles = shares_work_tiles and not space.max_and_sum
    # Ragged lengths gain from programs that wait for an SM: 8 of 1k to 64k take 237 us, and 249 with one per SM.
    ragged = space.has_lens and space.groups > 1
    large = kv_bytes > gpu_rates(query.device).short_tiles_most_bytes
    if not shares_work_tiles or ragged or large:
        return tiles
    two_stages, few = Tiles(16, 64, 4, 2, 2), work_tiles < 16
    if query.shape[3] <= 64:
        some_keys = (space.has_block_list or space.has_lens) and not paged and space.kv_len <= 8192
        leaves_room = some_keys and few and has_large_shared_memory(query.device)
        return two_stages if leaves_room and tiles == Tiles(16, 128, 4, 3, 2) else tiles
    if tiles != Tiles(16, 128, 4, 2, 2):
        return tiles
    if space.has_block_list and few:
        return two_stages  # 1 x 4096: 12.1 us, and 13.1 with 3 stages
    if sms % work_tiles >= 0.1 * sms or work_tiles > sms:
        return tiles
    if space.has_lens and few and not paged and space.kv_len <= 8192:
        return two_stages  # for room: 1 x 1000 takes 7.1 us, and 6.8 with 3 stages (H200)
    return Tiles(16, 64, 4, 3)


def resized(tiles: Tiles, call: AttentionCall, stored: KeyValue, space: TileSpace) -> Tiles:
    """Return the tiles that suit the numbers of work tiles and keys, for keys in pages or with lengths.

    Work tiles that stay whole keep their tiles: with smaller ones, programs might share them.
    """
    query = call.query
    in_16_bits = {query.dtype, stored.key.dtype, stored.value.dtype} <= {torch.bfloat16, torch.float16}
    variant = stored.attn_mask is not None or call.window is not None or call.softcap is not None
    if stored.kv_lens is None or not in_16_bits or variant or stored.row_groups is not None or space.chunk:
        return tiles
    if not has_large_shared_memory(query.device):
        return tiles
    work_tiles, sms = space.groups * space.work_tiles, multiprocessors(query.device)
    chosen = resized_tiles(
        tiles,
        {query.shape[3], stored.value.shape[3]},
        0 if stored.block_table is None else stored.key.shape[2],
        page_table(query.device),
        tiles_each=work_tiles * ceil_div(space.kv_len, tiles.block_n) / space.programs,
        work_tiles=work_tiles / sms,
        # Room for the combine helps if its programs, one for each state, then fit beside the launch.
        combine_fits=space.groups > 1 and query.shape[0] * query.shape[1] * query.shape[2] <= 2 * sms,
    )
    return tiles if chosen.registers is not None and not may_limit_registers() else chosen


def deepened(tiles: Tiles, space: TileSpace, query: Tensor) -> Tiles:
    """Return tiles with one more stage if each program has an SM to itself, and few tiles in a row.

    8 sequences of 512 keys and 8 kv heads of 128 take 10.3 us, and 12.9 with 2 stages (H200).
    """
    one_per_sm = space.stays_whole and space.programs <= multiprocessors(query.device)
    fits = tiles.block_m == 16 and tiles.num_stages == 2 and query.element_size() == 2 and query.shape[3] <= 128
    return replace(tiles, num_stages=3) if one_per_sm and fits and has_large_shared_memory(query.device) else tiles


def plan_tile_space(
    call: AttentionCall, stored: KeyValue, mask: MaskPlan, tiles: Tiles, place: Place, programs: int | None
) -> TileSpace:
    """Cut a launch into work tiles, and choose its number of programs unless `programs` sets it."""
    batch, q_heads, q_len, head_dim = call.query.shape
    kv_batch, kv_heads, kv_len, value_dim = stored.kv_batch, stored.key.shape[1], stored.kv_len, stored.value.shape[3]
    has_lens, has_row_groups, window = stored.kv_lens is not None, stored.row_groups is not None, call.window
    seqs_per_kv, most_kv_rows = _seqs_and_rows(call.query, stored)
    groups = mask.groups
    if has_row_groups and (groups > 1 or stored.block_table is not None):
        groups = max(2, most_kv_rows)  # 1 would be one list for all rows
    block_n = BLOCK_KEYS if mask.has_block_list else tiles.block_n
    chunk = LEAST_CHUNK // block_n if call.batch_invariant else 0
    q_blocks = ceil_div(_packed_q_rows(call.query, stored), tiles.block_m)
    work_tiles = (1 if has_row_groups else kv_batch // groups) * kv_heads * q_blocks
    if programs is None:
        most, rates = tiles.per_sm * multiprocessors(call.query.device), gpu_rates(call.query.device)
        n_tiles = max(1, ceil_div(kv_len, block_n))
        tile_us = most * block_n * (head_dim + value_dim) * stored.key.element_size() / rates.read_bytes_per_us
        short = 1 < n_tiles <= rates.most_whole_tiles and not has_row_groups and (mask.has_block_list or has_lens)
        if call.batch_invariant:
            most_groups = most_kv_rows if has_row_groups else groups
            programs = min(
                rates.waves * most, most_groups * work_tiles * min(ceil_div(n_tiles, chunk), MOST_CHUNKS.value)
            )
        elif place.final and short and not combining_pays(groups * work_tiles, n_tiles, tile_us, most, rates):
            chunk, programs = power_of_2(n_tiles), groups * work_tiles  # one chunk holds a whole work tile
        elif has_row_groups:
            programs = most
        elif (
            place.final
            or mask.has_block_list
            or splitting_pays(work_tiles, n_tiles, tile_us, batch * q_heads * q_len, most, rates)
        ):
            programs = programs_for(groups * work_tiles, n_tiles, most)
        else:
            programs = programs_for_whole_tiles(work_tiles, n_tiles, most)
    return TileSpace(
        groups,
        work_tiles,
        kv_len,
        kv_heads,
        seqs_per_kv,
        q_blocks,
        programs,
        tiles.block_m,
        block_n,
        window=None if mask.has_block_list else window,
        has_lens=has_lens and not mask.has_block_list,
        has_block_list=mask.has_block_list,
        row_groups=most_kv_rows if has_row_groups else 0,
        max_and_sum=place.max_and_sum or mask.kind == ADDITIVE_MASK,
        chunk=chunk,
        margin=0 if chunk else _most_margin(call, stored, mask, tiles.block_m, block_n),
        lanes=1 if chunk else math.gcd(_most_lanes(call, stored, tiles.block_m), kv_heads * q_blocks, programs),
    )


def _most_lanes(call: AttentionCall, stored: KeyValue, block_m: int) -> int:
    """Return the most lanes: several for sequences with room for many keys, whose heads are neighbours in a page."""
    key, table = stored.key, stored.block_table
    heads_are_neighbours = key.stride(1) < key.stride(2)
    measured = heads_are_neighbours and stored.shared_pages is None and _has_spare_registers(call, stored, block_m)
    if table is None or not measured:
        return 1
    keys = min(table.shape[0] * table.shape[1], key.shape[0]) * key.shape[2] * key.shape[1]
    large = keys * (call.query.shape[3] + stored.value.shape[3]) * key.element_size() >= LEAST_BYTES_IN_STEP
    return page_table(call.query.device).most_lanes if large else 1


def _most_margin(call: AttentionCall, stored: KeyValue, mask: MaskPlan, block_m: int, block_n: int) -> int:
    """Return the most tiles of a margin: none if all sequences have one length, or share keys in row groups."""
    ragged = mask.groups > 1 and stored.row_groups is None
    return MARGIN_KEYS // block_n if ragged and _has_spare_registers(call, stored, block_m) else 0


def _has_spare_registers(call: AttentionCall, stored: KeyValue, block_m: int) -> bool:
    """Return True for tiles, dtypes and widths that a longer schedule does not make ptxas (Triton 3.6, 3.9) spill."""
    in_16_bits = call.query.element_size() == stored.key.element_size() == 2
    return block_m == 16 and in_16_bits and max(call.query.shape[3], stored.value.shape[3]) <= 128
