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
ENDS_AT_ONCE = 1024
NO_QUERY = -(1 << 30)  # the limit of a row without a query, below all others
_BLOCK_N, _ENDS_AT_ONCE, _NO_QUERY = gl.constexpr(BLOCK_N), gl.constexpr(ENDS_AT_ONCE), gl.constexpr(NO_QUERY)
_COLUMNS, _CUTS_COLUMN, _LEVELS = gl.constexpr(COLUMNS), gl.constexpr(CUTS_COLUMN), gl.constexpr(LEVELS)
_BEGINS, _ORDER, _STARTS = gl.constexpr(BEGINS), gl.constexpr(ORDER), gl.constexpr(STARTS)
_STOPS, _ENTRY_STOPS = gl.constexpr(STOPS), gl.constexpr(ENTRY_STOPS)
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # the layout of one number for each thread


@gluon.jit
def load_ends(ends, unit, room):
    """Return the tile space of `room` blocks: `ends`, `unit`, `room`, the number of tiles, and the first ends.

    No load waits for another.

    Args:
        ends: the end of each block, `[room]`, in units of `unit` tiles.
    """
    return ends, unit, room, gl.load(ends + (room - 1)).to(gl.int32) * unit, _ends_from(ends, unit, room, 0)


@gluon.jit
def _ends_from(ends, unit, room, first):
    at = first + gl.arange(0, _ENDS_AT_ONCE, layout=THREADS)
    return gl.where(at < room, gl.load(ends + at, mask=at < room, other=0).to(gl.int32) * unit, 2147483647)


@gluon.jit
def share_of_program(space, programs, blocks, kv_heads, SHARED: gl.constexpr):
    """Return this program's part of the tile space, the block that it begins in, and that block's end.

    Without `SHARED`, work tiles may count more than their tiles, and the part may be whole work tiles (`query_blocks`).
    The result counts tiles alone.

    Args:
        space: the result of `load_ends`.
        blocks: the list of blocks.
    """
    room, total = space[2], space[3]
    cuts = 0
    if not SHARED:
        cuts = gl.load(blocks + _CUTS_COLUMN)
    active = programs_over_runs(programs, total) if SHARED else gl.minimum(programs, total)
    active = gl.maximum(active, 1)
    program = gl.program_id(0).to(gl.int64)
    begin = gl.minimum(total * program // active, total).to(gl.int32)
    end = gl.minimum(total * (program + 1) // active, total).to(gl.int32)
    if SHARED:
        block, block_end = _block_at(space, begin)
    else:
        # With cuts, a place at the end of a block belongs to that block.
        shift = gl.where(cuts == 0, 0, 1)
        block, block_end = _block_at(space, gl.maximum(begin - shift, 0))
        if cuts != 0:
            last, last_end = _block_at(space, gl.maximum(end - 1, 0))
            following = gl.minimum(block + 1, room - 1)
            n_last = gl.load(blocks + last * _COLUMNS + 6)
            n_tiles = gl.load(blocks + block * _COLUMNS + 6)
            n_following = gl.load(blocks + following * _COLUMNS + 6)
            end, _ = _cut(last, last_end, n_last, end, kv_heads, cuts)
            begin, block_end = _cut(block, block_end, n_tiles, begin, kv_heads, cuts)
            if begin == block_end:
                block = following
                block_end += n_following * kv_heads
    return begin, end, block, block_end


@gluon.jit
def _cut(block, block_end, n_tiles, place, kv_heads, cuts):
    """Return the cut near a place in or at the end of a block of `n_tiles`, and the block's end, counted in tiles."""
    margin = cuts // 2
    size = n_tiles + 2 * margin
    in_block = place - (block_end - size * kv_heads)
    block_end -= 2 * margin * kv_heads * (block + 1)
    in_block += gl.where(cuts % 2 == 1, size // 2, 0)
    work_tile = in_block // size
    tile = gl.minimum(gl.maximum(in_block - work_tile * size - margin, 0), n_tiles)
    tile = gl.where(cuts % 2 == 1, 0, tile)
    return block_end - (kv_heads - work_tile) * n_tiles + tile, block_end


@gluon.jit
def _block_at(space, place):
    """Return the block that a place of the tile space belongs to, or the last one, and its end."""
    ends, unit, room, total, first_ends = space
    block = gl.sum((first_ends <= place).to(gl.int32), axis=0)
    block_end = gl.min(gl.where(first_ends <= place, total, first_ends), axis=0)
    for first in range(_ENDS_AT_ONCE, room, _ENDS_AT_ONCE):
        block_ends = _ends_from(ends, unit, room, first)
        block += gl.sum((block_ends <= place).to(gl.int32), axis=0)
        block_end = gl.minimum(block_end, gl.min(gl.where(block_ends <= place, total, block_ends), axis=0))
    return gl.minimum(block, room - 1), gl.minimum(block_end, total)


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
def entries_of(lists, block, batch, SHARED: gl.constexpr):
    """Return the place in ORDER of the first entry of a row group, and one past the last; (0, 0) without `SHARED`."""
    begin, end = 0, 0
    if SHARED:
        at = lists + _BEGINS * (_LEVELS * batch + 1) + block
        begin, end = gl.load(at), gl.load(at + 1)
    return begin, end


@gluon.jit
def queries_of(lists, block, entries, q_row, kv_head, sizes, strides, SHARED: gl.constexpr):
    """Return offset, state and limit of packed queries, each in the shape of `q_row`.

    The offset is that of the query in memory, and -1 if there is none. The state is the place of its output. The limit
    is the last key that it attends to; with `SHARED` one past it; `NO_QUERY` if there is no query.

    Args:
        entries: the result of `entries_of`.
    """
    kv_heads, heads_per_kv, most_members, q_len, batch = sizes
    query_b, query_h, query_l = strides
    q_heads = kv_heads * heads_per_kv
    if SHARED:
        width = _LEVELS * batch + 1
        begin, end = entries
        nth = begin + q_row // q_len % most_members
        ok = (q_row < heads_per_kv * most_members * q_len) & (nth < end)
        entry = gl.load(lists + _ORDER * width + nth, mask=ok, other=0)
        position = q_row % q_len
        head = kv_head * heads_per_kv + q_row // (q_len * most_members)
        limit = gl.load(lists + _ENTRY_STOPS * width + entry, mask=ok, other=0)
        offset = (entry % batch).to(gl.int64) * query_b + head * query_h + position * query_l
        state = (entry.to(gl.int64) * q_heads + head) * q_len + position
    else:
        at = lists + block * _COLUMNS
        row = gl.load(at + 1) + q_row
        q_len = gl.load(at + 3)
        ok = row < q_len * heads_per_kv
        position = row // heads_per_kv
        token = (gl.load(at + 2) + position).to(gl.int64)
        head = kv_head * heads_per_kv + row % heads_per_kv
        limit = gl.load(at + 4) - q_len + position
        offset = token * query_b + head * query_h
        state = token * q_heads + head
    return gl.where(ok, offset, -1), state, gl.where(ok, limit, _NO_QUERY)
