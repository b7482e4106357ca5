"""The sizes of a mixed batch's lists of blocks, and the tensors that its launches write."""

from __future__ import annotations

from typing import Any

import torch

from tatten.ops.cuda.allocation import Dense
from tatten.ops.cuda.kernels.query_blocks import COLUMNS, FEW_ROWS
from tatten.ops.cuda.ragged_launches import BlockClass, heads_per_kv
from tatten.ops.mixed_batch import MixedCall
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.states import accumulator_dtype

HOPPER_M, HOPPER_N = 128, 128  # the largest tile of the pages kernel
NEAR_BYTES = 1 << 24  # of a sequence's keys and values, which an L2 cache holds beside others


def list_sizes(call: MixedCall, few: BlockClass, many: BlockClass, on_hopper: bool) -> dict[str, Any]:
    """Return the sizes that the lists of blocks are made for, by the names of the kernels' arguments.

    `on_hopper`: the pages kernel attends, whose programs may take whole work tiles.
    """
    tile_bytes = 2 * call.key.shape[2] * HOPPER_N * call.key.shape[3] * call.key.element_size()  # of all kv heads
    return {
        "n_tokens": call.query.shape[0],
        "batch": call.batch,
        "kv_len": call.kv_len,
        "kv_heads": call.key.shape[2],
        "heads_per_kv": heads_per_kv(call),
        "few": few.room,
        "many": many.room,
        "SEQUENCES": power_of_2(call.batch + 1),
        "TILES": tuple((x.tiles.block_m, x.tiles.block_n) for x in (few, many)),
        "few_programs": few.programs,
        "many_programs": many.programs,
        "far_tiles": ceil_div(NEAR_BYTES, tile_bytes),
        "BLOCK": 256,
        "WHOLE": on_hopper,
    }


def slot_rows(few: BlockClass, many: BlockClass) -> int:
    """Return the rows of partial states that the programs leave at most."""
    return few.slots * FEW_ROWS + many.slots * many.tiles.block_m


def combine_programs(few: BlockClass, many: BlockClass, kv_heads: int) -> int:
    """Count the programs that combine shares of work tiles, as `combine_shares` numbers them."""
    counts = (min(x.room * kv_heads, x.programs) for x in (few, many))
    return sum(n * parts for n, parts in zip(counts, (1, many.tiles.block_m // FEW_ROWS), strict=True))


def writes_of(call: MixedCall, few: BlockClass, many: BlockClass) -> tuple[Dense, ...]:
    """Return the layouts of out, lse, scratch, blocks, ends, and the partials."""
    query, (n_tokens, q_heads, _), value_dim = call.query, call.query.shape, call.value.shape[3]
    acc, rows, room = accumulator_dtype(query.dtype), slot_rows(few, many), few.room + many.room
    return (
        Dense.of((n_tokens, q_heads, value_dim), query.dtype),
        Dense.of((n_tokens, q_heads), acc),
        Dense.of((2, 2, power_of_2(call.batch + 1)), torch.int32),
        Dense.of((room, COLUMNS), torch.int32),
        Dense.of((room,), torch.int64),
        Dense.of((rows, value_dim), acc),
        Dense.of((rows,), acc),
    )
