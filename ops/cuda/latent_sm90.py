"""Planning a launch of the latent kernel for Hopper: many packed queries, latents of 512 + 64 without a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.combine import Partials, TileSpace
from tatten.ops.cuda.heuristics import multiprocessors, programs_for
from tatten.ops.cuda.kernels.latent_sm90 import BLOCK_M, BLOCK_N, RANK, ROPE, START_REGS, _latent_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.sm90 import key_tiling, strides_in_units
from tatten.ops.cuda.tma import Tiling
from tatten.ops.sizes import ceil_div


@dataclass(frozen=True)
class LatentSegment:
    """A launch of the latent kernel."""

    tile_space: TileSpace
    launch: Launch
    latent_tiles: Tiling
    rope_tiles: Tiling
    writes: tuple[Dense, ...]  # out, lse, partial_out, partial_lse

    def __call__(self, query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor) -> Partials:
        out, lse, partial_out, partial_lse = allocate(query, *self.writes)
        tiles = self.latent_tiles(latent), self.rope_tiles(key_rope)
        self.launch(query, query_rope, *tiles, out, lse, partial_out, partial_lse)
        return Partials(out, lse, partial_out, partial_lse)


def plan_latent_segment(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, scale: float, out_dtype: torch.dtype
) -> LatentSegment:
    batch, heads, q_len, _ = query.shape
    kv_len = latent.shape[2]
    q_blocks = ceil_div(heads * q_len, BLOCK_M)
    work_tiles = batch * q_blocks
    programs = programs_for(work_tiles, ceil_div(kv_len, BLOCK_N), multiprocessors(query.device))
    space = TileSpace(1, work_tiles, kv_len, 1, 1, q_blocks, programs, BLOCK_M, BLOCK_N, q_blocks_first=True)
    aligned, (of_query, of_rope) = strides_in_units(query, query_rope)
    launch = Launch(
        _latent_kernel,
        (programs,),
        {"num_warps": 4, "maxnreg": START_REGS, "launch_pdl": True},
        query_b=of_query[0],
        query_h=of_query[1],
        query_l=of_query[2],
        rope_b=of_rope[0],
        rope_h=of_rope[1],
        rope_l=of_rope[2],
        scale=scale,
        kv_len=kv_len,
        work_tiles=work_tiles,
        heads=heads,
        q_len=q_len,
        batch=batch,
        programs=programs,
        ALIGNED=aligned,
    )
    writes = (
        Dense.of((batch, heads, q_len, RANK), out_dtype),
        Dense.of((batch, heads, q_len), torch.float32),
        Dense.of((space.slots, BLOCK_M, RANK), torch.float32),
        Dense.of((space.slots, BLOCK_M), torch.float32),
    )
    tilings = key_tiling(latent, BLOCK_N, RANK // 2), key_tiling(key_rope, BLOCK_N, ROPE)
    return LatentSegment(space, launch, *tilings, writes)
