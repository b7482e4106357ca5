"""The latent_sm90 kernel: stream-K attention of many packed queries to latents, in Gluon, for Hopper.

A tile of 64 latents is both keys and values. Its scores are the products of all its 512 columns and of its 64 rope
columns, but an accumulator of 64 x 512 does not fit a warpgroup. So the first warpgroup makes scores and `p`, and both
sum values, for half of the columns each; `p` and `alpha` are handed over in shared memory. A producer warp keeps two
tiles filled by TMA. FlashAttention-3 does its `q_v` path so (arXiv 2407.08608); FlashMLA lets the warpgroups take
turns.

The tile space, the order of packed queries and the slots of partial states are those of the decode kernel, but for
`q_blocks_first`. A visit goes through its tiles backwards, so that only its first one can have keys beyond the end.

A mask that is the same for all queries of a sequence is read by its block list, whose run of full blocks needs no mask.
TMA reads a block whole: latents that no query attends to may be NaN, and are cleared before values are summed.
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

from tatten.ops.cuda.kernels.latent_visits import (
    BLOCK_M,
    BLOCK_N,
    LISTED,
    attended_keys,
    bits_of,
    block_list_of,
    clear,
    tiles_of_groups,
    visit_at,
)
from tatten.ops.cuda.kernels.prefix_sm90 import _barrier, _load

RANK, ROPE = 512, 64
_BLOCK_M, _BLOCK_N, _RANK, _ROPE = gl.constexpr(BLOCK_M), gl.constexpr(BLOCK_N), gl.constexpr(RANK), gl.constexpr(ROPE)
_HALF = gl.constexpr(RANK // 2)
_STAGES, _LISTED = gl.constexpr(2), gl.constexpr(LISTED)

# As in `prefix_sm90`: 2 * 232 + 40 = 3 * 168.
START_REGS = 168
_CONSUMER_REGS, _PRODUCER_REGS = gl.constexpr(232), gl.constexpr(40)


@gluon.jit
def _produce(latent, rope, buffers, sizes, lengths, GROUPS: gl.constexpr, KEYS: gl.constexpr):
    """Load the tiles of all visits."""
    left, right, key_rope, full, empty = buffers
    tile, program_end, _, _, _, _ = sizes
    n = 0
    while tile < program_end:
        first, stop, _n_tiles, kv_row, _q_row = visit_at(tile, sizes, lengths, GROUPS, KEYS, 1)
        block_list, run, run_start = block_list_of(kv_row, lengths, KEYS)
        for i in range(first, stop):
            block = first + stop - 1 - i
            if KEYS == _LISTED:
                listed = gl.load(block_list + 2 * (block + 1), mask=block >= run, other=0).to(gl.int32)
                block = gl.where(block < run, run_start + block, listed)
            first_key = block * _BLOCK_N
            stage = n % _STAGES
            barrier = full.index(stage)
            mbarrier.wait(empty.index(stage), ((n // _STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, 2 * latent.block_type.nbytes + rope.block_type.nbytes)
            _load(rope, [kv_row, 0, first_key, 0], barrier, key_rope.index(stage))
            _load(latent, [kv_row, 0, first_key, 0], barrier, left.index(stage))
            _load(latent, [kv_row, 0, first_key, _HALF], barrier, right.index(stage))
            n += 1
        tile += stop - first


@gluon.jit
def _load_queries(query, strides, shared, q_row_start, kv_row, sizes, COLUMN: gl.constexpr, ALIGNED: gl.constexpr):
    """Copy some columns of the queries of a work tile to shared memory."""
    query_b, query_h, query_l = strides
    q_len, heads = sizes
    WIDTH: gl.constexpr = shared.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    q_row = q_row_start + gl.arange(0, _BLOCK_M, layout=gl.SliceLayout(1, layout))
    dims = COLUMN + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    at = (kv_row * query_b + (q_row // q_len) * query_h + (q_row % q_len) * query_l) * ALIGNED
    q = gl.load(query + at[:, None] + dims[None, :], mask=(q_row < heads * q_len)[:, None], other=0.0)
    shared.store(q)


@gluon.jit
def _store(out, partial_out, acc, visit, sizes, COLUMN: gl.constexpr):
    """Store half of the columns of a whole or of a partial state."""
    work_tile_start, whole, program_start, q_row_start, kv_row = visit
    q_len, heads = sizes
    layout: gl.constexpr = acc.type.layout
    rows = gl.arange(0, _BLOCK_M, layout=gl.SliceLayout(1, layout))
    dims = COLUMN + gl.arange(0, _HALF, layout=gl.SliceLayout(0, layout))
    q_row = q_row_start + rows
    ok = q_row < heads * q_len
    if whole:
        state = (kv_row * heads + q_row // q_len) * q_len + q_row % q_len
        at = out + (state * _RANK)[:, None] + dims[None, :]
        gl.store(at, acc.to(out.dtype.element_ty), mask=ok[:, None])
    else:
        slots = (2 * gl.program_id(0) + (work_tile_start > program_start).to(gl.int32)) * _BLOCK_M + rows
        gl.store(partial_out + (slots * _RANK)[:, None] + dims[None, :], acc, mask=ok[:, None])


@gluon.jit
def _score(
    tensors,
    queries,
    buffers,
    handover,
    strides,
    scale,
    sizes,
    lengths,
    ALIGNED: gl.constexpr,
    GROUPS: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Score tiles, hand over `p` and `alpha`, and sum the left half of the values."""
    query, query_rope, out, lse, partial_out, partial_lse = tensors
    q_left, q_right, q_rope, q_full = queries
    left, right, key_rope, full, empty = buffers
    shared_p, shared_alpha, p_full, p_empty, cleared = handover
    program_start, program_end, _, _, q_len, heads = sizes
    query_strides, rope_strides = strides
    kv_len = lengths[3]
    DTYPE: gl.constexpr = left.dtype
    LOG2E: gl.constexpr = 1.4426950408889634
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)

    no_scores = gl.zeros([_BLOCK_M, _BLOCK_N], gl.float32, layout=scores_layout)
    to_exponent = scale * LOG2E
    LEFT: gl.constexpr = 0
    tile = program_start
    n = 0  # the tile at hand, as the producer counts them
    tiles_cleared = 0
    visits = 0
    while tile < program_end:
        first, stop, n_tiles, kv_row, q_row_start = visit_at(tile, sizes, lengths, GROUPS, KEYS, 4)
        block_list, run, _run_start = block_list_of(kv_row, lengths, KEYS)
        kv_row = kv_row.to(gl.int64)
        _load_queries(query, query_strides, q_left.index(0), q_row_start, kv_row, (q_len, heads), LEFT, ALIGNED)
        _load_queries(query_rope, rope_strides, q_rope.index(0), q_row_start, kv_row, (q_len, heads), LEFT, ALIGNED)
        fence_async_shared()
        _barrier()
        mbarrier.wait(q_full, visits & 1)

        row_max = gl.full([_BLOCK_M], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores_layout))
        row_sum = gl.full([_BLOCK_M], 0.0, gl.float32, layout=gl.SliceLayout(1, scores_layout))
        acc = gl.zeros([_BLOCK_M, _HALF], gl.float32, layout=acc_layout)
        for i in range(first, stop):
            stage = n % _STAGES
            if KEYS:
                attended = attended_keys(first + stop - 1 - i, kv_row, run, block_list, lengths, KEYS)
            mbarrier.wait(full.index(stage), (n // _STAGES) & 1)
            k_left = left.index(stage).reshape([_BLOCK_N, _HALF])
            k_right = right.index(stage).reshape([_BLOCK_N, _HALF])
            k_rope = key_rope.index(stage).reshape([_BLOCK_N, _ROPE])
            # 0, which the compiler can't know: it would keep the descriptors of all queries in registers, and spill.
            zero = n >> 30
            scores = warpgroup_mma(q_rope.index(zero), k_rope.permute([1, 0]), no_scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(q_left.index(zero), k_left.permute([1, 0]), scores, is_async=True)
            scores = warpgroup_mma(q_right.index(zero), k_right.permute([1, 0]), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if KEYS:
                if attended != -1:
                    scores = gl.where(
                        bits_of(attended, gl.SliceLayout(0, scores_layout))[None, :], scores, float("-inf")
                    )
            elif i == first:
                key_at = (stop - 1) * _BLOCK_N + gl.arange(0, _BLOCK_N, layout=gl.SliceLayout(0, scores_layout))
                scores = gl.where((key_at < kv_len)[None, :], scores, float("-inf"))
            new_row_max = gl.maximum(row_max, gl.max(scores, axis=1))
            # A product may overflow to -inf for all keys so far: their `p` and `alpha` are 0, not exp2(-inf + inf).
            base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max) * to_exponent
            alpha = gl.exp2(gl.fma(row_max, to_exponent, -base))
            exponents = gl.exp2(gl.fma(scores, to_exponent, -base[:, None]))
            row_sum = row_sum * alpha + gl.sum(exponents, axis=1)
            row_max = new_row_max
            p = exponents.to(DTYPE)
            if KEYS:  # noqa: SIM102 (known when this is compiled)
                # The left half is summed when it is clear. This comes before `p` is handed over, with which the other
                # warpgroup goes on to the next tile: it may not be two phases of `cleared` ahead.
                if attended != -1:
                    mbarrier.wait(cleared, tiles_cleared & 1)
                    tiles_cleared += 1
            mbarrier.wait(p_empty, ((n + visits) & 1) ^ 1)  # one for each tile and each visit before
            shared_p.store(p)
            shared_alpha.store(alpha)
            fence_async_shared()
            _barrier()
            mbarrier.arrive(p_full)
            acc = acc * gl.convert_layout(alpha, row_layout)[:, None]
            acc = warpgroup_mma(gl.convert_layout(p, p_layout), k_left, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage))
            n += 1

        filled = row_sum != 0.0  # true for NaN, which must come out
        divisor = gl.where(filled, row_sum, 1.0)
        log_sum = gl.where(filled, row_max * scale + gl.log(divisor), float("-inf"))
        factor = 1.0 / divisor
        mbarrier.wait(p_empty, ((n + visits) & 1) ^ 1)
        shared_alpha.store(factor)
        _barrier()
        mbarrier.arrive(p_full)
        acc = acc * gl.convert_layout(factor, row_layout)[:, None]
        rows = gl.arange(0, _BLOCK_M, layout=gl.SliceLayout(1, scores_layout))
        q_row = q_row_start + rows
        whole = stop - first == n_tiles
        if whole:
            state = (kv_row * heads + q_row // q_len) * q_len + q_row % q_len
            gl.store(lse + state, log_sum, mask=q_row < heads * q_len)
        else:
            slots = (2 * gl.program_id(0) + (tile - first > program_start).to(gl.int32)) * _BLOCK_M + rows
            gl.store(partial_lse + slots, log_sum, mask=q_row < heads * q_len)
        _store(out, partial_out, acc, (tile - first, whole, program_start, q_row_start, kv_row), (q_len, heads), LEFT)
        visits += 1
        tile += stop - first


@gluon.jit
def _sum_right(
    tensors,
    queries,
    buffers,
    handover,
    strides,
    sizes,
    lengths,
    ALIGNED: gl.constexpr,
    GROUPS: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Sum the right half of the values by the `p` and `alpha` that `_score` hands over."""
    query, _, out, _, partial_out, _ = tensors
    _, q_right, _, q_full = queries
    left, right, _, full, empty = buffers
    shared_p, shared_alpha, p_full, p_empty, cleared = handover
    program_start, program_end, _, _, q_len, heads = sizes
    query_strides, _ = strides
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    RIGHT: gl.constexpr = _HALF
    tile = program_start
    n = 0  # the tile at hand, as the producer counts them
    handovers = 0
    while tile < program_end:
        first, stop, n_tiles, kv_row, q_row_start = visit_at(tile, sizes, lengths, GROUPS, KEYS, 4)
        block_list, run, _run_start = block_list_of(kv_row, lengths, KEYS)
        kv_row = kv_row.to(gl.int64)
        # The scores of the visit before are done: its factor, which is handed over last, has come.
        _load_queries(query, query_strides, q_right.index(0), q_row_start, kv_row, (q_len, heads), RIGHT, ALIGNED)
        fence_async_shared()
        _barrier()
        mbarrier.arrive(q_full)
        acc = gl.zeros([_BLOCK_M, _HALF], gl.float32, layout=acc_layout)
        for i in range(first, stop):
            stage = n % _STAGES
            if KEYS:
                attended = attended_keys(first + stop - 1 - i, kv_row, run, block_list, lengths, KEYS)
            mbarrier.wait(full.index(stage), (n // _STAGES) & 1)
            v = right.index(stage).reshape([_BLOCK_N, _HALF])
            if KEYS:  # noqa: SIM102 (known when this is compiled)
                # The other warpgroup may be reading what is cleared, for scores that it leaves out.
                if attended != -1:
                    clear(left.index(stage).reshape([_BLOCK_N, _HALF]), attended)
                    clear(v, attended)
                    fence_async_shared()
                    _barrier()
                    mbarrier.arrive(cleared)
            mbarrier.wait(p_full, handovers & 1)
            handovers += 1
            alpha = shared_alpha.load(row_layout)
            acc = acc * alpha[:, None]
            acc = warpgroup_mma(shared_p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _barrier()
            mbarrier.arrive(p_empty)
            mbarrier.arrive(empty.index(stage))
            n += 1
        mbarrier.wait(p_full, handovers & 1)
        handovers += 1
        factor = shared_alpha.load(row_layout)
        _barrier()
        mbarrier.arrive(p_empty)
        acc = acc * factor[:, None]
        whole = stop - first == n_tiles
        _store(out, partial_out, acc, (tile - first, whole, program_start, q_row_start, kv_row), (q_len, heads), RIGHT)
        tile += stop - first


@gluon.jit(
    do_not_specialize=[
        *("query_b", "query_h", "query_l", "rope_b", "rope_h", "rope_l", "block_list_stride", "kv_len", "n_groups"),
        *("q_blocks", "heads", "q_len", "batch", "programs"),
    ]
)
def _latent_kernel(
    query,
    query_rope,
    latent,
    rope,
    kv_lens,
    block_list,
    out,
    lse,
    partial_out,
    partial_lse,
    query_b,
    query_h,
    query_l,
    rope_b,
    rope_h,
    rope_l,
    scale,
    block_list_stride,
    kv_len,
    n_groups,
    q_blocks,
    heads,
    q_len,
    batch,
    programs,
    ALIGNED: gl.constexpr,
    GROUPS: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Attend to latents. Strides of queries are in units of `ALIGNED` elements, to make their alignment known."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_BLOCK_M, _HALF], DTYPE)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_BLOCK_M, _ROPE], DTYPE)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_BLOCK_M, _BLOCK_N], DTYPE)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(DTYPE, [1, _BLOCK_M, _HALF], half_layout)
    q_right = gl.allocate_shared_memory(DTYPE, [1, _BLOCK_M, _HALF], half_layout)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, _BLOCK_M, _ROPE], rope_layout)
    left = gl.allocate_shared_memory(DTYPE, [_STAGES, 1, 1, _BLOCK_N, _HALF], latent.layout)
    right = gl.allocate_shared_memory(DTYPE, [_STAGES, 1, 1, _BLOCK_N, _HALF], latent.layout)
    key_rope = gl.allocate_shared_memory(DTYPE, [_STAGES, 1, 1, _BLOCK_N, _ROPE], rope.layout)
    shared_p = gl.allocate_shared_memory(DTYPE, [_BLOCK_M, _BLOCK_N], p_layout)
    shared_alpha = gl.allocate_shared_memory(gl.float32, [_BLOCK_M], row_layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)
    mbarrier.init(cleared, count=1)
    mbarrier.init(q_full, count=1)
    fence_async_shared()

    # The wait comes first: the next kernel may not wait for this one, and may read what this one waited for.
    gdc_wait()
    gdc_launch_dependents()

    lengths = (kv_lens, block_list, block_list_stride, kv_len, n_groups)
    _, tiles, ends = tiles_of_groups(lengths, GROUPS, KEYS, 4)
    q_block_tiles = gl.max(tiles, axis=0) * batch if GROUPS == 1 else gl.max(ends, axis=0)
    total_tiles = q_block_tiles.to(gl.int64) * q_blocks
    active_programs = gl.minimum(total_tiles, programs)
    program = gl.program_id(0).to(gl.int64)
    program_start = gl.minimum(total_tiles * program // active_programs, total_tiles).to(gl.int32)
    program_end = gl.minimum(total_tiles * (program + 1) // active_programs, total_tiles).to(gl.int32)
    tensors = (query, query_rope, out, lse, partial_out, partial_lse)
    queries = (q_left, q_right, q_rope, q_full)
    buffers = (left, right, key_rope, full, empty)
    handover = (shared_p, shared_alpha, p_full, p_empty, cleared)
    strides = ((query_b, query_h, query_l), (rope_b, rope_h, rope_l))
    sizes = (program_start, program_end, q_block_tiles, batch, q_len, heads)
    gl.warp_specialize(
        [
            (_score, (tensors, queries, buffers, handover, strides, scale, sizes, lengths, ALIGNED, GROUPS, KEYS)),
            (_sum_right, (tensors, queries, buffers, handover, strides, sizes, lengths, ALIGNED, GROUPS, KEYS)),
            (_produce, (latent, rope, buffers, sizes, lengths, GROUPS, KEYS)),
        ],
        [4, 1],
        [_CONSUMER_REGS, _PRODUCER_REGS],
    )
