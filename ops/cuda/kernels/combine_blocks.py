"""The combine of a mixed batch: it adds up the partial states that programs left for blocks of queries.

Whole states are in place. The schedule is arithmetic over the lists of `query_blocks`. Without shared pages, a program
looks its work tile up in them before it waits for the partials. They are complete then: the combine begins after all
programs that attend have let it, and these began after the first of their launches had waited for the lists.

With that, and several loads at once, 5 queries of one sequence with 8192 keys take 26.3 us instead of 30.8
(`benchmarks/mixed.py` on an H200).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import finish_state
from tatten.ops.cuda.kernels.query_blocks import COLUMNS, CUTS_COLUMN, FEW_ROWS, block_at, load_block

_FEW_ROWS, _COLUMNS, _CUTS_COLUMN = tl.constexpr(FEW_ROWS), tl.constexpr(COLUMNS), tl.constexpr(CUTS_COLUMN)


@triton.jit(do_not_specialize=["few", "many", "few_programs", "many_programs", "kv_heads", "heads_per_kv"])
def _combine_shares_kernel(
    blocks,
    ends,
    out,
    lse,
    partial_out,
    partial_lse,
    few,
    many,
    few_programs,
    many_programs,
    few_slots,
    kv_heads,
    heads_per_kv,
    MANY_M: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine the partials of work tiles that several programs share: `FEW_ROWS` rows and a block of columns each.

    A class has a program here for each work tile that there is room for, or for each program that attended if these are
    fewer. Program p of the latter combines the work tile of which program p of the launch that attended had the second
    share.
    """
    column_blocks: tl.constexpr = (VALUE_DIM + BLOCK_DV - 1) // BLOCK_DV
    dims = tl.program_id(0) % column_blocks * BLOCK_DV + tl.arange(0, BLOCK_DV)
    combine_shares(
        tl.program_id(0) // column_blocks,
        (blocks, ends, None),
        (out, lse, partial_out, partial_lse),
        (few, many, few_programs, many_programs, few_slots, kv_heads, heads_per_kv),
        dims,
        MANY_M,
        VALUE_DIM,
        PDL,
    )


