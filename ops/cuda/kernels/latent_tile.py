"""Steps of the latent kernels for Hopper on a tile of latents and on a visit, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tatten.ops.cuda.kernels.latent_visits import BLOCK_M, BLOCK_N, LISTED, bits_of, clear, keys_of, visit_at
from tatten.ops.cuda.kernels.prefix_sm90 import _barrier, _load

RANK, ROPE = 512, 64
_BLOCK_M, _BLOCK_N, _RANK, _ROPE = gl.constexpr(BLOCK_M), gl.constexpr(BLOCK_N), gl.constexpr(RANK), gl.constexpr(ROPE)
_LISTED = gl.constexpr(LISTED)
HALF = gl.constexpr(RANK // 2)
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RANK // 2, 16]))
P = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=SUMS.value, k_width=2))
ROWS, _KEYS = gl.constexpr(gl.SliceLayout(1, _SCORES.value)), gl.constexpr(gl.SliceLayout(0, _SCORES.value))
_ROWS_OF_SUMS = gl.constexpr(gl.SliceLayout(1, SUMS.value))


@gluon.jit
def allocate_buffers(latent, rope):
    """Allocate shared memory for two tiles. Each half has its own full and empty barriers."""
    DTYPE: gl.constexpr = latent.dtype
    left = gl.allocate_shared_memory(DTYPE, [2, 1, 1, _BLOCK_N, HALF], latent.layout)
    right = gl.allocate_shared_memory(DTYPE, [2, 1, 1, _BLOCK_N, HALF], latent.layout)
    key_rope = gl.allocate_shared_memory(DTYPE, [2, 1, 1, _BLOCK_N, _ROPE], rope.layout)
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(left_full.index(i), count=1)
        mbarrier.init(right_full.index(i), count=1)
        mbarrier.init(left_empty.index(i), count=1)
        mbarrier.init(right_empty.index(i), count=1)
    return left, right, key_rope, left_full, right_full, left_empty, right_empty


@gluon.jit
def load_tiles(latent, rope, buffers, sizes, lengths, GROUPS: gl.constexpr, KEYS: gl.constexpr):
    """Load the tiles of all visits, each half as soon as its place is free."""
    left, right, key_rope, left_full, right_full, left_empty, right_empty = buffers
    tile, share_end, _, _, _, _, _, _ = sizes
    evens, odds = 0, 0
    while tile < share_end:
        first, stop, _n_tiles, kv_row, _q_row = visit_at(tile, sizes, GROUPS, 1)
        _length, block_list, run, run_start = keys_of(kv_row, lengths, KEYS)
        for i in range(first, stop):
            block = first + stop - 1 - i
            if KEYS == _LISTED:
                listed = gl.load(block_list + 2 * (block + 1), mask=block >= run, other=0).to(gl.int32)
                block = gl.where(block < run, run_start + block, listed)
            first_key = block * _BLOCK_N
            place = (i - first) % 2
            phase = (gl.where(place == 0, evens, odds) & 1) ^ 1
            mbarrier.wait(left_empty.index(place), phase)
            mbarrier.expect(left_full.index(place), latent.block_type.nbytes)
            _load(latent, [kv_row, 0, first_key, 0], left_full.index(place), left.index(place))
            # The rope's place holds a `p` that the other warpgroup reads: it is free when both halves are.
            mbarrier.wait(right_empty.index(place), phase)
            mbarrier.expect(right_full.index(place), latent.block_type.nbytes + rope.block_type.nbytes)
            _load(latent, [kv_row, 0, first_key, HALF], right_full.index(place), right.index(place))
            _load(rope, [kv_row, 0, first_key, 0], right_full.index(place), key_rope.index(place))
            evens += 1 - place
            odds += place
        tile += stop - first


@gluon.jit
def load_queries(
    query,
    strides,
    q_row_start,
    kv_row,
    sizes,
    COLUMN: gl.constexpr,
    WIDTH: gl.constexpr,
    ALIGNED: gl.constexpr,
    ROWS_OF_TILE: gl.constexpr,
):
    """Load `WIDTH` columns of the queries of a work tile."""
    query_b, query_h, query_l = strides
    q_len, heads = sizes
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    q_row = q_row_start + gl.arange(0, ROWS_OF_TILE, layout=gl.SliceLayout(1, layout))
    dims = COLUMN + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    at = (kv_row * query_b + (q_row // q_len) * query_h + (q_row % q_len) * query_l) * ALIGNED
    return gl.load(query + at[:, None] + dims[None, :], mask=(q_row < heads * q_len)[:, None], other=0.0)


@gluon.jit
def score(queries, buffers, PLACE: gl.constexpr, uses, GATHERED: gl.constexpr = False):
    """Begin to multiply queries by the tile in a place, each half as soon as it has arrived.

    Gathered rows are written by the generic proxy, and the products read by the async proxy, so fences are needed.
    """
    q_left, q_right, q_rope, _ = queries
    left, right, key_rope, left_full, right_full, _, _ = buffers
    no_scores = gl.zeros([_BLOCK_M, _BLOCK_N], gl.float32, layout=_SCORES)
    # It is 0. If the compiler knew, it would keep the descriptors of all operands in registers, and spill.
    zero = uses >> 30
    k_left = left.index(PLACE + zero).reshape([_BLOCK_N, HALF])
    k_right = right.index(PLACE + zero).reshape([_BLOCK_N, HALF])
    k_rope = key_rope.index(PLACE + zero).reshape([_BLOCK_N, _ROPE])
    mbarrier.wait(left_full.index(PLACE), uses & 1)
    if GATHERED:
        fence_async_shared()
    scores = warpgroup_mma(q_left.index(zero), k_left.permute([1, 0]), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(right_full.index(PLACE), uses & 1)
    if GATHERED:
        fence_async_shared()
    scores = warpgroup_mma(q_right.index(zero), k_right.permute([1, 0]), scores, is_async=True)
    return warpgroup_mma(q_rope.index(zero), k_rope.permute([1, 0]), scores, is_async=True)


@gluon.jit
def leave_out(scores, block, attended, length, KEYS: gl.constexpr):
    """Leave out the scores of keys that are not attended to."""
    if KEYS == _LISTED:
        if attended != -1:
            scores = gl.where(bits_of(attended, _KEYS)[None, :], scores, float("-inf"))
    elif (block + 1) * _BLOCK_N > length:
        here = block * _BLOCK_N + gl.arange(0, _BLOCK_N, layout=_KEYS) < length
        scores = gl.where(here[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def rescaled(row_max, new_row_max, to_exponent):
    """Return the number to subtract from exponents, and the factor of the sums so far."""
    # The products of all keys so far may overflow to -inf: their `p` and `alpha` are then 0, not exp2(-inf + inf).
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max) * to_exponent
    return base, gl.exp2(gl.fma(row_max, to_exponent, -base))


@gluon.jit
def hand_over(scores, row_max, row_sum, buffers, handover, to_exponent, PLACE: gl.constexpr):
    """Compute `p` from scores, and hand it over with the maximum. It takes the place of the tile's rope."""
    key_rope = buffers[2]
    shared_max, p_full, _, _ = handover
    new_row_max = gl.maximum(row_max, gl.max(scores, axis=1))
    base, alpha = rescaled(row_max, new_row_max, to_exponent)
    exponents = gl.exp2(gl.fma(scores, to_exponent, -base[:, None]))
    row_sum = row_sum * alpha + gl.sum(exponents, axis=1)
    p = exponents.to(key_rope.dtype)
    _barrier()  # all warps have read the rope
    key_rope.index(PLACE).reshape([_BLOCK_M, _BLOCK_N]).store(p)
    shared_max.index(PLACE).store(new_row_max)
    fence_async_shared()
    _barrier()
    mbarrier.arrive(p_full.index(PLACE))
    return p, alpha, new_row_max, row_sum


