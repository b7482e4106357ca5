"""The blocks of queries of a mixed batch, listed on the device.

Packed queries of a sequence, `token * heads_per_kv + head`, are cut into blocks. Sequences of at most `FEW_ROWS` packed
queries have one small block each, unless there is no room for these; the others have blocks of `many_m`. Each class has
a list of its own, with room for as many blocks as the shapes allow, and a tile space: the key tiles of all blocks and
kv heads, one after the other. `ends` are the ends of the blocks in it. With chunks, they count chunks of tiles instead,
which depend on their block alone.

Programs take equal parts of the tile space. With `WHOLE` there are two refinements, for the pages kernel:

- Where parts are long, each work tile counts `MARGIN` tiles more at its begin and at its end, because its queries,
  softmax and output take time, too. Programs that have many short work tiles would end last otherwise. `ends` count
  them, and a cut within a margin is one between work tiles.
- Programs take the nearest whole work tiles, where no part is much larger then. They go through the keys of a sequence
  in step, and find them in the L2 cache.

The first block's last column has both choices: twice the margin, plus 1 for whole work tiles.

Padding tokens are a sequence without keys, after the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.tile_scheduler import chunks_of

FEW_ROWS = 16
COLUMNS = 8  # numbers that describe a block: see `load_block`; the last one of the first block describes its class
CUTS_COLUMN = COLUMNS - 1
MARGIN = 1  # measured on an H100: a work tile of 2 tiles takes as long as 4 of a long one
LONG_PART = 8  # tiles; in shorter parts a tile more or less weighs more than a margin
_FEW_ROWS, _COLUMNS, _CUTS_COLUMN = tl.constexpr(FEW_ROWS), tl.constexpr(COLUMNS), tl.constexpr(CUTS_COLUMN)
_MARGIN, _LONG_PART = tl.constexpr(MARGIN), tl.constexpr(LONG_PART)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def starts_of(cu_seqlens_q, sequences, n_tokens, batch):
    """Return the first token of each sequence and of the padding; later entries begin after all tokens."""
    starts = tl.load(cu_seqlens_q + sequences, mask=(sequences > 0) & (sequences <= batch), other=0)
    starts = tl.minimum(tl.maximum(starts, 0), n_tokens)
    return tl.associative_scan(tl.where(sequences > batch, n_tokens, starts), 0, _larger)


@triton.jit(
    do_not_specialize=[
        *("n_tokens", "batch", "kv_len", "window", "kv_heads", "heads_per_kv", "few", "many"),
        *("few_programs", "many_programs", "far_tiles"),
    ]
)
def _list_blocks_kernel(
    cu_seqlens_q,
    kv_lens,
    scratch,
    blocks,
    ends,
    n_tokens,
    batch,
    kv_len,
    window,
    kv_heads,
    heads_per_kv,
    few,
    many,
    few_programs,
    many_programs,
    far_tiles,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the blocks of one class in each of two programs. `few`, `many`: the room for them; 0 without a launch."""
    list_blocks(
        tl.program_id(0),
        (cu_seqlens_q, kv_lens, None),
        (scratch, blocks, ends),
        (n_tokens, batch, kv_len, window, kv_heads, heads_per_kv, few, many),
        (few_programs, many_programs, far_tiles),
        SEQUENCES,
        TILES,
        CHUNK,
        WINDOW,
        BLOCK,
        WHOLE,
        PDL,
    )


