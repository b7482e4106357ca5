"""Kernels that find the pages that sequences share, in four launches; `tatten.ops.page_runs` describes the result.

1. The owner of each page of the pool is set to the largest int32.
2. The lowest sequence that has a page at the end of a unit becomes its owner.
3. A program for each sequence follows its row, and finds leader and end of its first runs.
4. A program for each grouping keeps the runs that are shared, sorts them, and cuts them into row groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIZES = ["n_pages", "n_units", "batch", "q_length", "least"]


@triton.jit
def _seen_units(kv_lens, sequence, ok, q_length, n_units, UNIT: tl.constexpr, PAGE: tl.constexpr):
    """Return the number of units that all causal queries of a sequence attend to completely."""
    length = tl.load(kv_lens + sequence, mask=ok, other=0)
    return tl.minimum(tl.maximum(length - q_length + 1, 0) // (UNIT * PAGE), n_units).to(tl.int32)


@triton.jit
def _named(table, row, units, ok, table_b, table_s, n_pages, UNIT: tl.constexpr):
    """Return which units have only entries in the pool, and their last page; 0 for other units."""
    page = tl.zeros_like(units)
    for i in range(UNIT):
        page = tl.load(table + row * table_b + (units.to(tl.int64) * UNIT + i) * table_s, mask=ok, other=-1)
        ok = ok & (page >= 0) & (page < n_pages)
    return ok, tl.where(ok, page, 0)


@triton.jit(do_not_specialize=_SIZES)
def _free_pages_kernel(owners, n_pages, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(owners + at, tl.full([BLOCK], 2147483647, tl.int32), mask=at < n_pages)


@triton.jit(do_not_specialize=_SIZES)
def _own_pages_kernel(
    table,
    kv_lens,
    owners,
    table_strides,
    n_pages,
    n_units,
    q_length,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks = tl.cdiv(n_units, BLOCK)
    sequence = tl.program_id(0) // blocks
    units = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    seen = _seen_units(kv_lens, sequence, True, q_length, n_units, UNIT, PAGE)
    ok, page = _named(
        table, sequence.to(tl.int64), units, units < seen, table_strides[0], table_strides[1], n_pages, UNIT
    )
    tl.atomic_min(owners + page, sequence + tl.zeros_like(page), mask=ok, sem="relaxed")


@triton.jit
def _leaders(
    table,
    kv_lens,
    owners,
    sequence,
    units,
    seen,
    table_b,
    table_s,
    n_pages,
    n_units,
    q_length,
    UNIT,
    PAGE: tl.constexpr,
):
    """Return the leader of each unit: the owner of its last page, if the owner has the same pages there."""
    row = sequence.to(tl.int64)
    same, page = _named(table, row, units, units < seen, table_b, table_s, n_pages, UNIT)
    owner = tl.load(owners + page, mask=same, other=0)
    same = same & (units < _seen_units(kv_lens, owner, same, q_length, n_units, UNIT, PAGE))
    for i in range(UNIT):
        at = (units.to(tl.int64) * UNIT + i) * table_s
        owner_entry = tl.load(table + owner.to(tl.int64) * table_b + at, mask=same, other=-1)
        same = same & (owner_entry == tl.load(table + row * table_b + at, mask=same, other=-1))
    return tl.where(same, owner, sequence)


@triton.jit(do_not_specialize=_SIZES)
def _runs_kernel(
    table,
    kv_lens,
    owners,
    runs,
    table_strides,
    n_pages,
    n_units,
    batch,
    q_length,
    LEVELS: tl.constexpr,
    GROUPINGS: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write leader and end of each sequence's first runs, and for each grouping 0 for the longest run that it leads."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    table_b, table_s = table_strides
    sequence = tl.program_id(0)
    seen = _seen_units(kv_lens, sequence, True, q_length, n_units, UNIT, PAGE)
    end = seen * 0
    lanes = tl.arange(0, BLOCK)
    for level in tl.static_range(LEVELS):
        leader, start = sequence, end
        going = start < seen
        while going:
            units = end + lanes
            leaders = _leaders(
                table, kv_lens, owners, sequence, units, seen, table_b, table_s, n_pages, n_units, q_length, UNIT, PAGE
            )
            leader = tl.where(end == start, tl.sum(tl.where(lanes == 0, leaders, 0), axis=0), leader)
            past = end + BLOCK
            goes_on = (leaders == leader) & (units < seen)
            end = tl.min(tl.where(goes_on, past, units), axis=0)
            going = (end == past) & (end < seen)
        tl.store(runs + level * batch + sequence, leader)
        tl.store(runs + (LEVELS + level) * batch + sequence, end)
        for grouping in tl.static_range(GROUPINGS):
            tl.store(runs + (2 * LEVELS + grouping * (LEVELS + 1) + level) * batch + sequence, 0)


@triton.jit(do_not_specialize=_SIZES)
def _cut_runs_kernel(
    runs,
    shared,
    n_units,
    batch,
    least,
    LEVELS: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP_SIZES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keep the runs that are shared, and cut them into row groups.

    `runs` holds leaders and ends, each for all levels. Behind them, it holds for each grouping the longest run of each
    leader, for all levels, and has room for a start of each sequence.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n, grouping = LEVELS * batch, tl.program_id(0)
    group_size = GROUP_SIZES[0]
    for i in tl.static_range(1, len(GROUP_SIZES)):
        group_size = tl.where(grouping == i, GROUP_SIZES[i], group_size)
    shared += grouping * ROWS * (n + 1)
    leaders, begins = shared, shared + (n + 1)
    order, places = shared + 2 * (n + 1), shared + 3 * (n + 1)
    starts, stops = shared + 4 * (n + 1), shared + 5 * (n + 1)
    entry_stops, own, tile_ends = shared + 6 * (n + 1), shared + 7 * (n + 1), shared + 8 * (n + 1)
    ends, longest = runs + n, runs + 2 * n + grouping * (n + batch)
    complete = longest + n

    b = tl.arange(0, SEQUENCES)
    ok = b < batch
    start = tl.zeros([SEQUENCES], tl.int32)
    own_start = tl.zeros([SEQUENCES], tl.int32)
    may_share = ok
    for level in tl.static_range(LEVELS):
        run_leader = tl.load(runs + level * batch + b, mask=ok, other=0)
        end = tl.load(ends + level * batch + b, mask=ok, other=0)
        tl.store(complete + b, tl.where(may_share, start, -1), mask=ok)
        tl.debug_barrier()
        agrees = start == tl.load(complete + run_leader, mask=ok, other=-1)
        follows = may_share & agrees & (run_leader != b) & (end - start >= least)
        tl.atomic_max(longest + level * batch + run_leader, end, mask=follows, sem="relaxed")
        tl.debug_barrier()
        most = tl.load(longest + level * batch + b, mask=ok, other=0, cache_modifier=".cg")
        leads = may_share & (run_leader == b) & (most > start)
        stop = tl.where(follows, end, tl.where(leads, most, 0))
        tl.store(entry_stops + level * batch + b, stop * KEYS, mask=ok)
        own_start = tl.where(stop > 0, stop, own_start)
        may_share = (stop > 0) & (stop == end)
        start = end
    tl.store(own + b, own_start * KEYS, mask=ok)
    tl.debug_barrier()

    at = tl.arange(0, ENTRIES)
    ok = at < n
    stop = tl.load(entry_stops + at, mask=ok, other=0) // KEYS
    group = at // batch * batch + tl.load(runs + at, mask=ok, other=0)
    group = tl.where(ok, tl.where(stop > 0, group, n), n + 1).to(tl.int64)
    longest_first = tl.where(stop > 0, n_units - stop, 0)
    # All keys differ, so that entries of one length keep their order.
    key = tl.sort((group * (n_units + 1) + longest_first) * ENTRIES + at)
    entry = (key % ENTRIES).to(tl.int32)
    group = (key // ENTRIES // (n_units + 1)).to(tl.int32)
    active = group < n

    # Neighbours and the first entry of a group are read back from the memory of the result.
    tl.store(leaders + at, group, mask=ok)
    tl.debug_barrier()
    first = ok & (group != tl.load(leaders + at - 1, mask=ok & (at > 0), other=-1))
    nth_group = tl.cumsum(first.to(tl.int32), axis=0) - 1
    tl.store(begins + nth_group, at, mask=first)
    tl.debug_barrier()
    rank = at - tl.load(begins + nth_group, mask=ok, other=0)
    opens = active & (rank % group_size == 0)
    number = tl.cumsum(opens.to(tl.int32), axis=0) - 1
    n_groups = tl.sum(opens.to(tl.int32), axis=0)
    n_active = tl.sum(active.to(tl.int32), axis=0)
    run_start = tl.load(ends + entry - batch, mask=active & (entry >= batch), other=0)
    run_stop = tl.load(entry_stops + entry, mask=active, other=0)
    tl.debug_barrier()  # all reads come before the writes
    tiles = tl.where(opens, (run_stop - run_start * KEYS) // TILE, 0)
    tiles_so_far, all_tiles = tl.cumsum(tiles, axis=0), tl.sum(tiles, axis=0)

    rest, zeros = ok & (at >= n_groups), tl.zeros([ENTRIES], tl.int32)
    tl.store(leaders + number, group % batch, mask=opens)
    tl.store(begins + number, at, mask=opens)
    tl.store(starts + number, run_start * KEYS, mask=opens)
    tl.store(stops + number, run_stop, mask=opens)
    tl.store(tile_ends + number, tiles_so_far, mask=opens)
    tl.store(leaders + at, zeros, mask=rest)
    tl.store(begins + at, n_active + zeros, mask=rest)
    tl.store(starts + at, zeros, mask=rest)
    tl.store(stops + at, zeros, mask=rest)
    tl.store(tile_ends + at, all_tiles + zeros, mask=rest)
    tl.store(order + at, entry, mask=ok)
    tl.store(places + entry, tl.where(active, number * group_size + rank % group_size, -1), mask=ok)
    tl.store(own + at, zeros, mask=(at >= batch) & (at <= n))
    tl.store(leaders + n, n_groups)
    tl.store(begins + n, n_active)
    tl.store(order + n, 0)
    tl.store(places + n, 0)
    tl.store(starts + n, 0)
    tl.store(stops + n, 0)
    tl.store(entry_stops + n, 0)
    tl.store(own + n, 0)
    tl.store(tile_ends + n, all_tiles)
