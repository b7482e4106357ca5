"""The schedule of the latent kernels for Hopper, in Gluon: visits, and the keys that queries attend to.

The tiles of all groups are added up once. Each warpgroup and the producer warp of a program search the sums by
themselves. Each warp holds all of the searched values, so that no warp waits for another.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tatten.ops.cuda.kernels.prefix_sm90 import _barrier

BLOCK_M, BLOCK_N = 64, 64
# If there are several groups, they are padded to a full warp. A sum over all 32 threads is a `redux`, and ptxas knows
# that all threads get the same. A sum over fewer is made of shuffles, and ptxas assumes that threads may diverge at a
# branch on it: each wgmma after the branch then waits for the previous one.
LEAST_GROUPS = 32
MOST_GROUPS = 2048  # their ends take 8 KiB, the rest of shared memory
_BLOCK_M, _BLOCK_N = gl.constexpr(BLOCK_M), gl.constexpr(BLOCK_N)

# The keys that queries attend to: all of them, the first ones by `kv_lens`, or those of a block list.
ALL, FIRST, LISTED = 0, 1, 2
_FIRST, _LISTED = gl.constexpr(FIRST), gl.constexpr(LISTED)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _length_of(kv_lens, kv_len):
    """Clamp a length, and only then convert it to 32 bits: 5 - 2**32 is 0, not 5."""
    return gl.minimum(gl.maximum(kv_lens, 0), kv_len).to(gl.int32)


@gluon.jit
def ends_of_groups(lengths, GROUPS: gl.constexpr, KEYS: gl.constexpr):
    """Count the tiles of a work tile of each group, and add them up, as `tile_space` does."""
    kv_lens, block_list, block_list_stride, kv_len, n_groups = lengths
    layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
    groups = gl.arange(0, GROUPS, layout=layout)
    if KEYS == _LISTED:
        tiles = gl.load(block_list + groups * block_list_stride, mask=groups < n_groups, other=0).to(gl.int32)
    else:
        lens = kv_len + gl.full([GROUPS], 0, gl.int32, layout=layout)
        if KEYS == _FIRST:
            lens = _length_of(gl.load(kv_lens + groups, mask=groups < n_groups, other=0), kv_len)
        tiles = (lens + _BLOCK_N - 1) // _BLOCK_N
    tiles = gl.where(groups < n_groups, gl.maximum(tiles, 1), 0)  # the output of an empty kv_row is written too
    # Scans support no 1-D layout that every warp holds completely.
    ends = gl.associative_scan(gl.expand_dims(tiles, 0), 1, _add)
    return gl.sum(ends, axis=0)


@gluon.jit
def share_of_program(q_blocks, programs):
    """Return the index of this program's share of the tiles.

    Neighbouring programs read the same latents for other queries at about the same time, so that the L2 serves them. If
    the programs can't be divided so, shares are in the order of programs.
    """
    share = gl.program_id(0)
    if programs % q_blocks == 0:
        share = share % q_blocks * (programs // q_blocks) + share // q_blocks
    return share


@gluon.jit
def share_of_tiles(lengths, group_ends, q_blocks, batch, programs, GROUPS: gl.constexpr, KEYS: gl.constexpr):
    """Return this program's share, its start and end, and the tiles of a block of queries. Store the groups' ends."""
    ends = ends_of_groups(lengths, GROUPS, KEYS)
    group_ends.store(ends)
    _barrier()
    q_block_tiles = gl.max(ends, axis=0)
    if GROUPS == 1:
        q_block_tiles *= batch
    total_tiles = q_block_tiles.to(gl.int64) * q_blocks
    active_programs = gl.minimum(total_tiles, programs)
    share = share_of_program(q_blocks, programs)
    share_start = gl.minimum(total_tiles * share // active_programs, total_tiles).to(gl.int32)
    share_end = gl.minimum(total_tiles * (share + 1) // active_programs, total_tiles).to(gl.int32)
    return share, share_start, share_end, q_block_tiles


@gluon.jit
def visit_at(tile, sizes, GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """Return the visit that begins at `tile`: its tiles of a work tile, their total, its kv_row and first query."""
    _, share_end, q_block_tiles, batch, group_ends, _, _, _ = sizes
    q_block = tile // q_block_tiles
    first = tile - q_block * q_block_tiles
    if GROUPS == 1:
        n_tiles = q_block_tiles // batch
        kv_row = first // n_tiles
        first -= kv_row * n_tiles
    else:
        layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))
        groups, ends = gl.arange(0, GROUPS, layout=layout), group_ends.load(layout)
        kv_row = gl.sum((ends <= first).to(gl.int32), axis=0)
        start = gl.sum(gl.where(groups == kv_row - 1, ends, 0), axis=0)
        n_tiles = gl.sum(gl.where(groups == kv_row, ends, 0), axis=0) - start
        first -= start
    return first, gl.minimum(n_tiles, first + share_end - tile), n_tiles, kv_row, q_block * _BLOCK_M


@gluon.jit
def keys_of(kv_row, lengths, KEYS: gl.constexpr):
    """Return the keys of a kv_row that count: its length, or its block list, its run's blocks, and the first one."""
    kv_lens, block_list, block_list_stride, kv_len, n_groups = lengths
    if KEYS == _LISTED:
        if n_groups > 1:
            block_list += kv_row.to(gl.int64) * block_list_stride
        return kv_len, block_list, gl.load(block_list + 1).to(gl.int32), gl.load(block_list + 2).to(gl.int32)
    elif KEYS == _FIRST:
        return _length_of(gl.load(kv_lens + kv_row), kv_len), 0, 0, 0
    else:
        return kv_len, 0, 0, 0  # not `block_list`, which is None: Triton 3.6 returns no None


@gluon.jit
def attended_keys(tile, keys, KEYS: gl.constexpr):
    """Return the keys of a tile that are attended to, as the bits of an int64."""
    length, block_list, run, _ = keys
    if KEYS == _LISTED:
        return gl.load(block_list + 2 * (tile + 1) + 1, mask=tile >= run, other=-1)
    else:
        remaining = (length - tile * _BLOCK_N).to(gl.int64)
        return gl.where(remaining >= _BLOCK_N, -1, (1 << gl.maximum(gl.minimum(remaining, 63), 0)) - 1)


@gluon.jit
def bits_of(word, LAYOUT: gl.constexpr):
    """Return the bits of an int64 as a vector in a layout, computed in a layout with few bits per thread."""
    at = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.convert_layout(((word >> at) & 1).to(gl.int32), LAYOUT) != 0


@gluon.jit
def clear(latents, bits):
    """Set the latents of a tile that are not among the keys of `bits` to 0."""
    WIDTH: gl.constexpr = latents.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    here = bits_of(bits, gl.SliceLayout(1, layout))
    for column in gl.static_range(0, WIDTH, 64):
        part = latents.slice(column, 64, dim=1)
        part.store(gl.where(here[:, None], part.load(layout), 0.0))
