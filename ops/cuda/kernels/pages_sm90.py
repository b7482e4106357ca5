"""The pages kernel: stream-K attention of many packed queries to keys in pages, in Gluon, for Hopper.

A producer warp keeps rings of K and V tiles filled (`page_loads`). One or two warpgroups read the tiles from the rings,
for 64 packed queries each, as in the prefix kernel. `page_blocks` defines the blocks of packed queries.

A visit goes through its tiles backwards. Only tiles near the ends of a block have keys that some queries do not attend
to, and entries that name no page are rare, so the loop computes masks in a branch.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tatten.ops.cuda.kernels.page_blocks import BLOCK_N, keys_of, queries_of, share_of_program, visit_at
from tatten.ops.cuda.kernels.page_loads import load_tiles
from tatten.ops.cuda.kernels.prefix_sm90 import _barrier
from tatten.ops.cuda.kernels.query_blocks import COLUMNS
from tatten.ops.page_runs import LEVELS, TILE_ENDS

HALF_M = 64
_HALF_M = gl.constexpr(HALF_M)  # queries of each consumer: a warpgroup, whose wgmma has 64 rows
_BLOCK_N = gl.constexpr(BLOCK_N)
_COLUMNS, _LEVELS, _TILE_ENDS = gl.constexpr(COLUMNS), gl.constexpr(LEVELS), gl.constexpr(TILE_ENDS)

# The sum of the registers of the three warpgroups must not exceed that at the start, or setmaxnreg hangs:
# 2 * 224 + 56 = 3 * 168, and 168 is 65536 / 384 rounded down to a multiple of 8.
START_REGS = {1: 144, 2: 168}  # by the number of consumers
_CONSUMER_REGS, _PRODUCER_REGS = gl.constexpr(224), gl.constexpr(56)


@gluon.jit
def _zero_others(
    tile, start, stop, zeroed, n_zeroed, HALF: gl.constexpr, CONSUMERS: gl.constexpr, layout: gl.constexpr
):
    """Zero the rows of a tile of V outside `[start, stop)`: they may be NaN, and 0 * NaN is NaN.

    Each consumer zeroes its share, and waits for the other's. Return the number of tiles zeroed so far.
    """
    ROWS: gl.constexpr = 32
    PARTS: gl.constexpr = _BLOCK_N // ROWS // CONSUMERS
    if (start > 0) | (stop < _BLOCK_N):
        for j in gl.static_range(HALF * PARTS, (HALF + 1) * PARTS):
            if (start > j * ROWS) | (stop < (j + 1) * ROWS):
                part = tile.slice(j * ROWS, ROWS, 0)
                row = j * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
                x = part.load(layout)
                part.store(gl.where(((row >= start) & (row < stop))[:, None], x, gl.zeros_like(x)))
        fence_async_shared()
        _barrier()
        mbarrier.arrive(zeroed)
        mbarrier.wait(zeroed, n_zeroed & 1)
        n_zeroed += 1
    return n_zeroed


@gluon.jit
def _consume(
    tensors,
    lists,
    queries,
    buffers,
    strides,
    scale,
    sizes,
    HALF: gl.constexpr,
    ALIGNED: gl.constexpr,
    SHARED: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Attend to the tiles of all visits with the packed queries `[HALF * 64, (HALF + 1) * 64)` of each work tile."""
    query, sinks, out, lse, partial_out, partial_lse = tensors
    keys, values, unnamed, full, empty, zeroed = buffers
    query_b, query_h, query_l = strides
    program_start, end, block, block_end, kv_heads, q_blocks, kv_len, batch, heads_per_kv, members, q_len, window = (
        sizes
    )
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_M: gl.constexpr = queries.shape[0] * _HALF_M
    DIM: gl.constexpr = queries.shape[2]
    DTYPE: gl.constexpr = queries.dtype
    BOX: gl.constexpr = PAGE if PAGE < _BLOCK_N else _BLOCK_N
    LOG2E: gl.constexpr = 1.4426950408889634
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    acc_row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    flag_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])

    no_scores = gl.zeros([_HALF_M, _BLOCK_N], gl.float32, layout=scores_layout)
    to_exponent = scale * LOG2E
    q_shared = queries.index(HALF)
    q_heads = kv_heads * heads_per_kv
    place = program_start
    n = 0  # the current tile
    n_zeroed = 0
    table_row, begin, stop_key, n_tiles = keys_of(lists, block, kv_len, batch, SHARED)
    while place < end:
        kv_head, q_block, first, stop = visit_at(place, end, block_end, n_tiles, kv_heads, q_blocks)
        q_start = q_block * BLOCK_M + HALF * _HALF_M

        rows = gl.arange(0, _HALF_M, layout=gl.SliceLayout(1, load_layout))
        at_b, head, at_l, state, ok, limit = queries_of(
            lists, block, q_start + rows, kv_head, heads_per_kv, members, q_len, batch, SHARED
        )
        dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, load_layout))
        at = (at_b.to(gl.int64) * query_b + head * query_h + at_l * query_l) * ALIGNED
        q = gl.load(query + at[:, None] + dims[None, :], mask=ok[:, None], other=0.0)
        _barrier()  # all warps have read the queries of the previous visit
        q_shared.store(q)
        fence_async_shared()
        _barrier()

        rows = gl.arange(0, _HALF_M, layout=row_layout)
        at_b, head, at_l, state, ok, limit = queries_of(
            lists, block, q_start + rows, kv_head, heads_per_kv, members, q_len, batch, SHARED
        )
        # The smallest and the largest limit of the queries that exist.
        least = gl.min(gl.where(ok, limit, 1 << 30), axis=0)
        most = gl.max(gl.where(ok, limit, -1), axis=0)
        seen_from = begin  # the first key that any query of the block attends to
        if WINDOW:
            at_block = lists + block * _COLUMNS
            first_query = gl.load(at_block + 1) // heads_per_kv
            seen_from = gl.load(at_block + 4) - gl.load(at_block + 3) + first_query - window + 1
        row_max = gl.full([_HALF_M], float("-inf"), gl.float32, layout=row_layout)
        row_sum = gl.zeros([_HALF_M], gl.float32, layout=row_layout)
        if sinks is not None:  # noqa: SIM102 (known when this is compiled)
            if first == 0:
                # Padding is a sequence without keys, after the others, and has no sink.
                sink = gl.load(sinks + head, mask=ok & (table_row < batch), other=float("-inf")).to(gl.float32)
                row_sum = gl.where(sink == float("-inf"), 0.0, 1.0)
                row_max = sink / scale

        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        first_key = begin + (stop - 1) * _BLOCK_N
        k = keys.index(stage).reshape([_BLOCK_N, DIM]).permute([1, 0])
        scores = warpgroup_mma(q_shared, k, no_scores, use_acc=False, is_async=True)
        bits = gl.max(unnamed.index(stage).load(flag_layout), axis=0)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(empty.index(stage))
        scores = _masked(scores, first_key, stop_key, limit, bits, window, BOX, SHARED, WINDOW)
        new_row_max = gl.maximum(row_max, gl.max(scores, axis=1))
        base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max) * to_exponent
        exponents = gl.exp2(gl.fma(scores, to_exponent, -base[:, None]))
        row_sum = row_sum * gl.exp2(gl.fma(row_max, to_exponent, -base)) + gl.sum(exponents, axis=1)
        row_max = new_row_max
        p = gl.convert_layout(exponents.to(DTYPE), p_layout)
        acc = gl.zeros([_HALF_M, DIM], gl.float32, layout=acc_layout)
        mbarrier.wait(full.index(STAGES + stage), (n // STAGES) & 1)
        if not SHARED:
            tile = values.index(stage).reshape([_BLOCK_N, DIM])
            n_zeroed = _zero_others(
                tile, seen_from - first_key, stop_key - first_key, zeroed, n_zeroed, HALF, queries.shape[0], load_layout
            )

        for i in range(first + 1, stop):
            last_stage = n % STAGES
            n += 1
            stage = n % STAGES
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            k = keys.index(stage).reshape([_BLOCK_N, DIM]).permute([1, 0])
            scores = warpgroup_mma(q_shared, k, no_scores, use_acc=False, is_async=True)
            acc = warpgroup_mma(p, values.index(last_stage).reshape([_BLOCK_N, DIM]), acc, is_async=True)
            bits = gl.max(unnamed.index(stage).load(flag_layout), axis=0)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(empty.index(stage))
            first_key = begin + (first + stop - 1 - i) * _BLOCK_N
            needs_mask = (first_key + _BLOCK_N > least + (0 if SHARED else 1)) | (bits != 0)
            if WINDOW:
                needs_mask = needs_mask | (first_key <= most - window)
            if needs_mask:
                scores = _masked(scores, first_key, stop_key, limit, bits, window, BOX, SHARED, WINDOW)
            new_row_max = gl.maximum(row_max, gl.max(scores, axis=1))
            base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max) * to_exponent
            alpha = gl.exp2(gl.fma(row_max, to_exponent, -base))
            exponents = gl.exp2(gl.fma(scores, to_exponent, -base[:, None]))
            row_sum = row_sum * alpha + gl.sum(exponents, axis=1)
            empty_before = row_max == float("-inf")
            row_max = new_row_max
            # The wait for the next V is here and not at the top, because its branch keeps ptxas from moving the softmax
            # behind the wait for P@V, which would then overlap with nothing. It needs at least two stages.
            mbarrier.wait(full.index(STAGES + stage), (n // STAGES) & 1)
            # `deps` orders LLVM only; for ptxas the wait has no operands. The old p is among them so that its registers
            # are not reused while P@V reads them.
            acc, exponents, p = warpgroup_mma_wait(0, deps=[acc, exponents, p])
            mbarrier.arrive(empty.index(STAGES + last_stage))
            p = gl.convert_layout(exponents.to(DTYPE), p_layout)
            acc = acc * gl.convert_layout(alpha, acc_row_layout)[:, None]
            if SHARED:  # noqa: SIM102 (known when this is compiled)
                # Values of a tile that a sequence does not attend to may be NaN, and 0 * NaN is NaN.
                if first_key + 2 * _BLOCK_N > least:
                    acc = gl.where(gl.convert_layout(empty_before, acc_row_layout)[:, None], 0.0, acc)

        if WINDOW:  # noqa: SIM102 (known when this is compiled)
            if stop - first > 1:
                tile = values.index(n % STAGES).reshape([_BLOCK_N, DIM])
                n_zeroed = _zero_others(
                    tile, seen_from - first_key, _BLOCK_N, zeroed, n_zeroed, HALF, queries.shape[0], load_layout
                )
        acc = warpgroup_mma(p, values.index(n % STAGES).reshape([_BLOCK_N, DIM]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(STAGES + n % STAGES))
        n += 1

        filled = row_sum != 0.0  # true for NaN, which must be propagated
        divisor = gl.where(filled, row_sum, 1.0)
        log_sum = gl.where(filled, row_max * scale + gl.log(divisor), float("-inf"))
        factor = gl.convert_layout(1.0 / divisor, acc_row_layout)[:, None]
        acc = gl.where(gl.convert_layout(filled, acc_row_layout)[:, None], acc * factor, 0.0)
        log_sum = gl.convert_layout(log_sum, acc_row_layout)

        rows = gl.arange(0, _HALF_M, layout=acc_row_layout)
        out_dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, acc_layout))
        at_b, head, position, state, ok, limit = queries_of(
            lists, block, q_start + rows, kv_head, heads_per_kv, members, q_len, batch, SHARED
        )
        state = state.to(gl.int64) * q_heads + head
        if SHARED:
            state = state * q_len + position
        if stop - first == n_tiles:
            gl.store(lse + state, log_sum, mask=ok)
            gl.store(out + (state * DIM)[:, None] + out_dims[None, :], acc.to(out.dtype.element_ty), mask=ok[:, None])
        else:
            slot = 2 * gl.program_id(0) + (place - first > program_start).to(gl.int32)
            slots = slot.to(gl.int64) * BLOCK_M + HALF * _HALF_M + rows
            gl.store(partial_lse + slots, log_sum, mask=ok)
            gl.store(partial_out + (slots * DIM)[:, None] + out_dims[None, :], acc, mask=ok[:, None])
        place += stop - first
        if (place >= block_end) & (place < end):
            block += 1
            table_row, begin, stop_key, n_tiles = keys_of(lists, block, kv_len, batch, SHARED)
            block_end += n_tiles * (kv_heads * q_blocks)


@gluon.jit
def _masked(
    scores, first_key, stop_key, limit, bits, window, BOX: gl.constexpr, SHARED: gl.constexpr, WINDOW: gl.constexpr
):
    """Return the scores with -inf for keys that a query does not attend to."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 16]))
    nth = gl.arange(0, _BLOCK_N, layout=layout)
    key = first_key + nth
    if SHARED:  # each query of a row group attends to all keys of a tile, or to none
        ok = key[None, :] < limit[:, None]
    else:
        named = ((bits >> (nth // BOX)) & 1) == 0
        ok = (named & (key < stop_key))[None, :] & (key[None, :] <= limit[:, None])
        if WINDOW:
            ok = ok & (key[None, :] > (limit - window)[:, None])
    return gl.where(ok, scores, float("-inf"))


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
    WINDOW: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Attend to all blocks. Strides of `query` are in units of `ALIGNED` elements, to make their alignment known."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    # 128 KiB of K and V, and 192 for blocks of few queries, so that more loads are in flight.
    STAGES: gl.constexpr = (256 if CONSUMERS == 2 else 384) // DIM
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, _BLOCK_N, 1, DIM], DTYPE)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HALF_M, DIM], DTYPE)
    flag_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    queries = gl.allocate_shared_memory(DTYPE, [CONSUMERS, _HALF_M, DIM], q_layout)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _BLOCK_N, 1, DIM], tile_layout)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _BLOCK_N, 1, DIM], tile_layout)
    unnamed = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flag_layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())  # of K, then of V
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    zeroed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
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
        ends, unit = lists + _TILE_ENDS * (_LEVELS * batch + 1), kv_heads * q_blocks
        if gl.load(ends + (room - 1)) == 0:
            return  # nothing is shared; the launch over own parts needs the SM
    place, end, block, block_end = share_of_program(ends, unit, room, programs, lists, kv_heads, SHARED)
    # `warp_specialize` stores what it captures where a sum of `share_of_program` has left its result. Triton (3.6) puts
    # no barrier in between: a warp could store before another one has read.
    _barrier()
    tensors = (query, sinks, out, lse, partial_out, partial_lse)
    buffers = (keys, values, unnamed, full, empty, zeroed)
    strides = (query_b, query_h, query_l)
    sizes = (place, end, block, block_end, kv_heads, q_blocks, kv_len, batch, heads_per_kv, members, q_len, window)
    loads = (place, end, block, block_end, kv_heads, q_blocks, kv_len, batch, n_pages, table_b, table_s)
    # Constants are passed directly: in a tuple that a variable holds they would become tensors.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (tensors, lists, queries, buffers, strides, scale, sizes, FIRST, ALIGNED, SHARED, PAGE, WINDOW),
                ),
                (load_tiles, ((key, value), lists, table, buffers[:5], loads, SHARED, PAGE)),
            ],
            [1],
            [_PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (tensors, lists, queries, buffers, strides, scale, sizes, FIRST, ALIGNED, SHARED, PAGE, WINDOW),
                ),
                (
                    _consume,
                    (tensors, lists, queries, buffers, strides, scale, sizes, SECOND, ALIGNED, SHARED, PAGE, WINDOW),
                ),
                (load_tiles, ((key, value), lists, table, buffers[:5], loads, SHARED, PAGE)),
            ],
            [4, 1],
            [_CONSUMER_REGS, _PRODUCER_REGS],
        )
