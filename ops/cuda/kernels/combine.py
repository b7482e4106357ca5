"""Merging what the lean kernel left of one or two segments into the final states, in one Triton kernel.

Each output row finds its own partial states: the schedule is arithmetic, so nothing but the lengths has to be read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.tile_scheduler import (
    finish_state,
    first_tile,
    fold_states,
    program_of,
    store_lse,
    tile_space,
)


@triton.jit
def _find_partials(
    sequence,
    head,
    position,
    kv_lens,
    blocks,
    blocks_group,
    n_groups,
    rows,
    kv_len,
    kv_heads,
    seqs_per_kv,
    m_blocks,
    programs,
    q_heads,
    q_len,
    window,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_LENS: tl.constexpr,
    LISTED: tl.constexpr,
    WINDOW: tl.constexpr,
    INT64_TILES: tl.constexpr,
):
    """Where the first partial state of each output row lies, where the others do, and how many there are."""
    tiles, ends = tile_space(
        kv_lens, blocks, blocks_group, n_groups, rows, kv_len, window, q_len, BLOCK_N, GROUPS, HAS_LENS, LISTED, WINDOW
    )
    line = tl.max(ends, axis=0)
    used = tl.minimum(programs, line)
    group = q_heads // kv_heads
    packed = (head % group * seqs_per_kv + sequence % seqs_per_kv) * q_len + position
    row = (sequence // seqs_per_kv * kv_heads + head // group) * m_blocks + packed // BLOCK_M
    if GROUPS == 1:
        n_tiles = tl.max(tiles, axis=0)
        row_start = row * n_tiles
    else:
        of_row = tl.arange(0, GROUPS)[None, :] == (row // rows)[:, None]
        n_tiles = tl.sum(tl.where(of_row, tiles[None, :], 0), axis=1)
        end = tl.sum(tl.where(of_row, ends[None, :], 0), axis=1)
        row_start = end - (rows - row % rows) * n_tiles
    first = program_of(row_start, line, used, INT64_TILES)
    owners = program_of(row_start + n_tiles - 1, line, used, INT64_TILES) - first + 1
    # Only its first owner may have begun the row behind its own start, in its second slot.
    later = (row_start > first_tile(first, line, used, INT64_TILES)).to(tl.int32)
    within = packed % BLOCK_M
    return (2 * first + later) * BLOCK_M + within, 2 * first * BLOCK_M + within, owners


@triton.jit
def _fold_partials(
    acc,
    row_max,
    row_sum,
    states,
    row_ok,
    out,
    lse,
    partial_out,
    partial_lse,
    first_at,
    others_at,
    owners,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTIALS: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Add a segment's states of some output rows, whole or in partials, to the running ones."""
    dims = tl.arange(0, BLOCK_DV)
    if WHOLE:
        whole = row_ok & (owners == 1)
        if tl.max(whole.to(tl.int32), axis=0) > 0:
            acc, row_max, row_sum = fold_states(
                acc, row_max, row_sum, out, lse, states[None, :], whole[None, :], dims, VALUE_DIM, PAIRED
            )
    most = tl.max(tl.where(row_ok & (owners > 1), owners, 0), axis=0)
    for i in range(0, most, PARTIALS):
        partials = (i + tl.arange(0, PARTIALS))[:, None]
        at = tl.where(partials == 0, first_at[None, :], others_at[None, :] + 2 * BLOCK_M * partials).to(tl.int64)
        here = (row_ok & (owners > 1))[None, :] & (partials < owners[None, :])
        acc, row_max, row_sum = fold_states(
            acc, row_max, row_sum, partial_out, partial_lse, at, here, dims, VALUE_DIM, PAIRED
        )
    return acc, row_max, row_sum


_SIZES = [
    "blocks_g_a",
    "blocks_g_b",
    "groups_a",
    "rows_a",
    "kv_len_a",
    "seqs_per_kv_a",
    "m_blocks_a",
    "programs_a",
    "kv_heads_a",
    "window",
    "q_len",
]
_SIZES += ["groups_b", "rows_b", "kv_len_b", "seqs_per_kv_b", "m_blocks_b", "programs_b", "kv_heads_b", "q_heads"]