@gluon.jit
def values(half, key_rope, OTHER: gl.constexpr, uses):
    """Return half of the values of both tiles, and the `p` of the other warpgroup."""
    zero = uses >> 30
    v_even = half.index(zero).reshape([_BLOCK_N, HALF])
    v_odd = half.index(1 + zero).reshape([_BLOCK_N, HALF])
    return v_even, v_odd, key_rope.index(OTHER + zero).reshape([_BLOCK_M, _BLOCK_N])


@gluon.jit
def scaled(acc, factor):
    """Multiply the rows of sums by factors."""
    return acc * gl.convert_layout(factor, _ROWS_OF_SUMS)[:, None]


@gluon.jit
def clear_half(latents, attended, KEYS: gl.constexpr):
    """Clear the latents that no query attends to, in half of a tile whose scores are all done."""
    if KEYS:  # noqa: SIM102 (known when this is compiled)
        if attended != -1:
            clear(latents, attended)
            fence_async_shared()
            _barrier()


@gluon.jit
def take_over(
    acc, row_max, row_sum, value, p, attended, handover, to_exponent, PLACE: gl.constexpr, uses, KEYS: gl.constexpr
):
    """Begin to sum values by the `p` that the other warpgroup hands over."""
    shared_max, p_full, _, _ = handover
    mbarrier.wait(p_full.index(PLACE), uses & 1)
    new_row_max = shared_max.index(PLACE).load(ROWS)
    _, alpha = rescaled(row_max, new_row_max, to_exponent)
    clear_half(value, attended, KEYS)
    acc = warpgroup_mma(p, value, scaled(acc, alpha), is_async=True)
    return acc, new_row_max, row_sum * alpha


@gluon.jit
def finish_sums(acc, empty):
    """Wait for the sums, and free the half of a tile that they read."""
    acc = warpgroup_mma_wait(0, deps=[acc])
    _barrier()
    mbarrier.arrive(empty)
    return acc


@gluon.jit
def add_up(row_sum, handover, visits, SIDE: gl.constexpr):
    """Add the sums of `p` of both warpgroups: the left one is side 0."""
    _, _, shared_sum, sum_full = handover
    OTHER: gl.constexpr = 1 - SIDE
    shared_sum.index(SIDE).store(row_sum)
    _barrier()
    mbarrier.arrive(sum_full.index(SIDE))
    mbarrier.wait(sum_full.index(OTHER), visits & 1)
    return row_sum + shared_sum.index(OTHER).load(ROWS)


@gluon.jit
def store(out, partial_out, acc, visit, sizes, COLUMN: gl.constexpr):
    """Store half of the columns of a whole or a partial state."""
    slot, final, q_row_start, kv_row = visit
    q_len, heads = sizes
    layout: gl.constexpr = acc.type.layout
    rows = gl.arange(0, _BLOCK_M, layout=gl.SliceLayout(1, layout))
    dims = COLUMN + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    q_row = q_row_start + rows
    ok = q_row < heads * q_len
    if final:
        state = (kv_row * heads + q_row // q_len) * q_len + q_row % q_len
        at = out + (state * _RANK)[:, None] + dims[None, :]
        gl.store(at, acc.to(out.dtype.element_ty), mask=ok[:, None])
    else:
        gl.store(partial_out + ((slot * _BLOCK_M + rows) * _RANK)[:, None] + dims[None, :], acc, mask=ok[:, None])
