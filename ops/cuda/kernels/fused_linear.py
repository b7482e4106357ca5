"""The kernel of linear layers of one row and the ops around them, with float32 sums."""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.skinny_linear import _weight_of

NO_GATE, SILU, GELU, GELU_TANH = range(4)
_NO_GATE, _SILU, _GELU = tl.constexpr(NO_GATE), tl.constexpr(SILU), tl.constexpr(GELU)


@triton.jit
def _activated(x, GATE: tl.constexpr):
    if GATE == _SILU:
        return x * tl.sigmoid(x)
    elif GATE == _GELU:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:  # 1 + tanh(y) = 2 * sigmoid(2 * y)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _load_rows(at, k, IN: tl.constexpr, BLOCK_IN: tl.constexpr):
    if BLOCK_IN == IN:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=k < IN, other=0.0, eviction_policy="evict_first")


@triton.jit
def _fused_linear_kernel(
    x,  # [IN], contiguous
    weight_0,  # [OUT_0, IN], contiguous
    weight_1,  # None without a second weight
    weight_2,
    norm_weight,  # [IN], contiguous; None without a norm
    residual,  # [OUT_0], contiguous; None without a residual
    result_0,  # [OUT_0], contiguous
    result_1,  # None with a gate
    result_2,
    eps,
    IN: tl.constexpr,
    OUT_0: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply `BLOCK_OUT` rows of a weight, or of the two weights of a gate, with `x`.

    A program holds its rows in registers. If `PREFETCH`, it loads them before it waits for the previous launch, so that
    memory has work while one launch ends and the next one begins.

    Each program computes the norm's sum of squares. The factor of the norm is common to all features, so sums are
    multiplied by it, and no feature waits for it.
    """
    if PDL and not PREFETCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    if GATE == _NO_GATE:
        weight, result, n_out, block = _weight_of(
            block, weight_0, weight_1, weight_2, result_0, result_1, result_2, OUT_0, OUT_1, OUT_2, BLOCK_OUT
        )
    else:
        weight, result, n_out = weight_0, result_0, OUT_0
    out = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    k = tl.arange(0, BLOCK_IN)
    # Rows beyond the end repeat the last one. They are not stored.
    at = tl.minimum(out, n_out - 1).to(tl.int64)[:, None] * IN + k[None, :]
    rows = _load_rows(weight + at, k[None, :], IN, BLOCK_IN)
    if GATE != _NO_GATE:
        other_rows = _load_rows(weight_1 + at, k[None, :], IN, BLOCK_IN)
    if norm_weight is not None:
        factors = tl.load(norm_weight + k, mask=k < IN, other=0.0).to(tl.float32)
    if PDL and PREFETCH:
        # The wait still comes before the launch of dependents, so that the next launch starts with all results of
        # the previous one, and may load what this launch doesn't write.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    xs = tl.load(x + k, mask=k < IN, other=0.0).to(tl.float32)
    ok = out < n_out
    if residual is not None:
        added = tl.load(residual + out, mask=ok, other=0.0).to(tl.float32)
    if norm_weight is not None:
        scale = tl.rsqrt(tl.sum(xs * xs, 0) / IN + eps)
        xs *= factors
    sums = tl.sum(rows.to(tl.float32) * xs[None, :], 1)
    if norm_weight is not None:
        sums *= scale
    if GATE != _NO_GATE:
        other_sums = tl.sum(other_rows.to(tl.float32) * xs[None, :], 1)
        if norm_weight is not None:
            other_sums *= scale
        sums = _activated(sums, GATE) * other_sums
    if residual is not None:
        sums += added
    tl.store(result + out, sums.to(result.dtype.element_ty), mask=ok)