@triton.jit(do_not_specialize=_SIZES)
def _combine_kernel(
    out,
    lse,
    out_a,
    lse_a,
    partial_out_a,
    partial_lse_a,
    kv_lens_a,
    blocks_a,
    out_b,
    lse_b,
    partial_out_b,
    partial_lse_b,
    kv_lens_b,
    blocks_b,
    q_heads,
    q_len,
    blocks_g_a,
    groups_a,
    rows_a,
    kv_len_a,
    kv_heads_a,
    seqs_per_kv_a,
    m_blocks_a,
    programs_a,
    blocks_g_b,
    groups_b,
    rows_b,
    kv_len_b,
    kv_heads_b,
    seqs_per_kv_b,
    m_blocks_b,
    programs_b,
    window,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M_A: tl.constexpr,
    BLOCK_N_A: tl.constexpr,
    GROUPS_A: tl.constexpr,
    HAS_LENS_A: tl.constexpr,
    LISTED_A: tl.constexpr,
    PAIRED_A: tl.constexpr,
    BLOCK_M_B: tl.constexpr,
    BLOCK_N_B: tl.constexpr,
    GROUPS_B: tl.constexpr,
    HAS_LENS_B: tl.constexpr,
    LISTED_B: tl.constexpr,
    PAIRED_B: tl.constexpr,
    WINDOW: tl.constexpr,
    INT64_TILES: tl.constexpr,
    TWO: tl.constexpr,
    PAIRED_OUT: tl.constexpr,
    PARTIALS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    states = tl.program_id(0) + tl.arange(0, 1)
    row_ok = states >= 0
    position = states % q_len
    head = states // q_len % q_heads
    sequence = states // q_len // q_heads
    states = states.to(tl.int64)
    first_a, others_a, owners_a = _find_partials(
        sequence,
        head,
        position,
        kv_lens_a,
        blocks_a,
        blocks_g_a,
        groups_a,
        rows_a,
        kv_len_a,
        kv_heads_a,
        seqs_per_kv_a,
        m_blocks_a,
        programs_a,
        q_heads,
        q_len,
        window,
        BLOCK_M_A,
        BLOCK_N_A,
        GROUPS_A,
        HAS_LENS_A,
        LISTED_A,
        WINDOW,
        INT64_TILES,
    )
    if TWO:
        first_b, others_b, owners_b = _find_partials(
            sequence,
            head,
            position,
            kv_lens_b,
            blocks_b,
            blocks_g_b,
            groups_b,
            rows_b,
            kv_len_b,
            kv_heads_b,
            seqs_per_kv_b,
            m_blocks_b,
            programs_b,
            q_heads,
            q_len,
            window,
            BLOCK_M_B,
            BLOCK_N_B,
            GROUPS_B,
            HAS_LENS_B,
            LISTED_B,
            False,
            INT64_TILES,
        )
    else:
        row_ok = row_ok & (owners_a > 1)  # the others were written at once
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    acc, row_max, row_sum = _fold_partials(
        acc,
        row_max,
        row_sum,
        states,
        row_ok,
        out_a,
        lse_a,
        partial_out_a,
        partial_lse_a,
        first_a,
        others_a,
        owners_a,
        VALUE_DIM,
        BLOCK_DV,
        BLOCK_M_A,
        PARTIALS,
        TWO,
        PAIRED_A,
    )
    if TWO:
        acc, row_max, row_sum = _fold_partials(
            acc,
            row_max,
            row_sum,
            states,
            row_ok,
            out_b,
            lse_b,
            partial_out_b,
            partial_lse_b,
            first_b,
            others_b,
            owners_b,
            VALUE_DIM,
            BLOCK_DV,
            BLOCK_M_B,
            PARTIALS,
            TWO,
            PAIRED_B,
        )
    acc, log_sum = finish_state(acc, row_max, row_sum)
    dims = tl.arange(0, BLOCK_DV)
    store_lse(lse, states, log_sum, row_max, row_sum, row_ok, PAIRED_OUT)
    tl.store(
        out + states[:, None] * VALUE_DIM + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=row_ok[:, None] & (dims < VALUE_DIM)[None, :],
    )
