"""Plans of launches of the decode kernel: tiles, grid and outputs. Calling a plan launches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.combine import INTERPRETED, Combine, Partials, plan_combine
from tatten.ops.cuda.decode_grid import choose_tiles, deepened, plan_tile_space
from tatten.ops.cuda.heuristics import Tiles, capability
from tatten.ops.cuda.kernels.decode import HEAD_SCALE, KEY_SCALE, NO_SCALE, _decode_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.mask_plan import MaskPlan, plan_mask
from tatten.ops.cuda.recording import recorder
from tatten.ops.cuda.tile_space import TileSpace
from tatten.ops.cuda.tma import LEAST_BYTES, Tiling, key_tiling, takes_tma
from tatten.ops.sizes import power_of_2
from tatten.ops.states import accumulator_dtype
from tatten.ops.variant import PLAIN, AttentionVariant

Rope = tuple[()] | tuple[Tensor, Tensor]  # for the queries, for the keys


@dataclass(frozen=True)
class SegmentLaunch:
    """A launch of the decode kernel for tensors of the layout that it was planned for."""

    tile_space: TileSpace
    launch: Launch
    writes: tuple[Dense, Dense, Dense, Dense]  # out, lse, partial_out, partial_lse
    mask: MaskPlan
    key_tiles: Tiling | None
    value_tiles: Tiling | None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        kv_lens: Tensor | None = None,
        block_mask: Tensor | None = None,
        variant: AttentionVariant = PLAIN,
        row_groups: Tensor | None = None,
        rope: Rope = (),
    ) -> Partials:
        # The kernels need contiguous tensors here. A copy is one more launch.
        optional = kv_lens, block_mask, row_groups, variant.sinks, variant.key_scale, variant.value_scale
        kv_lens, block_mask, row_groups, *of_variant = [x if x is None else x.contiguous() for x in optional]
        mask, block_mask = self.mask(attn_mask, kv_lens, block_mask)
        out, lse, partial_out, partial_lse = allocate(query, *self.writes)
        self.launch(
            query,
            key,
            value,
            key if self.key_tiles is None else self.key_tiles(key),
            value if self.value_tiles is None else self.value_tiles(value),
            mask,
            kv_lens,
            block_mask,
            row_groups,
            *of_variant,
            rope,
            out,
            lse,
            partial_out,
            partial_lse,
        )
        lens = kv_lens if self.tile_space.has_lens else None
        return Partials(out, lse, partial_out, partial_lse, lens, block_mask, row_groups)


def _constant_stride(x: Tensor) -> int:
    """Return the stride of the length to compile for, which saves registers, or 0 to pass it at run time.

    A large stride may depend on the batch, as for `[length, batch, heads, head_dim]`, and would compile for each batch.
    """
    return x.stride(2) if x.stride(2) < 1 << 14 else 0


def _scale_kind(scale: Tensor | None) -> int:
    if scale is None:
        return NO_SCALE
    return HEAD_SCALE if scale.dim() == 1 else KEY_SCALE


def plan_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    kv_lens: Tensor | None,
    scale: float,
    block_mask: Tensor | None = None,
    variant: AttentionVariant = PLAIN,
    row_groups: Tensor | None = None,
    rope: Rope = (),
    *,
    latent: bool = False,
    out_dtype: torch.dtype | None = None,
    whole: bool = True,
    max_and_sum: bool = False,
    follows: bool = False,
    tiles: Tiles | None = None,
    programs: int | None = None,
    pdl: bool = True,
    batch_invariant: bool = False,
) -> SegmentLaunch:
    """Plan one launch of the kernel for checked inputs.

    Args:
        query, key, value, attn_mask, kv_lens, scale, variant: as in `tatten.decode_attention`.
        block_mask: the block list of `attn_mask`, if it was found before, as it always is with `row_groups`.
        row_groups: the result of `tatten::row_groups`, if each sequence may read any row of the keys.
        rope: `query_rope` and `key_rope` of latent attention, if it has them.
        latent: `key` and `value` are one tensor, the latents.
        out_dtype: the dtype of whole states; default: that of the queries.
        whole: there are no other segments, so that whole work tiles are final.
        max_and_sum: partial states have maximum and sum instead of their lse, because of an additive mask elsewhere.
        follows: the launch just before wrote nothing that this one reads, and nothing on the stream did since. The two
            then run side by side.
        tiles, programs: default: the choice of `tatten.ops.cuda.heuristics`.
        batch_invariant: add up each sequence in an order that does not depend on the rest of the batch, nor on
            `programs`, given the same `tiles`.
        pdl: let this launch begin before the one before ends (programmatic dependent launch), if the GPU can.
    """
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len, value_dim = *key.shape[1:3], value.shape[3]
    window, softcap, sinks, key_scale, value_scale = variant
    window = None if window is None else min(window, kv_len + q_len)  # longer is the same, and could overflow
    has_lens, has_row_groups = kv_lens is not None, row_groups is not None

    mask = plan_mask(query, key, attn_mask, kv_lens, block_mask, window, has_row_groups)
    copies = any(x is not None and not x.is_contiguous() for x in (block_mask, row_groups))
    follows = follows and mask.find_blocks is None and not copies
    given: dict[str, Any] = {
        "window": window,
        "has_lens": has_lens,
        "has_row_groups": has_row_groups,
        "batch_invariant": batch_invariant,
    }
    if tiles is None:
        tiles = choose_tiles(query, key, value, mask, latent=latent, **given)
    space = plan_tile_space(
        query, key, value, mask, tiles, whole=whole, max_and_sum=max_and_sum, programs=programs, **given
    )
    if not batch_invariant:  # the number of programs depends on the batch
        tiles = deepened(tiles, space, query)
    block_d, block_dv = (max(16, power_of_2(dim)) for dim in (head_dim, value_dim))
    rope_dim = rope[1].shape[3] if rope else 0
    # TMA reads whole tiles, so it is used if every key counts: without a mask, or in its run of full blocks.
    every_key = mask.has_block_list or (not has_lens and window is None)
    hopper = not INTERPRETED and capability(query.device) >= (9, 0)
    kv_bytes = sum(x.numel() * x.element_size() for x in (key, value))
    tma = hopper and every_key and not batch_invariant and kv_bytes >= LEAST_BYTES
    tma = tma and takes_tma(key) and takes_tma(value)
    if tma and (recording := recorder.get()) is not None and not recording.tma:
        # Kernels that Inductor defines do without TMA: Inductor would make descriptors anew in each call.
        recording.without_tma += kv_bytes
        tma = False
    run_n = max(tiles.block_n, space.block_n)
    pdl = pdl and hopper
    acc_dtype = accumulator_dtype(query.dtype)
    pair = (2,) if space.max_and_sum else ()
    launch = Launch(
        _decode_kernel,
        (space.programs,),
        {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": pdl},
        query_strides=query.stride(),
        key_strides=key.stride(),
        value_strides=value.stride(),
        rope_strides=tuple(x.stride() for x in rope),
        mask_strides=mask.strides,
        block_list_stride=space.block_list_stride,
        scale=scale,
        softcap=softcap or 0.0,
        window=window or 0,
        kv_len=kv_len,
        n_groups=space.groups,
        work_tiles=space.work_tiles,
        seqs_per_kv=space.seqs_per_kv,
        kv_heads=kv_heads,
        heads_per_kv=q_heads // kv_heads,
        q_len=q_len,
        q_blocks=space.q_blocks,
        programs=space.programs,
        batch=batch,
        KEY_S=_constant_stride(key),
        VALUE_S=_constant_stride(value),
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        ROPE_DIM=rope_dim,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_R=max(16, power_of_2(rope_dim)),
        BLOCK_M=tiles.block_m,
        BLOCK_N=space.block_n,
        RUN_N=run_n,
        GROUPS=power_of_2(space.groups),
        MASK=mask.kind,
        HAS_LENS=has_lens,
        HAS_BLOCK_LIST=mask.has_block_list,
        WINDOW=window is not None,
        ROWS=has_row_groups,
        CHUNK=space.chunk,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        KEY_SCALE=_scale_kind(key_scale),
        VALUE_SCALE=_scale_kind(value_scale),
        LATENT=latent,
        HALVES=latent and query.dtype != value.dtype,
        MAX_AND_SUM=space.max_and_sum,
        FINAL=whole,
        POSITIVE_SCALE=scale > 0,
        INT64_OFFSETS=max(x.stride(3) * x.shape[3] for x in (query, key, value)) >= 1 << 31,
        INT64_TILES=space.int64_tiles(batch),
        TMA=tma,
        PDL=pdl,
        WAIT_LAST=follows,
        FLOAT32_DOTS=INTERPRETED,  # bf16 dots are garbage in the interpreter (Triton 3.6 to 3.9)
    )
    return SegmentLaunch(
        space,
        launch,
        writes=(
            Dense.of((batch, q_heads, q_len, value_dim), (out_dtype or query.dtype) if whole else acc_dtype),
            Dense.of((batch, q_heads, q_len, *(() if whole else pair)), acc_dtype),
            Dense.of((space.slots, tiles.block_m, value_dim), acc_dtype),
            Dense.of((space.slots, tiles.block_m, *pair), acc_dtype),
        ),
        mask=mask,
        key_tiles=key_tiling(key, run_n, block_d) if tma else None,
        value_tiles=key_tiling(value, run_n, block_dv) if tma else None,
    )


@dataclass(frozen=True)
class DecodeAttention:
    """Computes `tatten::decode_attention` for tensors of the layout that it was planned for."""

    segment: SegmentLaunch
    combine: Combine

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        kv_lens: Tensor | None,
        block_mask: Tensor | None = None,
        variant: AttentionVariant = PLAIN,
    ) -> tuple[Tensor, Tensor]:
        state = self.combine(self.segment(query, key, value, attn_mask, kv_lens, block_mask, variant))
        return state.out, state.lse


def plan_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    kv_lens: Tensor | None,
    scale: float,
    block_mask: Tensor | None = None,
    variant: AttentionVariant = PLAIN,
    **options: Any,
) -> DecodeAttention:
    """Plan the two launches for checked inputs; `options` are those of `plan_segment`."""
    segment = plan_segment(query, key, value, attn_mask, kv_lens, scale, block_mask, variant, **options)
    return DecodeAttention(segment, plan_combine(query, value.shape[3], segment.tile_space))
