"""A tile of keys: its loads, and its products with queries. If `valid` is given, other keys are zero and not read.

With pages, `entries` are those of a block table: one for each key, or one for all of them if a page holds whole tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import upcast


@triton.jit
def key_of_tile(tile, first_key, BLOCK_N: tl.constexpr):
    """Return the first key of a tile; tiles begin at `first_key`, or at 0 if that is None."""
    if first_key is None:
        return tile * BLOCK_N
    else:
        return first_key + tile * BLOCK_N


@triton.jit
def load_entries(
    table, stride, start, stop, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr, SCALARS: tl.constexpr
):
    """Load the entries of a tile of keys from `start` on, a multiple of `ALIGN`; -1 for keys from `stop` on.

    The result is for `entries_of_keys`: a tuple of a scalar for each page, or of one vector if the tile has more than
    `SCALARS` pages. A vector is loaded once for each layout of keys and values, which takes more registers.
    """
    PAGES: tl.constexpr = BLOCK_N // PAGE if PAGE < BLOCK_N else 1
    if PAGES <= SCALARS and (BLOCK_N // PAGES) <= ALIGN:
        entries = ()
        for i in tl.static_range(PAGES):
            key = start + i * PAGE
            entry = tl.load(table + (key // PAGE).to(tl.int64) * stride, mask=key < stop, other=-1)
            entries = entries + (entry,)  # type: ignore[assignment]  # noqa: RUF005 (Triton's tuples)
        return entries
    else:
        keys = start + tl.arange(0, BLOCK_N)
        return (tl.load(table + (keys // PAGE).to(tl.int64) * stride, mask=keys < stop, other=-1),)


@triton.jit
def entries_of_keys(entries, BLOCK_N: tl.constexpr):
    """Return an entry for each key of a tile, or one for all of them, from the result of `load_entries`."""
    each = entries[0]
    PAGES: tl.constexpr = len(entries)
    if PAGES > 1:
        page = tl.arange(0, BLOCK_N) // (BLOCK_N // PAGES)
        for i in tl.static_range(1, PAGES):
            each = tl.where(page >= i, entries[i], each)
    return each


@triton.jit
def in_named_page(keys, stop, entries, n_pages):
    """Return which keys are before `stop` and have an entry that names a page."""
    return keys < tl.where((entries >= 0) & (entries < n_pages), stop, 0)


@triton.jit
def rows_at(keys, stride, entries, page_stride, PAGE: tl.constexpr):
    """Return the offsets at which keys are stored."""
    if entries is None:
        return keys * stride
    else:
        return entries.to(tl.int64) * page_stride + (keys & (PAGE - 1)) * stride


@triton.jit
def load_values(base, rows, dims, dim_stride, DIM: tl.constexpr, valid=None):
    """Load a tile `[keys, dims]`, the right operand of the product with `p`, from the offsets `rows` of keys."""
    ok = (dims < DIM)[None, :]
    if valid is not None:
        ok = valid[:, None] & ok
    return tl.load(base + rows[:, None] + (dims * dim_stride)[None, :], mask=ok, other=0.0)


@triton.jit
def load_keys(base, rows, dims, dim_stride, DIM: tl.constexpr, valid=None):
    """Load a tile `[dims, keys]`, the right operand of the product with queries, from the offsets `rows` of keys."""
    ok = (dims < DIM)[:, None]
    if valid is not None:
        ok = valid[None, :] & ok
    return tl.load(base + rows[None, :] + (dims * dim_stride)[:, None], mask=ok, other=0.0)


@triton.jit
def load_scales(base, rows, valid=None):
    """Load a factor for each key of a tile, in float32."""
    if valid is None:
        return tl.load(base + rows).to(tl.float32)
    else:
        return tl.load(base + rows, mask=valid, other=0.0).to(tl.float32)


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
    PAGE: tl.constexpr,
    entries,
    page_strides,
):
    """Load a tile of keys and values; return the products of queries and keys, and the values.

    `operands` are the same for all tiles of a work tile. If `valid` is given, other keys may be NaN, so they are not
    read. `page_strides`: from page to page of keys, values, ropes and scales of keys, and from scale to scale.
    """
    queries, bases, strides, dims, tma_at = operands
    q, q_rest, q_rope = queries
    key_base, value_base, rope_base, key_scale_base = bases
    key_s, key_d, value_s, value_d, rope_s, rope_d = strides
    key_dims, value_dims, rope_dims = dims
    key_p, value_p, rope_p, scale_p, scale_s = page_strides
    BLOCK_N: tl.constexpr = keys.shape[0]
    if TMA:
        kv_row, head = tma_at
        if entries is None:  # noqa: SIM108 (known when this is compiled)
            first = [kv_row, head, start_key, 0]
        else:
            first = [entries, start_key & (PAGE - 1), head, 0]
        if not LATENT:
            k = key_tiles.load(first).reshape([BLOCK_N, key_dims.shape[0]]).T
        v = value_tiles.load(first).reshape([BLOCK_N, value_dims.shape[0]])
    else:
        if not LATENT:
            k = load_keys(key_base, rows_at(keys, key_s, entries, key_p, PAGE), key_dims, key_d, HEAD_DIM, valid)
        v_rows = rows_at(keys, value_s, entries, value_p, PAGE)
        v = load_values(value_base, v_rows, value_dims, value_d, VALUE_DIM, valid)
    if LATENT:
        k = v.T
    k, v = upcast(k, q.dtype), upcast(v, q.dtype)
    products = tl.dot(q, k, input_precision="ieee")
    if HALVES:
        products = tl.dot(q_rest, k, products, input_precision="ieee")
    if ROPE_DIM:
        k = load_keys(rope_base, rows_at(keys, rope_s, entries, rope_p, PAGE), rope_dims, rope_d, ROPE_DIM, valid)
        products = tl.dot(q_rope, upcast(k, q.dtype), products, input_precision="ieee")
    if KEY_SCALE == 2:
        scale_rows = rows_at(keys, scale_s, entries, scale_p, PAGE)
        products *= load_scales(key_scale_base, scale_rows, valid)[None, :]
    return products, v
