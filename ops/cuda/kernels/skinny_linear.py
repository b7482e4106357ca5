"""The kernels of linear layers of few rows and of one row, with float32 sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weight_of(
    block,
    weight_0,
    weight_1,
    weight_2,
    product_0,
    product_1,
    product_2,
    OUT_0: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Return the weight and the product of a block of a launch, the rows of that weight, and the block's index in it.

    Blocks of `BLOCK_OUT` rows are numbered one weight after the other.
    """
    weight, product, n_out = weight_0, product_0, tl.full([], OUT_0, tl.int32)
    end_0: tl.constexpr = (OUT_0 + BLOCK_OUT - 1) // BLOCK_OUT
    end_1: tl.constexpr = end_0 + (OUT_1 + BLOCK_OUT - 1) // BLOCK_OUT
    if weight_1 is not None:  # noqa: SIM102 (known when this is compiled)
        if block >= end_0:
            weight, product, n_out = weight_1, product_1, tl.full([], OUT_1, tl.int32)
    if weight_2 is not None:  # noqa: SIM102
        if block >= end_1:
            weight, product, n_out = weight_2, product_2, tl.full([], OUT_2, tl.int32)
    block -= tl.where(block >= end_1, end_1, tl.where(block >= end_0, end_0, 0))
    return weight, product, n_out, block


@triton.jit(do_not_specialize=["rows", "parts"])
def _skinny_linear_kernel(
    x,  # [rows, IN], contiguous
    weight_0,  # [OUT_0, IN], contiguous
    weight_1,  # None without a second weight
    weight_2,
    product_0,  # [parts, rows, OUT_0], contiguous
    product_1,
    product_2,
    rows,
    parts,
    IN: tl.constexpr,
    OUT_0: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGGERED: tl.constexpr,
    PDL: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):
    """Multiply `BLOCK_OUT` rows of a weight with a part of `BLOCK_ROWS` rows of `x`.

    The weight is the left operand: its tiles have the 64 rows that wgmma has at least, while the right operand may be
    as narrow as 16 rows of `x`. The other way round, most rows of the tensor cores would multiply padding.

    Rows of a weight are often a power of two apart. Programs that all begin with the first tile of their part would
    read from a few channels of memory at a time. If `STAGGERED`, each begins at another tile, and ends at the one
    before it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0) % parts
    block = tl.program_id(0) // parts
    weight, product, n_out, block = _weight_of(
        block, weight_0, weight_1, weight_2, product_0, product_1, product_2, OUT_0, OUT_1, OUT_2, BLOCK_OUT
    )
    out = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n_blocks: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    start, stop = part * n_blocks // parts, (part + 1) * n_blocks // parts
    n_tiles = stop - start
    tile = start
    if STAGGERED:
        tile += tl.program_id(0) % tl.maximum(n_tiles, 1)
    k = tile * BLOCK_IN + tl.arange(0, BLOCK_IN)
    # Rows beyond the end repeat the last one. They are not stored, and no other row depends on them.
    weight_at = weight + tl.minimum(out, n_out - 1).to(tl.int64)[:, None] * IN + k[None, :]
    x_at = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * IN + k[None, :]
    acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for _ in range(start, stop):
        if IN % BLOCK_IN == 0:
            w, xs = tl.load(weight_at), tl.load(x_at)
        else:
            ok = (tile * BLOCK_IN + tl.arange(0, BLOCK_IN) < IN)[None, :]
            w, xs = tl.load(weight_at, mask=ok, other=0.0), tl.load(x_at, mask=ok, other=0.0)
        if FLOAT32_DOTS:
            w, xs = w.to(tl.float32), xs.to(tl.float32)
        acc = tl.dot(w, tl.trans(xs), acc, input_precision="ieee")
        step = tl.where(tile + 1 < stop, 1, 1 - n_tiles) if STAGGERED else 1
        tile += step
        weight_at += step * BLOCK_IN
        x_at += step * BLOCK_IN
    at = product + (part.to(tl.int64) * rows + row)[:, None] * n_out + out[None, :]
    ok = (row < rows)[:, None] & (out < n_out)[None, :]
    tl.store(at, tl.trans(acc).to(product.dtype.element_ty), mask=ok)


@triton.jit
def _one_row_linear_kernel(
    x,  # [IN], contiguous
    weight_0,  # [OUT_0, IN], contiguous
    weight_1,  # None without a second weight
    weight_2,
    product_0,  # [OUT_0], contiguous
    product_1,
    product_2,
    IN: tl.constexpr,
    OUT_0: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply `BLOCK_OUT` rows of a weight with `x`.

    A row of a weight is read once and in order, without the tensor cores. Its lines are the first that leave the L2,
    which keeps room there for results that the next launches read.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    weight, product, n_out, block = _weight_of(
        tl.program_id(0), weight_0, weight_1, weight_2, product_0, product_1, product_2, OUT_0, OUT_1, OUT_2, BLOCK_OUT
    )
    out = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    k = tl.arange(0, BLOCK_IN)
    # Rows beyond the end repeat the last one. They are not stored.
    weight_at = weight + tl.minimum(out, n_out - 1).to(tl.int64)[:, None] * IN + k[None, :]
    sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for start in tl.static_range(0, IN, BLOCK_IN):  # unrolled, so that loads of several tiles are in flight
        if start + BLOCK_IN <= IN:
            w, xs = tl.load(weight_at + start, eviction_policy="evict_first"), tl.load(x + start + k)
        else:
            ok = start + k < IN
            w = tl.load(weight_at + start, mask=ok[None, :], other=0.0, eviction_policy="evict_first")
            xs = tl.load(x + start + k, mask=ok, other=0.0)
        xs = tl.broadcast_to(xs.to(tl.float32)[None, :], [BLOCK_OUT, BLOCK_IN])
        sums = tl.fma(w.to(tl.float32), xs, sums)
    tl.store(product + out, tl.sum(sums, 1).to(product.dtype.element_ty), mask=out < n_out)
