"""The launches that attend to the blocks of a mixed batch: one for each class of blocks that has room for any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tatten.ops.cuda.combine import INTERPRETED
from tatten.ops.cuda.decode import scale_kind
from tatten.ops.cuda.gpu import has_early_launches
from tatten.ops.cuda.heuristics import Tiles
from tatten.ops.cuda.kernels.query_blocks import FEW_ROWS
from tatten.ops.cuda.kernels.ragged import _ragged_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.mixed_batch import MixedCall


@dataclass(frozen=True)
class BlockClass:
    """A launch of the ragged kernel for the blocks of one size.

    Attributes:
        tiles: the sizes of a tile.
        room: the most blocks that the shapes allow; 0 if there are none, and no launch.
        programs: the programs that share the tile space.
        slots: the partial states that they leave at most, each of `tiles.block_m` rows.
        chunk: the `CHUNK` of the kernel.
    """

    tiles: Tiles
    room: int
    programs: int
    slots: int
    chunk: int


class AttendBlocks(Protocol):
    """A launch that attends to listed blocks, and writes their states, or partial ones if programs share them."""

    def __call__(
        self, call: MixedCall, blocks: Tensor, ends: Tensor, sinks: Tensor | None, outputs: tuple[Tensor, ...]
    ) -> None: ...


@dataclass(frozen=True)
class RaggedLaunch:
    """A launch of the ragged kernel."""

    launch: Launch

    def __call__(
        self, call: MixedCall, blocks: Tensor, ends: Tensor, sinks: Tensor | None, outputs: tuple[Tensor, ...]
    ) -> None:
        keys = call.key, call.value, call.block_table
        self.launch(call.query, *keys, blocks, ends, sinks, call.key_scale, call.value_scale, *outputs)


def heads_per_kv(call: MixedCall) -> int:
    return call.query.shape[1] // call.key.shape[2]


def has_pdl(call: MixedCall) -> bool:
    return not INTERPRETED and has_early_launches(call.query.device)


def window_of(call: MixedCall) -> int | None:
    # A longer window has the same effect, and could overflow.
    return None if call.window is None else min(call.window, call.kv_len)


def attend_launches(
    call: MixedCall, few: BlockClass, many: BlockClass, on_hopper: bool, beside_previous: bool = False
) -> tuple[AttendBlocks, ...]:
    """Plan a launch for each class that has room for blocks.

    `beside_previous`: a launch that has waited for the lists comes before them. Kernels in Triton run beside it.
    """
    query, window, pdl = call.query, window_of(call), has_pdl(call)
    launches: list[AttendBlocks] = []
    for block_class, first_block, first_slot_row in ((few, 0, 0), (many, few.room, few.slots * FEW_ROWS)):
        if block_class.room == 0:
            continue
        if on_hopper:
            from tatten.ops.cuda.pages_sm90 import plan_blocks

            launches.append(
                plan_blocks(call, window, block_class.tiles.block_m, block_class.room, block_class.programs)
            )
            continue
        launches.append(
            RaggedLaunch(
                Launch(
                    _ragged_kernel,
                    (block_class.programs,),
                    {
                        "num_warps": block_class.tiles.num_warps,
                        "num_stages": block_class.tiles.num_stages,
                        "launch_pdl": pdl,
                    },
                    strides=(
                        query.stride(),
                        call.key.stride(),
                        call.value.stride(),
                        call.block_table.stride(),
                        *[() if x is None else x.stride() for x in (call.key_scale, call.value_scale)],
                    ),
                    scale=call.score_scale,
                    softcap=call.softcap or 0.0,
                    window=window or 0,
                    n_pages=call.key.shape[0],
                    batch=call.batch,
                    kv_heads=call.key.shape[2],
                    heads_per_kv=heads_per_kv(call),
                    first_block=first_block,
                    room=block_class.room,
                    programs=block_class.programs,
                    first_slot_row=first_slot_row,
                    KV_S=(_constant_stride(call.key), _constant_stride(call.value)),
                    DIMS=(query.shape[2], call.value.shape[3]),
                    TILE=(block_class.tiles.block_m, block_class.tiles.block_n),
                    CHUNK=block_class.chunk,
                    WINDOW=window is not None,
                    SOFTCAP=call.softcap is not None,
                    SCALES=(scale_kind(call.key_scale), scale_kind(call.value_scale)),
                    PAGE=call.key.shape[1],
                    POSITIVE_SCALE=call.score_scale > 0,
                    INT64_OFFSETS=max(x.stride(-1) * x.shape[-1] for x in (query, call.key, call.value)) >= 1 << 31,
                    PDL=pdl,
                    # The previous launch waits for the list before it lets this one begin, and this one writes nothing
                    # that the previous one reads.
                    WAIT_LAST=beside_previous or bool(launches),
                )
            )
        )
    return tuple(launches)


def _constant_stride(pool: Tensor) -> int:
    """Return the stride from a key to the next to compile for, which saves registers, or 0 to pass it at run time."""
    return pool.stride(1) if pool.stride(1) < 1 << 14 else 0
