"""Stream-K arithmetic on the tile space, shared by the decode kernel and the combine of its partials.

A work tile is the block of output states of one kv_row, one kv head and one block of packed queries. Its keys come in
tiles of `BLOCK_N`; the tile space numbers the tiles of all work tiles one after the other. Each program takes an equal,
contiguous range of it. `tests/support/stream_k_schedule.py` has the same arithmetic in Python.

With chunks, the tile space numbers chunks of tiles instead. Their places depend on their work tile alone.

With margins, each work tile counts as some tiles longer at each end. A program that reaches another work tile has to
store a state, load queries and fill its pipeline. Programs with many short work tiles would end last otherwise. A cut
within a margin falls between work tiles. Work tiles of equal length have no margins, as each may be cut evenly.

With `LANES`, the tile space has `lanes` parts of equal length. Lane i has every `lanes`-th work tile of a group, from
work tile i on. Neighbouring programs take shares of different lanes, and go through neighbouring work tiles in step:
other heads of the same keys, which are neighbours in memory, or other queries of the same keys.

`SPACE` has the constants of a tile space: BLOCK_M, BLOCK_N, GROUPS, CHUNK, MAX_AND_SUM, MARGIN and LANES, in the order
of `tatten.ops.cuda.tile_space.TileSpace.constants`. Its members have no names, because Inductor can't write named ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.page_runs import ENTRY_STOPS, OWN, STARTS, STOPS
from tatten.ops.page_runs import LEVELS as _LEVELS

MOST_CHUNKS = tl.constexpr(32)  # per work tile
# With shared pages, the keys that a launch attends to: each sequence's own part, or the runs of row groups.
OWN_PART, SHARED_PART = tl.constexpr(1), tl.constexpr(2)
LEVELS = tl.constexpr(_LEVELS)
_STARTS, _STOPS, _ENTRY_STOPS, _OWN = (tl.constexpr(row) for row in (STARTS, STOPS, ENTRY_STOPS, OWN))


@triton.jit
def tile_space(
    kv_lens,
    blocks,
    row_groups,
    blocks_group,
    n_groups,
    work_tiles,
    kv_len,
    window,
    q_len,
    programs,
    batch,
    lanes,
    SPACE: tl.constexpr,
    WINDOW: tl.constexpr,
    shared=None,
    PART: tl.constexpr = 0,
):
    """Count the tiles of a work tile of each group, and find where the group ends in a lane, and where the lane ends.

    A group has one length: it is a kv_row, or all of them together. It has `work_tiles` work tiles. The fourth result
    is their number in a lane: with row groups, which take the place of kv_rows, only the device knows it. The last
    result is the margin. With chunks the ends count chunks.
    """
    BLOCK_N: tl.constexpr = SPACE[1]
    GROUPS: tl.constexpr = SPACE[2]
    CHUNK: tl.constexpr = SPACE[3]
    MARGIN: tl.constexpr = SPACE[5]
    LANES: tl.constexpr = SPACE[6]
    groups = tl.arange(0, GROUPS)
    if row_groups is not None:
        n_row_groups = tl.load(row_groups + batch)
        if GROUPS == 1:
            work_tiles = work_tiles * n_row_groups
        else:
            n_groups = n_row_groups
    if blocks is not None:
        lists = groups
        if row_groups is not None:  # noqa: SIM102 (known when this is compiled)
            if GROUPS > 1:
                lists = tl.load(row_groups + groups, mask=groups < n_groups, other=0)
        tiles = tl.load(blocks + lists * blocks_group, mask=groups < n_groups, other=0).to(tl.int32)
    else:
        lens = kv_len + tl.zeros([GROUPS], tl.int32)
        if kv_lens is not None:
            lens = tl.load(kv_lens + groups, mask=groups < n_groups, other=0)
            lens = tl.minimum(tl.maximum(lens, 0), kv_len).to(tl.int32)
        if PART == OWN_PART:
            lens = tl.maximum(lens - own_start(shared, batch, groups, groups < n_groups), 0)
        if PART == SHARED_PART:
            start, stop = shared_span(shared, batch, groups, groups < n_groups, kv_len)
            lens = stop - start
        tiles = (lens + BLOCK_N - 1) // BLOCK_N
        if WINDOW:
            tiles -= tl.maximum(lens - q_len - window + 1, 0) // BLOCK_N
    tiles = tl.where(groups < n_groups, tl.maximum(tiles, 1), 0)  # the output of an empty kv_row is written too
    if LANES:
        work_tiles = work_tiles // lanes
    sizes = chunks_of(tiles, CHUNK)
    total, margin = tl.sum(sizes, axis=0), 0
    if MARGIN:
        even = total == tl.max(tiles, axis=0) * n_groups
        margin = total * work_tiles * (lanes if LANES else 1) // (2 * programs)
        margin = tl.where(even, 0, tl.minimum(margin, MARGIN))
        total += 2 * margin * n_groups
        sizes += 2 * margin
    return tiles, tl.cumsum(sizes * work_tiles, axis=0), total * work_tiles, work_tiles, margin


@triton.jit
def own_start(shared, batch, sequence, ok):
    """Return the first key of a sequence's own part."""
    return tl.load(shared + _OWN * (LEVELS * batch + 1) + sequence, mask=ok, other=0)


