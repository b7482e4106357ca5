"""The latent_few_sm90 kernel: stream-K attention of up to 16 packed queries to latents, in Gluon, for Hopper.

Latents are the left operand of both products, `scores = latents queries^T` and `sums^T = latents^T p^T`: wgmma needs at
least 64 rows of the left operand, and at least 8 columns of the right one. So no row of the tensor cores is idle, and
the residue of float32 queries costs next to nothing: a number is split into two bfloat16 numbers, in two columns whose
scores are added. Weights `p` and sums are transposed, too. One warpgroup computes, and a producer warp loads; visits,
slots of partial states and masks are those of `latent_sm90`.
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

from tatten.ops.cuda.kernels.latent_tile import (
    HALF,
    RANK,
    ROPE,
    allocate_buffers,
    load_queries,
    load_tiles,
    rescaled,
)
from tatten.ops.cuda.kernels.latent_visits import (
    BLOCK_N,
    LISTED,
    attended_keys,
    bits_of,
    clear,
    keys_of,
    share_of_tiles,
    visit_at,
)
from tatten.ops.cuda.kernels.prefix_sm90 import _barrier
from tatten.ops.latent_validation import FEW_QUERIES_ON_CUDA

FEW = FEW_QUERIES_ON_CUDA
_FEW, _BLOCK_N, _RANK, _ROPE = gl.constexpr(FEW), gl.constexpr(BLOCK_N), gl.constexpr(RANK), gl.constexpr(ROPE)
_LISTED = gl.constexpr(LISTED)
_BOTH = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * FEW, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FEW, 16]))
_QUERIES, _KEYS = gl.constexpr(gl.SliceLayout(0, _SUMS.value)), gl.constexpr(gl.SliceLayout(1, _SUMS.value))

# Two warpgroups, of which the producer's has one warp: 248 + 40 = 2 * 144.
START_REGS = 144
_PRODUCER_REGS = gl.constexpr(40)


@gluon.jit
def _store_queries(
    place, query, strides, kv_row, sizes, COLUMN: gl.constexpr, WIDTH: gl.constexpr, ALIGNED: gl.constexpr
):
    """Store `WIDTH` columns of the rounded queries in shared memory, and below them their residues."""
    q = load_queries(query, strides, 0, kv_row, sizes, COLUMN, WIDTH, ALIGNED, _FEW)
    high = q.to(place.dtype)
    rounded = high.to(gl.float32)
    residue = gl.where(gl.abs(rounded) < float("inf"), q.to(gl.float32) - rounded, 0.0)  # inf - inf would be NaN
    place.slice(0, _FEW, dim=0).store(high)
    place.slice(_FEW, _FEW, dim=0).store(residue.to(place.dtype))


@gluon.jit
def _store_sums(out, partial_out, acc, visit, sizes, COLUMN: gl.constexpr):
    """Store half of the columns of a whole or a partial state, from sums `[columns, queries]`."""
    slot, final, kv_row = visit
    q_len, heads = sizes
    q_row = gl.arange(0, _FEW, layout=_QUERIES)
    dims = COLUMN + gl.arange(0, HALF, layout=_KEYS)
    ok = (q_row < heads * q_len)[None, :]
    if final:
        state = (kv_row * heads + q_row // q_len) * q_len + q_row % q_len
        gl.store(out + (state * _RANK)[None, :] + dims[:, None], acc.to(out.dtype.element_ty), mask=ok)
    else:
        gl.store(partial_out + ((slot * _FEW + q_row) * _RANK)[None, :] + dims[:, None], acc, mask=ok)


@gluon.jit
def _attend(
    tensors,
    shared,
    strides,
    scale,
    sizes,
    lengths,
    ALIGNED: gl.constexpr,
    GROUPS: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Score the tiles of each visit, and sum their values."""
    query, query_rope, out, lse, partial_out, partial_lse = tensors
    queries, buffers, shared_weights = shared
    q_left, q_right, q_rope = queries
    left, right, key_rope, left_full, right_full, left_empty, right_empty = buffers
    share_start, share_end, _, _, _, q_len, heads, share = sizes
    query_strides, rope_strides = strides
    LOG2E: gl.constexpr = 1.4426950408889634
    to_exponent = scale * LOG2E
    tile = share_start
    evens, odds = 0, 0  # tiles so far, as the producer counts them
    while tile < share_end:
        first, stop, n_tiles, kv_row, _q_row = visit_at(tile, sizes, GROUPS, 4)
        keys = keys_of(kv_row, lengths, KEYS)
        kv_row = kv_row.to(gl.int64)
        _store_queries(q_left, query, query_strides, kv_row, (q_len, heads), 0, HALF, ALIGNED)
        _store_queries(q_right, query, query_strides, kv_row, (q_len, heads), HALF, HALF, ALIGNED)
        _store_queries(q_rope, query_rope, rope_strides, kv_row, (q_len, heads), 0, _ROPE, ALIGNED)
        fence_async_shared()
        _barrier()

        row_max = gl.full([_FEW], float("-inf"), gl.float32, layout=_QUERIES)
        weights = gl.zeros([_BLOCK_N, _FEW], gl.float32, layout=_SUMS)
        acc_left = gl.zeros([HALF, _FEW], gl.float32, layout=_SUMS)
        acc_right = gl.zeros([HALF, _FEW], gl.float32, layout=_SUMS)
        for i in range(first, stop):
            block = first + stop - 1 - i
            place = (i - first) % 2
            phase = gl.where(place == 0, evens, odds) & 1
            evens += 1 - place
            odds += place
            attended = attended_keys(block, keys, KEYS)
            k_left = left.index(place).reshape([_BLOCK_N, HALF])
            k_right = right.index(place).reshape([_BLOCK_N, HALF])
            k_rope = key_rope.index(place).reshape([_BLOCK_N, _ROPE])
            both = gl.zeros([_BLOCK_N, 2 * _FEW], gl.float32, layout=_BOTH)
            mbarrier.wait(left_full.index(place), phase)
            both = warpgroup_mma(k_left, q_left.permute([1, 0]), both, use_acc=False, is_async=True)
            mbarrier.wait(right_full.index(place), phase)
            both = warpgroup_mma(k_right, q_right.permute([1, 0]), both, is_async=True)
            both = warpgroup_mma(k_rope, q_rope.permute([1, 0]), both, is_async=True)
            both = warpgroup_mma_wait(0, deps=[both])
            scores = gl.convert_layout(gl.sum(both.reshape([_BLOCK_N, 2, _FEW]), axis=1), _SUMS)
            if KEYS == _LISTED:
                if attended != -1:
                    scores = gl.where(bits_of(attended, _KEYS)[:, None], scores, float("-inf"))
            elif (block + 1) * _BLOCK_N > keys[0]:
                here = block * _BLOCK_N + gl.arange(0, _BLOCK_N, layout=_KEYS) < keys[0]
                scores = gl.where(here[:, None], scores, float("-inf"))

            new_row_max = gl.maximum(row_max, gl.max(scores, axis=0))
            base, alpha = rescaled(row_max, new_row_max, to_exponent)
            row_max = new_row_max
            exponents = gl.exp2(gl.fma(scores, to_exponent, -base[None, :]))
            weights = gl.fma(weights, alpha[None, :], exponents)
            shared_weights.permute([1, 0]).store(exponents.to(shared_weights.dtype))
            if KEYS:  # noqa: SIM102 (known when this is compiled)
                if attended != -1:
                    _barrier()  # all warps have read the scores
                    clear(k_left, attended)
                    clear(k_right, attended)
            fence_async_shared()
            _barrier()
            p = shared_weights.permute([1, 0])
            acc_left = warpgroup_mma(k_left.permute([1, 0]), p, acc_left * alpha[None, :], is_async=True)
            acc_right = warpgroup_mma(k_right.permute([1, 0]), p, acc_right * alpha[None, :], is_async=True)
            acc_left, acc_right = warpgroup_mma_wait(0, deps=[acc_left, acc_right])
            _barrier()
            mbarrier.arrive(left_empty.index(place))
            mbarrier.arrive(right_empty.index(place))

        row_sum = gl.sum(weights, axis=0)
        filled = row_sum != 0.0  # true for NaN, which must be propagated
        divisor = gl.where(filled, row_sum, 1.0)
        log_sum = gl.where(filled, row_max * scale + gl.log(divisor), float("-inf"))
        q_row = gl.arange(0, _FEW, layout=_QUERIES)
        final = stop - first == n_tiles
        slot = 2 * share + (tile - first > share_start).to(gl.int32)
        if final:
            state = (kv_row * heads + q_row // q_len) * q_len + q_row % q_len
            gl.store(lse + state, log_sum, mask=q_row < heads * q_len)
        else:
            gl.store(partial_lse + (slot * _FEW + q_row), log_sum, mask=q_row < heads * q_len)
        factor = (1.0 / divisor)[None, :]
        _store_sums(out, partial_out, acc_left * factor, (slot, final, kv_row), (q_len, heads), 0)
        _store_sums(out, partial_out, acc_right * factor, (slot, final, kv_row), (q_len, heads), HALF)
        tile += stop - first


@gluon.jit(
    do_not_specialize=[
        *("query_b", "query_h", "query_l", "rope_b", "rope_h", "rope_l", "block_list_stride", "kv_len", "n_groups"),
        *("q_blocks", "heads", "batch", "programs"),
    ]
)
def _latent_few_kernel(
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
    """Attend to latents. Arguments are those of `latent_sm90`, except that queries may be in float32."""
    DTYPE: gl.constexpr = query_rope.dtype.element_ty
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * _FEW, HALF], DTYPE)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * _FEW, _ROPE], DTYPE)
    weights_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_FEW, _BLOCK_N], DTYPE)
    q_left = gl.allocate_shared_memory(DTYPE, [2 * _FEW, HALF], half_layout)
    q_right = gl.allocate_shared_memory(DTYPE, [2 * _FEW, HALF], half_layout)
    q_rope = gl.allocate_shared_memory(DTYPE, [2 * _FEW, _ROPE], rope_layout)
    shared_weights = gl.allocate_shared_memory(DTYPE, [_FEW, _BLOCK_N], weights_layout)
    buffers = allocate_buffers(latent, rope)
    group_ends = gl.allocate_shared_memory(gl.int32, [GROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()

    # The wait comes first: the next kernel may not wait for this one, and may read the data that this one waited for.
    gdc_wait()
    gdc_launch_dependents()

    lengths = (kv_lens, block_list, block_list_stride, kv_len, n_groups)
    share, share_start, share_end, q_block_tiles = share_of_tiles(
        lengths, group_ends, q_blocks, batch, programs, GROUPS, KEYS
    )
    tensors = (query, query_rope, out, lse, partial_out, partial_lse)
    strides = ((query_b, query_h, query_l), (rope_b, rope_h, rope_l))
    sizes = (share_start, share_end, q_block_tiles, batch, group_ends, q_len, heads, share)
    shared = ((q_left, q_right, q_rope), buffers, shared_weights)
    gl.warp_specialize(
        [
            (_attend, (tensors, shared, strides, scale, sizes, lengths, ALIGNED, GROUPS, KEYS)),
            (load_tiles, (latent, rope, buffers, sizes, lengths, GROUPS, KEYS)),
        ],
        [1],
        [_PRODUCER_REGS],
    )
