"""Plan a launch of the latent kernel for Hopper: many packed queries, latents of 512 + 64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.combine import Partials, plan_combine
from tatten.ops.cuda.decode import DecodeAttention
from tatten.ops.cuda.gpu import multiprocessors
from tatten.ops.cuda.heuristics import latent_programs_for, programs_for
from tatten.ops.cuda.kernels.latent_few_sm90 import FEW, _latent_few_kernel
from tatten.ops.cuda.kernels.latent_few_sm90 import START_REGS as FEW_START_REGS
from tatten.ops.cuda.kernels.latent_sm90 import START_REGS, _latent_kernel
from tatten.ops.cuda.kernels.latent_tile import RANK, ROPE
from tatten.ops.cuda.kernels.latent_visits import ALL, BLOCK_M, BLOCK_N, FIRST, LEAST_GROUPS, LISTED
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.mask_plan import MaskPlan
from tatten.ops.cuda.sm90 import key_tiling, strides_in_units
from tatten.ops.cuda.tile_space import TileSpace
from tatten.ops.cuda.tma import Tiling
from tatten.ops.sizes import ceil_div, power_of_2


@dataclass(frozen=True)
class LatentLaunch:
    """A launch of the latent kernel."""

    tile_space: TileSpace
    launch: Launch
    mask: MaskPlan
    latent_tiles: Tiling
    rope_tiles: Tiling
    writes: tuple[Dense, ...]  # out, lse, partial_out, partial_lse

    def __call__(self, call: AttentionCall, stored: KeyValue) -> Partials:
        kv_lens, block_mask = [None if x is None else x.contiguous() for x in (stored.kv_lens, stored.block_mask)]
        _, block_mask = self.mask(stored.attn_mask, kv_lens, block_mask)
        out, lse, partial_out, partial_lse = allocate(call.query, *self.writes)
        assert stored.rope is not None
        tiles = self.latent_tiles(stored.key), self.rope_tiles(stored.rope)
        self.launch(call.query, call.query_rope, *tiles, kv_lens, block_mask, out, lse, partial_out, partial_lse)
        lens = kv_lens if self.tile_space.has_lens else None
        return Partials(out, lse, partial_out, partial_lse, lens, block_mask)


def plan_latents_sm90(call: AttentionCall, mask: MaskPlan) -> DecodeAttention:
    """Plan the two launches for a checked call that the kernels support."""
    segment = plan_latent_segment(call, mask)
    return DecodeAttention(segment, plan_combine(call.query, RANK, segment.tile_space))


def plan_latent_segment(call: AttentionCall, mask: MaskPlan) -> LatentLaunch:
    """Plan one launch for the latents of a checked call."""
    query, query_rope, (stored,) = call.query, call.query_rope, call.segments
    latent, key_rope = stored.key, stored.rope
    assert query_rope is not None
    assert key_rope is not None
    has_lens = stored.kv_lens is not None and not mask.has_block_list
    batch, heads, q_len, _ = query.shape
    kv_len = latent.shape[2]
    few = heads * q_len <= FEW
    kernel, block_m, start_regs = (
        (_latent_few_kernel, FEW, FEW_START_REGS) if few else (_latent_kernel, BLOCK_M, START_REGS)
    )
    q_blocks = ceil_div(heads * q_len, block_m)
    sms = multiprocessors(query.device)
    programs_of = programs_for if few else latent_programs_for
    programs = sms if has_lens else programs_of(batch * q_blocks, ceil_div(kv_len, BLOCK_N), sms)
    space = TileSpace(
        mask.groups,
        batch // mask.groups * q_blocks,
        kv_len,
        1,
        1,
        q_blocks,
        programs,
        block_m,
        BLOCK_N,
        has_lens=has_lens,
        has_block_list=mask.has_block_list,
        lanes=q_blocks,
    )
    aligned, (query_strides, rope_strides) = strides_in_units(query, query_rope)
    launch = Launch(
        kernel,
        (programs,),
        {"num_warps": 4, "maxnreg": start_regs, "launch_pdl": True},
        query_b=query_strides[0],
        query_h=query_strides[1],
        query_l=query_strides[2],
        rope_b=rope_strides[0],
        rope_h=rope_strides[1],
        rope_l=rope_strides[2],
        scale=call.score_scale,
        block_list_stride=space.block_list_stride,
        kv_len=kv_len,
        n_groups=space.groups,
        q_blocks=q_blocks,
        heads=heads,
        q_len=q_len,
        batch=batch,
        programs=programs,
        ALIGNED=aligned,
        GROUPS=1 if space.groups == 1 else max(LEAST_GROUPS, power_of_2(space.groups)),
        KEYS=LISTED if space.has_block_list else FIRST if has_lens else ALL,
    )
    writes = (
        Dense.of((batch, heads, q_len, RANK), call.out_dtype or query.dtype),
        Dense.of((batch, heads, q_len), torch.float32),
        Dense.of((space.slots, block_m, RANK), torch.float32),
        Dense.of((space.slots, block_m), torch.float32),
    )
    tilings = key_tiling(latent, BLOCK_N, RANK // 2), key_tiling(key_rope, BLOCK_N, ROPE)
    return LatentLaunch(space, launch, mask, *tilings, writes)
