"""`tatten::index_scores` on CUDA: one launch, whose programs read the keys once for a block of queries.

Calls in float64, and those whose queries don't fit in shared memory, are computed in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tatten.ops.cpu.index_scores import scores_of_keys
from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.gpu import has_early_launches, has_float8, has_large_shared_memory, multiprocessors
from tatten.ops.cuda.launcher import Launch, by_layout, on_device_of
from tatten.ops.index_scores_validation import check_index_scores
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.validation import check_no_grad

Scores = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]

KEY_BYTES, QUERY_BYTES = 32768, 65536  # of a tile, and of a program's queries, in shared memory
LARGE_MEMORY, SMALL_MEMORY = 112 << 10, 96 << 10  # of a program; two of `LARGE_MEMORY` fit on an SM of Hopper
WIDE_TILE = 2048  # products of a tile in float32, which are made without tensor cores: with more, registers spill
PER_SM = 2  # programs


class IndexTiles(NamedTuple):
    """A program's tile: `queries` with `block_h` heads of `block_d` dims each, by `block_n` keys."""

    queries: int
    block_h: int
    block_d: int
    block_n: int
    num_warps: int
    num_stages: int


def index_scores(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    scale: float = 1.0,
    attn_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
) -> Tensor:
    # A plan may stem from tensors without gradients.
    check_no_grad("index_scores", query=query, key=key, weights=weights, attn_mask=attn_mask, key_scale=key_scale)
    tensors = query, key, weights, attn_mask, key_scale
    return on_device_of(query, plan_index_scores(*tensors, scale), *tensors)


@dataclass(frozen=True)
class IndexScores:
    """Computes the op for tensors of the layout that it was planned for."""

    launch: Launch
    writes: Dense

    def __call__(
        self, query: Tensor, key: Tensor, weights: Tensor, attn_mask: Tensor | None, key_scale: Tensor | None
    ) -> Tensor:
        (out,) = allocate(query, self.writes)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.view(torch.uint8)
        self.launch(query, key, weights, attn_mask, key_scale, out)
        return out


@by_layout
def plan_index_scores(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    attn_mask: Tensor | None,
    key_scale: Tensor | None,
    scale: float,
    tiles: IndexTiles | None = None,
) -> Scores:
    """Plan the op. `tiles` replaces the choice of `choose_tiles`, for sweeps."""
    check_index_scores(query, key, weights, attn_mask, key_scale)
    batch, q_len, heads, dim = query.shape
    kv_len = key.shape[1]
    tiles = tiles or choose_tiles(query, key)
    if tiles is None:
        return lambda query, key, weights, *optional: scores_of_keys(query, key, weights, scale, *optional)
    writes = Dense.of((batch, q_len, kv_len), torch.float32)
    if 0 in writes.shape:
        return lambda query, *others: query.new_empty(writes.shape, dtype=torch.float32)

    from tatten.ops.cuda.combine import INTERPRETED
    from tatten.ops.cuda.kernels.index_scores import _index_scores_kernel

    q_blocks, n_tiles = ceil_div(q_len, tiles.queries), ceil_div(kv_len, tiles.block_n)
    splits = min(n_tiles, max(1, PER_SM * multiprocessors(query.device) // (batch * q_blocks)))
    mask = None if attn_mask is None else attn_mask.expand(writes.shape)
    pdl = not INTERPRETED and has_early_launches(query.device)
    launch = Launch(
        _index_scores_kernel,
        (batch * q_blocks * splits,),
        {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": pdl},
        strides=(
            query.stride(),
            key.stride(),
            weights.stride(),
            (0, 0, 0) if mask is None else mask.stride(),
            (0, 0) if key_scale is None else key_scale.stride()[:2],
        ),
        scale=scale,
        kv_len=kv_len,
        q_len=q_len,
        q_blocks=q_blocks,
        splits=splits,
        n_tiles=n_tiles,
        HEADS=heads,
        DIM=dim,
        BLOCK_H=tiles.block_h,
        BLOCK_D=tiles.block_d,
        BLOCK_N=tiles.block_n,
        QUERIES=tiles.queries,
        PDL=pdl,
        FLOAT32_DOTS=INTERPRETED,  # bf16 dots are garbage in the interpreter (Triton 3.6 to 3.9)
    )
    return IndexScores(launch, writes)


def choose_tiles(query: Tensor, key: Tensor) -> IndexTiles | None:
    """Choose the tile of a program; None if the kernel does not support these queries and keys.

    The choice depends on neither the batch nor the number of keys, so a sequence's scores don't, to the bit.
    """
    _, q_len, heads, dim = query.shape
    block_h, block_d = max(16, power_of_2(heads)), max(16, power_of_2(dim))
    row_bytes, narrow = block_d * query.element_size(), key.element_size() == 1
    wide = query.dtype == torch.float32
    most_columns = min(64 if wide else 128 if narrow else 256, QUERY_BYTES // row_bytes)
    unreadable = key.dtype == torch.float8_e4m3fn and not has_float8(query.device)
    if query.dtype == torch.float64 or block_h > most_columns or unreadable:
        return None
    queries = min(power_of_2(max(1, q_len)), most_columns // block_h)
    columns, large = queries * block_h, has_large_shared_memory(query.device)
    free = (LARGE_MEMORY if large else SMALL_MEMORY) - columns * row_bytes
    if free < 16 * row_bytes:
        return None
    if wide:
        fitting = power_of_2(free // row_bytes + 1) // 2
        return IndexTiles(queries, block_h, block_d, min(128, WIDE_TILE // columns, fitting), 8, 2)
    block_n = max(16, min(128 if large and columns <= 64 and not narrow else 64, KEY_BYTES // row_bytes))
    return IndexTiles(queries, block_h, block_d, block_n, 4, min(5, free // (block_n * block_d * key.element_size())))
