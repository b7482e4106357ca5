"""A tile of keys: its loads, and its products with queries. If `valid` is given, other keys are zero and not read."""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import upcast


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


@triton.jit
def load_scales(base, keys, valid=None):
    """Load a factor for each key of a tile, in float32."""
    if valid is None:
        return tl.load(base + keys).to(tl.float32)
    else:
        return tl.load(base + keys, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def score_tile(
    operands,
    key_tiles,
    value_tiles,
    start_key,
    keys,
    valid,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    HALVES: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load a tile of keys and values; return the products of queries and keys, and the values.

    `operands` are the same for all tiles of a work tile. If `valid` is given, other keys may be NaN, so they are not
    read.
    """
    queries, bases, strides, dims, tma_at = operands
    q, q_rest, q_rope = queries
    key_base, value_base, rope_base, key_scale_base = bases
    key_s, key_d, value_s, value_d, rope_s, rope_d = strides
    key_dims, value_dims, rope_dims = dims
    BLOCK_N: tl.constexpr = keys.shape[0]
    if TMA:
        if not LATENT:
            k = key_tiles.load([tma_at[0], tma_at[1], start_key, 0]).reshape([BLOCK_N, key_dims.shape[0]]).T
        v = value_tiles.load([tma_at[0], tma_at[1], start_key, 0]).reshape([BLOCK_N, value_dims.shape[0]])
    else:
        if not LATENT:
            k = load_keys(key_base, keys, key_s, key_dims, key_d, HEAD_DIM, valid)
        v = load_values(value_base, keys, value_s, value_dims, value_d, VALUE_DIM, valid)
    if LATENT:
        k = v.T
    k, v = upcast(k, q.dtype), upcast(v, q.dtype)
    products = tl.dot(q, k, input_precision="ieee")
    if HALVES:
        products = tl.dot(q_rest, k, products, input_precision="ieee")
    if ROPE_DIM:
        k = load_keys(rope_base, keys, rope_s, rope_dims, rope_d, ROPE_DIM, valid)
        products = tl.dot(q_rope, upcast(k, q.dtype), products, input_precision="ieee")
    if KEY_SCALE == 2:
        products *= load_scales(key_scale_base, keys, valid)[None, :]
    return products, v
