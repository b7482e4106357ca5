"""Plan mixed batches: a list of blocks of queries, a launch for each class of blocks, and a combine of their partials.

All sizes follow from shapes: one captured CUDA graph serves any lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.block_lists import HOPPER_M, HOPPER_N, combine_programs, list_sizes, slot_rows, writes_of
from tatten.ops.cuda.decode import scale_kind
from tatten.ops.cuda.decode_grid import LEAST_CHUNK
from tatten.ops.cuda.gpu import has_large_shared_memory, multiprocessors
from tatten.ops.cuda.heuristics import Tiles, tiles_for
from tatten.ops.cuda.kernels.combine_blocks import _combine_chunks_kernel, _combine_shares_kernel
from tatten.ops.cuda.kernels.decode import KEY_SCALE
from tatten.ops.cuda.kernels.query_blocks import FEW_ROWS, MARGIN, _list_blocks_kernel
from tatten.ops.cuda.kernels.tile_scheduler import MOST_CHUNKS
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.ragged_launches import (
    AttendBlocks,
    BlockClass,
    attend_launches,
    has_pdl,
    heads_per_kv,
    window_of,
)
from tatten.ops.mixed_batch import MixedCall
from tatten.ops.pages import sharing
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.states import State

MANY_ROWS = 64  # blocks are large if sequences have more packed queries than this on average
WIDEST_COMBINE = 128  # columns of a program that combines


@dataclass(frozen=True)
class AttendRagged:
    """Computes mixed batches of the layout that it was planned for."""

    list_blocks: Launch
    launches: tuple[AttendBlocks, ...]
    combine: Launch | None
    writes: tuple[Dense, ...]

    def __call__(self, call: MixedCall) -> State:
        out, lse, scratch, blocks, ends, partial_out, partial_lse = allocate(call.query, *self.writes)
        self.list_blocks(call.cu_seqlens_q.contiguous(), call.kv_lens.contiguous(), scratch, blocks, ends)
        sinks = None if call.sinks is None else call.sinks.contiguous()
        for attend in self.launches:
            attend(call, blocks, ends, sinks, (out, lse, partial_out, partial_lse))
        if self.combine is not None:
            self.combine(blocks, ends, out, lse, partial_out, partial_lse)
        return out, lse


def ragged_tiles(call: MixedCall) -> tuple[Tiles, Tiles]:
    """Choose the tiles for few and for many packed queries. Not measured: they spill few registers or none.

    With `batch_invariant` they depend on neither the tokens nor the number of sequences.
    """
    query, narrow = call.query, call.key.element_size() == 1
    dim = max(16, power_of_2(max(query.shape[2], call.value.shape[3])))
    large = has_large_shared_memory(query.device)
    few = tiles_for(
        FEW_ROWS,
        dim,
        query.element_size(),
        masked=call.window is not None or narrow,
        narrow=narrow,
        page=call.key.shape[1],
        large_shared_memory=large,
    )
    few_n = min(64, few.block_n) if narrow else few.block_n  # 128 keys in 8 bits spill
    few = Tiles(FEW_ROWS, few_n, few.num_warps, few.num_stages, few.per_sm)
    rows = query.shape[0] * heads_per_kv(call) // call.batch
    if query.element_size() == 4 or dim > 256 or not large:
        return few, Tiles(max(16, min(64, 2048 // dim)), 32, 8, 2)
    if dim > 128:
        return few, Tiles(32, 64, 8, 2)  # 64 packed queries spill
    per_key = KEY_SCALE in (scale_kind(call.key_scale), scale_kind(call.value_scale))  # these take registers
    if rows > MANY_ROWS and not call.batch_invariant and not per_key:
        return few, Tiles(128, 64, 8, 3)
    return few, Tiles(32 if per_key else 64, 64, 8, 3)  # 64 packed queries spill with a scale for each key


def _classes(
    call: MixedCall, tiles: tuple[Tiles, Tiles], programs: int | None, all_large: bool
) -> tuple[BlockClass, BlockClass]:
    """Size the launches for few and for many packed queries. Padding takes one block more than its rows fill.

    `all_large`: sequences with few packed queries take the large blocks, too.
    """
    few, many = tiles
    rows, kv_heads = call.query.shape[0] * heads_per_kv(call), call.key.shape[2]
    has_many = all_large or rows > FEW_ROWS
    rooms = (
        0 if all_large or heads_per_kv(call) > FEW_ROWS else call.batch + (not has_many),
        rows // many.block_m + call.batch + 1 if has_many else 0,
    )
    classes = []
    for chosen, room, is_many in zip((few, many), rooms, (False, True), strict=True):
        n_tiles = max(1, ceil_div(call.kv_len, chosen.block_n))
        chunk = 0 if not call.batch_invariant else -1 if is_many else LEAST_CHUNK // chosen.block_n
        chunks = min(ceil_div(n_tiles, chunk), MOST_CHUNKS.value) if chunk > 0 else n_tiles if chunk == 0 else 1
        n = min(room * kv_heads * chunks, programs or chosen.per_sm * multiprocessors(call.query.device))
        slots = 2 * n if chunk == 0 else room * kv_heads * chunks if chunk > 0 else 0
        classes.append(BlockClass(chosen, room, n, slots, chunk))
    return classes[0], classes[1]


def plan_ragged(
    call: MixedCall, tiles: tuple[Tiles, Tiles] | None = None, programs: int | None = None
) -> Callable[[MixedCall], State]:
    """Plan a valid call in any dtype but float64.

    `tiles`, for few and for many packed queries, and `programs` replace the choices, for tests and sweeps.
    """
    on_hopper = tiles is None and _takes_pages_kernel(call)
    classes = _classes(
        call, (hopper_tiles(call),) * 2 if on_hopper else tiles or ragged_tiles(call), programs, on_hopper
    )
    if call.batch > 1 and sharing(call.one_query_each()) is not None:
        from tatten.ops.cuda.mixed_shared import plan_shared_blocks

        return plan_shared_blocks(call, classes, on_hopper, programs)
    few, many = classes
    pdl = has_pdl(call)
    window = window_of(call)
    list_blocks = Launch(
        _list_blocks_kernel,
        (2,),
        {"num_warps": 8, "launch_pdl": pdl},
        **list_sizes(call, few, many, on_hopper),
        window=window or 0,
        CHUNK=few.chunk,
        WINDOW=window is not None,
        PDL=pdl,
    )
    return AttendRagged(
        list_blocks,
        attend_launches(call, few, many, on_hopper),
        _plan_combine(call, few, many, pdl) if slot_rows(few, many) else None,
        writes_of(call, few, many),
    )


def hopper_tiles(call: MixedCall) -> Tiles:
    """Choose the tiles of the pages kernel, which takes all blocks."""
    few = call.query.shape[0] * heads_per_kv(call) <= MANY_ROWS * call.batch
    return Tiles(HOPPER_M // 2 if few else HOPPER_M, HOPPER_N, 8 if few else 12, 2)


def _takes_pages_kernel(call: MixedCall) -> bool:
    """Return True if the kernel for Hopper computes this. It numbers tiles in 32 bits."""
    if call.softcap is not None or call.key_scale is not None or call.value_scale is not None or call.batch_invariant:
        return False
    from tatten.ops.cuda.pages_sm90 import takes_pages_kernel

    rows, kv_heads = call.query.shape[0] * heads_per_kv(call), call.key.shape[2]
    blocks = (2 * rows // HOPPER_M + call.batch + 1) * kv_heads  # of each kv head
    tiles = blocks * (max(1, ceil_div(call.kv_len, HOPPER_N)) + 2 * MARGIN)
    return tiles < 1 << 31 and takes_pages_kernel(call.query, call.key, call.value, call.score_scale)


def _plan_combine(call: MixedCall, few: BlockClass, many: BlockClass, pdl: bool) -> Launch:
    kv_heads, value_dim = call.key.shape[2], call.value.shape[3]
    block_dv = min(WIDEST_COMBINE, max(16, power_of_2(value_dim)))
    sizes = {
        "few": few.room,
        "many": many.room,
        "few_slots": few.slots,
        "kv_heads": kv_heads,
        "heads_per_kv": heads_per_kv(call),
        "MANY_M": many.tiles.block_m,
        "VALUE_DIM": value_dim,
        "BLOCK_DV": block_dv,
        "PDL": pdl,
    }
    if few.chunk or many.chunk:
        kernel, programs = _combine_chunks_kernel, kv_heads * (few.room + many.room * many.tiles.block_m // FEW_ROWS)
    else:
        kernel, programs = _combine_shares_kernel, combine_programs(few, many, kv_heads)
        sizes |= {"few_programs": few.programs, "many_programs": many.programs}
    options = {"num_warps": 4, "launch_pdl": pdl}
    return Launch(kernel, (programs * ceil_div(value_dim, block_dv),), options, **sizes)
