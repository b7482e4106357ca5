"""The ragged kernel: stream-K attention of blocks of queries of a mixed batch to keys in pages, in Triton.

`tatten.ops.cuda.kernels.query_blocks` lists the blocks and numbers their key tiles. Program p of P takes an equal share
of the tile space, whatever the lengths are, as in the decode kernel. A block's tiles whose keys all of its queries see
come first and need no causal mask. A tile's entries of the block table are loaded one tile ahead.

With `CHUNK`, sums do not depend on the rest of the batch: a block is cut into chunks by its own length, or not cut if
`CHUNK` is negative.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.decode import INTERPRETED
from tatten.ops.cuda.kernels.early_launch import end_after_previous_launch
from tatten.ops.cuda.kernels.online_softmax import finish_state, fold_tile, scores_of
from tatten.ops.cuda.kernels.query_blocks import COLUMNS, block_at, load_block, share_of
from tatten.ops.cuda.kernels.tile_scheduler import tiles_of_chunk
from tatten.ops.cuda.kernels.tiles import entries_of_keys, in_named_page, load_entries, load_scales, rows_at, score_tile

_COLUMNS = tl.constexpr(COLUMNS)
_SIZES = ["window", "n_pages", "kv_heads", "heads_per_kv", "batch", "first_block", "room", "programs", "first_slot_row"]


@triton.jit(do_not_specialize=_SIZES)
def _ragged_kernel(
    query,
    key,
    value,
    block_table,
    blocks,
    ends,
    sinks,
    key_scale,
    value_scale,
    out,
    lse,
    partial_out,
    partial_lse,
    strides,
    scale,
    softcap,
    window,
    n_pages,
    kv_heads,
    heads_per_kv,
    batch,
    first_block,
    room,
    programs,
    first_slot_row,
    KV_S: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr,
    PAGE: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
    WAIT_LAST: tl.constexpr,
):
    query_strides, key_strides, value_strides, table_strides, key_scale_strides, value_scale_strides = strides
    query_t, query_h, query_d = query_strides
    key_p, key_s, key_h, key_d = key_strides
    value_p, value_s, value_h, value_d = value_strides
    table_b, table_s = table_strides
    HEAD_DIM: tl.constexpr = DIMS[0]
    VALUE_DIM: tl.constexpr = DIMS[1]
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM) if HEAD_DIM > 16 else 16
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(VALUE_DIM) if VALUE_DIM > 16 else 16
    BLOCK_M: tl.constexpr = TILE[0]
    BLOCK_N: tl.constexpr = TILE[1]
    KEY_SCALE: tl.constexpr = SCALES[0]
    VALUE_SCALE: tl.constexpr = SCALES[1]
    UNSCALED: tl.constexpr = POSITIVE_SCALE and not SOFTCAP and not KEY_SCALE
    SCALARS: tl.constexpr = 4 if BLOCK_M == 16 and BLOCK_N <= 64 else 1  # as in the decode kernel
    if PDL:
        if not WAIT_LAST:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks += first_block * _COLUMNS
    ends += first_block
    program = tl.program_id(0)
    program_start, program_end = share_of(program, ends, room, programs)
    block = block_at(ends, room, program_start, 1024)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    if INT64_OFFSETS:
        offset_dims, offset_value_dims = dims.to(tl.int64), value_dims.to(tl.int64)
    else:
        offset_dims, offset_value_dims = dims, value_dims

    place = program_start
    while place < program_end:
        sequence, first_row, start, q_len, length, skipped, n_tiles = load_block(blocks, block)
        block_end = tl.load(ends + block)
        if CHUNK > 0:
            chunk = tiles_of_chunk(n_tiles, CHUNK)
        elif CHUNK < 0:
            chunk = n_tiles
        else:
            chunk = 1
        n_shares = tl.cdiv(n_tiles, chunk)
        in_block = (place - (block_end - n_shares.to(tl.int64) * kv_heads)).to(tl.int32)
        kv_head = in_block // n_shares
        first_share = in_block - kv_head * n_shares
        taken = 1 if CHUNK else tl.minimum(n_shares - first_share, program_end - place).to(tl.int32)
        first, stop = first_share * chunk, tl.minimum(n_tiles, (first_share + taken) * chunk)
        kv_head = kv_head.to(tl.int64)

        row = first_row + tl.arange(0, BLOCK_M)
        q_ok = row < q_len * heads_per_kv
        token = (start + row // heads_per_kv).to(tl.int64)
        head = kv_head * heads_per_kv + row % heads_per_kv
        last_key = length - q_len + row // heads_per_kv  # the last key that each query may attend to
        q = tl.load(
            query + (token * query_t + head * query_h)[:, None] + (offset_dims * query_d)[None, :],
            mask=q_ok[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        if INTERPRETED:
            q = q.to(tl.float32)
        table = block_table + sequence.to(tl.int64) * table_b
        score_scale = scale
        if KEY_SCALE == 1:
            score_scale *= tl.load(key_scale + kv_head * key_scale_strides[0]).to(tl.float32)
        key_base, value_base = key + kv_head * key_h, value + kv_head * value_h
        key_scale_base = key_base
        if KEY_SCALE == 2:
            key_scale_base = key_scale + kv_head * key_scale_strides[2]
        if VALUE_SCALE == 2:
            value_scale_base = value_scale + kv_head * value_scale_strides[2]
        # An operand that this variant lacks is replaced by another one, which is not read.
        stride_k, stride_v = KV_S[0] if KV_S[0] else key_s, KV_S[1] if KV_S[1] else value_s
        operands = (
            (q, q, q),
            (key_base, value_base, key_base, key_scale_base),
            (stride_k, key_d, stride_v, value_d, stride_k, key_d),
            (offset_dims, offset_value_dims, offset_dims),
            (0, 0),
        )
        in_pages = (
            key_p,
            value_p,
            key_p,
            key_scale_strides[0] if KEY_SCALE == 2 else key_p,
            key_scale_strides[1] if KEY_SCALE == 2 else 1,
        )

        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:  # noqa: SIM102 (known when this is compiled)
            if first == 0:  # the sink counts once, and not for padding
                with_sink = row < tl.where(sequence < batch, q_len * heads_per_kv, 0)
                row_max = tl.load(sinks + head, mask=with_sink, other=float("-inf")).to(tl.float32)
                row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
                if UNSCALED:
                    row_max = row_max / scale
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

        begin_tile, stop_tile = skipped + first, skipped + stop
        seen_by_all = tl.maximum(length - q_len + first_row // heads_per_kv + 1, 0)
        last_row = tl.minimum(first_row + BLOCK_M, q_len * heads_per_kv) - 1
        stop_key = tl.maximum(length - q_len + last_row // heads_per_kv + 1, 0)
        # Tiles that all queries see come first. With a window, all tiles take the causal path.
        first_causal_tile = (
            begin_tile if WINDOW else tl.minimum(tl.maximum(seen_by_all // BLOCK_N, begin_tile), stop_tile)
        )
        for CAUSAL in tl.static_range(1 if WINDOW else 0, 2):
            tile, end_tile = (first_causal_tile, stop_tile) if CAUSAL else (begin_tile, first_causal_tile)
            end_key = tl.minimum(stop_key, end_tile * BLOCK_N)
            entries = load_entries(table, table_s, tile * BLOCK_N, end_key, BLOCK_N, PAGE, BLOCK_N, SCALARS)
            for _ in tl.range(0, end_tile - tile):
                keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                of_keys = entries_of_keys(entries, BLOCK_N)
                valid = in_named_page(keys, end_key, of_keys, n_pages)
                if WINDOW:
                    valid = valid & (keys >= seen_by_all - window)
                products, v = score_tile(
                    operands,
                    key,
                    value,
                    0,
                    keys.to(tl.int64),
                    valid,
                    HEAD_DIM,
                    VALUE_DIM,
                    0,
                    False,
                    False,
                    KEY_SCALE,
                    False,
                    PAGE,
                    of_keys,
                    in_pages,
                )
                scores = scores_of(products, score_scale, softcap, UNSCALED, SOFTCAP)
                ok = valid[None, :]
                if CAUSAL:
                    ok = ok & (keys[None, :] <= last_key[:, None])
                if WINDOW:
                    ok = ok & (keys[None, :] > (last_key - window)[:, None])
                scores = tl.where(ok, scores, float("-inf"))
                v_scale = None
                if VALUE_SCALE == 2:
                    at = rows_at(keys.to(tl.int64), value_scale_strides[1], of_keys, value_scale_strides[0], PAGE)
                    v_scale = load_scales(value_scale_base, at, valid)
                acc, row_max, row_sum = fold_tile(acc, row_max, row_sum, scores, v, scale, UNSCALED, v_scale)
                tile += 1
                entries = load_entries(table, table_s, tile * BLOCK_N, end_key, BLOCK_N, PAGE, BLOCK_N, SCALARS)
        if UNSCALED:
            row_max *= scale
        acc, log_sum = finish_state(acc, row_max, row_sum)
        if VALUE_SCALE == 1:  # an empty state stays 0 even if the scale is infinite
            factor = tl.load(value_scale + kv_head * value_scale_strides[0]).to(tl.float32)
            acc = tl.where(row_sum[:, None] != 0, acc * factor, acc)

        value_ok = q_ok[:, None] & (value_dims < VALUE_DIM)[None, :]
        if stop - first == n_tiles:
            state = token * (kv_heads * heads_per_kv) + head
            tl.store(lse + state, log_sum, mask=q_ok)
            tl.store(
                out + state[:, None] * VALUE_DIM + value_dims[None, :], acc.to(out.dtype.element_ty), mask=value_ok
            )
        else:
            slot = place if CHUNK else 2 * program.to(tl.int64) + (place - first_share > program_start).to(tl.int64)
            at = first_slot_row + slot * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(partial_lse + at, log_sum, mask=q_ok)
            tl.store(partial_out + at[:, None] * VALUE_DIM + value_dims[None, :], acc, mask=value_ok)
        place += taken
        block += (place >= block_end).to(tl.int32)
    if PDL and WAIT_LAST:
        end_after_previous_launch()
