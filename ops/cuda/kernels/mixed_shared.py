"""Kernels around attention of a mixed batch with shared pages: what comes before it, and the combine after it.

Sequences of one query share pages: row groups read their runs, as in a decode step, and their blocks begin behind them.
Sequences of several queries read all of their keys. Only the device knows which are which.

1. One launch lists the blocks, keeps the row groups of sequences with one query, and copies their queries to one place
   for each sequence, where the launch over row groups finds them.
2. After attention, the combine adds the states over runs to those of the blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.combine_blocks import combine_shares, fold_slots, slots_of_shares
from tatten.ops.cuda.kernels.online_softmax import finish_state, fold_states
from tatten.ops.cuda.kernels.partials import find_shared_partials, fold_partials
from tatten.ops.cuda.kernels.query_blocks import COLUMNS, CUTS_COLUMN, FEW_ROWS, list_blocks, starts_of
from tatten.ops.page_runs import (
    BEGINS,
    ENTRY_STOPS,
    LEADERS,
    LEVELS,
    ORDER,
    OWN,
    PLACES,
    STARTS,
    STOPS,
    TILE_ENDS,
    UNIT_KEYS,
)

_COLUMNS, _FEW_ROWS, _CUTS_COLUMN = tl.constexpr(COLUMNS), tl.constexpr(FEW_ROWS), tl.constexpr(CUTS_COLUMN)
_LEVELS, _UNIT_KEYS = tl.constexpr(LEVELS), tl.constexpr(UNIT_KEYS)
_LEADERS, _BEGINS, _ORDER, _PLACES, _STARTS, _STOPS, _ENTRY_STOPS, _OWN, _TILE_ENDS = (
    tl.constexpr(row) for row in (LEADERS, BEGINS, ORDER, PLACES, STARTS, STOPS, ENTRY_STOPS, OWN, TILE_ENDS)
)
LISTS = 3  # programs that make lists; each of the others copies the query of a sequence
_LISTS = tl.constexpr(LISTS)


@triton.jit(
    do_not_specialize=[
        *("n_tokens", "batch", "kv_len", "q_heads", "kv_heads", "heads_per_kv", "few", "many"),
        *("few_programs", "many_programs", "far_tiles"),
    ]
)
def _list_shared_kernel(
    cu_seqlens_q,
    kv_lens,
    shared,
    query,
    scratch,
    blocks,
    ends,
    kept,
    queries,
    query_strides,
    n_tokens,
    batch,
    kv_len,
    q_heads,
    kv_heads,
    heads_per_kv,
    few,
    many,
    few_programs,
    many_programs,
    far_tiles,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ENTRIES: tl.constexpr,
    MEMBERS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the blocks of each class, write `kept` for `shared`, and copy the queries of sequences that share keys."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    own_starts = shared + _OWN * (_LEVELS * batch + 1)
    if program < 2:
        list_blocks(
            program,
            (cu_seqlens_q, kv_lens, own_starts),
            (scratch, blocks, ends),
            (n_tokens, batch, kv_len, 0, kv_heads, heads_per_kv, few, many),
            (few_programs, many_programs, far_tiles),
            SEQUENCES,
            TILES,
            0,
            False,
            BLOCK,
            WHOLE,
            False,
        )
    elif program == 2:
        shared += FIRST_ROW * (_LEVELS * batch + 1)
        _keep_runs(cu_seqlens_q, shared, kept, n_tokens, batch, SEQUENCES, ENTRIES, MEMBERS)
    else:
        _copy_query(
            cu_seqlens_q,
            own_starts,
            query,
            queries,
            program - _LISTS,
            query_strides,
            n_tokens,
            q_heads,
            SEQUENCES,
            DIM,
            BLOCK,
        )


@triton.jit
def _keep_runs(
    cu_seqlens_q,
    shared,
    kept,
    n_tokens,
    batch,
    SEQUENCES: tl.constexpr,
    ENTRIES: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Write a grouping of the shared pages without the entries of sequences that don't have one query.

    A row group keeps the order of its entries, so that its first one is still the longest. It may have any leader.
    """
    n = _LEVELS * batch
    width = n + 1
    own = kept + _OWN * width
    sequences = tl.arange(0, SEQUENCES)
    starts = starts_of(cu_seqlens_q, sequences, n_tokens, batch)
    stops = tl.load(cu_seqlens_q + 1 + sequences, mask=sequences < batch, other=n_tokens)
    q_lens = tl.maximum(starts, tl.minimum(stops, n_tokens)) - starts
    own_starts = tl.load(shared + _OWN * width + sequences, mask=(sequences < batch) & (q_lens == 1), other=0)
    tl.store(own + sequences, own_starts, mask=sequences < batch)
    tl.debug_barrier()

    at = tl.arange(0, ENTRIES)
    ok = at < n
    entry = tl.load(shared + _ORDER * width + at, mask=ok, other=0)
    active = at < tl.load(shared + _BEGINS * width + n)
    # An entry has a run, so its sequence has an own part behind it.
    keeps = active & (tl.load(own + entry % batch, mask=active, other=0) > 0)
    nth = tl.cumsum(keeps.to(tl.int32), axis=0) - 1
    n_kept = tl.sum(keeps.to(tl.int32), axis=0)
    group = tl.load(shared + _PLACES * width + entry, mask=keeps, other=0) // MEMBERS

    # Neighbours, and the first entry of a group, are read back from the memory of the result.
    tl.store(kept + _LEADERS * width + nth, group, mask=keeps)
    tl.debug_barrier()
    opens = keeps & (group != tl.load(kept + _LEADERS * width + nth - 1, mask=keeps & (nth > 0), other=-1))
    number = tl.cumsum(opens.to(tl.int32), axis=0) - 1
    n_groups = tl.sum(opens.to(tl.int32), axis=0)
    tl.store(kept + _BEGINS * width + number, nth, mask=opens)
    tl.debug_barrier()
    slot = nth - tl.load(kept + _BEGINS * width + number, mask=keeps, other=0)
    leader = tl.load(shared + _LEADERS * width + group, mask=opens, other=0)
    start = tl.load(shared + _STARTS * width + group, mask=opens, other=0)
    stop = tl.load(shared + _ENTRY_STOPS * width + entry, mask=keeps, other=0)
    tiles = tl.where(opens, (stop - start) // _UNIT_KEYS, 0)
    tiles_so_far, all_tiles = tl.cumsum(tiles, axis=0), tl.sum(tiles, axis=0)

    tl.store(kept + _LEADERS * width + number, leader, mask=opens)
    tl.store(kept + _STARTS * width + number, start, mask=opens)
    tl.store(kept + _STOPS * width + number, stop, mask=opens)
    tl.store(kept + _TILE_ENDS * width + number, tiles_so_far, mask=opens)
    rest, zeros = (at >= n_groups) & (at <= n), tl.zeros([ENTRIES], tl.int32)
    tl.store(kept + _LEADERS * width + at, tl.where(at == n, n_groups, 0), mask=rest)
    tl.store(kept + _BEGINS * width + at, n_kept + zeros, mask=rest)
    tl.store(kept + _STARTS * width + at, zeros, mask=rest)
    tl.store(kept + _STOPS * width + at, zeros, mask=rest)
    tl.store(kept + _TILE_ENDS * width + at, all_tiles + zeros, mask=rest)
    place = tl.where(keeps, nth, n_kept + at - nth - 1)  # the others follow those that are kept
    tl.store(kept + _ORDER * width + place, entry, mask=ok)
    tl.store(kept + _PLACES * width + entry, tl.where(keeps, number * MEMBERS + slot, -1), mask=ok)
    tl.store(kept + _ENTRY_STOPS * width + entry, tl.where(keeps, stop, 0), mask=ok)
    tl.store(own + at, zeros, mask=(at >= batch) & (at <= n))
    tl.store(kept + _ORDER * width + n, 0)
    tl.store(kept + _PLACES * width + n, 0)
    tl.store(kept + _ENTRY_STOPS * width + n, 0)


@triton.jit
def _copy_query(
    cu_seqlens_q,
    own_starts,
    query,
    queries,
    sequence,
    query_strides,
    n_tokens,
    q_heads,
    SEQUENCES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the query of a sequence that shares keys, if it has one."""
    if tl.load(own_starts + sequence) > 0:
        query_t, query_h, query_d = query_strides
        at = tl.arange(0, SEQUENCES)
        cu = tl.load(cu_seqlens_q + at, mask=(at > 0) & (at <= sequence), other=0)
        start = tl.max(tl.minimum(tl.maximum(cu, 0), n_tokens), axis=0)
        stop = tl.maximum(tl.minimum(tl.load(cu_seqlens_q + sequence + 1), n_tokens), start)
        if stop - start == 1:
            query += start.to(tl.int64) * query_t
            size = q_heads * DIM
            queries += sequence.to(tl.int64) * size
            for i in range(0, size, BLOCK):
                x = i + tl.arange(0, BLOCK)
                place = (x // DIM).to(tl.int64) * query_h + (x % DIM).to(tl.int64) * query_d
                tl.store(queries + x, tl.load(query + place, mask=x < size), mask=x < size)


@triton.jit(
    do_not_specialize=[
        *("few", "many", "few_programs", "many_programs", "few_slots", "kv_heads", "heads_per_kv", "batch"),
        *("work_tiles", "seqs_per_kv", "q_blocks", "shared_programs"),
    ]
)
def _combine_shared_kernel(
    blocks,
    ends,
    scratch,
    out,
    lse,
    partial_out,
    partial_lse,
    shared_states,
    few,
    many,
    few_programs,
    many_programs,
    few_slots,
    kv_heads,
    heads_per_kv,
    batch,
    work_tiles,
    seqs_per_kv,
    q_blocks,
    shared_programs,
    SEQUENCES: tl.constexpr,
    SPACE: tl.constexpr,
    INT64_TILES: tl.constexpr,
    MANY_M: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine the states of sequences that share keys in the first programs, and the partials of blocks in the others.

    A program has all columns, because it reads an lse that it then replaces.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dims = tl.arange(0, BLOCK_DV)
    own_starts = shared_states[7] + _OWN * (_LEVELS * batch + 1)
    program = tl.program_id(0)
    parts = tl.cdiv(heads_per_kv, _FEW_ROWS)
    adding = batch * kv_heads * parts
    if program < adding:  # these take longest
        sequence = program // parts // kv_heads
        if tl.load(own_starts + sequence) > 0:
            _add_runs(
                sequence,
                program // parts % kv_heads,
                program % parts,
                (blocks, ends, scratch),
                (out, lse, partial_out, partial_lse),
                shared_states,
                (few, many, few_programs, many_programs, kv_heads, heads_per_kv, batch),
                (0, 0, work_tiles, 0, kv_heads, seqs_per_kv, q_blocks, shared_programs, 1),
                dims,
                SEQUENCES,
                SPACE,
                INT64_TILES,
                MANY_M,
                VALUE_DIM,
            )
    else:
        combine_shares(
            program - adding,
            (blocks, ends, own_starts),
            (out, lse, partial_out, partial_lse),
            (few, many, few_programs, many_programs, few_slots, kv_heads, heads_per_kv),
            dims,
            MANY_M,
            VALUE_DIM,
            False,
        )


@triton.jit
def _add_runs(
    sequence,
    kv_head,
    part,
    lists,
    tensors,
    shared_states,
    sizes,
    shared_sizes,
    dims,
    SEQUENCES: tl.constexpr,
    SPACE: tl.constexpr,
    INT64_TILES: tl.constexpr,
    MANY_M: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Combine the states of up to `FEW_ROWS` heads of a sequence with one query: its own part, and its runs.

    Sequences with one query are in the first class that has blocks.
    """
    blocks, ends, scratch = lists
    out, lse, partial_out, partial_lse = tensors
    few, many, few_programs, many_programs, kv_heads, heads_per_kv, batch = sizes
    is_many = few == 0
    room, programs = tl.where(is_many, many, few), tl.where(is_many, many_programs, few_programs)
    block_m = tl.where(is_many, MANY_M, _FEW_ROWS)
    scratch += tl.where(is_many, 2 * SEQUENCES, 0)
    first_block = tl.load(scratch + sequence - 1, mask=sequence > 0, other=0)
    token = tl.load(scratch + SEQUENCES + sequence).to(tl.int64)
    row = part * _FEW_ROWS + tl.arange(0, _FEW_ROWS)
    ok = row < heads_per_kv
    head = kv_head * heads_per_kv + row
    q_heads = kv_heads * heads_per_kv
    state = token * q_heads + head

    block = first_block + part * _FEW_ROWS // block_m
    total = tl.load(ends + room - 1)
    cuts = tl.load(blocks + _CUTS_COLUMN)
    end, margin = tl.load(ends + block), cuts // 2
    size = tl.load(blocks + block * _COLUMNS + 6).to(tl.int64) + 2 * margin
    active = tl.maximum(tl.minimum(programs, total), 1)
    slots, _ = slots_of_shares(end - (kv_heads - kv_head) * size, size, margin, total, active)

    row_max = tl.full([_FEW_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([_FEW_ROWS], tl.float32)
    acc = tl.zeros([_FEW_ROWS, dims.shape[0]], tl.float32)
    if (cuts % 2 == 1) | (slots[3] == 1):
        acc, row_max, row_sum = fold_states(
            acc, row_max, row_sum, out, lse, state[None, :], ok[None, :], dims, VALUE_DIM, False
        )
    else:
        acc, row_max, row_sum = fold_slots(
            acc, row_max, row_sum, (partial_out, partial_lse), slots, row % block_m, block_m, ok, dims, VALUE_DIM, 4
        )
    for level in tl.static_range(_LEVELS):
        entry = level * batch + sequence
        slots = find_shared_partials(
            entry + 0 * row,
            head,
            0,
            shared_states,
            shared_sizes,
            q_heads,
            1,
            _LEVELS * batch,
            SPACE,
            INT64_TILES,
            0,
        )
        acc, row_max, row_sum = fold_partials(
            acc,
            row_max,
            row_sum,
            entry.to(tl.int64) * q_heads + head,
            ok,
            shared_states,
            slots,
            dims,
            VALUE_DIM,
            SPACE,
            1,
            True,
        )
    acc, log_sum = finish_state(acc, row_max, row_sum)
    tl.debug_barrier()  # a thread may store what another one has loaded
    tl.store(lse + state, log_sum, mask=ok)
    tl.store(
        out + state[:, None] * VALUE_DIM + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=ok[:, None] & (dims < VALUE_DIM)[None, :],
    )
