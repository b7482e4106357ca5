"""The latent_sm90 kernel: stream-K attention of many packed queries to latents, in Gluon, for Hopper.

A tile of 64 latents is both keys and values. Its scores are the products of all its 512 columns and of its 64 rope
columns, but a warpgroup's registers can't hold an accumulator of 64 x 512. So each of two warpgroups sums values for
half of the columns, and scores every other tile: the left one the even tiles of a visit, the right one the odd ones.
While one computes the softmax of its tile, the tensor cores compute the products of the other. `p` and the maximum are
handed over in shared memory. There `p` takes the place of its tile's rope, which is no longer needed once the scores
are done. The schedule is FlashMLA's (https://github.com/deepseek-ai/FlashMLA, "seesaw"). A producer warp loads the next
tile into a place by TMA, each half as soon as the warpgroup that sums its values is done with it.

The tile space, the order of packed queries and the slots of partial states are those of the decode kernel, with a lane
for each block of packed queries. A visit goes through its tiles backwards, so that only its first one can have keys
beyond the end.

A mask that is the same for all queries of a sequence is read by its block list, whose run of full blocks needs no mask.
TMA reads a whole block, so latents that no query attends to may be NaN. As soon as all scores of a tile are done, each
warpgroup clears these latents in its half, before it sums values.
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
    ROPE,
    ROWS,
    SUMS,
    P,
    add_up,
    allocate_buffers,
    clear_half,
    finish_sums,
    hand_over,
    leave_out,
    load_queries,
    load_tiles,
    scaled,
    score,
    store,
    take_over,
    values,
)
from tatten.ops.cuda.kernels.latent_visits import (
    BLOCK_M,
    attended_keys,
    keys_of,
    share_of_tiles,
    visit_at,
)
from tatten.ops.cuda.kernels.prefix_sm90 import _barrier

_BLOCK_M, _ROPE = gl.constexpr(BLOCK_M), gl.constexpr(ROPE)

# As in `prefix_sm90`: 2 * 232 + 40 = 3 * 168.
START_REGS = 168
_CONSUMER_REGS, _PRODUCER_REGS = gl.constexpr(232), gl.constexpr(40)


@gluon.jit
def _attend_left(
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
    """Score the even tiles of each visit, and sum the left half of the values of all."""
    query, query_rope, out, lse, partial_out, partial_lse = tensors
    queries, buffers, handover = shared
    q_left, _, q_rope, q_full = queries
    left, _, key_rope, _, _, left_empty, _ = buffers
    share_start, share_end, _, _, _, q_len, heads, share = sizes
    query_strides, rope_strides = strides
    LOG2E: gl.constexpr = 1.4426950408889634
    to_exponent = scale * LOG2E
    tile = share_start
    evens, odds = 0, 0  # tiles so far, as the producer counts them
    visits = 0
    while tile < share_end:
        first, stop, n_tiles, kv_row, q_row_start = visit_at(tile, sizes, GROUPS, 4)
        keys = keys_of(kv_row, lengths, KEYS)
        kv_row = kv_row.to(gl.int64)
        # Both loads are under way before the first store.
        q = load_queries(query, query_strides, q_row_start, kv_row, (q_len, heads), 0, HALF, ALIGNED, _BLOCK_M)
        rope_columns = load_queries(
            query_rope, rope_strides, q_row_start, kv_row, (q_len, heads), 0, _ROPE, ALIGNED, _BLOCK_M
        )
        q_left.index(0).store(q)
        q_rope.index(0).store(rope_columns)
        fence_async_shared()
        _barrier()
        mbarrier.arrive(q_full)
        mbarrier.wait(q_full, visits & 1)

        row_max = gl.full([_BLOCK_M], float("-inf"), gl.float32, layout=ROWS)
        row_sum = gl.full([_BLOCK_M], 0.0, gl.float32, layout=ROWS)
        acc = gl.zeros([_BLOCK_M, HALF], gl.float32, layout=SUMS)
        for i in range(first, stop, 2):
            block = first + stop - 1 - i
            v_even, v_odd, p_odd = values(left, key_rope, 1, evens)
            attended = attended_keys(block, keys, KEYS)
            scores = score(queries, buffers, 0, evens)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores = leave_out(scores, block, attended, keys[0], KEYS)
            p, alpha, row_max, row_sum = hand_over(scores, row_max, row_sum, buffers, handover, to_exponent, 0)
            clear_half(v_even, attended, KEYS)
            acc = warpgroup_mma(gl.convert_layout(p, P), v_even, scaled(acc, alpha), is_async=True)
            acc = finish_sums(acc, left_empty.index(0))
            evens += 1
            if i + 1 < stop:
                attended = attended_keys(block - 1, keys, KEYS)
                acc, row_max, row_sum = take_over(
                    acc, row_max, row_sum, v_odd, p_odd, attended, handover, to_exponent, 1, odds, KEYS
                )
                acc = finish_sums(acc, left_empty.index(1))
                odds += 1

        row_sum = add_up(row_sum, handover, visits, SIDE=0)
        filled = row_sum != 0.0  # true for NaN, which must be propagated
        divisor = gl.where(filled, row_sum, 1.0)
        log_sum = gl.where(filled, row_max * scale + gl.log(divisor), float("-inf"))
        rows = gl.arange(0, _BLOCK_M, layout=ROWS)
        q_row = q_row_start + rows
        final = stop - first == n_tiles
        slot = 2 * share + (tile - first > share_start).to(gl.int32)
        if final:
            state = (kv_row * heads + q_row // q_len) * q_len + q_row % q_len
            gl.store(lse + state, log_sum, mask=q_row < heads * q_len)
        else:
            gl.store(partial_lse + (slot * _BLOCK_M + rows), log_sum, mask=q_row < heads * q_len)
        acc = scaled(acc, 1.0 / divisor)
        store(out, partial_out, acc, (slot, final, q_row_start, kv_row), (q_len, heads), 0)
        visits += 1
        tile += stop - first


@gluon.jit
def _attend_right(
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
    """Score the odd tiles of each visit, and sum the right half of the values of all."""
    query, _, out, _, partial_out, _ = tensors
    queries, buffers, handover = shared
    _, q_right, _, q_full = queries
    _, right, key_rope, _, _, _, right_empty = buffers
    share_start, share_end, _, _, _, q_len, heads, share = sizes
    query_strides, _ = strides
    LOG2E: gl.constexpr = 1.4426950408889634
    to_exponent = scale * LOG2E
    tile = share_start
    evens, odds = 0, 0  # tiles so far, as the producer counts them
    visits = 0
    while tile < share_end:
        first, stop, n_tiles, kv_row, q_row_start = visit_at(tile, sizes, GROUPS, 4)
        keys = keys_of(kv_row, lengths, KEYS)
        kv_row = kv_row.to(gl.int64)
        q = load_queries(query, query_strides, q_row_start, kv_row, (q_len, heads), HALF, HALF, ALIGNED, _BLOCK_M)
        q_right.index(0).store(q)
        fence_async_shared()
        _barrier()
        mbarrier.arrive(q_full)
        mbarrier.wait(q_full, visits & 1)

        row_max = gl.full([_BLOCK_M], float("-inf"), gl.float32, layout=ROWS)
        row_sum = gl.full([_BLOCK_M], 0.0, gl.float32, layout=ROWS)
        acc = gl.zeros([_BLOCK_M, HALF], gl.float32, layout=SUMS)
        for i in range(first + 1, stop, 2):
            block = first + stop - 1 - i
            v_even, v_odd, p_even = values(right, key_rope, 0, evens)
            scores = score(queries, buffers, 1, odds)
            attended = attended_keys(block + 1, keys, KEYS)
            acc, row_max, row_sum = take_over(
                acc, row_max, row_sum, v_even, p_even, attended, handover, to_exponent, 0, evens, KEYS
            )
            scores = warpgroup_mma_wait(1, deps=[scores])
            attended = attended_keys(block, keys, KEYS)
            scores = leave_out(scores, block, attended, keys[0], KEYS)
            p, alpha, row_max, row_sum = hand_over(scores, row_max, row_sum, buffers, handover, to_exponent, 1)
            acc = finish_sums(acc, right_empty.index(0))
            evens += 1
            clear_half(v_odd, attended, KEYS)
            acc = warpgroup_mma(gl.convert_layout(p, P), v_odd, scaled(acc, alpha), is_async=True)
            acc = finish_sums(acc, right_empty.index(1))
            odds += 1
        if (stop - first) % 2 == 1:
            v_even, _v_odd, p_even = values(right, key_rope, 0, evens)
            attended = attended_keys(first, keys, KEYS)
            acc, row_max, row_sum = take_over(
                acc, row_max, row_sum, v_even, p_even, attended, handover, to_exponent, 0, evens, KEYS
            )
            acc = finish_sums(acc, right_empty.index(0))
            evens += 1

        row_sum = add_up(row_sum, handover, visits, SIDE=1)
        acc = scaled(acc, 1.0 / gl.where(row_sum != 0.0, row_sum, 1.0))
        final = stop - first == n_tiles
        slot = 2 * share + (tile - first > share_start).to(gl.int32)
        store(out, partial_out, acc, (slot, final, q_row_start, kv_row), (q_len, heads), HALF)
        visits += 1
        tile += stop - first


@gluon.jit(
    do_not_specialize=[
        *("query_b", "query_h", "query_l", "rope_b", "rope_h", "rope_l", "block_list_stride", "kv_len", "n_groups"),
        *("q_blocks", "heads", "batch", "programs"),  # not q_len: if it is known to be 1, nothing is divided
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
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_BLOCK_M, HALF], DTYPE)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_BLOCK_M, _ROPE], DTYPE)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(DTYPE, [1, _BLOCK_M, HALF], half_layout)
    q_right = gl.allocate_shared_memory(DTYPE, [1, _BLOCK_M, HALF], half_layout)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, _BLOCK_M, _ROPE], rope_layout)
    buffers = allocate_buffers(latent, rope)
    shared_max = gl.allocate_shared_memory(gl.float32, [2, _BLOCK_M], row_layout)
    shared_sum = gl.allocate_shared_memory(gl.float32, [2, _BLOCK_M], row_layout)
    group_ends = gl.allocate_shared_memory(gl.int32, [GROUPS], row_layout)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sum_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(sum_full.index(i), count=1)
    mbarrier.init(q_full, count=2)
    fence_async_shared()

    # The wait comes first: the next kernel may not wait for this one, and may read the data that this one waited for.
    gdc_wait()
    gdc_launch_dependents()

    lengths = (kv_lens, block_list, block_list_stride, kv_len, n_groups)
    share, share_start, share_end, q_block_tiles = share_of_tiles(
        lengths, group_ends, q_blocks, batch, programs, GROUPS, KEYS
    )
    tensors = (query, query_rope, out, lse, partial_out, partial_lse)
    queries = (q_left, q_right, q_rope, q_full)
    handover = (shared_max, p_full, shared_sum, sum_full)
    strides = ((query_b, query_h, query_l), (rope_b, rope_h, rope_l))
    sizes = (share_start, share_end, q_block_tiles, batch, group_ends, q_len, heads, share)
    shared = (queries, buffers, handover)
    gl.warp_specialize(
        [
            (_attend_left, (tensors, shared, strides, scale, sizes, lengths, ALIGNED, GROUPS, KEYS)),
            (_attend_right, (tensors, shared, strides, scale, sizes, lengths, ALIGNED, GROUPS, KEYS)),
            (load_tiles, (latent, rope, buffers, sizes, lengths, GROUPS, KEYS)),
        ],
        [4, 1],
        [_CONSUMER_REGS, _PRODUCER_REGS],
    )
