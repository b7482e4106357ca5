"""Online softmax: scoring a tile of keys, and running states `(acc, row_max, row_sum)` of a block of queries."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def upcast(x, dtype: tl.constexpr):
    """Convert keys or values to the dtype of the queries, exactly."""
    if x.dtype == tl.int8:
        # Use the bits of 2^23 + 128 + x, because the conversion unit handles only 16 numbers per clock.
        bits = (x.to(tl.uint8, bitcast=True) ^ 128).to(tl.int32) | 0x4B000000
        return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(dtype)
    elif x.dtype.primitive_bitwidth == 8:
        # The unit for direct conversion to bfloat16 handles only 16 numbers per clock.
        return x.to(tl.float16).to(tl.float32).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def halves_of(x, dtype: tl.constexpr):
    """Split float32 numbers into two of 16 bits each: the rounded number, and its residue."""
    high = x.to(dtype)
    rounded = high.to(tl.float32)
    return high, tl.where(tl.abs(rounded) < float("inf"), x - rounded, 0.0).to(dtype)  # inf - inf would be NaN


@triton.jit
def scores_of(scores, scale, softcap, UNSCALED: tl.constexpr, SOFTCAP: tl.constexpr):
    """Score a tile of keys by products with the queries; if `UNSCALED`, `fold_tile` applies the scale."""
    if not UNSCALED:
        scores *= scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right even where exp underflows or overflows
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2 * _LOG2E / softcap)) + 1.0))
    return scores


@triton.jit
def fold_tile(acc, row_max, row_sum, scores, v, scale, UNSCALED: tl.constexpr, v_scale=None):
    """Add a tile to the running state; a score of -inf leaves its key out. `v_scale`: a factor of each value."""
    new_row_max = tl.maximum(row_max, tl.max(scores, axis=1))
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    if UNSCALED:
        to_exponent = scale * _LOG2E
        alpha = tl.exp2((row_max - base) * to_exponent)
        p = tl.exp2(tl.fma(scores, to_exponent, -(base * to_exponent)[:, None]))
    else:
        # Subtract before going to base 2: a bias of finfo.min times log2(e) would overflow to -inf.
        alpha = tl.exp2((row_max - base) * _LOG2E)
        p = tl.exp2((scores - base[:, None]) * _LOG2E)
    row_sum = row_sum * alpha + tl.sum(p, axis=1)
    if v_scale is not None:
        if v.dtype == tl.float16:  # small p times small factors would have few bits or none
            v = (v.to(tl.float32) * v_scale[:, None]).to(tl.float16)
        else:
            p *= v_scale[None, :]
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc, new_row_max, row_sum


@triton.jit
def fold_states(acc, row_max, row_sum, out, lse, at, ok, dims, VALUE_DIM: tl.constexpr, MAX_AND_SUM: tl.constexpr):
    """Add the stored states at `at`, `[partials, queries]`, to the running states of the queries, all at once."""
    if MAX_AND_SUM:
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
    if MAX_AND_SUM:
        weights *= sums
    acc = acc * alpha[:, None] + tl.sum(values * weights[:, :, None], axis=0)
    return acc, new_row_max, row_sum * alpha + tl.sum(weights, axis=0)


@triton.jit
def finish_state(acc, row_max, row_sum):
    """Normalise a running state to `(out, lse)`; an empty state is `(0, -inf)`."""
    filled = row_sum != 0  # true for NaN, which must be propagated
    divisor = tl.where(filled, row_sum, 1.0)
    return acc / divisor[:, None], tl.where(filled, row_max + tl.log(divisor), float("-inf"))


@triton.jit
def store_lse(lse, at, log_sum, row_max, row_sum, ok, MAX_AND_SUM: tl.constexpr):
    """Store the lse of states: as one number or, for states that are still to be merged, as maximum and sum.

    With a bias of -1e9 the lse of 3 keys equals that of 1000 in float32; maximum and sum still tell them apart.
    """
    if MAX_AND_SUM:
        tl.store(lse + 2 * at, row_max, mask=ok)
        tl.store(lse + 2 * at + 1, row_sum, mask=ok)
    else:
        tl.store(lse + at, log_sum, mask=ok)
