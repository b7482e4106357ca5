"""Plan mixed batches with shared pages: a launch for the row groups of sequences with one query, before the blocks.

If nothing is shared, this takes one launch more than without shared pages, and it ends at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.block_lists import combine_programs, list_sizes, writes_of
from tatten.ops.cuda.decode import SegmentLaunch
from tatten.ops.cuda.kernels.mixed_shared import LISTS, _combine_shared_kernel, _list_shared_kernel
from tatten.ops.cuda.kernels.query_blocks import FEW_ROWS
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.ragged_launches import AttendBlocks, BlockClass, attend_launches, has_pdl, heads_per_kv
from tatten.ops.cuda.shared_attention import plan_shared_part
from tatten.ops.mixed_batch import MixedCall
from tatten.ops.page_runs import LEVELS, ROWS_OF_GROUPING, UNIT_KEYS, first_row
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.states import State

if TYPE_CHECKING:
    from tatten.ops.cuda.pages_sm90 import SharedSegment


@dataclass(frozen=True)
class AttendShared:
    """Computes mixed batches with shared pages, of the layout that it was planned for."""

    list_blocks: Launch
    shared_part: SegmentLaunch | SharedSegment
    launches: tuple[AttendBlocks, ...]
    combine: Launch
    writes: tuple[Dense, ...]

    def __call__(self, call: MixedCall) -> State:
        assert call.shared_pages is not None
        out, lse, scratch, blocks, ends, partial_out, partial_lse, kept, queries = allocate(call.query, *self.writes)
        # Launches run beside each other, so a copy comes before all of them.
        sinks = None if call.sinks is None else call.sinks.contiguous()
        inputs = call.cu_seqlens_q.contiguous(), call.kv_lens.contiguous(), call.shared_pages.contiguous()
        self.list_blocks(*inputs, call.query, scratch, blocks, ends, kept, queries)
        steps = call.sequences(queries, call.block_table, call.kv_lens, kept)
        shared = self.shared_part(steps, steps.segments[0]._replace(kv_lens=None, row_groups=kept))
        for attend in self.launches:
            attend(call, blocks, ends, sinks, (out, lse, partial_out, partial_lse))
        self.combine(blocks, ends, scratch, out, lse, partial_out, partial_lse, tuple(shared))
        return out, lse


def plan_shared_blocks(
    call: MixedCall, classes: tuple[BlockClass, BlockClass], on_hopper: bool, programs: int | None
) -> AttendShared:
    """Plan the launches for a valid call of two sequences or more, in any dtype but float64.

    Args:
        classes, on_hopper: the blocks of queries, and whether the kernel for Hopper attends to them.
        programs: of the launch over row groups, for tests; None for its choice.
    """
    query, (_, q_heads, dim), batch = call.query, call.query.shape, call.batch
    # No block of a sequence may begin within a tile.
    assert all(UNIT_KEYS % x.tiles.block_n == 0 for x in classes)
    queries = Dense.of((batch, q_heads, 1, dim), query.dtype)
    like = query.new_empty(queries.shape)  # a plan sees layouts alone
    assert call.shared_pages is not None
    kept_rows = call.shared_pages.narrow(0, 0, ROWS_OF_GROUPING)
    steps = call.sequences(like, call.block_table, call.kv_lens, call.shared_pages)
    (stored,) = steps.segments
    shared_part = plan_shared_part(steps, stored._replace(kv_lens=None, row_groups=kept_rows), programs)
    members = shared_part.tile_space.seqs_per_kv
    pdl = has_pdl(call)
    list_blocks = Launch(
        _list_shared_kernel,
        (LISTS + batch,),
        {"num_warps": 8, "launch_pdl": pdl},
        query_strides=query.stride(),
        q_heads=q_heads,
        **list_sizes(call, *classes, on_hopper),
        ENTRIES=power_of_2(LEVELS * batch + 1),
        MEMBERS=members,
        FIRST_ROW=first_row(batch, members),
        DIM=dim,
        PDL=pdl,
    )
    kept = Dense.of(tuple(kept_rows.shape), torch.int32)
    return AttendShared(
        list_blocks,
        shared_part,
        attend_launches(call, *classes, on_hopper, beside_previous=True),
        _plan_combine(call, classes, shared_part, pdl),
        (*writes_of(call, *classes), kept, queries),
    )


def _plan_combine(
    call: MixedCall, classes: tuple[BlockClass, BlockClass], shared_part: SegmentLaunch | SharedSegment, pdl: bool
) -> Launch:
    (few, many), space = classes, shared_part.tile_space
    kv_heads, dim = call.key.shape[2], max(16, power_of_2(call.value.shape[3]))
    heads = heads_per_kv(call)
    programs = combine_programs(few, many, kv_heads) + call.batch * kv_heads * ceil_div(heads, FEW_ROWS)
    return Launch(
        _combine_shared_kernel,
        (programs,),
        {"num_warps": 4 if dim <= 128 else 8, "launch_pdl": pdl},
        few=few.room,
        many=many.room,
        few_programs=few.programs,
        many_programs=many.programs,
        few_slots=few.slots,
        kv_heads=kv_heads,
        heads_per_kv=heads,
        batch=call.batch,
        work_tiles=space.work_tiles,
        seqs_per_kv=space.seqs_per_kv,
        q_blocks=space.q_blocks,
        shared_programs=space.programs,
        SEQUENCES=power_of_2(call.batch + 1),
        SPACE=space.constants,
        INT64_TILES=space.int64_tiles(call.batch),
        MANY_M=many.tiles.block_m,
        VALUE_DIM=call.value.shape[3],
        BLOCK_DV=dim,
        PDL=pdl,
    )
