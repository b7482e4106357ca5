"""What the lean kernel and the merge of its partials share: the line of tiles, and the sum of partial states."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_space(
    kv_lens,
    blocks,
    blocks_group,
    n_groups,
    rows,
    kv_len,
    window,
    q_len,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_LENS: tl.constexpr,
    LISTED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The tiles of a row of each group, and where the group ends on the line. All rows of a group are equally long."""
    groups = tl.arange(0, GROUPS)
    if LISTED:
        tiles = tl.load(blocks + groups * blocks_group, mask=groups < n_groups, other=0).to(tl.int32)
    else:
        lens = kv_len + tl.zeros([GROUPS], tl.int32)
        if HAS_LENS:
            lens = tl.load(kv_lens + groups, mask=groups < n_groups, other=0)
            lens = tl.minimum(tl.maximum(lens, 0), kv_len).to(tl.int32)
        tiles = (lens + BLOCK_N - 1) // BLOCK_N
        if WINDOW:
            tiles -= tl.maximum(lens - q_len - window + 1, 0) // BLOCK_N
    tiles = tl.where(groups < n_groups, tl.maximum(tiles, 1), 0)  # an empty row is written too
    return tiles, tl.cumsum(tiles * rows, axis=0)


@triton.jit
def first_tile(program, line, used, INT64_TILES: tl.constexpr):
    """The first tile of a program: `line * program // used`; for those that have none, the end of the line."""
    program = tl.minimum(program, used)
    if INT64_TILES:
        return (line.to(tl.int64) * program // used).to(tl.int32)
    else:
        return line * program // used


@triton.jit
def program_of(place, line, used, INT64_TILES: tl.constexpr):
    """The program that has the tile at `place`: the inverse of `first_tile`."""
    if INT64_TILES:
        return (((place + 1).to(tl.int64) * used - 1) // line).to(tl.int32)
    else:
        return ((place + 1) * used - 1) // line


@triton.jit
def store_lse(lse, at, log_sum, row_max, row_sum, ok, PAIRED: tl.constexpr):
    """Store the lse of some rows for a merge: as one number or, `PAIRED`, as maximum and sum.

    Beside a bias of -1e9 the lse of 3 keys is that of 1000 in float32; the pair still has their number.
    """
    if PAIRED:
        tl.store(lse + 2 * at, row_max, mask=ok)
        tl.store(lse + 2 * at + 1, row_sum, mask=ok)
    else:
        tl.store(lse + at, log_sum, mask=ok)


@triton.jit
def fold_states(acc, row_max, row_sum, out, lse, at, ok, dims, VALUE_DIM: tl.constexpr, PAIRED: tl.constexpr):
    """Add to the running states of some rows the partial states of each at `at`, `[partials, rows]`, all at once."""
    if PAIRED:
        log_sums = tl.load(lse + 2 * at, mask=ok, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(lse + 2 * at + 1, mask=ok, other=0.0, cache_modifier=".cg")
    else:
        log_sums = tl.load(lse + at, mask=ok, other=float("-inf"), cache_modifier=".cg")
    values = tl.load(
        out + at[:, :, None] * VALUE_DIM + dims[None, None, :],
        mask=ok[:, :, None] & (dims < VALUE_DIM)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    new_row_max = tl.maximum(row_max, tl.max(log_sums, axis=0))
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    alpha, weights = tl.exp(row_max - base), tl.exp(log_sums - base[None, :])
    if PAIRED:
        weights *= sums
    acc = acc * alpha[:, None] + tl.sum(values * weights[:, :, None], axis=0)
    return acc, new_row_max, row_sum * alpha + tl.sum(weights, axis=0)


@triton.jit
def finish_state(acc, row_max, row_sum):
    """The state that was summed up; empty, it is `(0, -inf)`."""
    filled = row_sum != 0  # true for NaN, which must come out
    divisor = tl.where(filled, row_sum, 1.0)
    return acc / divisor[:, None], tl.where(filled, row_max + tl.log(divisor), float("-inf"))
