"""The prefix kernel: stream-K attention of many packed queries to one long uniform K/V, in Gluon, for Hopper.

The tile space, the order of packed queries and the slots of partial states are those of the decode kernel,
`tatten.ops.cuda.kernels.decode`. The work on a tile differs: a producer warp keeps a ring of K and V tiles filled by
TMA, and two warpgroups read them from it, for 64 packed queries each. The tensor cores compute the scores of the next
tile during the softmax of a tile, as in FlashAttention-3 (arXiv 2407.08608). A visit goes through its tiles backwards,
so that only its first one can have keys beyond the end, and the loop has no mask.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK_M, BLOCK_N = 128, 128
_BLOCK_M, _BLOCK_N = gl.constexpr(BLOCK_M), gl.constexpr(BLOCK_N)
_HALF_M = gl.constexpr(BLOCK_M // 2)  # queries of each consumer: a warpgroup, whose wgmma has 64 rows

# Measured on an H200 against tiles of 64 keys, one consumer of 128 rows, more stages, and consumers that take turns
# (FlashAttention-3's pingpong): this is the fastest, or within 1% of it.
# The sum of the registers of the three warpgroups must not exceed that at the start, or setmaxnreg hangs:
# 2 * 232 + 40 = 3 * 168, and 168 is 65536 / 384 rounded down to a multiple of 8. With 24 for the producer ptxas spills
# 32 bytes.
START_REGS = 168
_CONSUMER_REGS, _PRODUCER_REGS = gl.constexpr(232), gl.constexpr(40)

# Renamed after Triton 3.6.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _produce(tensors, row_groups, buffers, sizes, ROWS: gl.constexpr):
    """Load K of each tile of all visits together with V of the tile before it.

    There is one pair more than tiles: the first pair lacks V, and the last one K.
    """
    key, value = tensors
    keys, values, full, empty = buffers
    program_start, program_end, n_tiles, kv_heads, q_blocks = sizes
    STAGES: gl.constexpr = keys.shape[0]
    tile = program_start
    n = 0
    last_kv_row, last_head, last_key = 0, 0, 0
    while tile < program_end:
        work_tile = tile // n_tiles
        first = tile - work_tile * n_tiles
        stop = gl.minimum(n_tiles, first + program_end - tile)
        kv_row = work_tile // (kv_heads * q_blocks)
        if ROWS:
            kv_row = gl.load(row_groups + kv_row)
        head = work_tile // q_blocks % kv_heads
        for i in range(first, stop):
            first_key = (first + stop - 1 - i) * _BLOCK_N
            stage = n % STAGES
            barrier = full.index(stage)
            mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
            if n == 0:
                mbarrier.expect(barrier, key.block_type.nbytes)
            else:
                mbarrier.expect(barrier, key.block_type.nbytes + value.block_type.nbytes)
            _load(key, [kv_row, head, first_key, 0], barrier, keys.index(stage))
            _load(value, [last_kv_row, last_head, last_key, 0], barrier, values.index(stage), pred=n > 0)
            last_kv_row, last_head, last_key = kv_row, head, first_key
            n += 1
        tile += stop - first
    if n > 0:
        stage = n % STAGES
        barrier = full.index(stage)
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(barrier, value.block_type.nbytes)
        _load(value, [last_kv_row, last_head, last_key, 0], barrier, values.index(stage))


@gluon.jit
def _sequences(row_groups, batch, group, slot):
    """Find the sequences in slots of a row group; -1 in empty slots."""
    starts = row_groups + batch + 1
    start, end = gl.load(starts + group), gl.load(starts + group + 1)
    in_order = start + slot
    return gl.load(starts + batch + 1 + in_order, mask=in_order < end, other=-1)


@gluon.jit
def _consume(
    tensors,
    row_groups,
    queries,
    buffers,
    strides,
    scale,
    sizes,
    HALF: gl.constexpr,
    ALIGNED: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Attend to the tiles of all visits with the packed queries `[HALF * 64, (HALF + 1) * 64)` of each work tile."""
    query, out, lse, partial_out, partial_lse = tensors
    keys, values, full, empty = buffers
    query_b, query_h, query_l = strides
    program_start, program_end, n_tiles, kv_len, seqs_per_kv, kv_heads, heads_per_kv, q_len, q_blocks, batch = sizes
    STAGES: gl.constexpr = keys.shape[0]
    DIM: gl.constexpr = queries.shape[2]
    DTYPE: gl.constexpr = queries.dtype
    LOG2E: gl.constexpr = 1.4426950408889634
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    acc_row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])

    no_scores = gl.zeros([_HALF_M, _BLOCK_N], gl.float32, layout=scores_layout)
    to_exponent = scale * LOG2E
    q_shared = queries.index(HALF)
    tile = program_start
    n = 0  # the current pair, as the producer counts them
    if program_start < program_end:
        mbarrier.wait(full.index(0), 0)
    while tile < program_end:
        work_tile = tile // n_tiles
        first = tile - work_tile * n_tiles
        stop = gl.minimum(n_tiles, first + program_end - tile)
        kv_row = (work_tile // (kv_heads * q_blocks)).to(gl.int64)
        kv_head = (work_tile // q_blocks % kv_heads).to(gl.int64)
        q_row_start = work_tile % q_blocks * _BLOCK_M + HALF * _HALF_M

        q_row = q_row_start + gl.arange(0, _HALF_M, layout=gl.SliceLayout(1, load_layout))
        dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, load_layout))
        mask = q_row < heads_per_kv * seqs_per_kv * q_len
        if ROWS:
            sequence_or_none = _sequences(row_groups, batch, kv_row, q_row // q_len % seqs_per_kv)
            sequence = sequence_or_none.to(gl.int64)
            mask = mask & (sequence_or_none >= 0)
        else:
            sequence = kv_row * seqs_per_kv + q_row // q_len % seqs_per_kv
        head = kv_head * heads_per_kv + q_row // (q_len * seqs_per_kv)
        at = (sequence * query_b + head * query_h + (q_row % q_len) * query_l) * ALIGNED
        q = gl.load(query + at[:, None] + dims[None, :], mask=mask[:, None], other=0.0)
        _barrier()  # all warps have read the queries of the previous visit
        q_shared.store(q)
        fence_async_shared()
        _barrier()

        # Only the first tile can have keys beyond the end. No wait for its pair is needed: the pair holds the last V of
        # the previous visit, which has waited for it.
        stage = n % STAGES
        k = keys.index(stage).reshape([_BLOCK_N, DIM]).permute([1, 0])
        scores = warpgroup_mma(q_shared, k, no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(empty.index(stage))
        key_at = (stop - 1) * _BLOCK_N + gl.arange(0, _BLOCK_N, layout=gl.SliceLayout(0, scores_layout))
        scores = gl.where((key_at < kv_len)[None, :], scores, float("-inf"))
        row_max = gl.max(scores, axis=1)
        base = gl.where(row_max == float("-inf"), 0.0, row_max) * to_exponent
        exponents = gl.exp2(gl.fma(scores, to_exponent, -base[:, None]))
        row_sum = gl.sum(exponents, axis=1)
        p = gl.convert_layout(exponents.to(DTYPE), p_layout)
        acc = gl.zeros([_HALF_M, DIM], gl.float32, layout=acc_layout)
        n += 1
        mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)

        for _ in range(first + 1, stop):
            stage = n % STAGES
            k = keys.index(stage).reshape([_BLOCK_N, DIM]).permute([1, 0])
            scores = warpgroup_mma(q_shared, k, no_scores, use_acc=False, is_async=True)
            acc = warpgroup_mma(p, values.index(stage).reshape([_BLOCK_N, DIM]), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            new_row_max = gl.maximum(row_max, gl.max(scores, axis=1))
            base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max) * to_exponent
            alpha = gl.exp2(gl.fma(row_max, to_exponent, -base))
            exponents = gl.exp2(gl.fma(scores, to_exponent, -base[:, None]))
            row_sum = row_sum * alpha + gl.sum(exponents, axis=1)
            row_max = new_row_max
            n += 1
            # The wait for the next pair is here and not at the top, because its branch keeps ptxas from moving the
            # softmax behind the wait for P@V, which would then overlap with nothing. It needs at least two stages.
            mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
            # `deps` orders LLVM only; for ptxas the wait has no operands. The old p is among them so that its registers
            # are not reused while P@V reads them.
            acc, exponents, p = warpgroup_mma_wait(0, deps=[acc, exponents, p])
            mbarrier.arrive(empty.index(stage))
            p = gl.convert_layout(exponents.to(DTYPE), p_layout)
            acc = acc * gl.convert_layout(alpha, acc_row_layout)[:, None]

        acc = warpgroup_mma(p, values.index(n % STAGES).reshape([_BLOCK_N, DIM]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

        filled = row_sum != 0.0  # true for NaN, which must be propagated
        divisor = gl.where(filled, row_sum, 1.0)
        log_sum = gl.where(filled, row_max * scale + gl.log(divisor), float("-inf"))
        acc = acc * gl.convert_layout(1.0 / divisor, acc_row_layout)[:, None]
        log_sum = gl.convert_layout(log_sum, acc_row_layout)

        rows = gl.arange(0, _HALF_M, layout=acc_row_layout)
        out_dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, acc_layout))
        q_row_out = q_row_start + rows
        ok = q_row_out < heads_per_kv * seqs_per_kv * q_len
        work_tile_start = tile - first
        if stop - first == n_tiles:
            if ROWS:
                sequence_out = _sequences(row_groups, batch, kv_row, q_row_out // q_len % seqs_per_kv)
                ok = ok & (sequence_out >= 0)
                state = sequence_out.to(gl.int64) * (kv_heads * heads_per_kv)
            else:
                state = (kv_row * seqs_per_kv + q_row_out // q_len % seqs_per_kv) * (kv_heads * heads_per_kv)
            state = (state + kv_head * heads_per_kv + q_row_out // (q_len * seqs_per_kv)) * q_len + q_row_out % q_len
            gl.store(lse + state, log_sum, mask=ok)
            gl.store(out + (state * DIM)[:, None] + out_dims[None, :], acc, mask=ok[:, None])
        else:
            slot = 2 * gl.program_id(0) + (work_tile_start > program_start).to(gl.int32)
            slots = slot * _BLOCK_M + HALF * _HALF_M + rows
            gl.store(partial_lse + slots, log_sum, mask=ok)
            gl.store(partial_out + (slots * DIM)[:, None] + out_dims[None, :], acc, mask=ok[:, None])
        tile += stop - first


@gluon.jit(
    do_not_specialize=[
        *("query_b", "query_h", "query_l", "kv_len", "work_tiles", "seqs_per_kv", "kv_heads", "heads_per_kv"),
        *("q_len", "q_blocks", "programs", "batch"),
    ]
)
def _prefix_kernel(
    query,
    key,
    value,
    row_groups,
    out,
    lse,
    partial_out,
    partial_lse,
    query_b,
    query_h,
    query_l,
    scale,
    kv_len,
    work_tiles,
    seqs_per_kv,
    kv_heads,
    heads_per_kv,
    q_len,
    q_blocks,
    programs,
    batch,
    DIM: gl.constexpr,
    ALIGNED: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Attend to one segment. Strides of `query` are in units of `ALIGNED` elements, to make their alignment known."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    STAGES: gl.constexpr = 256 // DIM  # 128 KiB of K and V
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HALF_M, DIM], DTYPE)
    queries = gl.allocate_shared_memory(DTYPE, [2, _HALF_M, DIM], q_layout)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, _BLOCK_N, DIM], key.layout)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, _BLOCK_N, DIM], value.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()

    # The wait comes first: the next kernel may not wait for this one, and may read the data that this one waited for.
    # The other warps are behind the wait too, as they start at `warp_specialize`.
    gdc_wait()
    gdc_launch_dependents()

    # The 64-bit divisions are done here, where registers abound; in the producer they would spill.
    n_tiles = (kv_len + _BLOCK_N - 1) // _BLOCK_N
    if ROWS:
        work_tiles = work_tiles * gl.load(row_groups + batch)  # times the number of row groups
    total_tiles = n_tiles.to(gl.int64) * work_tiles
    active_programs = gl.minimum(total_tiles, programs)
    program = gl.program_id(0).to(gl.int64)
    program_start = gl.minimum(total_tiles * program // active_programs, total_tiles).to(gl.int32)
    program_end = gl.minimum(total_tiles * (program + 1) // active_programs, total_tiles).to(gl.int32)
    tensors = (query, out, lse, partial_out, partial_lse)
    buffers = (keys, values, full, empty)
    strides = (query_b, query_h, query_l)
    sizes = (program_start, program_end, n_tiles, kv_len, seqs_per_kv, kv_heads, heads_per_kv, q_len, q_blocks, batch)
    loads = (program_start, program_end, n_tiles, kv_heads, q_blocks)
    # Constants are passed directly: in a tuple that a variable holds they would become tensors.
    gl.warp_specialize(
        [
            (_consume, (tensors, row_groups, queries, buffers, strides, scale, sizes, FIRST, ALIGNED, ROWS)),
            (_consume, (tensors, row_groups, queries, buffers, strides, scale, sizes, SECOND, ALIGNED, ROWS)),
            (_produce, ((key, value), row_groups, buffers, loads, ROWS)),
        ],
        [4, 1],
        [_CONSUMER_REGS, _PRODUCER_REGS],
    )
