"""Blocks of packed queries that read one row of a block table, and their place in the tile space of the pages kernel.

A block is one of two kinds:

- in a mixed batch, packed queries of a sequence, which `tatten.ops.cuda.kernels.query_blocks` lists;
- with `SHARED`, those of a row group over shared pages, which `tatten.ops.page_runs` describes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tatten.ops.cuda.kernels.query_blocks import COLUMNS, CUTS_COLUMN
from tatten.ops.cuda.kernels.tile_scheduler import programs_over_runs
from tatten.ops.page_runs import BEGINS, ENTRY_STOPS, LEVELS, ORDER, STARTS, STOPS

BLOCK_N = 128  # keys of a tile
_BLOCK_N = gl.constexpr(BLOCK_N)
_COLUMNS, _CUTS_COLUMN, _LEVELS = gl.constexpr(COLUMNS), gl.constexpr(CUTS_COLUMN), gl.constexpr(LEVELS)
_BEGINS, _ORDER, _STARTS = gl.constexpr(BEGINS), gl.constexpr(ORDER), gl.constexpr(STARTS)
_STOPS, _ENTRY_STOPS = gl.constexpr(STOPS), gl.constexpr(ENTRY_STOPS)


@gluon.jit
def share_of_program(ends, unit, room, programs, blocks, kv_heads, SHARED: gl.constexpr):
    """Return this program's part of the tile space, the block that it begins in, and that block's end.

    Without `SHARED`, work tiles may count more than their tiles, and the part may be whole work tiles (`query_blocks`).
    The result counts tiles alone.

    Args:
        ends: the ends of blocks, in units of `unit` tiles.
        blocks: their list.
    """
    total = gl.load(ends + (room - 1)).to(gl.int32) * unit
    active = programs_over_runs(programs, total) if SHARED else gl.minimum(programs, total)
    active = gl.maximum(active, 1)
    program = gl.program_id(0).to(gl.int64)
    begin = gl.minimum(total * program // active, total).to(gl.int32)
    end = gl.minimum(total * (program + 1) // active, total).to(gl.int32)
    if SHARED:
        block, block_end = _block_at(ends, unit, room, begin)
    else:
        cuts = gl.load(blocks + _CUTS_COLUMN)
        if cuts == 0:
            block, block_end = _block_at(ends, unit, room, begin)
        else:
            end, _, _ = _cut(blocks, ends, room, end, kv_heads, cuts)
            begin, block, block_end = _cut(blocks, ends, room, begin, kv_heads, cuts)
            if begin == block_end:
                block = gl.minimum(block + 1, room - 1)
                block_end += gl.load(blocks + block * _COLUMNS + 6) * kv_heads
    return begin, end, block, block_end


@gluon.jit
def _cut(blocks, ends, room, place, kv_heads, cuts):
    """Return the cut near a place, counted in tiles, the block that it is in or at the end of, and that block's end."""
    margin = cuts // 2
    block, block_end = _block_at(ends, 1, room, gl.maximum(place - 1, 0))
    n_tiles = gl.load(blocks + block * _COLUMNS + 6)
    size = n_tiles + 2 * margin
    in_block = place - (block_end - size * kv_heads)
    block_end -= 2 * margin * kv_heads * (block + 1)
    in_block += gl.where(cuts % 2 == 1, size // 2, 0)
    work_tile = in_block // size
    tile = gl.minimum(gl.maximum(in_block - work_tile * size - margin, 0), n_tiles)
    tile = gl.where(cuts % 2 == 1, 0, tile)
    return block_end - (kv_heads - work_tile) * n_tiles + tile, block, block_end


@gluon.jit
def _block_at(ends, unit, room, place):
    """Return the block that a place of the tile space belongs to, or the last one, and its end."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    block = 0
    for i in range(0, room, 1024):
        at = i + gl.arange(0, 1024, layout=layout)
        block_ends = gl.load(ends + at, mask=at < room, other=0).to(gl.int32) * unit
        block += gl.sum(((block_ends <= place) & (at < room)).to(gl.int32), axis=0)
    block = gl.minimum(block, room - 1)
    return block, gl.load(ends + block).to(gl.int32) * unit


@gluon.jit
def keys_of(lists, block, kv_len, batch, SHARED: gl.constexpr):
    """Return a block's row of the block table, first key, one past its last key, and number of tiles."""
    if SHARED:
        width = _LEVELS * batch + 1
        row = gl.load(lists + block)
        start = gl.load(lists + _STARTS * width + block)
        stop = gl.maximum(gl.minimum(gl.load(lists + _STOPS * width + block), kv_len), start)
        return row, start, stop, gl.maximum((stop - start + _BLOCK_N - 1) // _BLOCK_N, 1)
    else:
        at = lists + block * _COLUMNS
        return gl.load(at), gl.load(at + 5) * _BLOCK_N, gl.load(at + 4), gl.load(at + 6)


@gluon.jit
def visit_at(place, end, block_end, n_tiles, kv_heads, q_blocks):
    """Return the kv head, the block of packed queries, the first tile, and one past the last tile of a visit."""
    in_block = place - (block_end - n_tiles * (kv_heads * q_blocks))
    work_tile = in_block // n_tiles
    first = in_block - work_tile * n_tiles
    return work_tile // q_blocks, work_tile % q_blocks, first, gl.minimum(n_tiles, first + end - place)


@gluon.jit
def queries_of(lists, block, q_row, kv_head, heads_per_kv, members, q_len, batch, SHARED: gl.constexpr):
    """Return sequence or token, head, position, state and limit of packed queries, and which of the queries exist.

    The limit is the last key that a query attends to; with `SHARED` one past it.
    """
    if SHARED:
        width = _LEVELS * batch + 1
        position = q_row % q_len
        nth = gl.load(lists + _BEGINS * width + block) + q_row // q_len % members
        head = kv_head * heads_per_kv + q_row // (q_len * members)
        ok = (q_row < heads_per_kv * members * q_len) & (nth < gl.load(lists + _BEGINS * width + block + 1))
        entry = gl.load(lists + _ORDER * width + nth, mask=ok, other=0)
        limit = gl.load(lists + _ENTRY_STOPS * width + entry, mask=ok, other=0)
        return entry % batch, head, position, entry, ok, limit
    else:
        at = lists + block * _COLUMNS
        row = gl.load(at + 1) + q_row
        q_len = gl.load(at + 3)
        ok = row < q_len * heads_per_kv
        position = row // heads_per_kv
        token = gl.load(at + 2) + position
        return (
            token,
            kv_head * heads_per_kv + row % heads_per_kv,
            position * 0,
            token,
            ok,
            (gl.load(at + 4) - q_len + position),
        )
