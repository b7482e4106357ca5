"""The pages kernel: stream-K attention of many packed queries to keys in pages, in Gluon, for Hopper.

A producer warp keeps rings of K and V tiles filled (`page_loads`). One or two warpgroups read the tiles from the rings,
for 64 packed queries each (`page_softmax`). `page_blocks` defines the blocks of packed queries.

Launches often find the instruction cache cold. A program with few tiles then loads code for longer than it runs in its
loop, so the place of each query is computed once in a visit, and kept in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tatten.ops.cuda.kernels.page_blocks import (
    BLOCK_N,
    NO_QUERY,
    THREADS,
    entries_of,
    keys_of,
    load_ends,
    queries_of,
    share_of_program,
    visit_at,
)
from tatten.ops.cuda.kernels.page_loads import load_tiles
from tatten.ops.cuda.kernels.page_softmax import (
    CONSUMER_ROWS,
    SCORES,
    attend_overlapped,
    attend_step_by_step,
    rows_layout,
    sums_layout,
)
from tatten.ops.cuda.kernels.prefix_sm90 import _barrier
from tatten.ops.cuda.kernels.query_blocks import COLUMNS
from tatten.ops.page_runs import LEVELS, TILE_ENDS

_ROWS = gl.constexpr(CONSUMER_ROWS)
_BLOCK_N, _NO_QUERY = gl.constexpr(BLOCK_N), gl.constexpr(NO_QUERY)
_COLUMNS, _LEVELS, _TILE_ENDS = gl.constexpr(COLUMNS), gl.constexpr(LEVELS), gl.constexpr(TILE_ENDS)

# The sum of the registers of the three warpgroups must not exceed that at the start, or setmaxnreg hangs:
# 2 * 224 + 56 = 3 * 168, and 168 is 65536 / 384 rounded down to a multiple of 8.
START_REGS = {1: 144, 2: 168}  # by the number of consumers
_CONSUMER_REGS, _PRODUCER_REGS = gl.constexpr(224), gl.constexpr(56)


@gluon.jit
def _consume(
    tensors,
    lists,
    queries,
    buffers,
    strides,
    scale,
    sizes,
    NTH: gl.constexpr,
    ALIGNED: gl.constexpr,
    SHARED: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Attend to the tiles of all visits with the packed queries of this consumer, the `NTH` one."""
    query, sinks, out, lse, partial_out, partial_lse = tensors
    keys, values, unnamed, full, empty, zeroed, offsets, states, limits = buffers
    (
        program_start,
        end,
        block,
        block_end,
        kv_heads,
        q_blocks,
        kv_len,
        batch,
        heads_per_kv,
        most_members,
        q_len,
        window,
    ) = sizes
    query_sizes = (kv_heads, heads_per_kv, most_members, q_len, batch)
    CONSUMERS: gl.constexpr = queries.shape[0]
    DIM: gl.constexpr = queries.shape[2]
    BOX: gl.constexpr = PAGE if PAGE < _BLOCK_N else _BLOCK_N
    LOG2E: gl.constexpr = 1.4426950408889634
    row_layout: gl.constexpr = gl.SliceLayout(1, SCORES)
    acc_layout: gl.constexpr = sums_layout(DIM)
    acc_row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    load_layout: gl.constexpr = rows_layout(DIM)

    queries, offsets, states, limits = queries.index(NTH), offsets.index(NTH), states.index(NTH), limits.index(NTH)
    place = program_start
    n = 0  # tiles of earlier visits
    n_zeroed = 0
    entries = entries_of(lists, block, batch, SHARED)
    table_row, begin, stop_key, n_tiles = keys_of(lists, block, kv_len, batch, SHARED)
    while place < end:
        kv_head, q_block, first, stop = visit_at(place, end, block_end, n_tiles, kv_heads, q_blocks)

        rows = (q_block * CONSUMERS + NTH) * _ROWS + gl.arange(0, _ROWS, layout=THREADS)
        offset, state, limit = queries_of(lists, block, entries, rows, kv_head, query_sizes, strides, SHARED)
        _barrier()  # all warps have read the rows and the queries of the previous visit
        offsets.store(offset)
        states.store(state)
        limits.store(limit)
        _barrier()
        offset = offsets.load(gl.SliceLayout(1, load_layout))
        dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, load_layout))
        q = gl.load(query + (offset * ALIGNED)[:, None] + dims[None, :], mask=(offset >= 0)[:, None], other=0.0)
        queries.store(q)
        fence_async_shared()
        _barrier()

        limit = limits.load(row_layout)
        # The smallest and the largest limit of the queries that exist.
        least = gl.min(gl.where(limit == _NO_QUERY, 1 << 30, limit), axis=0)
        most = gl.max(limit, axis=0)
        seen_from = begin  # the first key that any query of the block attends to
        if WINDOW:
            at_block = lists + block * _COLUMNS
            first_query = gl.load(at_block + 1) // heads_per_kv
            seen_from = gl.load(at_block + 4) - gl.load(at_block + 3) + first_query - window + 1
        row_max = gl.full([_ROWS], float("-inf"), gl.float32, layout=row_layout)
        row_sum = gl.zeros([_ROWS], gl.float32, layout=row_layout)
        if sinks is not None:
            gl.static_assert(not SHARED, "a state has no head alone, and sums of rows begin with a sink")
            if first == 0:
                # Padding is a sequence without keys, after the others, and has no sink.
                head = (states.load(row_layout) % (kv_heads * heads_per_kv)).to(gl.int32)
                has_sink = (limit != _NO_QUERY) & (table_row < batch)
                sink = gl.load(sinks + head, mask=has_sink, other=float("-inf")).to(gl.float32)
                row_sum = gl.where(sink == float("-inf"), 0.0, 1.0)
                row_max = sink / scale

        rings = (keys, values, unnamed, full, empty, zeroed)
        keys_of_visit = (first, stop, begin, stop_key, seen_from, window)
        if SHARED and CONSUMERS == 2:
            acc, row_max, row_sum, n = attend_step_by_step(
                queries, rings, keys_of_visit, (limit, least, most), row_max, row_sum, scale * LOG2E, n, BOX
            )
        else:
            acc, row_max, row_sum, n, n_zeroed = attend_overlapped(
                queries,
                rings,
                keys_of_visit,
                (limit, least, most),
                row_max,
                row_sum,
                scale * LOG2E,
                n,
                n_zeroed,
                NTH,
                CONSUMERS,
                BOX,
                SHARED,
                WINDOW,
            )

        filled = row_sum != 0.0  # true for NaN, which must be propagated
        divisor = gl.where(filled, row_sum, 1.0)
        log_sum = gl.where(filled, row_max * scale + gl.log(divisor), float("-inf"))
        factor = gl.convert_layout(1.0 / divisor, acc_row_layout)[:, None]
        acc = gl.where(gl.convert_layout(filled, acc_row_layout)[:, None], acc * factor, 0.0)
        log_sum = gl.convert_layout(log_sum, acc_row_layout)

        out_dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, acc_layout))
        ok = limits.load(acc_row_layout) != _NO_QUERY
        if stop - first == n_tiles:
            at = states.load(acc_row_layout)
            gl.store(lse + at, log_sum, mask=ok)
            gl.store(out + (at * DIM)[:, None] + out_dims[None, :], acc.to(out.dtype.element_ty), mask=ok[:, None])
        else:
            slot = 2 * gl.program_id(0) + (place - first > program_start).to(gl.int32)
            slots = (slot.to(gl.int64) * CONSUMERS + NTH) * _ROWS + gl.arange(0, _ROWS, layout=acc_row_layout)
            gl.store(partial_lse + slots, log_sum, mask=ok)
            gl.store(partial_out + (slots * DIM)[:, None] + out_dims[None, :], acc, mask=ok[:, None])
        place += stop - first
        if (place >= block_end) & (place < end):
            block += 1
            entries = entries_of(lists, block, batch, SHARED)
            table_row, begin, stop_key, n_tiles = keys_of(lists, block, kv_len, batch, SHARED)
            block_end += n_tiles * (kv_heads * q_blocks)


