"""Partial states: find the slots of an output state, and add its partial states to a running state."""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import fold_states
from tatten.ops.cuda.kernels.tile_scheduler import (
    SHARED_PART,
    active_programs_of,
    chunks_of,
    first_tile,
    program_of,
    tile_space,
)
from tatten.ops.page_runs import PLACES, TILE_ENDS, UNIT_KEYS

_PLACES, _TILE_ENDS, _UNIT_KEYS = tl.constexpr(PLACES), tl.constexpr(TILE_ENDS), tl.constexpr(UNIT_KEYS)


@triton.jit
def find_partials(
    sequence,
    head,
    position,
    partials,
    sizes,
    q_heads,
    q_len,
    window,
    batch,
    SPACE: tl.constexpr,
    WINDOW: tl.constexpr,
    INT64_TILES: tl.constexpr,
    PART: tl.constexpr = 0,
):
    """Find the slots of the partial states of output states: the first, the others, and their number."""
    BLOCK_M: tl.constexpr = SPACE[0]
    GROUPS: tl.constexpr = SPACE[2]
    CHUNK: tl.constexpr = SPACE[3]
    LANES: tl.constexpr = SPACE[6]
    block_list_stride, n_groups, work_tiles, kv_len, kv_heads, seqs_per_kv, q_blocks, programs, lanes = sizes
    _, _, _, _, kv_lens, block_list, row_groups, shared = partials
    if row_groups is not None:
        sequence = tl.load(row_groups + 3 * (batch + 1) + sequence)  # its place
    tiles, ends, total_tiles, work_tiles, margin = tile_space(
        kv_lens,
        block_list,
        row_groups,
        block_list_stride,
        n_groups,
        work_tiles,
        kv_len,
        window,
        q_len,
        programs,
        batch,
        lanes,
        SPACE,
        WINDOW,
        shared,
        PART,
    )
    tiles = chunks_of(tiles, CHUNK)
    heads_per_kv = q_heads // kv_heads
    q_row = (head % heads_per_kv * seqs_per_kv + sequence % seqs_per_kv) * q_len + position
    work_tile = (sequence // seqs_per_kv * kv_heads + head // heads_per_kv) * q_blocks + q_row // BLOCK_M
    if LANES:
        lane_start = work_tile % lanes * total_tiles
        work_tile = work_tile // lanes
        total_tiles *= lanes
    if GROUPS == 1:
        n_tiles = tl.max(tiles, axis=0)
        start = work_tile * n_tiles
    else:
        group = work_tile // work_tiles
        in_group = tl.arange(0, GROUPS)[None, :] == group[:, None]
        n_tiles = tl.sum(tl.where(in_group, tiles[None, :], 0), axis=1)
        group_end = tl.sum(tl.where(in_group, ends[None, :], 0), axis=1)
        start = group_end - (work_tiles - work_tile % work_tiles) * (n_tiles + 2 * margin) + margin
    if LANES:
        start += lane_start
    if CHUNK:  # each chunk has its own slot
        slot = start * BLOCK_M + q_row % BLOCK_M
        return slot, slot, n_tiles + 0 * start
    active_programs = active_programs_of(programs, total_tiles, PART)
    return _slots(start, n_tiles, q_row % BLOCK_M, total_tiles, active_programs, BLOCK_M, INT64_TILES)


@triton.jit
def find_shared_partials(
    entry,
    head,
    position,
    partials,
    sizes,
    q_heads,
    q_len,
    entries,
    SPACE: tl.constexpr,
    INT64_TILES: tl.constexpr,
    FIRST_ROW: tl.constexpr,
):
    """Find the slots of partial states over shared pages, as `find_partials` does; an entry without a run has none.

    `TILE_ENDS` counts the tiles of the row groups, so that no program adds them up. `FIRST_ROW` is that of the
    grouping.
    """
    BLOCK_M: tl.constexpr = SPACE[0]
    _, _, work_tiles, _, kv_heads, seqs_per_kv, q_blocks, programs, _ = sizes
    shared = partials[7] + FIRST_ROW * (entries + 1)
    place = tl.load(shared + _PLACES * (entries + 1) + entry)
    shares = place >= 0
    place = tl.maximum(place, 0)
    heads_per_kv = q_heads // kv_heads
    q_row = (head % heads_per_kv * seqs_per_kv + place % seqs_per_kv) * q_len + position
    tile_ends, tiles = shared + _TILE_ENDS * (entries + 1), _UNIT_KEYS // SPACE[1]  # of a unit
    group = place // seqs_per_kv
    end = tl.load(tile_ends + group, mask=shares, other=1) * tiles
    n_tiles = end - tl.load(tile_ends + group - 1, mask=shares & (group > 0), other=0) * tiles
    start = end * work_tiles - (work_tiles - head // heads_per_kv * q_blocks - q_row // BLOCK_M) * n_tiles
    total_tiles = tl.maximum(tl.load(tile_ends + entries) * tiles * work_tiles, 1)
    active_programs = active_programs_of(programs, total_tiles, SHARED_PART)
    first_slot, other_slots, owners = _slots(
        start, n_tiles, q_row % BLOCK_M, total_tiles, active_programs, BLOCK_M, INT64_TILES
    )
    return first_slot, other_slots, tl.where(shares, owners, 0)


@triton.jit
def _slots(start, n_tiles, row, total_tiles, active_programs, BLOCK_M: tl.constexpr, INT64_TILES: tl.constexpr):
    """Return the slots of a row of work tiles of `n_tiles` from `start` on: the first, the others, and their number."""
    first = program_of(start, total_tiles, active_programs, INT64_TILES)
    owners = program_of(start + n_tiles - 1, total_tiles, active_programs, INT64_TILES) - first + 1
    # If the first owner began in another work tile, this is its second slot. The others began in this one.
    later = (start > first_tile(first, total_tiles, active_programs, INT64_TILES)).to(tl.int32)
    return (2 * first + later) * BLOCK_M + row, 2 * first * BLOCK_M + row, owners


@triton.jit
def fold_partials(
    acc,
    row_max,
    row_sum,
    state,
    ok,
    partials,
    slots,
    dims,
    VALUE_DIM: tl.constexpr,
    SPACE: tl.constexpr,
    PARTIALS: tl.constexpr,
    FOLD_WHOLE: tl.constexpr,
):
    """Add the columns `dims` of a segment's states, whole or partial, to the running states.

    `slots` are those of the partial states, as `find_partials` returns them.
    """
    BLOCK_M: tl.constexpr = SPACE[0]
    MAX_AND_SUM: tl.constexpr = SPACE[4]
    SLOTS: tl.constexpr = 1 if SPACE[3] else 2  # slots of a chunk, or of a program
    first_slot, other_slots, owners = slots
    out, lse, partial_out, partial_lse, _, _, _, _ = partials
    if FOLD_WHOLE:
        is_whole = ok & (owners == 1)
        if tl.max(is_whole.to(tl.int32), axis=0) > 0:
            acc, row_max, row_sum = fold_states(
                acc,
                row_max,
                row_sum,
                out,
                lse,
                state[None, :],
                is_whole[None, :],
                dims,
                VALUE_DIM,
                MAX_AND_SUM,
            )
    most = tl.max(tl.where(ok & (owners > 1), owners, 0), axis=0)
    for i in range(0, most, PARTIALS):
        nth = (i + tl.arange(0, PARTIALS))[:, None]
        at = tl.where(nth == 0, first_slot[None, :], other_slots[None, :] + SLOTS * BLOCK_M * nth).to(tl.int64)
        exists = (ok & (owners > 1))[None, :] & (nth < owners[None, :])
        acc, row_max, row_sum = fold_states(
            acc, row_max, row_sum, partial_out, partial_lse, at, exists, dims, VALUE_DIM, MAX_AND_SUM
        )
    return acc, row_max, row_sum
