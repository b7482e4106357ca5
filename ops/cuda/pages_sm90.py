"""Plan launches of the pages kernel for Hopper: blocks of a mixed batch, or row groups over shared pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.combine import Partials
from tatten.ops.cuda.gpu import has_wgmma, multiprocessors
from tatten.ops.cuda.kernels.page_softmax import CONSUMER_ROWS
from tatten.ops.cuda.kernels.pages_sm90 import BLOCK_N, START_REGS, _pages_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.recording import may_take_gluon
from tatten.ops.cuda.sm90 import DTYPES, key_tiling, strides_in_units
from tatten.ops.cuda.tile_space import TileSpace
from tatten.ops.cuda.tma import Tiling, takes_tma
from tatten.ops.mixed_batch import MixedCall
from tatten.ops.page_runs import LEVELS, ROWS, UNIT_KEYS, first_row, group_sizes
from tatten.ops.sizes import ceil_div

LEAST_PAGE = 8  # rows of a box: the swizzle of shared memory repeats every 8 rows


def takes_pages_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    """Return True if the pages kernel can compute attention of `query` to pools `[pages, page, kv_heads, head_dim]`."""
    dim = query.shape[-1]
    return (
        _on_hopper(query)
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and dim in (64, 128)
        and dim == value.shape[3]
        and query.stride(-1) == 1
        and key.shape[1] >= LEAST_PAGE
        and scale > 0
        and takes_tma(key)
        and takes_tma(value)
        and may_take_gluon("pages_sm90")
    )


@dataclass(frozen=True)
class BlocksLaunch:
    """Attends to the blocks of a mixed batch."""

    launch: Launch
    tilings: tuple[Tiling, Tiling]

    def __call__(
        self, call: MixedCall, blocks: Tensor, ends: Tensor, sinks: Tensor | None, outputs: tuple[Tensor, ...]
    ) -> None:
        pools = self.tilings[0](call.key), self.tilings[1](call.value)
        self.launch(call.query, *pools, call.block_table, blocks, ends, sinks, *outputs)


def plan_blocks(call: MixedCall, window: int | None, block_m: int, room: int, programs: int) -> BlocksLaunch:
    """Plan the launch for at most `room` blocks of `block_m` packed queries. `takes_pages_kernel` accepts the call."""
    aligned, (strides,) = strides_in_units(call.query.unsqueeze(0))
    launch = _launch(
        call.key,
        call.block_table,
        call.score_scale,
        strides=(strides[1], strides[2], 0),
        aligned=aligned,
        programs=programs,
        window=window,
        kv_len=call.kv_len,
        room=room,
        heads_per_kv=call.query.shape[1] // call.key.shape[2],
        batch=call.batch,
        members=1,
        q_len=1,
        q_blocks=1,
        block_m=block_m,
        shared=False,
    )
    return BlocksLaunch(launch, _tilings(call.key, call.value))


def _on_hopper(x: Tensor) -> bool:
    return x.is_cuda and has_wgmma(x.device)


def _heads_last(pool: Tensor) -> Tensor:
    return pool.transpose(1, 2)


@dataclass(frozen=True)
class SharedSegment:
    """Attends to the row groups over shared pages, in the tile space of the decode kernel's `SHARED_PART`."""

    tile_space: TileSpace
    launch: Launch
    tilings: tuple[Tiling, Tiling]
    writes: tuple[Dense, Dense, Dense, Dense]

    def __call__(self, call: AttentionCall, stored: KeyValue) -> Partials:
        assert stored.row_groups is not None
        shared = stored.row_groups.contiguous()
        out, lse, partial_out, partial_lse = allocate(call.query, *self.writes)
        pools = self.tilings[0](_heads_last(stored.key)), self.tilings[1](_heads_last(stored.value))
        outputs = out, lse, partial_out, partial_lse
        self.launch(call.query, *pools, stored.block_table, shared, None, None, *outputs)
        return Partials(*outputs, row_groups=shared, shared_pages=shared)


