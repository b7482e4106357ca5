"""Attention of one consumer of the pages kernel to the tiles of a visit, the last tile first.

Only tiles near the ends of a block have keys that some queries do not attend to, and entries that name no page are
rare, so loops compute masks in a branch.
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

from tatten.ops.cuda.kernels.page_blocks import BLOCK_N, THREADS
from tatten.ops.cuda.kernels.prefix_sm90 import _barrier

CONSUMER_ROWS = 64  # packed queries of a consumer: a warpgroup, whose wgmma has 64 rows
_ROWS, _BLOCK_N = gl.constexpr(CONSUMER_ROWS), gl.constexpr(BLOCK_N)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))  # a layout


@gluon.constexpr_function
def sums_layout(dim):
    """Return the layout of the sums of values, `[64, dim]`."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])


@gluon.constexpr_function
def weights_layout(dim):
    """Return the layout of the weights of a tile, `[64, 128]`, as the product with values takes them."""
    return gl.DotOperandLayout(operand_index=0, parent=sums_layout(dim), k_width=2)


@gluon.constexpr_function
def rows_layout(dim):
    """Return the layout of rows of `dim` elements that are loaded from memory."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])


@gluon.jit
def attend_overlapped(
    queries,
    rings,
    keys_of_visit,
    bounds,
    row_max,
    row_sum,
    to_exponent,
    n,
    n_zeroed,
    NTH: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BOX: gl.constexpr,
    SHARED: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Attend to the tiles of a visit. The tensor cores multiply P@V of a tile during the softmax of the next one.

    Args:
        queries: `[64, DIM]` in shared memory.
        rings: in shared memory, K and V, `[STAGES, 1, 128, 1, DIM]` each; the bits of boxes that name no page,
            `[STAGES, 1]`; and barriers: of filled and of empty tiles, of K and then of V, and of zeroed tiles.
        keys_of_visit: the first tile of the visit and one past the last, the block's first key and one past its last
            key, the first key that any of its queries attends to, and the window.
        bounds: the limit of each query, `[64]`, as `queries_of` returns it; the least and the largest of those that
            exist.
        row_max, row_sum: `[64]`, those of the sinks.
        n: the number of tiles of earlier visits.
        n_zeroed: the number of tiles that were zeroed in part.

    Returns:
        The sums of values, `[64, DIM]` in float32 and not divided yet; maximum and sum of each row, `[64]`; and `n` and
        `n_zeroed` with this visit.
    """
    keys, values, unnamed, full, empty, zeroed = rings
    first, stop, begin, stop_key, seen_from, window = keys_of_visit
    limit, least, most = bounds
    STAGES: gl.constexpr = keys.shape[0]
    DIM: gl.constexpr = queries.shape[1]
    sums: gl.constexpr = sums_layout(DIM)
    no_scores = gl.zeros([_ROWS, _BLOCK_N], gl.float32, layout=SCORES)

    stage = n % STAGES
    mbarrier.wait(full.index(stage), (n // STAGES) & 1)
    first_key = begin + (stop - 1) * _BLOCK_N
    scores, bits = _scores_of(queries, rings, stage)
    scores = _masked(scores, first_key, stop_key, limit, bits, window, BOX, SHARED, WINDOW)
    exponents, _, row_max, row_sum = _exponents(scores, row_max, row_sum, to_exponent)
    p = gl.convert_layout(exponents.to(queries.dtype), weights_layout(DIM))
    acc = gl.zeros([_ROWS, DIM], gl.float32, layout=sums)
    mbarrier.wait(full.index(STAGES + stage), (n // STAGES) & 1)
    if not SHARED:
        tile = values.index(stage).reshape([_BLOCK_N, DIM])
        n_zeroed = _zero_others(tile, seen_from - first_key, stop_key - first_key, zeroed, n_zeroed, NTH, CONSUMERS)

    for i in range(first + 1, stop):
        last_stage = n % STAGES
        n += 1
        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        k = keys.index(stage).reshape([_BLOCK_N, DIM]).permute([1, 0])
        scores = warpgroup_mma(queries, k, no_scores, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, values.index(last_stage).reshape([_BLOCK_N, DIM]), acc, is_async=True)
        bits = gl.max(unnamed.index(stage).load(THREADS), axis=0)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(empty.index(stage))
        first_key = begin + (first + stop - 1 - i) * _BLOCK_N
        needs_mask = (first_key + _BLOCK_N > least + (0 if SHARED else 1)) | (bits != 0)
        if WINDOW:
            needs_mask = needs_mask | (first_key <= most - window)
        if needs_mask:
            scores = _masked(scores, first_key, stop_key, limit, bits, window, BOX, SHARED, WINDOW)
        empty_before = row_max == float("-inf")
        exponents, alpha, row_max, row_sum = _exponents(scores, row_max, row_sum, to_exponent)
        # The wait for the next V is here and not at the top, because its branch keeps ptxas from moving the softmax
        # behind the wait for P@V, which would then overlap with nothing. It needs at least two stages.
        mbarrier.wait(full.index(STAGES + stage), (n // STAGES) & 1)
        # `deps` orders LLVM only; for ptxas the wait has no operands. The old p is among them so that its registers
        # are not reused while P@V reads them.
        acc, exponents, p = warpgroup_mma_wait(0, deps=[acc, exponents, p])
        mbarrier.arrive(empty.index(STAGES + last_stage))
        p = gl.convert_layout(exponents.to(queries.dtype), weights_layout(DIM))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, sums))[:, None]
        if SHARED:
            acc = _zeroed_if_new(acc, empty_before, first_key, least)

    if WINDOW:  # noqa: SIM102 (known when this is compiled)
        if stop - first > 1:
            tile = values.index(n % STAGES).reshape([_BLOCK_N, DIM])
            n_zeroed = _zero_others(tile, seen_from - first_key, _BLOCK_N, zeroed, n_zeroed, NTH, CONSUMERS)
    acc = warpgroup_mma(p, values.index(n % STAGES).reshape([_BLOCK_N, DIM]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(STAGES + n % STAGES))
    return acc, row_max, row_sum, n + 1, n_zeroed


@gluon.jit
def attend_step_by_step(queries, rings, keys_of_visit, bounds, row_max, row_sum, to_exponent, n, BOX: gl.constexpr):
    """Attend to the tiles of a visit to a row group as `attend_overlapped` does, but wait for each product.

    The other consumer can use the tensor cores meanwhile. The code is shorter by a quarter. That counts while the
    instruction cache is cold: 16 x 1024 keys of 64 heads after 32768 shared ones take 82 us, and 90 with overlap
    (H200). Mixed batches, whose programs have many tiles, would take 1.1 times as long.
    """
    _, values, _, full, empty, _ = rings
    first, stop, begin, stop_key, _, window = keys_of_visit
    limit, least, _ = bounds
    STAGES: gl.constexpr = values.shape[0]
    DIM: gl.constexpr = queries.shape[1]
    sums: gl.constexpr = sums_layout(DIM)
    acc = gl.zeros([_ROWS, DIM], gl.float32, layout=sums)
    for i in range(first, stop):
        stage = n % STAGES
        first_key = begin + (first + stop - 1 - i) * _BLOCK_N
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        scores, bits = _scores_of(queries, rings, stage)
        if (first_key + _BLOCK_N > least) | (bits != 0):
            scores = _masked(scores, first_key, stop_key, limit, bits, window, BOX, True, False)
        empty_before = row_max == float("-inf")
        exponents, alpha, row_max, row_sum = _exponents(scores, row_max, row_sum, to_exponent)
        p = gl.convert_layout(exponents.to(queries.dtype), weights_layout(DIM))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, sums))[:, None]
        acc = _zeroed_if_new(acc, empty_before, first_key, least)
        mbarrier.wait(full.index(STAGES + stage), (n // STAGES) & 1)
        acc = warpgroup_mma(p, values.index(stage).reshape([_BLOCK_N, DIM]), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(empty.index(STAGES + stage))
        n += 1
    return acc, row_max, row_sum, n


@gluon.jit
def _scores_of(queries, rings, stage):
    """Return the scores of the tile of K in a stage, and the bits of its boxes that name no page. K is free then."""
    keys, _, unnamed, _, empty, _ = rings
    k = keys.index(stage).reshape([_BLOCK_N, queries.shape[1]]).permute([1, 0])
    no_scores = gl.zeros([_ROWS, _BLOCK_N], gl.float32, layout=SCORES)
    scores = warpgroup_mma(queries, k, no_scores, use_acc=False, is_async=True)
    bits = gl.max(unnamed.index(stage).load(THREADS), axis=0)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(empty.index(stage))
    return scores, bits


@gluon.jit
def _exponents(scores, row_max, row_sum, to_exponent):
    """Return the exponents of scores, the factor of earlier sums, and the new maximum and sum of each row."""
    new_row_max = gl.maximum(row_max, gl.max(scores, axis=1))
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max) * to_exponent
    alpha = gl.exp2(gl.fma(row_max, to_exponent, -base))
    exponents = gl.exp2(gl.fma(scores, to_exponent, -base[:, None]))
    return exponents, alpha, new_row_max, row_sum * alpha + gl.sum(exponents, axis=1)


@gluon.jit
def _zeroed_if_new(acc, empty_before, first_key, least):
    """Return the sums of values, and 0 for rows that attend to no key of the tiles so far.

    Values of a tile that a sequence does not attend to may be NaN, and 0 * NaN is NaN. A row has no sink here.
    """
    layout: gl.constexpr = gl.SliceLayout(1, sums_layout(acc.shape[1]))
    if first_key + 2 * _BLOCK_N > least:
        acc = gl.where(gl.convert_layout(empty_before, layout)[:, None], 0.0, acc)
    return acc


@gluon.jit
def _masked(
    scores, first_key, stop_key, limit, bits, window, BOX: gl.constexpr, SHARED: gl.constexpr, WINDOW: gl.constexpr
):
    """Return the scores with -inf for keys that a query does not attend to."""
    nth = gl.arange(0, _BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    key = first_key + nth
    if SHARED:  # each query of a row group attends to all keys of a tile, or to none
        ok = key[None, :] < limit[:, None]
    else:
        named = ((bits >> (nth // BOX)) & 1) == 0
        ok = (named & (key < stop_key))[None, :] & (key[None, :] <= limit[:, None])
        if WINDOW:
            ok = ok & (key[None, :] > (limit - window)[:, None])
    return gl.where(ok, scores, float("-inf"))


@gluon.jit
def _zero_others(tile, start, stop, zeroed, n_zeroed, NTH: gl.constexpr, CONSUMERS: gl.constexpr):
    """Zero the rows of a tile of V outside `[start, stop)`: they may be NaN, and 0 * NaN is NaN.

    Each consumer zeroes its share, and waits for the other's. Return the number of tiles zeroed so far.
    """
    ROWS: gl.constexpr = 32
    PARTS: gl.constexpr = _BLOCK_N // ROWS // CONSUMERS
    layout: gl.constexpr = rows_layout(tile.shape[1])
    if (start > 0) | (stop < _BLOCK_N):
        for j in gl.static_range(NTH * PARTS, (NTH + 1) * PARTS):
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
