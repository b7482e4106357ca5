"""The picked_sm90 kernel: attention of many heads to picked latents, in Gluon, for Hopper.

Two warpgroups compute a tile of 64 picks as those of `latent_sm90` compute a tile of latents. A third warpgroup takes
the place of its producer warp. It gathers the rows of a tile by cp.async, 16 bytes at a time, as TMA can't gather rows
by number on Hopper. FlashMLA (https://github.com/deepseek-ai/FlashMLA) prefills by indices in this way.

A program has one query of one sequence, 64 heads and a split of the picks, and goes through its tiles once. Its state
is a partial one, as `picked` leaves it, or the output if there is one split.

The copies write zeros for picks that don't count, so that no NaN behind a mask reaches shared memory. Flags that the
producer stores with the tile leave out their scores.

No wait can deadlock. `place` is `tile % 2`, and its `use` is `tile // 2`:

- `left_full`, `right_full` complete once for each use: the 128 threads of the producer arrive at each when their copies
  are there, and its warpgroup once more when the flags of the tile are. Both consumers need both halves of the scores
  of their own tiles alone, and the producer fills every place of every tile. A consumer waits for a `p_full` before it
  reads values of the other one's tile, and that one has waited for both halves.
- `left_empty`, `right_empty`: the warpgroup that sums this half of the values arrives once for each tile, the last ones
  too. The producer waits for the use before; for the first use of a place, the phase before the first counts as
  complete. So it never waits for more arrivals than there are.
- `p_full` of a place: the warpgroup that scores its tiles arrives once for each of them, and the other one waits once
  for each of them. It can't arrive twice between two waits: the rope's place of the next use is not filled, so there
  are no scores, before the other one has freed the place.
- `q_full`: both warpgroups arrive once, and both wait for phase 0. `sum_full` of a side: its warpgroup arrives once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tatten.ops.cuda.kernels.latent_tile import (
    HALF,
    RANK,
    ROPE,
    ROWS,
    SUMS,
    P,
    add_up,
    finish_sums,
    hand_over,
    load_queries,
    scaled,
    score,
    take_over,
    values,
)
from tatten.ops.cuda.kernels.latent_visits import ALL, BLOCK_M, BLOCK_N
from tatten.ops.cuda.kernels.prefix_sm90 import _barrier

_BLOCK_M, _BLOCK_N, _RANK, _ROPE = gl.constexpr(BLOCK_M), gl.constexpr(BLOCK_N), gl.constexpr(RANK), gl.constexpr(ROPE)
_ALL = gl.constexpr(ALL)
UNIT = 8  # elements of 16 bytes: the strides of stored rows are in this unit, to make their alignment known
_UNIT = gl.constexpr(UNIT)

# FlashMLA's numbers of registers. The sum must not exceed that at the start: 2 * 216 + 72 = 3 * 168.
START_REGS = 168
_CONSUMER_REGS, _PRODUCER_REGS = gl.constexpr(216), gl.constexpr(72)
_PRODUCER_THREADS = gl.constexpr(128)

# 8 threads copy 128 bytes of a row, 16 each: a warp copies 4 rows at a time, and the warpgroup 16.
_COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_PICKS = gl.constexpr(gl.SliceLayout(1, _COPIES.value))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, _COPIES.value))
_FLAGS = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])))

# Renamed after Triton 3.6.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_arrive_after_copies = async_copy.mbarrier_arrive


@gluon.jit
def _load_picks(picks, stride, tile, n_picks):
    """Load the picks of a tile: -1 beyond the last one."""
    at = tile * _BLOCK_N + gl.arange(0, _BLOCK_N, layout=_PICKS)
    return gl.load(picks + at * stride, mask=at < n_picks, other=-1)


@gluon.jit
def _load_mask(mask, stride, picks, length):
    """Load the mask at picks: 0 where there is no key."""
    exists = (picks >= 0) & (picks < length)
    if mask is not None:
        return gl.load(mask + picks.to(gl.int64) * stride, mask=exists, other=0)
    else:
        return exists.to(gl.uint8)


@gluon.jit
def _gather(stored, mask, picks, sizes, buffers, counts):
    """Gather the rows of all tiles, each half as soon as its place is free.

    Picks are loaded two tiles ahead, and the mask one tile ahead, so that both arrive while the previous tile is
    copied.
    """
    latent, rope, latent_stride, rope_stride = stored
    mask, mask_stride = mask
    picks, pick_stride, n_picks = picks
    first, tiles, length = sizes
    left, right, key_rope, left_full, right_full, left_empty, right_empty = buffers
    half = gl.arange(0, HALF, layout=_COLUMNS)
    width = gl.arange(0, _ROPE, layout=_COLUMNS)
    n_picks = gl.minimum(n_picks, (first + tiles) * _BLOCK_N)
    tile_picks = _load_picks(picks, pick_stride, first, n_picks)
    next_picks = _load_picks(picks, pick_stride, first + 1, n_picks)
    allowed = _load_mask(mask, mask_stride, tile_picks, length)
    for i in range(tiles):
        place, phase = i % 2, ((i // 2) & 1) ^ 1
        counted = allowed != 0
        rows = gl.where(counted, tile_picks, 0).to(gl.int64)
        tile_picks = next_picks
        next_picks = _load_picks(picks, pick_stride, first + i + 2, n_picks)
        allowed = _load_mask(mask, mask_stride, tile_picks, length)
        latents = latent + (rows * latent_stride * _UNIT)[:, None] + half[None, :]
        ropes = rope + (rows * rope_stride * _UNIT)[:, None] + width[None, :]
        mbarrier.wait(left_empty.index(place), phase)
        _copy(left.index(place), latents, mask=counted[:, None])
        _arrive_after_copies(left_full.index(place), increment_count=False)
        # The rope's place holds a `p` that the other warpgroup reads: it is free when both halves are.
        mbarrier.wait(right_empty.index(place), phase)
        _copy(right.index(place), latents + HALF, mask=counted[:, None])
        _copy(key_rope.index(place), ropes, mask=counted[:, None])
        _arrive_after_copies(right_full.index(place), increment_count=False)
        counts.index(place).store(counted.to(gl.int32))
        _barrier()
        mbarrier.arrive(right_full.index(place))


@gluon.jit
def _leave_out(scores, counts, PLACE: gl.constexpr):
    """Leave out the scores of the picks of a tile that don't count."""
    counted = counts.index(PLACE).load(_FLAGS) != 0
    return gl.where(counted[None, :], scores, float("-inf"))


