"""The producer warp of the pages kernel: TMA fills rings of K and V tiles, with a box for each page."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tatten.ops.cuda.kernels.page_blocks import BLOCK_N, keys_of, visit_at
from tatten.ops.cuda.kernels.prefix_sm90 import _load

_BLOCK_N = gl.constexpr(BLOCK_N)


@gluon.jit
def _copy_tile(pool, entries, head, first_key, barrier, tile, PAGE: gl.constexpr):
    """Begin to copy a tile of keys, a box for each page; the box of an entry that names no page is zero."""
    BOX: gl.constexpr = PAGE if PAGE < _BLOCK_N else _BLOCK_N
    for j in gl.static_range(_BLOCK_N // BOX):
        _load(pool, [entries[j], first_key & (PAGE - 1), head, 0], barrier, tile.slice(j * BOX, BOX, 1))


@gluon.jit
def _entries_of(table, table_s, first_key, stop, n_pages, PAGE: gl.constexpr):
    """Load a tile's entries of the block table, -1 for pages from `stop` on, and a bit for each that names no page."""
    BOX: gl.constexpr = PAGE if PAGE < _BLOCK_N else _BLOCK_N
    entries = ()
    unnamed = first_key * 0
    for j in gl.static_range(_BLOCK_N // BOX):
        key = first_key + j * BOX
        entry = gl.load(table + (key // PAGE).to(gl.int64) * table_s, mask=key < stop, other=-1)
        unnamed |= ((key < stop) & ((entry < 0) | (entry >= n_pages))).to(gl.int32) << j
        entries = entries + (entry,)  # type: ignore[assignment]  # noqa: RUF005 (Triton's tuples)
    return entries, unnamed


@gluon.jit
def load_tiles(pools, lists, table, buffers, sizes, SHARED: gl.constexpr, PAGE: gl.constexpr):
    """Load K of each tile of all visits, and then V of the tile before it."""
    key, value = pools
    keys, values, unnamed, full, empty = buffers
    place, end, block, block_end, kv_heads, q_blocks, kv_len, batch, n_pages, table_b, table_s = sizes
    STAGES: gl.constexpr = keys.shape[0]
    TILE_BYTES: gl.constexpr = _BLOCK_N * keys.shape[4] * 2
    flag_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n = 0
    last_head, last_key = 0, 0
    last_entries, bits = _entries_of(table, table_s, 0 * place, 0 * place, n_pages, PAGE)
    row, begin, stop_key, n_tiles = keys_of(lists, block, kv_len, batch, SHARED)
    while place < end:
        head, _q_block, first, stop = visit_at(place, end, block_end, n_tiles, kv_heads, q_blocks)
        row_table = table + row.to(gl.int64) * table_b
        first_key = begin + (stop - 1) * _BLOCK_N
        entries, bits = _entries_of(row_table, table_s, first_key, stop_key, n_pages, PAGE)
        for i in range(first, stop):
            stage = n % STAGES
            # The entries of the next tile are loaded while the stage is in use.
            next_key = first_key - _BLOCK_N
            next_stop = gl.where(i + 1 < stop, stop_key, -_BLOCK_N)
            next_entries, next_bits = _entries_of(row_table, table_s, next_key, next_stop, n_pages, PAGE)
            mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
            unnamed.index(stage).store(gl.full([1], 0, gl.int32, layout=flag_layout) + bits)
            mbarrier.expect(full.index(stage), TILE_BYTES)
            _copy_tile(key, entries, head, first_key, full.index(stage), keys.index(stage), PAGE)
            if n > 0:
                stage = (n - 1) % STAGES
                mbarrier.wait(empty.index(STAGES + stage), (((n - 1) // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(STAGES + stage), TILE_BYTES)
                _copy_tile(
                    value, last_entries, last_head, last_key, full.index(STAGES + stage), values.index(stage), PAGE
                )
            last_entries, last_head, last_key = entries, head, first_key
            entries, bits, first_key = next_entries, next_bits, next_key
            n += 1
        place += stop - first
        if (place >= block_end) & (place < end):
            block += 1
            row, begin, stop_key, n_tiles = keys_of(lists, block, kv_len, batch, SHARED)
            block_end += n_tiles * (kv_heads * q_blocks)
    if n > 0:
        stage = (n - 1) % STAGES
        mbarrier.wait(empty.index(STAGES + stage), (((n - 1) // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(STAGES + stage), TILE_BYTES)
        _copy_tile(value, last_entries, last_head, last_key, full.index(STAGES + stage), values.index(stage), PAGE)
