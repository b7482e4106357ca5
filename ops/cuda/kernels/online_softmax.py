"""A tile of keys and values in the lean kernel: widened, scored, and added to the running state."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def upcast(x, dtype: tl.constexpr):
    """Keys or values in the dtype of the queries, exactly."""
    if x.dtype.primitive_bitwidth == 8:  # to bfloat16 at once is a number at a time, by a unit that does 16 a clock
        return x.to(tl.float16).to(tl.float32).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def scores_of(q, k, scale, softcap, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr):
    """Of queries and a tile of keys, unscaled if `PLAIN`."""
    scores = tl.dot(q, k, input_precision="ieee")
    if not PLAIN:
        scores *= scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends of float32's exponents
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2 * _LOG2E / softcap)) + 1.0))
    return scores


@triton.jit
def fold_tile(acc, row_max, row_sum, scores, v, scale, PLAIN: tl.constexpr):
    """Add a tile to the running state; a score of -inf is a key that does not count."""
    new_row_max = tl.maximum(row_max, tl.max(scores, axis=1))
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    if PLAIN:
        alpha = tl.exp2((row_max - base) * (scale * _LOG2E))
        p = tl.exp2(scores * (scale * _LOG2E) - (base * (scale * _LOG2E))[:, None])
    else:
        # Subtract before going to base 2: a bias of finfo.min times log2(e) would overflow to -inf.
        alpha = tl.exp2((row_max - base) * _LOG2E)
        p = tl.exp2((scores - base[:, None]) * _LOG2E)
    row_sum = row_sum * alpha + tl.sum(p, axis=1)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc, new_row_max, row_sum
