"""The lean kernel: stream-K attention of a few packed queries to long keys, in Triton, for any mask and any strides.

The tiles of all work rows (sequence, kv head, block of packed queries) lie on one line, and program p of P takes the
tiles `[T * p // P, T * (p + 1) // P)`: equal work for each whatever the lengths, which are read on the device, so that
one captured launch serves all lengths. A row that one program does whole is written at once. Of a row that several
share each leaves a partial state in a slot of its own, for `tatten.ops.cuda.kernels.combine`: no program waits for
another. `tatten.ops.cuda.schedule` is the same arithmetic in Python.

Lean Attention (arXiv 2405.10480); the packed rows are those of FlashInfer (arXiv 2501.01005).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import fold_tile, scores_of, upcast
from tatten.ops.cuda.kernels.tile_scheduler import finish_state, first_tile, store_lse, tile_space

NO_MASK, BOOL_MASK, ADDITIVE_MASK = 0, 1, 2

# Sizes that change from step to step or model to model: to specialise on 1 and on multiples of 16 would recompile.
_SIZES = [
    "blocks_group",
    "kv_len",
    "window",
    "n_groups",
    "rows",
    "seqs_per_kv",
    "kv_heads",
    "group",
    "q_len",
    "m_blocks",
    "programs",
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
    blocks,
    sinks,
    key_scale,
    value_scale,
    out,
    lse,
    partial_out,
    partial_lse,
    query_b,
    query_h,
    query_l,
    query_d,
    key_b,
    key_h,
    key_s,
    key_d,
    value_b,
    value_h,
    value_s,
    value_d,
    mask_r,
    mask_b,
    mask_h,
    mask_l,
    mask_s,
    blocks_group,
    scale,
    softcap,
    window,
    kv_len,
    n_groups,
    rows,
    seqs_per_kv,
    kv_heads,
    group,
    q_len,
    m_blocks,
    programs,
    KEY_S: tl.constexpr,
    VALUE_S: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN_N: tl.constexpr,
    GROUPS: tl.constexpr,
    MASK: tl.constexpr,
    HAS_LENS: tl.constexpr,
    LISTED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    PAIRED: tl.constexpr,
    FINAL: tl.constexpr,
    POSITIVE: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    INT64_TILES: tl.constexpr,
    TMA: tl.constexpr,
    OVERLAP: tl.constexpr,
    WAIT_LAST: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):
    # Scores are kept unscaled where only a positive factor separates them from their exponents.
    PLAIN: tl.constexpr = POSITIVE and MASK != 2 and not SOFTCAP and not KEY_SCALE
    # A list leaves few blocks to the second loop, and a long pipeline in both would spill registers of large tiles.
    STAGES: tl.constexpr = None if not LISTED else 1 if BLOCK_M > 64 else 2 if BLOCK_D > 128 else None
    if OVERLAP:
        if not WAIT_LAST:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles, ends = tile_space(
        kv_lens,
        blocks,
        blocks_group,
        n_groups,
        rows,
        kv_len,
        window,
        q_len,
        BLOCK_N,
        GROUPS,
        HAS_LENS,
        LISTED,
        WINDOW,
    )
    groups = tl.arange(0, GROUPS)
    program = tl.program_id(0)
    line = tl.max(ends, axis=0)
    used = tl.minimum(programs, line)
    start = first_tile(program, line, used, INT64_TILES)
    end = first_tile(program + 1, line, used, INT64_TILES)

    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_DV)
    if INT64_OFFSETS:  # keys stored transposed have kv_length as the stride of head_dim
        offset_dims, offset_value_dims = dims.to(tl.int64), value_dims.to(tl.int64)
    else:
        offset_dims, offset_value_dims = dims, value_dims

    place = start
    while place < end:
        g = tl.sum((ends <= place).to(tl.int32), axis=0)
        n_tiles = tl.sum(tl.where(groups == g, tiles, 0), axis=0)
        within = place - tl.sum(tl.where(groups < g, tiles * rows, 0), axis=0)
        row = within // n_tiles
        first = within - row * n_tiles
        row += g * rows
        stop = tl.minimum(n_tiles, first + end - place)

        b = (row // (kv_heads * m_blocks)).to(tl.int64)
        kv_head = (row // m_blocks % kv_heads).to(tl.int64)
        packed = row % m_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        row_ok = packed < group * seqs_per_kv * q_len
        position = (packed % q_len).to(tl.int64)
        sequence = b * seqs_per_kv + packed // q_len % seqs_per_kv
        head = kv_head * group + packed // (q_len * seqs_per_kv)
        q = tl.load(
            query
            + (sequence * query_b + head * query_h + position * query_l)[:, None]
            + (offset_dims * query_d)[None, :],
            mask=row_ok[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        if FLOAT32_DOTS:
            q = q.to(tl.float32)

        length = kv_len
        if HAS_LENS:
            length = tl.minimum(tl.maximum(tl.load(kv_lens + b), 0), kv_len).to(tl.int32)
        last_key = length - q_len + position  # the place of each query
        if TMA:
            kv_row, head_row = b.to(tl.int32), kv_head.to(tl.int32)
        key_row = key + b * key_b + kv_head * key_h
        value_row = value + b * value_b + kv_head * value_h
        if MASK:
            mask_rows = mask + b * mask_r + (sequence * mask_b + head * mask_h + position * mask_l)[:, None]
        row_scale = scale
        if KEY_SCALE:
            row_scale *= tl.load(key_scale + kv_head)

        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:  # noqa: SIM102 (known when this is compiled); the program that begins a row begins with its sink
            if first == 0:
                row_max = tl.load(sinks + head, mask=row_ok, other=float("-inf")).to(tl.float32)
                row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
                if PLAIN:
                    row_max = row_max / scale
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

        block = first
        if LISTED:
            # First comes a run of blocks side by side where all queries attend to all keys, without mask and bits.
            row_blocks = blocks + g * blocks_group
            count = tl.load(row_blocks).to(tl.int32)  # an empty row has a tile, but no block
            run = tl.load(row_blocks + 1).to(tl.int32)
            run_start = (tl.load(row_blocks + 2, mask=run > 0, other=0).to(tl.int32) + first) * BLOCK_N
            steps = tl.maximum(tl.minimum(stop, run) - first, 0) // (RUN_N // BLOCK_N)
            for i in range(steps):
                start_key = run_start + i * RUN_N
                if TMA:
                    k = key_tiles.load([kv_row, head_row, start_key, 0]).reshape([RUN_N, BLOCK_D]).T
                    v = value_tiles.load([kv_row, head_row, start_key, 0]).reshape([RUN_N, BLOCK_DV])
                else:
                    keys = (start_key + tl.arange(0, RUN_N)).to(tl.int64)
                    k = tl.load(
                        key_row + (keys * (KEY_S if KEY_S else key_s))[None, :] + (offset_dims * key_d)[:, None],
                        mask=(dims < HEAD_DIM)[:, None],
                        other=0.0,
                    )
                    v = tl.load(
                        value_row
                        + (keys * (VALUE_S if VALUE_S else value_s))[:, None]
                        + (offset_value_dims * value_d)[None, :],
                        mask=(value_dims < VALUE_DIM)[None, :],
                        other=0.0,
                    )
                k, v = upcast(k, q.dtype), upcast(v, q.dtype)
                scores = scores_of(q, k, row_scale, softcap, PLAIN, SOFTCAP)
                acc, row_max, row_sum = fold_tile(acc, row_max, row_sum, scores, v, scale, PLAIN)
            begin = first + steps * (RUN_N // BLOCK_N)
            more = begin < tl.minimum(stop, count)
            block = tl.load(row_blocks + 2 * (begin + 1), mask=more, other=0).to(tl.int32)
            bits = tl.load(row_blocks + 2 * (begin + 1) + 1, mask=more, other=0)
        else:
            begin = first
            if WINDOW:
                block += tl.maximum(length - q_len - window + 1, 0) // BLOCK_N
        for i in tl.range(begin, stop, num_stages=STAGES):
            keys = (block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
            if LISTED:
                valid = ((bits >> tl.arange(0, BLOCK_N)) & 1) != 0
            else:
                valid = keys < length
                if WINDOW:
                    valid = valid & (keys > length - q_len - window)
            # What no query attends to is not read even inside a block, and may be NaN.
            if TMA and not LISTED:
                k = key_tiles.load([kv_row, head_row, block * BLOCK_N, 0]).reshape([BLOCK_N, BLOCK_D]).T
                v = value_tiles.load([kv_row, head_row, block * BLOCK_N, 0]).reshape([BLOCK_N, BLOCK_DV])
            else:
                k = tl.load(
                    key_row + (keys * (KEY_S if KEY_S else key_s))[None, :] + (offset_dims * key_d)[:, None],
                    mask=valid[None, :] & (dims < HEAD_DIM)[:, None],
                    other=0.0,
                )
                v = tl.load(
                    value_row
                    + (keys * (VALUE_S if VALUE_S else value_s))[:, None]
                    + (offset_value_dims * value_d)[None, :],
                    mask=valid[:, None] & (value_dims < VALUE_DIM)[None, :],
                    other=0.0,
                )
            k, v = upcast(k, q.dtype), upcast(v, q.dtype)
            scores = scores_of(q, k, row_scale, softcap, PLAIN, SOFTCAP)
            ok = valid[None, :]
            if WINDOW:
                ok = ok & (keys[None, :] <= last_key[:, None]) & (keys[None, :] > (last_key - window)[:, None])
            if MASK:
                bias = tl.load(mask_rows + (keys * mask_s)[None, :], mask=ok & row_ok[:, None], other=0)
                if MASK == 1:
                    ok = ok & (bias != 0)
                else:
                    bias = bias.to(tl.float32)
                    ok = ok & (bias != float("-inf"))
                    scores += bias
            scores = tl.where(ok, scores, float("-inf"))
            acc, row_max, row_sum = fold_tile(acc, row_max, row_sum, scores, v, scale, PLAIN)
            if LISTED:  # one tile ahead, so that no load waits for its address
                more = i + 1 < stop
                block = tl.load(row_blocks + 2 * (i + 2), mask=more, other=0).to(tl.int32)
                bits = tl.load(row_blocks + 2 * (i + 2) + 1, mask=more, other=0)
            else:
                block += 1
        if PLAIN:
            row_max *= scale
        acc, log_sum = finish_state(acc, row_max, row_sum)
        if VALUE_SCALE:  # of which an infinite one leaves an empty row 0
            acc = tl.where(row_sum[:, None] != 0, acc * tl.load(value_scale + kv_head), acc)

        value_ok = row_ok[:, None] & (value_dims < VALUE_DIM)[None, :]
        row_start = place - first
        states = (sequence * (kv_heads * group) + head) * q_len + position
        if stop - first == n_tiles:
            store_lse(lse, states, log_sum, row_max, row_sum, row_ok, PAIRED and not FINAL)
            tl.store(
                out + states[:, None] * VALUE_DIM + value_dims[None, :], acc.to(out.dtype.element_ty), mask=value_ok
            )
        else:
            rows_of_slot = tl.arange(0, BLOCK_M)
            slot = (2 * program + (row_start > start).to(tl.int32)) * BLOCK_M + rows_of_slot
            store_lse(partial_lse, slot, log_sum, row_max, row_sum, row_ok, PAIRED)
            tl.store(partial_out + slot[:, None] * VALUE_DIM + value_dims[None, :], acc, mask=value_ok)
        place += stop - first
    if OVERLAP and WAIT_LAST:
        tl.extra.cuda.gdc_wait()
