"""The decode kernel: stream-K attention of a few packed queries to long keys, in Triton, for any mask and any strides.

The tiles of all work tiles (kv_row, kv head, block of packed queries) are numbered one after the other. Program p of P
takes the tiles `[T * p // P, T * (p + 1) // P)`: equal shares, whatever the lengths, which are read on the device, so
that one captured launch serves all of them. A program that computes a whole work tile writes the output at once. If
several programs share it, each leaves a partial state in its own slot, for `tatten.ops.cuda.kernels.combine`: no
program waits for another. `tests/support/stream_k_schedule.py` has the same arithmetic in Python.

With `CHUNK`, a work tile is cut into chunks by its own length alone, and programs share out whole chunks. If a work
tile has several, each leaves a partial state, so that sums do not depend on the rest of the batch.

With `PAGE`, keys are in pages of a pool. A tile's entries of the block table are loaded one tile ahead: loading an
entry in the tile that needs it would cost K and V a pipeline stage.

With `PART`, `pages` also holds the result of `tatten::shared_pages`. A launch of `OWN_PART` begins at the first key of
each sequence's own part. A launch of `SHARED_PART` reads the pages of row groups; a state is then that of an entry, a
sequence at a level. Each query of a row group attends to all keys of a tile, or to none.

The schedule is that of Lean Attention (arXiv 2405.10480), and queries are packed as in FlashInfer (arXiv 2501.01005).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.early_launch import end_after_previous_launch
from tatten.ops.cuda.kernels.online_softmax import finish_state, fold_tile, halves_of, scores_of, store_lse
from tatten.ops.cuda.kernels.tile_scheduler import (
    LEVELS,
    OWN_PART,
    SHARED_PART,
    active_programs_of,
    chunks_of,
    entry_stop,
    first_tile,
    own_start,
    sequences_of,
    share_of_program,
    shared_span,
    tile_space,
    tiles_of_chunk,
)
from tatten.ops.cuda.kernels.tiles import (
    entries_of_keys,
    in_named_page,
    key_of_tile,
    load_entries,
    load_scales,
    rows_at,
    score_tile,
)

NO_MASK, BOOL_MASK, ADDITIVE_MASK = 0, 1, 2
NO_SCALE, HEAD_SCALE, KEY_SCALE = 0, 1, 2  # a scale for each head, or for each key of each head

# The interpreter takes dots in float32, because its bf16 dots are garbage (Triton 3.6 to 3.9).
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Sizes change from step to step or from model to model: specialising on 1 and on multiples of 16 would recompile. They
# can't be in tuples, as strides are, because Triton (3.6 to 3.9) specialises the members of any tuple.
_SIZES = [
    "block_list_stride",
    "kv_len",
    "window",
    "n_groups",
    "work_tiles",
    "seqs_per_kv",
    "kv_heads",
    "heads_per_kv",
    "q_len",
    "q_blocks",
    "programs",
    "batch",
    "lanes",
]


@triton.jit(do_not_specialize=_SIZES)
def _decode_kernel(
    query,
    key,
    value,
    key_tiles,
    value_tiles,
    mask,
    kv_lens,
    block_list,
    row_groups,
    sinks,
    key_scale,
    value_scale,
    rope,
    pages,
    out,
    lse,
    partial_out,
    partial_lse,
    strides,
    block_list_stride,
    scale,
    softcap,
    window,
    kv_len,
    n_groups,
    work_tiles,
    seqs_per_kv,
    kv_heads,
    heads_per_kv,
    q_len,
    q_blocks,
    programs,
    batch,
    lanes,
    KV_S: tl.constexpr,
    DIMS: tl.constexpr,
    SPACE: tl.constexpr,
    RUN_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr,
    PAGE: tl.constexpr,
    PART: tl.constexpr,
    LATENT: tl.constexpr,
    FINAL: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    INT64_TILES: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    WAIT_LAST: tl.constexpr,
):
    query_strides, key_strides, value_strides, rope_strides, mask_strides, page_strides = strides
    query_b, query_h, query_l, query_d = query_strides
    key_b, key_h, key_s, key_d = key_strides
    value_b, value_h, value_s, value_d = value_strides
    mask_r, mask_b, mask_h, mask_l, mask_s = mask_strides
    HEAD_DIM: tl.constexpr = DIMS[0]
    VALUE_DIM: tl.constexpr = DIMS[1]
    ROPE_DIM: tl.constexpr = DIMS[2]
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM) if HEAD_DIM > 16 else 16
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(VALUE_DIM) if VALUE_DIM > 16 else 16
    BLOCK_R: tl.constexpr = triton.next_power_of_2(ROPE_DIM) if ROPE_DIM > 16 else 16
    BLOCK_M: tl.constexpr = SPACE[0]
    BLOCK_N: tl.constexpr = SPACE[1]
    GROUPS: tl.constexpr = SPACE[2]
    CHUNK: tl.constexpr = SPACE[3]
    MAX_AND_SUM: tl.constexpr = SPACE[4]
    MARGIN: tl.constexpr = SPACE[5]
    LANES: tl.constexpr = SPACE[6]
    KEY_SCALE: tl.constexpr = SCALES[0]
    VALUE_SCALE: tl.constexpr = SCALES[1]
    MASK: tl.constexpr = 0 if mask is None else 1 if mask.dtype.element_ty == tl.uint8 else 2
    HALVES: tl.constexpr = query.dtype != value.dtype if LATENT else False
    HAS_LENS: tl.constexpr = kv_lens is not None
    HAS_BLOCK_LIST: tl.constexpr = block_list is not None
    PAGED: tl.constexpr = PAGE > 0
    SCALARS: tl.constexpr = 4 if BLOCK_M == 16 and RUN_N <= 64 else 1  # other tiles were not faster with them
    ROWS: tl.constexpr = row_groups is not None
    # Two loops over pages in float32 would spill up to 2296 bytes. With `HALVES`, only the queries are in float32.
    TWO_LOOPS: tl.constexpr = not PAGED or HALVES or query.dtype.element_ty != tl.float32
    RUN: tl.constexpr = (
        HAS_LENS and not HAS_BLOCK_LIST and not WINDOW and MASK == 0 and PART != SHARED_PART and TWO_LOOPS
    )
    # Scores stay unscaled if only a positive factor separates them from their exponents.
    UNSCALED: tl.constexpr = POSITIVE_SCALE and MASK != 2 and not SOFTCAP and not KEY_SCALE
    # With a block list the second loop has few blocks, and long pipelines in both would spill registers of large tiles.
    # With pages, Triton (3.9) fails to compile it with 2 stages: a block's entries wait for the block's number.
    FEW: tl.constexpr = 1 if BLOCK_M > 64 or PAGED else 2
    STAGES: tl.constexpr = 1 if RUN else None if not HAS_BLOCK_LIST else FEW if BLOCK_M > 64 or BLOCK_D > 128 else None
    if PDL:
        if not WAIT_LAST:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles, ends, total_tiles, work_tiles, margin = tile_space(
        kv_lens,
        block_list,
        row_groups,
        block_list_stride,
        n_groups,
        work_tiles,
        kv_len,
        window,
        q_len,
        programs,
        batch,
        lanes,
        SPACE,
        WINDOW,
        pages[1] if PART else None,
        PART,
    )
    groups = tl.arange(0, GROUPS)
    program = tl.program_id(0)
    if LANES:
        lane_tiles = total_tiles
        program = share_of_program(program, programs, lanes)
        total_tiles *= lanes
    active_programs = active_programs_of(programs, total_tiles, PART)
    if PART == SHARED_PART:  # there may be no row group
        active_programs = tl.maximum(active_programs, 1)
    program_start = first_tile(program, total_tiles, active_programs, INT64_TILES)
    program_end = first_tile(program + 1, total_tiles, active_programs, INT64_TILES)

    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_DV)
    if INT64_OFFSETS:  # keys stored transposed have kv_length as the stride of head_dim
        offset_dims, offset_value_dims = dims.to(tl.int64), value_dims.to(tl.int64)
    else:
        offset_dims, offset_value_dims = dims, value_dims

    tile = program_start
    while tile < program_end:
        tile_in_lane = tile
        if LANES:
            lane = tile // lane_tiles
            tile_in_lane -= lane * lane_tiles
        group = tl.sum((ends <= tile_in_lane).to(tl.int32), axis=0)
        n_tiles = tl.sum(tl.where(groups == group, tiles, 0), axis=0)
        shares = chunks_of(tiles, CHUNK) + 2 * margin  # the unit of the tile space: chunks, or tiles
        tile_in_group = tile_in_lane - tl.sum(tl.where(groups < group, shares * work_tiles, 0), axis=0)
        n_shares = chunks_of(n_tiles, CHUNK) + 2 * margin
        work_tile = tile_in_group // n_shares
        first = tile_in_group - work_tile * n_shares
        work_tile += group * work_tiles
        if LANES:
            work_tile = work_tile * lanes + lane
        if CHUNK:
            chunk = tiles_of_chunk(n_tiles, CHUNK)
            first *= chunk
            stop = tl.minimum(n_tiles, first + chunk)
        else:
            if MARGIN:
                tile += tl.maximum(margin - first, 0)
                first = tl.maximum(first - margin, 0)
            stop = tl.minimum(n_tiles, first + program_end - tile)
            if MARGIN:
                stop = tl.maximum(stop, first)

        kv_row = (work_tile // (kv_heads * q_blocks)).to(tl.int64)
        kv_head = (work_tile // q_blocks % kv_heads).to(tl.int64)
        q_row = work_tile % q_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        q_ok = q_row < heads_per_kv * seqs_per_kv * q_len
        position = (q_row % q_len).to(tl.int64)
        if ROWS:
            # Here `kv_row` is still a row group, which may have fewer sequences than there is room for.
            sequence, q_ok = sequences_of(row_groups, batch, kv_row, q_row // q_len % seqs_per_kv, q_ok)
            if PART == SHARED_PART:
                first_key, shared_stop = shared_span(pages[1], batch, kv_row, True, kv_len)
                entry_stops = entry_stop(pages[1], batch, sequence, q_ok)
            kv_row = tl.load(row_groups + kv_row).to(tl.int64)
        else:
            sequence = kv_row * seqs_per_kv + q_row // q_len % seqs_per_kv
        entry = sequence  # the entry whose state this is
        if PART == SHARED_PART:
            sequence = sequence % (batch // LEVELS)
        if PART == OWN_PART:
            first_key = own_start(pages[1], batch, kv_row, True)
        head = kv_head * heads_per_kv + q_row // (q_len * seqs_per_kv)
        q = tl.load(
            query
            + (sequence * query_b + head * query_h + position * query_l)[:, None]
            + (offset_dims * query_d)[None, :],
            mask=q_ok[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        if HALVES:
            # Latents are in 16 bits. The residue of rounding float32 queries to 16 bits is multiplied, too.
            q, q_rest = halves_of(q, value.dtype.element_ty)
            if INTERPRETED:
                q_rest = q_rest.to(tl.float32)
        if INTERPRETED:
            q = q.to(tl.float32)
        if ROPE_DIM:
            rope_dims = tl.arange(0, BLOCK_R)
            rope_b, rope_h, rope_l, rope_q_d = rope_strides[0]
            q_rope = tl.load(
                rope[0]
                + (sequence * rope_b + head * rope_h + position * rope_l)[:, None]
                + (rope_dims * rope_q_d)[None, :],
                mask=q_ok[:, None] & (rope_dims < ROPE_DIM)[None, :],
                other=0.0,
            )
            if INTERPRETED:
                q_rope = q_rope.to(tl.float32)
            rope_base = rope[1]
            if not PAGED:
                rope_base += kv_row * rope_strides[1][0]

        length = kv_len
        if HAS_LENS:
            length = tl.minimum(tl.maximum(tl.load(kv_lens + kv_row), 0), kv_len).to(tl.int32)
        if PART == SHARED_PART:
            length = shared_stop
        last_key = length - q_len + position  # the last key that each query may attend to
        tma_at = (kv_row.to(tl.int32), kv_head.to(tl.int32))
        if PAGED:
            table_b, table_s, n_pages, key_scale_strides, value_scale_strides = page_strides
            table = pages[0] + kv_row * table_b
            key_base = key + kv_head * key_h
            value_base = value + kv_head * value_h
        else:
            key_base = key + kv_row * key_b + kv_head * key_h
            value_base = value + kv_row * value_b + kv_head * value_h
        if MASK:
            mask_base = mask + kv_row * mask_r + (sequence * mask_b + head * mask_h + position * mask_l)[:, None]
        score_scale = scale
        if KEY_SCALE == 1:
            score_scale *= tl.load(key_scale + kv_head).to(tl.float32)
        if KEY_SCALE == 2:
            if PAGED:
                key_scale_base = key_scale + kv_head * key_scale_strides[1]
            else:
                key_scale_base = key_scale + (kv_row * kv_heads + kv_head) * kv_len
        if VALUE_SCALE == 2:
            if PAGED:
                value_scale_base = value_scale + kv_head * value_scale_strides[1]
            else:
                value_scale_base = value_scale + (kv_row * kv_heads + kv_head) * kv_len

        # An operand that this variant lacks is replaced by another one, which is not read.
        queries = (q, q_rest if HALVES else q, q_rope if ROPE_DIM else q)
        bases = (
            key_base,
            value_base,
            rope_base if ROPE_DIM else key_base,
            key_scale_base if KEY_SCALE == 2 else key_base,
        )
        tile_strides = (
            KV_S[0] if KV_S[0] else key_s,
            key_d,
            KV_S[1] if KV_S[1] else value_s,
            value_d,
            rope_strides[1][2] if ROPE_DIM else key_s,
            rope_strides[1][3] if ROPE_DIM else key_d,
        )
        column_dims = (offset_dims, offset_value_dims, rope_dims if ROPE_DIM else offset_dims)
        operands = (queries, bases, tile_strides, column_dims, tma_at)
        in_pages = (
            key_b,
            value_b,
            rope_strides[1][0] if ROPE_DIM else key_b,
            key_scale_strides[0] if PAGED and KEY_SCALE == 2 else key_b,
            key_scale_strides[2] if PAGED and KEY_SCALE == 2 else 1,
        )
        scale_p = value_scale_strides[0] if PAGED and VALUE_SCALE == 2 else key_b
        scale_s = value_scale_strides[2] if PAGED and VALUE_SCALE == 2 else 1

        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:  # noqa: SIM102 (known when this is compiled)
            if first == 0:  # the sink counts once in a work tile, so for the program with its first tile
                row_max = tl.load(sinks + head, mask=q_ok, other=float("-inf")).to(tl.float32)
                row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
                if UNSCALED:
                    row_max = row_max / scale
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

        block = first
        if HAS_BLOCK_LIST:
            # The run of consecutive blocks where all queries attend to all keys comes first. It needs no mask or bits.
            group_blocks = block_list + (kv_row if ROWS else group) * block_list_stride
            count = tl.load(group_blocks).to(tl.int32)  # an empty list has a tile, but no block
            run = tl.load(group_blocks + 1).to(tl.int32)
            run_start = (tl.load(group_blocks + 2, mask=run > 0, other=0).to(tl.int32) + first) * BLOCK_N
            steps = tl.maximum(tl.minimum(stop, run) - first, 0) // (RUN_N // BLOCK_N)
        elif RUN:
            run_start = key_of_tile(first, first_key if PART else None, BLOCK_N)
            steps = tl.minimum(stop - first, tl.maximum(length - run_start, 0) // BLOCK_N)
        if HAS_BLOCK_LIST or RUN:
            if PAGED:
                run_stop = run_start + steps * RUN_N
                entries = load_entries(table, table_s, run_start, run_stop, RUN_N, PAGE, BLOCK_N, SCALARS)
            for i in range(steps):
                start_key = run_start + i * RUN_N
                keys = (start_key + tl.arange(0, RUN_N)).to(tl.int64)
                if PAGED:
                    of_keys = entries_of_keys(entries, RUN_N)
                    valid = in_named_page(keys, run_stop, of_keys, n_pages)
                products, v = score_tile(
                    operands,
                    key_tiles,
                    value_tiles,
                    start_key,
                    keys,
                    valid if PAGED else None,
                    HEAD_DIM,
                    VALUE_DIM,
                    ROPE_DIM,
                    LATENT,
                    HALVES,
                    KEY_SCALE,
                    TMA,
                    PAGE,
                    of_keys if PAGED else None,
                    in_pages,
                )
                scores = scores_of(products, score_scale, softcap, UNSCALED, SOFTCAP)
                if PAGED:
                    scores = tl.where(valid[None, :], scores, float("-inf"))
                v_scale = None
                if VALUE_SCALE == 2:
                    at = rows_at(keys, scale_s, of_keys if PAGED else None, scale_p, PAGE)
                    v_scale = load_scales(value_scale_base, at, valid if PAGED else None)
                acc, row_max, row_sum = fold_tile(acc, row_max, row_sum, scores, v, scale, UNSCALED, v_scale)
                if PAGED:
                    entries = load_entries(table, table_s, start_key + RUN_N, run_stop, RUN_N, PAGE, BLOCK_N, SCALARS)
        begin = first
        if HAS_BLOCK_LIST:
            begin += steps * (RUN_N // BLOCK_N)
            more = begin < tl.minimum(stop, count)
            block = tl.load(group_blocks + 2 * (begin + 1), mask=more, other=0).to(tl.int32)
            bits = tl.load(group_blocks + 2 * (begin + 1) + 1, mask=more, other=0)
        elif RUN:
            begin += steps
            block = begin
        elif WINDOW:
            block += tl.maximum(length - q_len - window + 1, 0) // BLOCK_N
        if PAGED:
            start_key = key_of_tile(block, first_key if PART else None, BLOCK_N)
            entries = load_entries(table, table_s, start_key, length, BLOCK_N, PAGE, BLOCK_N, SCALARS)
        for i in tl.range(begin, stop, num_stages=STAGES):
            start_key = key_of_tile(block, first_key if PART else None, BLOCK_N)
            keys = (start_key + tl.arange(0, BLOCK_N)).to(tl.int64)
            if HAS_BLOCK_LIST:
                valid = ((bits >> tl.arange(0, BLOCK_N)) & 1) != 0
            else:
                valid = keys < length
                if WINDOW:
                    valid = valid & (keys > length - q_len - window)
            if PAGED:
                of_keys = entries_of_keys(entries, BLOCK_N)
                valid = valid & in_named_page(keys, length, of_keys, n_pages)
            products, v = score_tile(
                operands,
                key_tiles,
                value_tiles,
                start_key,
                keys,
                valid,
                HEAD_DIM,
                VALUE_DIM,
                ROPE_DIM,
                LATENT,
                HALVES,
                KEY_SCALE,
                TMA and not HAS_BLOCK_LIST and not RUN,
                PAGE,
                of_keys if PAGED else None,
                in_pages,
            )
            scores = scores_of(products, score_scale, softcap, UNSCALED, SOFTCAP)
            ok = valid[None, :]
            if WINDOW:
                ok = ok & (keys[None, :] <= last_key[:, None]) & (keys[None, :] > (last_key - window)[:, None])
            if MASK:
                bias = tl.load(mask_base + (keys * mask_s)[None, :], mask=ok & q_ok[:, None], other=0)
                if MASK == 1:
                    ok = ok & (bias != 0)
                else:
                    bias = bias.to(tl.float32)
                    ok = ok & (bias != float("-inf"))
                    scores += bias
            if PART == SHARED_PART:
                takes_part = start_key < entry_stops
                ok = ok & takes_part[:, None]
            scores = tl.where(ok, scores, float("-inf"))
            v_scale = None
            if VALUE_SCALE == 2:
                at = rows_at(keys, scale_s, of_keys if PAGED else None, scale_p, PAGE)
                v_scale = load_scales(value_scale_base, at, valid)
            if PART == SHARED_PART:
                acc_before = acc
            acc, row_max, row_sum = fold_tile(acc, row_max, row_sum, scores, v, scale, UNSCALED, v_scale)
            if PART == SHARED_PART:  # a value of another sequence may be NaN, and 0 * NaN is NaN
                acc = tl.where(takes_part[:, None], acc, acc_before)
            if HAS_BLOCK_LIST:  # fetched one tile ahead, so that no load waits for its address
                more = i + 1 < stop
                block = tl.load(group_blocks + 2 * (i + 2), mask=more, other=0).to(tl.int32)
                bits = tl.load(group_blocks + 2 * (i + 2) + 1, mask=more, other=0)
            else:
                block += 1
            if PAGED:
                stop_key = tl.where(i + 1 < stop, length, 0)
                start_key = key_of_tile(block, first_key if PART else None, BLOCK_N)
                entries = load_entries(table, table_s, start_key, stop_key, BLOCK_N, PAGE, BLOCK_N, SCALARS)
        if UNSCALED:
            row_max *= scale
        acc, log_sum = finish_state(acc, row_max, row_sum)
        if VALUE_SCALE == 1:  # an empty state stays 0 even if the scale is infinite
            acc = tl.where(row_sum[:, None] != 0, acc * tl.load(value_scale + kv_head).to(tl.float32), acc)

        if MARGIN:
            q_ok = tl.where(stop > first, q_ok, False)  # a visit may meet nothing but a margin
        value_ok = q_ok[:, None] & (value_dims < VALUE_DIM)[None, :]
        work_tile_start = tile - first
        state = (entry * (kv_heads * heads_per_kv) + head) * q_len + position
        if stop - first == n_tiles:
            store_lse(lse, state, log_sum, row_max, row_sum, q_ok, MAX_AND_SUM and not FINAL)
            tl.store(
                out + state[:, None] * VALUE_DIM + value_dims[None, :], acc.to(out.dtype.element_ty), mask=value_ok
            )
        else:
            slot_rows = tl.arange(0, BLOCK_M)
            if CHUNK:
                slot = tile.to(tl.int64) * BLOCK_M + slot_rows
            else:
                slot = (2 * program + (work_tile_start > program_start).to(tl.int32)) * BLOCK_M + slot_rows
            store_lse(partial_lse, slot, log_sum, row_max, row_sum, q_ok, MAX_AND_SUM)
            tl.store(partial_out + slot[:, None] * VALUE_DIM + value_dims[None, :], acc, mask=value_ok)
        if CHUNK:
            tile += 1
        elif MARGIN:
            tile += n_tiles + margin - first
        else:
            tile += stop - first
    if PDL and WAIT_LAST:
        end_after_previous_launch()