@triton.jit
def list_blocks(
    is_many,
    inputs,
    lists,
    sizes,
    schedule,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the blocks of a class.

    The last of the `inputs` is None, or the first key of each sequence that a block of it attends to if the sequence
    has one query.
    """
    cu_seqlens_q, kv_lens, own_starts = inputs
    scratch, blocks, ends = lists
    n_tokens, batch, kv_len, window, kv_heads, heads_per_kv, few, many = sizes
    block_m = tl.where(is_many == 1, TILES[1][0], TILES[0][0])
    block_n = tl.where(is_many == 1, TILES[1][1], TILES[0][1])
    room = tl.where(is_many == 1, many, few)
    scratch += is_many * 2 * SEQUENCES
    blocks += is_many * few * _COLUMNS
    ends += is_many * few
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequences = tl.arange(0, SEQUENCES)
    starts = starts_of(cu_seqlens_q, sequences, n_tokens, batch)
    stops = tl.load(cu_seqlens_q + 1 + sequences, mask=sequences < batch, other=n_tokens)
    stops = tl.maximum(starts, tl.minimum(stops, n_tokens))
    rows = (stops - starts) * heads_per_kv
    padding = (is_many == 1) == (many > 0)  # True for the class that has the padding
    in_class = tl.where(sequences == batch, padding, ((rows > _FEW_ROWS) | (few == 0)) == (is_many == 1))
    n_blocks = tl.where(in_class, (rows + block_m - 1) // block_m, 0)
    block_ends = tl.cumsum(n_blocks, axis=0)
    used = tl.sum(n_blocks, axis=0)
    # Blocks find their sequence in memory.
    tl.store(scratch + sequences, block_ends)
    tl.store(scratch + SEQUENCES + sequences, starts)
    tl.debug_barrier()

    total = tl.zeros([], tl.int64)
    most_tiles = 1
    for i in range(0, room, BLOCK):
        block = i + tl.arange(0, BLOCK)
        ok = block < used
        sequence = tl.zeros([BLOCK], tl.int32)
        step = SEQUENCES // 2
        while step > 0:  # the first sequence that ends after the block
            before = tl.load(scratch + sequence + step - 1)
            sequence = tl.where(before <= block, sequence + step, sequence)
            step = step // 2
        first_block = tl.load(scratch + sequence - 1, mask=sequence > 0, other=0)
        start = tl.load(scratch + SEQUENCES + sequence)
        stop = tl.load(scratch + SEQUENCES + sequence + 1, mask=sequence < batch, other=n_tokens)
        length = tl.load(kv_lens + sequence, mask=ok & (sequence < batch), other=0)
        length = tl.minimum(tl.maximum(length, 0), kv_len).to(tl.int32)
        row, q_len = (block - first_block) * block_m, stop - start
        last_row = tl.minimum(row + block_m, q_len * heads_per_kv) - 1
        keys = tl.maximum(length - q_len + last_row // heads_per_kv + 1, 0)
        skipped = tl.zeros([BLOCK], tl.int32)
        if WINDOW:
            skipped = tl.maximum(length - q_len + row // heads_per_kv - window + 1, 0) // block_n
        if own_starts is not None:
            one_query = ok & (q_len == 1) & (sequence < batch)
            skipped = tl.load(own_starts + sequence, mask=one_query, other=0) // block_n
        tiles = tl.maximum((keys + block_n - 1) // block_n - skipped, 1)  # the output of a block without keys, too
        shares = tl.where(is_many == 1, 1, chunks_of(tiles, CHUNK)) if CHUNK else tiles
        block_shares = tl.where(ok, shares.to(tl.int64) * kv_heads, 0)
        tl.store(ends + block, total + tl.cumsum(block_shares, axis=0), mask=block < room)
        total += tl.sum(block_shares, axis=0)
        most_tiles = tl.maximum(most_tiles, tl.max(tl.where(ok, tiles, 1), axis=0))
        at = blocks + block * _COLUMNS
        tl.store(at, sequence, mask=ok)
        tl.store(at + 1, row, mask=ok)
        tl.store(at + 2, start, mask=ok)
        tl.store(at + 3, q_len, mask=ok)
        tl.store(at + 4, length, mask=ok)
        tl.store(at + 5, skipped, mask=ok)
        tl.store(at + 6, tiles, mask=ok)
    if room > 0:
        cuts = 0
        if WHOLE:
            few_programs, many_programs, far_tiles = schedule
            programs = tl.where(is_many == 1, many_programs, few_programs)
            margin = tl.where(total >= _LONG_PART * programs, _MARGIN, 0)
            tl.debug_barrier()  # what follows reads what was stored above
            if margin > 0:
                for i in range(0, room, BLOCK):
                    block = i + tl.arange(0, BLOCK)
                    margins = 2 * margin * kv_heads * tl.minimum(block + 1, used)
                    tl.store(ends + block, tl.load(ends + block, mask=block < room) + margins, mask=block < room)
                total += (2 * margin * kv_heads * used).to(tl.int64)
                tl.debug_barrier()
            # Keys of all kv heads don't stay in the L2 cache if there are `far_tiles`.
            percent = tl.where(most_tiles >= far_tiles, 125, 110)
            active = tl.maximum(tl.minimum(programs, total), 1)
            # With work tiles of one size, a program has this many tiles. It often tells without a search.
            size = most_tiles + 2 * margin
            whole = 0
            if 100 * active * size * tl.cdiv(total, active * size) <= percent * total:
                largest = _largest_part(blocks, ends, room, active, total, kv_heads, margin, BLOCK)
                whole = (100 * active * largest <= percent * total).to(tl.int32)
            cuts = 2 * margin + whole
        tl.store(blocks + _CUTS_COLUMN, cuts)


@triton.jit
def _largest_part(blocks, ends, room, active, total, kv_heads, margin, BLOCK: tl.constexpr):
    """Return the most tiles and margins of a program if all programs take whole work tiles."""
    largest = tl.zeros([], tl.int64)
    for i in range(0, active, BLOCK):
        program = i + tl.arange(0, BLOCK).to(tl.int64)
        begin = _nearest_end(blocks, ends, room, total * program // active, total, kv_heads, margin)
        end = _nearest_end(blocks, ends, room, total * (program + 1) // active, total, kv_heads, margin)
        largest = tl.maximum(largest, tl.max(tl.where(program < active, end - begin, 0), axis=0))
    return largest


@triton.jit
def _nearest_end(blocks, ends, room, place, total, kv_heads, margin):
    """Return the ends of work tiles that are nearest to places, as `page_blocks` finds one for a program."""
    ok = place < total
    block = (place * 0).to(tl.int32)
    step = 1
    while step < room:
        step *= 2
    while step > 0:  # the first block that ends after the place
        at = block + step - 1
        before = tl.load(ends + at, mask=ok & (at < room), other=total)
        block = tl.where(before <= place, block + step, block)
        step = step // 2
    size = tl.load(blocks + block * _COLUMNS + 6, mask=ok, other=1) + 2 * margin
    in_block = place - (tl.load(ends + block, mask=ok, other=0) - size.to(tl.int64) * kv_heads)
    return tl.where(ok, place - in_block + (in_block + size // 2) // size * size, total)


@triton.jit
def load_block(blocks, block):
    """Return a block's sequence, first row, first token, queries and keys of the sequence, first tile and tiles."""
    at = blocks + block * _COLUMNS
    return (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
    )


@triton.jit
def share_of(program, ends, room, programs):
    """Return the begin and the end of a program's part of a tile space."""
    total = tl.load(ends + room - 1)
    active = tl.maximum(tl.minimum(programs, total), 1)
    program = tl.minimum(program, active).to(tl.int64)
    return total * program // active, total * tl.minimum(program + 1, active) // active


@triton.jit
def block_at(ends, room, place, BLOCK: tl.constexpr):
    """Return the block that a place of the tile space belongs to."""
    block = 0
    for i in range(0, room, BLOCK):
        at = i + tl.arange(0, BLOCK)
        end = tl.load(ends + at, mask=at < room, other=place + 1)
        block += tl.sum((end <= place).to(tl.int32), axis=0)
    return block
