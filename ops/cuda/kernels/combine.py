"""The combine kernel: adds up the states that launches of the decode or prefix kernel left for segments.

It takes the partial states of up to two segments, and whole states of any number of others. Each output state finds its
own partial states: the schedule is arithmetic, so only the lengths have to be read.

With `SHARED`, the second segment is the launch over pages that sequences share. It leaves up to one state per level for
an output state. States that it has not left are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tatten.ops.cuda.kernels.online_softmax import finish_state, fold_states, store_lse
from tatten.ops.cuda.kernels.partials import find_partials, find_shared_partials, fold_partials
from tatten.ops.cuda.kernels.tile_scheduler import LEVELS, OWN_PART

SIZES = [
    "block_list_stride",
    "n_groups",
    "work_tiles",
    "kv_len",
    "kv_heads",
    "seqs_per_kv",
    "q_blocks",
    "programs",
    "lanes",
]


@triton.jit(
    do_not_specialize=[
        "q_heads",
        "q_len",
        "n_states",
        "window",
        "batch",
        *[f"{size}_{x}" for x in "ab" for size in SIZES],
    ]
)
def _combine_kernel(
    out,
    lse,
    partials_a,
    partials_b,
    whole_outs,
    whole_lses,
    q_heads,
    q_len,
    n_states,
    block_list_stride_a,
    n_groups_a,
    work_tiles_a,
    kv_len_a,
    kv_heads_a,
    seqs_per_kv_a,
    q_blocks_a,
    programs_a,
    lanes_a,
    block_list_stride_b,
    n_groups_b,
    work_tiles_b,
    kv_len_b,
    kv_heads_b,
    seqs_per_kv_b,
    q_blocks_b,
    programs_b,
    lanes_b,
    window,
    batch,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPACES: tl.constexpr,
    WINDOW: tl.constexpr,
    INT64_TILES: tl.constexpr,
    WHOLES: tl.constexpr,
    MAX_AND_SUM_OUT: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_STATES: tl.constexpr,
    SHARED: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    # Whole states of a single segment are in place already.
    FOLD_WHOLE: tl.constexpr = len(SPACES) + len(WHOLES) > 1
    column_blocks: tl.constexpr = (VALUE_DIM + BLOCK_DV - 1) // BLOCK_DV
    dims = tl.program_id(0) % column_blocks * BLOCK_DV + tl.arange(0, BLOCK_DV)
    state = tl.program_id(0) // column_blocks * BLOCK_STATES + tl.arange(0, BLOCK_STATES)
    ok = state < n_states
    state = tl.minimum(state, n_states - 1)
    position = state % q_len
    head = state // q_len % q_heads
    sequence = state // q_len // q_heads
    state = state.to(tl.int64)
    if len(SPACES) > 0:
        SPACE_A: tl.constexpr = SPACES[0]  # Triton 3.6 can't pass an item of a tuple of constants on
        sizes_a = (
            block_list_stride_a,
            n_groups_a,
            work_tiles_a,
            kv_len_a,
            kv_heads_a,
            seqs_per_kv_a,
            q_blocks_a,
            programs_a,
            lanes_a,
        )
        slots_a = find_partials(
            sequence,
            head,
            position,
            partials_a,
            sizes_a,
            q_heads,
            q_len,
            window,
            batch,
            SPACE_A,
            WINDOW,
            INT64_TILES,
            OWN_PART if SHARED else 0,
        )
        if not FOLD_WHOLE:
            ok = ok & (slots_a[2] > 1)
    if len(SPACES) > 1:
        SPACE_B: tl.constexpr = SPACES[1]
        sizes_b = (
            block_list_stride_b,
            n_groups_b,
            work_tiles_b,
            kv_len_b,
            kv_heads_b,
            seqs_per_kv_b,
            q_blocks_b,
            programs_b,
            lanes_b,
        )
        if SHARED:  # one launch leaves the states of both levels
            entries = LEVELS * batch
            slots_b = find_shared_partials(
                sequence, head, position, partials_b, sizes_b, q_heads, q_len, entries, SPACE_B, INT64_TILES, FIRST_ROW
            )
            slots_c = find_shared_partials(
                sequence + batch,
                head,
                position,
                partials_b,
                sizes_b,
                q_heads,
                q_len,
                entries,
                SPACE_B,
                INT64_TILES,
                FIRST_ROW,
            )
        else:
            slots_b = find_partials(
                sequence,
                head,
                position,
                partials_b,
                sizes_b,
                q_heads,
                q_len,
                window,
                batch,
                SPACE_B,
                False,
                INT64_TILES,
            )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    row_max = tl.full([BLOCK_STATES], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_STATES], tl.float32)
    acc = tl.zeros([BLOCK_STATES, BLOCK_DV], tl.float32)
    if len(SPACES) > 0:
        acc, row_max, row_sum = fold_partials(
            acc,
            row_max,
            row_sum,
            state,
            ok,
            partials_a,
            slots_a,
            dims,
            VALUE_DIM,
            SPACE_A,
            PARTIALS,
            FOLD_WHOLE,
        )
    if len(SPACES) > 1:
        acc, row_max, row_sum = fold_partials(
            acc,
            row_max,
            row_sum,
            state,
            ok,
            partials_b,
            slots_b,
            dims,
            VALUE_DIM,
            SPACE_B,
            PARTIALS,
            FOLD_WHOLE,
        )
    if SHARED:
        acc, row_max, row_sum = fold_partials(
            acc,
            row_max,
            row_sum,
            state + n_states,
            ok,
            partials_b,
            slots_c,
            dims,
            VALUE_DIM,
            SPACE_B,
            PARTIALS,
            FOLD_WHOLE,
        )
    for i in tl.static_range(len(WHOLES)):
        acc, row_max, row_sum = fold_states(
            acc,
            row_max,
            row_sum,
            whole_outs[i],
            whole_lses[i],
            state[None, :],
            ok[None, :],
            dims,
            VALUE_DIM,
            WHOLES[i],
        )
    acc, log_sum = finish_state(acc, row_max, row_sum)
    store_lse(lse, state, log_sum, row_max, row_sum, ok, MAX_AND_SUM_OUT)
    tl.store(
        out + state[:, None] * VALUE_DIM + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=ok[:, None] & (dims < VALUE_DIM)[None, :],
    )
