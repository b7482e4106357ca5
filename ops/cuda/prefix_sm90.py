"""Plan a launch of the prefix kernel for Hopper: many packed queries, one long K and V without a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.heuristics import seqs_and_rows
from tatten.ops.cuda.kernels.prefix_sm90 import BLOCK_M, BLOCK_N, START_REGS, _prefix_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.sm90 import DTYPES, key_tiling, strides_in_units
from tatten.ops.cuda.tma import Tiling
from tatten.ops.sizes import ceil_div


@dataclass(frozen=True)
class PrefixAttention:
    """A launch of the prefix kernel; `plan_prefix_attention` describes its results."""

    launch: Launch
    key_tiles: Tiling
    value_tiles: Tiling
    writes: tuple[Dense, Dense, Dense, Dense]  # in the order of the results

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, row_groups: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, lse, partial_out, partial_lse = allocate(query, *self.writes)
        tiles = self.key_tiles(key), self.value_tiles(value)
        self.launch(query, *tiles, row_groups, out, lse, partial_out, partial_lse)
        return out, lse, partial_out, partial_lse


def plan_prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    programs: int,
    row_groups: Tensor | None = None,
    *,
    split: bool = True,
) -> PrefixAttention:
    """Plan the states of work tiles that one program computes, and the partial states of those that several share.

    This is FlashAttention-3 (arXiv 2407.08608) on the schedule of `tests/support/stream_k_schedule.py`, whose work
    tiles have `BLOCK_M` packed queries (heads of a kv head, times sequences, times q_length) and whose tiles are
    `BLOCK_N` keys.

    Args:
        query: `[batch, q_heads, q_length, head_dim]`, bfloat16 or float16 on a GPU of capability 9.0, head_dim 64 or
            128 and dense, other strides any.
        key: `[kv_batch, kv_heads, kv_length, head_dim]`, in the dtype of `query`, not empty; kv_batch divides batch,
            kv_heads q_heads. Its address and all strides but the last, which is 1, are multiples of 16 bytes.
        value: like `key`, with its own strides.
        scale: factor of the scores, above 0.
        programs: the number of programs launched, at least 1. An SM runs one at a time.
        row_groups: the result of `tatten::row_groups`, dense, if each sequence may read any row of the keys; kv_batch
            then is any number.
        split: True if several programs may share a work tile, as in `TileSpace.split`; else there is no memory for
            partial states.

    Returns:
        A plan to call with query, key, value and row_groups of this layout. It returns `out` `[batch, q_heads,
        q_length, head_dim]` and `lse` `[batch, q_heads, q_length]`, written for whole work tiles only, and for the
        others `partial_out` `[2 * programs, BLOCK_M, head_dim]` and `partial_lse` `[2 * programs, BLOCK_M]` in the
        slots of the schedule's visits; all float32, the rest uninitialised.

    Raises:
        ValueError: the kernel does not support the dtypes, the head_dim or its stride, or `scale` is not above 0.
        AssertionError: `key` or `value` is empty or not aligned (from Triton).
    """
    batch, q_heads, q_len, dim = query.shape
    _, kv_heads, kv_len, _ = key.shape
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        got = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise ValueError(f"`query`, `key` and `value` must all be bfloat16 or all float16, got {got}")
    if dim not in (64, 128) or key.shape[3] != dim or value.shape != key.shape or query.stride(3) != 1:
        got = f"shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        raise ValueError(f"`query`, `key` and `value` must have one dense head_dim of 64 or 128, got {got}")
    if not scale > 0:
        raise ValueError(f"`scale` must be above 0, got {scale}")
    heads_per_kv = q_heads // kv_heads
    seqs_per_kv, kv_rows = seqs_and_rows(query, key, row_groups is not None)
    q_blocks = ceil_div(heads_per_kv * seqs_per_kv * q_len, BLOCK_M)
    aligned, (strides,) = strides_in_units(query)
    launch = Launch(
        _prefix_kernel,
        (programs,),
        {"num_warps": 4, "maxnreg": START_REGS, "launch_pdl": True},
        query_b=strides[0],
        query_h=strides[1],
        query_l=strides[2],
        scale=scale,
        kv_len=kv_len,
        work_tiles=(kv_rows if row_groups is None else 1) * kv_heads * q_blocks,
        seqs_per_kv=seqs_per_kv,
        kv_heads=kv_heads,
        heads_per_kv=heads_per_kv,
        q_len=q_len,
        q_blocks=q_blocks,
        programs=programs,
        batch=batch,
        DIM=dim,
        ALIGNED=aligned,
        ROWS=row_groups is not None,
    )
    slots = 2 * programs if split else 0
    shapes = tuple(query.shape), tuple(query.shape[:3]), (slots, BLOCK_M, dim), (slots, BLOCK_M)
    out, lse, partial_out, partial_lse = (Dense.of(shape, torch.float32) for shape in shapes)
    key_tiles, value_tiles = (key_tiling(x, BLOCK_N, dim) for x in (key, value))
    return PrefixAttention(launch, key_tiles, value_tiles, (out, lse, partial_out, partial_lse))