@triton.jit
def combine_shares(
    program,
    lists,
    tensors,
    sizes,
    dims,
    MANY_M: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine as `_combine_shares_kernel` does.

    The last of the `lists` is None, or has a number for each sequence and the padding: if it is not 0, the partials of
    the sequence's blocks are left alone.
    """
    blocks, ends, left_alone = lists
    few, many, few_programs, many_programs, few_slots, kv_heads, heads_per_kv = sizes
    few_count = tl.minimum(few * kv_heads, few_programs)
    is_many = program >= few_count
    program -= tl.where(is_many, few_count, 0)
    parts = tl.where(is_many, MANY_M // _FEW_ROWS, 1)
    part = program % parts
    program = program // parts
    room, programs = tl.where(is_many, many, few), tl.where(is_many, many_programs, few_programs)
    blocks += tl.where(is_many, few, 0) * _COLUMNS
    ends += tl.where(is_many, few, 0)
    total = tl.maximum(tl.load(ends + room - 1), 1)
    cuts = tl.load(blocks + _CUTS_COLUMN)
    active = tl.minimum(programs, total)
    for_tile = room * kv_heads <= programs
    # Program 0 never has a second share. If a class has no blocks, its `active` program would read past the lists.
    combines = (cuts % 2 == 0) & (for_tile | ((program > 0) & (program < active)))
    block, place = program // kv_heads, total * 0
    if combines & (not for_tile):
        place = total * program // active  # where the program began to attend
        block = block_at(ends, room, place, 1024)
    begin = tl.load(ends + block - 1, mask=combines & (block > 0), other=0)
    size = (tl.load(ends + block, mask=combines, other=begin) - begin) // kv_heads  # 0 for a block that is not there
    combines = combines & (size > 0)
    head = tl.where(for_tile, program % kv_heads, (place - begin) // tl.maximum(size, 1)).to(tl.int32)
    slots, first = slots_of_shares(begin + head * size, size, cuts // 2, total, active)
    combines = combines & (slots[3] > 1) & (for_tile | (program == first + 1))
    at_block = blocks + block * _COLUMNS
    sequence = tl.load(at_block, mask=combines, other=0)
    row = tl.load(at_block + 1, mask=combines, other=0)
    start_token = tl.load(at_block + 2, mask=combines, other=0)
    q_len = tl.load(at_block + 3, mask=combines, other=0)
    combines = combines & (row + part * _FEW_ROWS < q_len * heads_per_kv)
    if left_alone is not None:
        combines = combines & (tl.load(left_alone + sequence) == 0)
    if PDL:
        _wait_for_partials()
    if combines:
        _combine_rows(
            tensors,
            slots,
            tl.where(is_many, few_slots * _FEW_ROWS, 0).to(tl.int64),
            tl.where(is_many, MANY_M, _FEW_ROWS),
            part,
            (row, start_token, q_len, head),
            kv_heads,
            heads_per_kv,
            dims,
            VALUE_DIM,
            8 if MANY_M <= 64 else 4,  # registers of 8 leave an SM with few programs, and large blocks have many
        )


@triton.jit
def slots_of_shares(start, size, margin, total, active):
    """Return the slots of the programs that share a work tile, as `fold_slots` takes them, and the first program.

    Programs that take whole work tiles (`cuts` is odd) don't share any: the result has no meaning for them.

    Args:
        start, size: the place and the size of the work tile with its margins.
        margin: the size of a margin.
        total, active: the size of the tile space, and the programs that share it.
    """
    first = ((start + margin + 1) * active - 1) // total
    last = ((start + size - margin) * active - 1) // total
    # If the first program began before the previous work tile's margin, this is its second slot.
    later = (total * first // active < start - margin).to(tl.int64)
    return (2 * first + later, 2 * first, 2, (last - first + 1).to(tl.int32)), first


@triton.jit
def _wait_for_partials():
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["few", "many", "few_slots", "kv_heads", "heads_per_kv"])
def _combine_chunks_kernel(
    blocks,
    ends,
    out,
    lse,
    partial_out,
    partial_lse,
    few,
    many,
    few_slots,
    kv_heads,
    heads_per_kv,
    MANY_M: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine the chunks of a block and kv head: `FEW_ROWS` rows and a block of columns. Whole states are in place."""
    column_blocks: tl.constexpr = (VALUE_DIM + BLOCK_DV - 1) // BLOCK_DV
    dims = tl.program_id(0) % column_blocks * BLOCK_DV + tl.arange(0, BLOCK_DV)
    program = tl.program_id(0) // column_blocks
    is_many = program >= few * kv_heads
    parts = tl.where(is_many, MANY_M // _FEW_ROWS, 1)
    program -= tl.where(is_many, few * kv_heads, 0)
    head = program // parts % kv_heads
    block = program // parts // kv_heads
    block_m = tl.where(is_many, MANY_M, _FEW_ROWS)
    blocks += tl.where(is_many, few, 0) * _COLUMNS
    ends += tl.where(is_many, few, 0)
    first_row = tl.where(is_many, few_slots * _FEW_ROWS, 0).to(tl.int64)
    begin = tl.load(ends + block - 1, mask=block > 0, other=0)
    chunks = (tl.load(ends + block) - begin) // kv_heads
    if PDL:
        _wait_for_partials()
    if chunks > 1:
        _, row, start_token, q_len, _, _, _ = load_block(blocks, block)
        start = begin + head * chunks
        _combine_rows(
            (out, lse, partial_out, partial_lse),
            (start, start, 1, chunks.to(tl.int32)),
            first_row,
            block_m,
            program % parts,
            (row, start_token, q_len, head),
            kv_heads,
            heads_per_kv,
            dims,
            VALUE_DIM,
            4,
        )


@triton.jit
def _combine_rows(
    tensors,
    slots,
    first_row,
    block_m,
    part,
    rows,
    kv_heads,
    heads_per_kv,
    dims,
    VALUE_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Combine the partials of `FEW_ROWS` rows. `slots`: the first, base and distance of the rest, and their number."""
    out, lse, partial_out, partial_lse = tensors
    row, start_token, q_len, head = rows
    at = part * _FEW_ROWS + tl.arange(0, _FEW_ROWS)
    row += at
    ok = row < q_len * heads_per_kv
    row_max = tl.full([_FEW_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([_FEW_ROWS], tl.float32)
    acc = tl.zeros([_FEW_ROWS, dims.shape[0]], tl.float32)
    acc, row_max, row_sum = fold_slots(
        acc, row_max, row_sum, (partial_out, partial_lse), slots, first_row + at, block_m, ok, dims, VALUE_DIM, AT_ONCE
    )
    acc, log_sum = finish_state(acc, row_max, row_sum)
    token, q_head = start_token + row // heads_per_kv, head * heads_per_kv + row % heads_per_kv
    state = token.to(tl.int64) * (kv_heads * heads_per_kv) + q_head
    tl.store(lse + state, log_sum, mask=ok)
    tl.store(
        out + state[:, None] * VALUE_DIM + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=ok[:, None] & (dims < VALUE_DIM)[None, :],
    )


@triton.jit
def fold_slots(
    acc, row_max, row_sum, partials, slots, at, block_m, ok, dims, VALUE_DIM: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Add the partial states of a block of queries to their running states.

    A program mostly waits for loads, so it begins several of them before it adds the first state. `fold_states` with
    four at once would take 3 times the registers and go through shared memory: calls took up to 2.3 times as long
    (H100).

    Args:
        partials: their outputs and lse.
        slots: the first slot, base and distance of the rest, and their number.
        at: the place of each query in the first slot of all, in states; a slot has `block_m`.
        AT_ONCE: the partial states that are loaded before the first of them is added.
    """
    partial_out, partial_lse = partials
    first_slot, other_slots, distance, owners = slots
    columns = (dims < VALUE_DIM)[None, :]
    for i in range(0, owners, AT_ONCE):
        log_sums, values = (), ()
        for j in tl.static_range(AT_ONCE):
            slot = tl.where(i + j == 0, first_slot, other_slots + distance * (i + j)).to(tl.int64)
            exists = tl.where(i + j < owners, ok, False)
            state = slot * block_m + at
            log_sum = tl.load(partial_lse + state, mask=exists, other=float("-inf"), cache_modifier=".cg")
            value = tl.load(
                partial_out + state[:, None] * VALUE_DIM + dims[None, :],
                mask=exists[:, None] & columns,
                other=0.0,
                cache_modifier=".cg",
            )
            log_sums = log_sums + (log_sum,)  # type: ignore[assignment]  # noqa: RUF005 (Triton's tuples)
            values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
        before = row_max
        for j in tl.static_range(AT_ONCE):
            row_max = tl.maximum(row_max, log_sums[j])
        base = tl.where(row_max == float("-inf"), 0.0, row_max)
        alpha = tl.exp(before - base)
        acc, row_sum = acc * alpha[:, None], row_sum * alpha
        for j in tl.static_range(AT_ONCE):
            weight = tl.exp(log_sums[j] - base)
            acc, row_sum = acc + values[j] * weight[:, None], row_sum + weight
    return acc, row_max, row_sum