def plan_shared_segment(call: AttentionCall, stored: KeyValue, programs: int | None = None) -> SharedSegment:
    """Plan row groups over shared pages, which are `stored.row_groups`. One program runs on an SM at a time.

    They are those of the grouping with the largest row groups whose queries of a kv head fit into one consumer, or else
    the smallest. `stored.row_groups` may also be the rows of that grouping alone.
    """
    assert UNIT_KEYS == BLOCK_N
    assert stored.block_table is not None
    assert stored.row_groups is not None
    query, (batch, q_heads, q_len, dim) = call.query, call.query.shape
    kv_heads = stored.key.shape[1]
    queries = q_heads // kv_heads * q_len  # of a sequence
    sizes = group_sizes(batch)
    members = max([x for x in sizes if x * queries <= CONSUMER_ROWS], default=sizes[0])
    rows = members * queries
    block_m = CONSUMER_ROWS if rows <= CONSUMER_ROWS else 2 * CONSUMER_ROWS
    q_blocks = ceil_div(rows, block_m)
    programs = programs or shared_programs(multiprocessors(query.device))
    space = TileSpace(
        max(2, batch),
        kv_heads * q_blocks,
        stored.kv_len,
        kv_heads,
        members,
        q_blocks,
        programs,
        block_m,
        BLOCK_N,
        row_groups=batch,
    )
    aligned, (strides,) = strides_in_units(query)
    key, value = _heads_last(stored.key), _heads_last(stored.value)
    launch = _launch(
        key,
        stored.block_table,
        call.score_scale,
        strides=(strides[0], strides[1], strides[2]),
        aligned=aligned,
        programs=programs,
        window=None,
        kv_len=stored.kv_len,
        room=LEVELS * batch,
        heads_per_kv=q_heads // kv_heads,
        batch=batch,
        members=members,
        q_len=q_len,
        q_blocks=q_blocks,
        block_m=block_m,
        shared=True,
        first_row=first_row(batch, members) if stored.row_groups.shape[0] == ROWS else 0,
    )
    states, slots = (LEVELS * batch, q_heads, q_len), (space.slots, block_m)
    shapes = (*states, dim), states, (*slots, dim), slots
    out, lse, partial_out, partial_lse = (Dense.of(shape, torch.float32) for shape in shapes)
    return SharedSegment(space, launch, _tilings(key, value), (out, lse, partial_out, partial_lse))


def shared_programs(sms: int) -> int:
    """Choose the programs for row groups, and leave up to a tenth of the SMs to the own parts.

    The choice is a multiple of 24: the number of work tiles often is a multiple of 8 or 24, and is then cut less often.
    With 120 programs on 132 SMs, 256 x 256 own keys after 8192 shared ones take 208 us instead of 214 (H100).
    """
    fewer = (sms - sms // 17) // 24 * 24
    return fewer if fewer >= 0.9 * sms else sms


def _tilings(key: Tensor, value: Tensor) -> tuple[Tiling, Tiling]:
    """Make descriptors of boxes that hold a page each, or a tile if that is smaller."""
    box = min(key.shape[1], BLOCK_N)
    return key_tiling(key, box, key.shape[3], True), key_tiling(value, box, value.shape[3], True)


def _launch(
    key: Tensor,
    block_table: Tensor,
    scale: float,
    *,
    strides: tuple[int, int, int],
    aligned: int,
    programs: int,
    window: int | None,
    block_m: int,
    shared: bool,
    first_row: int = 0,
    **sizes: int,
) -> Launch:
    return Launch(
        _pages_kernel,
        (programs,),
        {"num_warps": 4, "maxnreg": START_REGS[block_m // CONSUMER_ROWS], "launch_pdl": True},
        query_b=strides[0],
        query_h=strides[1],
        query_l=strides[2],
        table_b=block_table.stride(0),
        table_s=block_table.stride(1),
        scale=scale,
        window=window or 0,
        n_pages=key.shape[0],
        kv_heads=key.shape[2],
        programs=programs,
        **sizes,
        DIM=key.shape[3],
        ALIGNED=aligned,
        PAGE=key.shape[1],
        SHARED=shared,
        FIRST_ROW=first_row,
        WINDOW=window is not None,
        CONSUMERS=block_m // CONSUMER_ROWS,
    )