_SIZES = [
    *("query_b", "query_h", "query_l", "table_b", "table_s", "window", "kv_len", "n_pages", "room", "kv_heads"),
    *("heads_per_kv", "members", "q_len", "q_blocks", "programs", "batch"),
]


@gluon.jit(do_not_specialize=_SIZES)
def _pages_kernel(
    query,
    key,
    value,
    table,
    lists,
    ends,
    sinks,
    out,
    lse,
    partial_out,
    partial_lse,
    query_b,
    query_h,
    query_l,
    table_b,
    table_s,
    scale,
    window,
    kv_len,
    n_pages,
    room,
    kv_heads,
    heads_per_kv,
    members,
    q_len,
    q_blocks,
    programs,
    batch,
    DIM: gl.constexpr,
    ALIGNED: gl.constexpr,
    PAGE: gl.constexpr,
    SHARED: gl.constexpr,
    FIRST_ROW: gl.constexpr,
    WINDOW: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Attend to all blocks. Strides of `query` are in units of `ALIGNED` elements, to make their alignment known."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    # 128 KiB of K and V, and 192 for blocks of few queries, so that more loads are in flight.
    STAGES: gl.constexpr = (256 if CONSUMERS == 2 else 384) // DIM
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, _BLOCK_N, 1, DIM], DTYPE)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, DIM], DTYPE)
    plain_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    queries = gl.allocate_shared_memory(DTYPE, [CONSUMERS, _ROWS, DIM], q_layout)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _BLOCK_N, 1, DIM], tile_layout)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _BLOCK_N, 1, DIM], tile_layout)
    unnamed = gl.allocate_shared_memory(gl.int32, [STAGES, 1], plain_layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())  # of K, then of V
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    zeroed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    # The offset, the state and the limit of each row of a work tile, as `queries_of` returns them.
    offsets = gl.allocate_shared_memory(gl.int64, [CONSUMERS, _ROWS], plain_layout)
    states = gl.allocate_shared_memory(gl.int64, [CONSUMERS, _ROWS], plain_layout)
    limits = gl.allocate_shared_memory(gl.int32, [CONSUMERS, _ROWS], plain_layout)
    mbarrier.init(zeroed, count=CONSUMERS)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()

    # The wait comes first: the next kernel may not wait for this one, and may read the data that this one waited for.
    # The other warps are behind the wait too, as they start at `warp_specialize`.
    gdc_wait()
    gdc_launch_dependents()
    unit = 1
    if SHARED:
        lists += FIRST_ROW * (_LEVELS * batch + 1)
        ends, unit = lists + _TILE_ENDS * (_LEVELS * batch + 1), kv_heads * q_blocks
    space = load_ends(ends, unit, room)
    if SHARED:  # noqa: SIM102 (known when this is compiled)
        if space[3] == 0:
            return  # nothing is shared; the launch over own parts needs the SM
    place, end, block, block_end = share_of_program(space, programs, lists, kv_heads, SHARED)
    # `warp_specialize` stores what it captures where a sum of `share_of_program` has left its result. Triton (3.6) puts
    # no barrier in between: a warp could store before another one has read.
    _barrier()
    tensors = (query, sinks, out, lse, partial_out, partial_lse)
    buffers = (keys, values, unnamed, full, empty, zeroed, offsets, states, limits)
    strides = (query_b, query_h, query_l)
    sizes = (place, end, block, block_end, kv_heads, q_blocks, kv_len, batch, heads_per_kv, members, q_len, window)
    loads = (place, end, block, block_end, kv_heads, q_blocks, kv_len, batch, n_pages, table_b, table_s)
    # Constants are passed directly: in a tuple that a variable holds they would become tensors.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (tensors, lists, queries, buffers, strides, scale, sizes, 0, ALIGNED, SHARED, PAGE, WINDOW)),
                (load_tiles, ((key, value), lists, table, buffers[:5], loads, SHARED, PAGE)),
            ],
            [1],
            [_PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tensors, lists, queries, buffers, strides, scale, sizes, 0, ALIGNED, SHARED, PAGE, WINDOW)),
                (_consume, (tensors, lists, queries, buffers, strides, scale, sizes, 1, ALIGNED, SHARED, PAGE, WINDOW)),
                (load_tiles, ((key, value), lists, table, buffers[:5], loads, SHARED, PAGE)),
            ],
            [4, 1],
            [_CONSUMER_REGS, _PRODUCER_REGS],
        )