@gluon.jit
def _share_queries(place, q, q_full):
    """Store queries for both warpgroups."""
    place.index(0).store(q)
    fence_async_shared()
    _barrier()
    mbarrier.arrive(q_full)
    mbarrier.wait(q_full, 0)


@gluon.jit
def _store(out, acc, states, heads_ok, COLUMN: gl.constexpr):
    """Store half of the columns of states."""
    rows: gl.constexpr = gl.SliceLayout(1, SUMS)
    dims = COLUMN + gl.arange(0, HALF, layout=gl.SliceLayout(0, SUMS))
    at = gl.convert_layout(states, rows) * _RANK
    ok = gl.convert_layout(heads_ok, rows)
    gl.store(out + at[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=ok[:, None])


@gluon.jit
def _states_of(item):
    """Return the states of a program's heads, and which of the heads exist."""
    sequence, position, split, first_head, q_len, heads, splits, _ = item
    head = first_head + gl.arange(0, _BLOCK_M, layout=ROWS)
    return ((sequence * heads + head) * q_len + position) * splits + split, head < heads


@gluon.jit
def _attend_left(tensors, shared, strides, item, scale, ALIGNED: gl.constexpr, MAX_AND_SUM: gl.constexpr):
    """Score the even tiles, and sum the left half of the values of all."""
    query, query_rope, out, lse = tensors
    queries, buffers, handover, counts = shared
    q_left, _, q_rope, q_full = queries
    left, _, key_rope, _, _, left_empty, _ = buffers
    sequence, position, _, first_head, _, heads, _, tiles = item
    query_strides, rope_strides = strides
    LOG2E: gl.constexpr = 1.4426950408889634
    to_exponent = scale * LOG2E
    query += position * query_strides[2] * ALIGNED
    query_rope += position * rope_strides[2] * ALIGNED
    q = load_queries(query, query_strides, first_head, sequence, (1, heads), 0, HALF, ALIGNED, _BLOCK_M)
    rope_columns = load_queries(query_rope, rope_strides, first_head, sequence, (1, heads), 0, _ROPE, ALIGNED, _BLOCK_M)
    q_rope.index(0).store(rope_columns)
    _share_queries(q_left, q, q_full)

    row_max = gl.full([_BLOCK_M], float("-inf"), gl.float32, layout=ROWS)
    row_sum = gl.full([_BLOCK_M], 0.0, gl.float32, layout=ROWS)
    acc = gl.zeros([_BLOCK_M, HALF], gl.float32, layout=SUMS)
    for i in range(0, tiles, 2):
        use = i // 2
        v_even, v_odd, p_odd = values(left, key_rope, 1, use)
        scores = score(queries, buffers, 0, use, True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = _leave_out(scores, counts, 0)
        p, alpha, row_max, row_sum = hand_over(scores, row_max, row_sum, buffers, handover, to_exponent, 0)
        acc = warpgroup_mma(gl.convert_layout(p, P), v_even, scaled(acc, alpha), is_async=True)
        acc = finish_sums(acc, left_empty.index(0))
        if i + 1 < tiles:
            acc, row_max, row_sum = take_over(
                acc, row_max, row_sum, v_odd, p_odd, -1, handover, to_exponent, 1, use, _ALL
            )
            acc = finish_sums(acc, left_empty.index(1))

    row_sum = add_up(row_sum, handover, 0, SIDE=0)
    filled = row_sum != 0.0  # true for NaN, which must be propagated
    divisor = gl.where(filled, row_sum, 1.0)
    states, ok = _states_of(item)
    if MAX_AND_SUM:
        gl.store(lse + 2 * states, row_max * scale, mask=ok)
        gl.store(lse + 2 * states + 1, row_sum, mask=ok)
    else:
        gl.store(lse + states, gl.where(filled, row_max * scale + gl.log(divisor), float("-inf")), mask=ok)
    _store(out, scaled(acc, 1.0 / divisor), states, ok, 0)


@gluon.jit
def _attend_right(tensors, shared, strides, item, scale, ALIGNED: gl.constexpr):
    """Score the odd tiles, and sum the right half of the values of all."""
    query, _, out, _ = tensors
    queries, buffers, handover, counts = shared
    _, q_right, _, q_full = queries
    _, right, key_rope, _, _, _, right_empty = buffers
    sequence, position, _, first_head, _, heads, _, tiles = item
    query_strides, _ = strides
    LOG2E: gl.constexpr = 1.4426950408889634
    to_exponent = scale * LOG2E
    query += position * query_strides[2] * ALIGNED
    q = load_queries(query, query_strides, first_head, sequence, (1, heads), HALF, HALF, ALIGNED, _BLOCK_M)
    _share_queries(q_right, q, q_full)

    row_max = gl.full([_BLOCK_M], float("-inf"), gl.float32, layout=ROWS)
    row_sum = gl.full([_BLOCK_M], 0.0, gl.float32, layout=ROWS)
    acc = gl.zeros([_BLOCK_M, HALF], gl.float32, layout=SUMS)
    for i in range(1, tiles, 2):
        use = i // 2
        v_even, v_odd, p_even = values(right, key_rope, 0, use)
        scores = score(queries, buffers, 1, use, True)
        acc, row_max, row_sum = take_over(
            acc, row_max, row_sum, v_even, p_even, -1, handover, to_exponent, 0, use, _ALL
        )
        scores = warpgroup_mma_wait(1, deps=[scores])
        scores = _leave_out(scores, counts, 1)
        p, alpha, row_max, row_sum = hand_over(scores, row_max, row_sum, buffers, handover, to_exponent, 1)
        acc = finish_sums(acc, right_empty.index(0))
        acc = warpgroup_mma(gl.convert_layout(p, P), v_odd, scaled(acc, alpha), is_async=True)
        acc = finish_sums(acc, right_empty.index(1))
    if tiles % 2 == 1:
        use = tiles // 2
        v_even, _v_odd, p_even = values(right, key_rope, 0, use)
        acc, row_max, row_sum = take_over(
            acc, row_max, row_sum, v_even, p_even, -1, handover, to_exponent, 0, use, _ALL
        )
        acc = finish_sums(acc, right_empty.index(0))

    row_sum = add_up(row_sum, handover, 0, SIDE=1)
    states, ok = _states_of(item)
    _store(out, scaled(acc, 1.0 / gl.where(row_sum != 0.0, row_sum, 1.0)), states, ok, HALF)


@gluon.jit(
    do_not_specialize=[
        *("query_b", "query_h", "query_l", "query_rope_b", "query_rope_h", "query_rope_l"),
        *("latent_b", "latent_s", "rope_b", "rope_s", "mask_r", "mask_b", "mask_l", "index_b", "index_l"),
        *("n_picks", "kv_len", "heads", "q_len", "head_blocks", "seqs_per_kv", "tiles", "splits"),
    ]
)
def _picked_sm90_kernel(
    query,
    latent,
    value,
    indices,
    mask,
    kv_lens,
    rows,
    sinks,
    key_scale,
    value_scale,
    ropes,
    out,
    lse,
    query_b,
    query_h,
    query_l,
    query_rope_b,
    query_rope_h,
    query_rope_l,
    latent_b,
    latent_s,
    rope_b,
    rope_s,
    mask_r,
    mask_b,
    mask_l,
    mask_s,
    index_b,
    index_l,
    index_s,
    scale,
    n_picks,
    kv_len,
    heads,
    q_len,
    head_blocks,
    seqs_per_kv,
    tiles,
    splits,
    ALIGNED: gl.constexpr,
    MAX_AND_SUM: gl.constexpr,
):
    """Attend to picked latents. The tensors are those of `_picked_kernel`; some of them are unused here.

    Strides of queries are in units of `ALIGNED` elements, and those of latents and of their rope in `UNIT`s.
    """
    query_rope, rope = ropes
    DTYPE: gl.constexpr = latent.dtype.element_ty
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_BLOCK_N, HALF], DTYPE)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_BLOCK_N, _ROPE], DTYPE)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(DTYPE, [1, _BLOCK_M, HALF], half_layout)
    q_right = gl.allocate_shared_memory(DTYPE, [1, _BLOCK_M, HALF], half_layout)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, _BLOCK_M, _ROPE], rope_layout)
    left = gl.allocate_shared_memory(DTYPE, [2, _BLOCK_N, HALF], half_layout)
    right = gl.allocate_shared_memory(DTYPE, [2, _BLOCK_N, HALF], half_layout)
    key_rope = gl.allocate_shared_memory(DTYPE, [2, _BLOCK_N, _ROPE], rope_layout)
    counts = gl.allocate_shared_memory(gl.int32, [2, _BLOCK_N], row_layout)
    shared_max = gl.allocate_shared_memory(gl.float32, [2, _BLOCK_M], row_layout)
    shared_sum = gl.allocate_shared_memory(gl.float32, [2, _BLOCK_M], row_layout)
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sum_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(left_full.index(i), count=_PRODUCER_THREADS)
        mbarrier.init(right_full.index(i), count=_PRODUCER_THREADS + 1)
        mbarrier.init(left_empty.index(i), count=1)
        mbarrier.init(right_empty.index(i), count=1)
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(sum_full.index(i), count=1)
    mbarrier.init(q_full, count=2)
    fence_async_shared()

    # The wait comes first: the next kernel may not wait for this one, and may read the data that this one waited for.
    gdc_wait()
    gdc_launch_dependents()

    # Neighbouring programs read the same rows for other heads at about the same time, so that the L2 serves them.
    program = gl.program_id(0)
    head_block, program = program % head_blocks, program // head_blocks
    split, program = program % splits, program // splits
    sequence, position = (program // q_len).to(gl.int64), (program % q_len).to(gl.int64)
    kv_row = sequence // seqs_per_kv
    first = split * tiles
    tiles = gl.minimum(tiles, gl.maximum((n_picks + _BLOCK_N - 1) // _BLOCK_N - first, 1))
    length = kv_len
    if kv_lens is not None:
        length = gl.minimum(gl.maximum(gl.load(kv_lens + sequence), 0), kv_len).to(gl.int32)
    if mask is not None:
        mask += kv_row * mask_r + sequence * mask_b + position * mask_l
    indices += sequence * index_b + position * index_l
    latent += kv_row * latent_b * _UNIT
    rope += kv_row * rope_b * _UNIT

    item = (sequence, position, split, head_block * _BLOCK_M, q_len, heads, splits, tiles)
    buffers = (left, right, key_rope, left_full, right_full, left_empty, right_empty)
    shared = ((q_left, q_right, q_rope, q_full), buffers, (shared_max, p_full, shared_sum, sum_full), counts)
    tensors = (query, query_rope, out, lse)
    strides = ((query_b, query_h, query_l), (query_rope_b, query_rope_h, query_rope_l))
    stored = (latent, rope, latent_s, rope_s)
    gl.warp_specialize(
        [
            (_attend_left, (tensors, shared, strides, item, scale, ALIGNED, MAX_AND_SUM)),
            (_attend_right, (tensors, shared, strides, item, scale, ALIGNED)),
            (
                _gather,
                (stored, (mask, mask_s), (indices, index_s, n_picks), (first, tiles, length), buffers, counts),
            ),
        ],
        [4, 4],
        [_CONSUMER_REGS, _PRODUCER_REGS],
    )
