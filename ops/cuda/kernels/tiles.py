"""Loads of a key tile by pointers. If `valid` is given, other elements are zero and not read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_values(base, keys, stride, dims, dim_stride, DIM: tl.constexpr, valid=None):
    """Load a tile `[keys, dims]`, the right operand of the product with `p`."""
    ok = (dims < DIM)[None, :]
    if valid is not None:
        ok = valid[:, None] & ok
    return tl.load(base + (keys * stride)[:, None] + (dims * dim_stride)[None, :], mask=ok, other=0.0)


@triton.jit
def load_keys(base, keys, stride, dims, dim_stride, DIM: tl.constexpr, valid=None):
    """Load a tile `[dims, keys]`, the right operand of the product with queries."""
    ok = (dims < DIM)[:, None]
    if valid is not None:
        ok = valid[None, :] & ok
    return tl.load(base + (keys * stride)[None, :] + (dims * dim_stride)[:, None], mask=ok, other=0.0)