@triton.jit
def shared_span(shared, entries, group, ok, kv_len):
    """Return the first key of a row group over shared pages, and one past the last; `entries`: their number."""
    start = tl.load(shared + _STARTS * (entries + 1) + group, mask=ok, other=0)
    stop = tl.load(shared + _STOPS * (entries + 1) + group, mask=ok, other=0)
    return start, tl.maximum(tl.minimum(stop, kv_len), start)  # a run of a longer table could end beyond this one


@triton.jit
def entry_stop(shared, entries, entry, ok):
    """Return one past the last key that an entry shares; 0 if it is not `ok`."""
    return tl.load(shared + _ENTRY_STOPS * (entries + 1) + entry, mask=ok, other=0)


@triton.jit
def tiles_of_chunk(tiles, CHUNK: tl.constexpr):
    """Return the tiles of a chunk of a work tile of `tiles`: the least multiple of `CHUNK` that makes few chunks."""
    return CHUNK * tl.maximum(tl.cdiv(tl.cdiv(tiles, CHUNK), MOST_CHUNKS), 1)


@triton.jit
def chunks_of(tiles, CHUNK: tl.constexpr):
    """Return the chunks of a work tile of `tiles`; its tiles, if `CHUNK` is 0."""
    if CHUNK:
        return tl.cdiv(tiles, tiles_of_chunk(tiles, CHUNK))
    else:
        return tiles


@triton.jit
def sequences_of(row_groups, batch, group, slot, ok):
    """Return the sequences in those slots of a row group that are `ok`, and which slots have a sequence."""
    starts = row_groups + batch + 1
    start, end = tl.load(starts + group), tl.load(starts + group + 1)
    ok = ok & (start + slot < end)
    return tl.load(starts + batch + 1 + start + slot, mask=ok, other=0).to(tl.int64), ok


@triton.jit
def share_of_program(program, programs, lanes):
    """Return the index of a program's share: those of neighbouring programs are in different lanes.

    `programs` is a multiple of `lanes`. Shares are numbered in the order of the tile space, lane by lane.
    """
    return program % lanes * (programs // lanes) + program // lanes


@triton.jit
def first_tile(program, total_tiles, active_programs, INT64_TILES: tl.constexpr):
    """Return the first tile of a program, `total_tiles * program // active_programs`; the number of tiles if idle."""
    program = tl.minimum(program, active_programs)
    if INT64_TILES:
        return (total_tiles.to(tl.int64) * program // active_programs).to(tl.int32)
    else:
        return total_tiles * program // active_programs


@triton.jit
def programs_over_runs(programs, tiles):
    """Return how many of `programs` share the `tiles` of a launch over the runs of row groups.

    A program of this launch fills an SM, and programs of own parts then wait for it. If there are few tiles, fewer
    programs leave SMs to own parts, and leave fewer partial states. The square root minimises `tiles / programs + c *
    programs`: the length of the launch, and the cost of starting its programs. At least half of the programs take part,
    because they start soon. On an H200, 512 tiles beside own parts take 24.8 us with 64 programs and 31.4 with 120; 256
    tiles take 15.9 with 64, 17.4 with 48 and 18.7 with 120; 64 tiles take 53.4 with 64 and 55.9 with 32.
    """
    root = tl.sqrt_rn(tl.minimum(tiles, 1 << 16).to(tl.float32)).to(tl.int32)
    few = programs * (4 + root) // 45 // 8 * 8  # a multiple of 8 suits the usual numbers of kv heads
    least = programs * 8 // 15 // 8 * 8
    return tl.minimum(tl.minimum(programs, tiles), tl.maximum(few, tl.maximum(least, 8)))


@triton.jit
def programs_over_own_parts(programs, tiles):
    """Return how many of `programs` share the `tiles` of a launch over own parts: equal shares, if these are short.

    With 1024 tiles after 8192 shared keys, 512 programs take 24.8 us, and 792 take 28.0 (H200).
    """
    each = tl.cdiv(tiles, programs)
    return tl.where(each <= 4, tl.cdiv(tiles, each), programs)


@triton.jit
def active_programs_of(programs, tiles, PART: tl.constexpr):
    """Return how many of `programs` share the `tiles` of a launch; 0 if it has none."""
    if PART == SHARED_PART:
        return programs_over_runs(programs, tiles)
    elif PART == OWN_PART:
        return programs_over_own_parts(programs, tiles)
    else:
        return tl.minimum(programs, tiles)


@triton.jit
def program_of(tile, total_tiles, active_programs, INT64_TILES: tl.constexpr):
    """Return the program that has `tile`: the inverse of `first_tile`."""
    if INT64_TILES:
        return (((tile + 1).to(tl.int64) * active_programs - 1) // total_tiles).to(tl.int32)
    else:
        return ((tile + 1) * active_programs - 1) // total_tiles
