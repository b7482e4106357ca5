"""The kernels of `top_picks`: a radix select, 8 bits of a score at a time, and a write in the order of indices.

A row is cut into chunks. Each pass counts, for each chunk, the values of 8 more bits among the scores whose earlier
bits are those of the k-th largest score. Each program of the next pass adds up these counts and so knows 8 more bits of
the k-th largest score. No pass needs atomics: the result is the same in each run.
"""

from __future__ import annotations

import triton
import triton.language as tl

PASSES, VALUES = 4, 256  # 4 times 8 bits
_PASSES, _VALUES = tl.constexpr(PASSES), tl.constexpr(VALUES)


@triton.jit
def _load_ordered(scores, stride, at, n):
    """Load scores as integers of the same order; NaN is the largest, and both zeros are equal."""
    x = tl.load(scores + at.to(tl.int64) * stride, mask=at < n, other=0.0)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x != x, 0xFFFFFFFF, ordered).to(tl.uint32)


@triton.jit
def _narrow(counts, prefix, rank, chunks, CHUNKS: tl.constexpr):
    """Find 8 more bits of the k-th largest score from the counts of the pass that counted these bits.

    Return all of its bits that are known, and its rank among the scores that have them.
    """
    chunk, value = tl.arange(0, CHUNKS)[:, None], tl.arange(0, _VALUES)
    chunk_counts = tl.load(counts + chunk * _VALUES + value[None, :], mask=chunk < chunks, other=0)
    count = tl.sum(chunk_counts, axis=0)
    at_least = tl.sum(count, axis=0) - tl.cumsum(count, axis=0) + count
    digit = tl.sum((at_least >= rank).to(tl.int32), axis=0) - 1
    larger = tl.sum(tl.where(value > digit, count, 0), axis=0)
    return (prefix << 8) | digit.to(tl.uint32), rank - larger


@triton.jit(do_not_specialize=["n", "k", "chunks"])
def _count_scores_kernel(
    scores,
    counts,
    known_bits,
    row_stride,
    stride,
    n,
    k,
    chunks,
    PASS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the values of 8 bits in a chunk: `counts[row, PASS, chunk]`.

    `known_bits[row, PASS - 1]` gets the bits of the k-th largest score that are known before this pass, and its rank
    among the scores that have them.
    """
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    counts += row * (_PASSES * _VALUES) * chunks
    known_bits += row * (2 * _PASSES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    prefix, rank = tl.full([], 0, tl.uint32), k
    if PASS > 1:
        prefix = tl.load(known_bits + 2 * (PASS - 2)).to(tl.uint32, bitcast=True)
        rank = tl.load(known_bits + 2 * (PASS - 2) + 1)
    if PASS > 0:
        prefix, rank = _narrow(counts + (PASS - 1) * _VALUES * chunks, prefix, rank, chunks, CHUNKS)
        if chunk == 0:
            tl.store(known_bits + 2 * (PASS - 1), prefix.to(tl.int32, bitcast=True))
            tl.store(known_bits + 2 * (PASS - 1) + 1, rank)
    total = tl.zeros([_VALUES], tl.int32)
    for i in range(BLOCKS):
        at = (chunk * BLOCKS + i) * BLOCK + tl.arange(0, BLOCK)
        ordered = _load_ordered(scores + row * row_stride, stride, at, n)
        among = at < n
        if PASS > 0:
            among &= (ordered >> (32 - 8 * PASS)) == prefix
        value = ((ordered >> (24 - 8 * PASS)) & 0xFF).to(tl.int32)
        total += tl.histogram(value, _VALUES, mask=among)
    tl.store(counts + (PASS * chunks + chunk) * _VALUES + tl.arange(0, _VALUES), total)


@triton.jit(do_not_specialize=["n", "k", "chunks"])
def _write_picks_kernel(
    scores,
    counts,
    known_bits,
    out,
    row_stride,
    stride,
    n,
    k,
    chunks,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the indices of the scores above the k-th largest one, and of the first ones that equal it."""
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    counts += row * (_PASSES * _VALUES) * chunks
    known_bits += row * (2 * _PASSES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    prefix = tl.load(known_bits + 2 * (_PASSES - 2)).to(tl.uint32, bitcast=True)
    rank = tl.load(known_bits + 2 * (_PASSES - 2) + 1)
    limit, ties = _narrow(counts + (_PASSES - 1) * _VALUES * chunks, prefix, rank, chunks, CHUNKS)

    before = tl.arange(0, CHUNKS)[:, None]
    value = tl.arange(0, _VALUES)[None, :]
    larger, equal = 0, 0  # the scores of the chunks before this one
    for i in tl.static_range(_PASSES):
        chunk_counts = tl.load(counts + (i * chunks + before) * _VALUES + value, mask=before < chunk, other=0)
        digit = ((limit >> (24 - 8 * i)) & 0xFF).to(tl.int32)
        larger += tl.sum(tl.where(value > digit, chunk_counts, 0))
        if i == _PASSES - 1:
            equal = tl.sum(tl.where(value == digit, chunk_counts, 0))
    written = larger + tl.minimum(equal, ties)
    for i in range(BLOCKS):
        at = (chunk * BLOCKS + i) * BLOCK + tl.arange(0, BLOCK)
        ordered = _load_ordered(scores + row * row_stride, stride, at, n)
        ties_here = ((at < n) & (ordered == limit)).to(tl.int32)
        takes_tie = (ties_here != 0) & (equal + tl.cumsum(ties_here, axis=0) <= ties)
        takes = ((at < n) & (ordered > limit)) | takes_tie
        place = written + tl.cumsum(takes.to(tl.int32), axis=0) - 1
        tl.store(out + row * k + place, at, mask=takes)
        equal += tl.sum(ties_here, axis=0)
        written += tl.sum(takes.to(tl.int32), axis=0)
