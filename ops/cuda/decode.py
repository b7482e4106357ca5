"""Plans of launches of the decode kernel: tiles, grid and outputs. Calling a plan launches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.combine import INTERPRETED, Combine, Partials, plan_combine
from tatten.ops.cuda.decode_grid import Place, choose_tiles, deepened, plan_tile_space, resized, shortened
from tatten.ops.cuda.gpu import has_early_launches, has_tma
from tatten.ops.cuda.heuristics import Tiles
from tatten.ops.cuda.kernels import tile_scheduler
from tatten.ops.cuda.kernels.decode import HEAD_SCALE, KEY_SCALE, NO_SCALE, _decode_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.mask_plan import MaskPlan, plan_mask
from tatten.ops.cuda.recording import recorder
from tatten.ops.cuda.tile_space import TileSpace
from tatten.ops.cuda.tma import Tiling, key_tiling, takes_tma
from tatten.ops.cuda.tuning import gpu_rates
from tatten.ops.page_runs import LEVELS
from tatten.ops.sizes import power_of_2
from tatten.ops.states import State, accumulator_dtype

ALONE = Place()
WHOLE, OWN_PART, SHARED_PART = 0, tile_scheduler.OWN_PART.value, tile_scheduler.SHARED_PART.value


@dataclass(frozen=True)
class SegmentLaunch:
    """A launch of the decode kernel for tensors of the layout that it was planned for."""

    tile_space: TileSpace
    launch: Launch
    writes: tuple[Dense, Dense, Dense, Dense]  # out, lse, partial_out, partial_lse
    mask: MaskPlan
    key_tiles: Tiling | None
    value_tiles: Tiling | None
    sinks: bool
    part: int

    def __call__(self, call: AttentionCall, stored: KeyValue) -> Partials:
        key, value, attn_mask, kv_lens, block_mask, row_groups, key_scale, value_scale, rope, _, table, shared = stored
        optional = kv_lens, block_mask, row_groups, call.sinks if self.sinks else None, shared if self.part else None
        # The kernels need contiguous tensors here. A copy is one more launch.
        kv_lens, block_mask, row_groups, sinks, shared = [x if x is None else x.contiguous() for x in optional]
        # Scales in pages may have any strides.
        key_scale, value_scale = [
            x if x is None or (table is not None and x.dim() == 3) else x.contiguous() for x in (key_scale, value_scale)
        ]
        mask, block_mask = self.mask(attn_mask, kv_lens, block_mask, table)
        out, lse, partial_out, partial_lse = allocate(call.query, *self.writes)
        self.launch(
            call.query,
            key,
            value,
            key if self.key_tiles is None else self.key_tiles(_tiled(key, table)),
            value if self.value_tiles is None else self.value_tiles(_tiled(value, table)),
            mask,
            kv_lens,
            block_mask,
            row_groups,
            sinks,
            key_scale,
            value_scale,
            () if rope is None else (call.query_rope, rope),
            () if table is None else (table,) if shared is None else (table, shared),
            out,
            lse,
            partial_out,
            partial_lse,
        )
        lens = kv_lens if self.tile_space.has_lens else None
        return Partials(out, lse, partial_out, partial_lse, lens, block_mask, row_groups, shared)


def _tiled(x: Tensor, table: Tensor | None) -> Tensor:
    """Return keys or values as TMA reads them: pools in the user's layout, with heads last."""
    return x if table is None else x.transpose(1, 2)


def _constant_stride(x: Tensor) -> int:
    """Return the stride over keys to compile for, which saves registers, or 0 to pass it at run time.

    A large stride may depend on the batch, as for `[length, batch, heads, head_dim]`, and would compile for each batch.
    """
    return x.stride(2) if x.stride(2) < 1 << 14 else 0


def scale_kind(scale: Tensor | None) -> int:
    if scale is None:
        return NO_SCALE
    return HEAD_SCALE if scale.dim() == 1 else KEY_SCALE


def _page_strides(stored: KeyValue) -> tuple[Any, ...]:
    """Return the strides of a block table, the number of pages, and the strides of scales of keys in pages."""
    if stored.block_table is None:
        return ()
    scales = [x.stride() if x is not None and x.dim() == 3 else () for x in (stored.key_scale, stored.value_scale)]
    return (*stored.block_table.stride(), stored.key.shape[0], *scales)


def plan_segment(
    call: AttentionCall,
    stored: KeyValue,
    place: Place = ALONE,
    *,
    tiles: Tiles | None = None,
    programs: int | None = None,
    part: int = WHOLE,
    pdl: bool = True,
) -> SegmentLaunch:
    """Plan one launch of the kernel for a segment of a checked call.

    Args:
        call: the call. With `batch_invariant` each sequence is added up in an order that does not depend on the rest of
            the batch, nor on `programs`, given the same `tiles`.
        stored: the segment. With row groups, its mask comes with a block mask.
        place: the place of the launch among others.
        tiles, programs: default: the choice of `tatten.ops.cuda.heuristics`.
        part: with shared pages, the keys to attend to: `OWN_PART`, each sequence's own part, or `SHARED_PART`, the
            runs of row groups, for which `stored.row_groups` is the result of `tatten::shared_pages`. Else `WHOLE`.
        pdl: let this launch begin before the previous one ends (programmatic dependent launch), if the GPU can.
    """
    query, key, value, rope = call.query, stored.key, stored.value, stored.rope
    batch, q_heads, q_len, head_dim = query.shape
    states = LEVELS * batch if part == SHARED_PART else batch  # one for each entry
    kv_heads, kv_len, value_dim, table = key.shape[1], stored.kv_len, value.shape[3], stored.block_table
    # A longer window has the same effect, and could overflow.
    window = None if call.window is None else min(call.window, kv_len + q_len)
    call = call._replace(window=window)
    sinks = place.sinks and call.sinks is not None

    mask = plan_mask(query, stored, window)
    scales = [x for x in (stored.key_scale, stored.value_scale) if part and x is not None and x.dim() == 1]
    auxiliary = (stored.block_mask, stored.row_groups, stored.kv_lens if part else None, *scales)
    copies = any(x is not None and not x.is_contiguous() for x in auxiliary)
    beside_previous = place.beside_previous and mask.find_blocks is None and not copies
    kv_bytes = stored.kv_batch * kv_heads * kv_len * (head_dim + value_dim) * key.element_size()
    chosen = choose_tiles(call, stored, mask) if tiles is None else tiles
    space = plan_tile_space(call, stored, mask, chosen, place, programs)
    if tiles is None and programs is None and place.final and not call.batch_invariant:
        chosen = shortened(chosen, space, query, kv_bytes, paged=table is not None)
        chosen = resized(chosen, call, stored, space)
        space = plan_tile_space(call, stored, mask, chosen, place, programs)
    tiles = chosen
    if not call.batch_invariant:  # the number of programs depends on the batch
        tiles = deepened(tiles, space, query)
    block_d, block_dv = (max(16, power_of_2(dim)) for dim in (head_dim, value_dim))
    rope_dim = 0 if rope is None else rope.shape[3]
    rope_strides = () if rope is None or call.query_rope is None else (call.query_rope.stride(), rope.stride())
    # TMA reads whole tiles, so it is used where every key counts: without a mask, or in its run of full blocks.
    # With lengths it reads the tiles before the last key's tile; for latents this was not measured.
    narrowed = (window, stored.attn_mask, stored.kv_lens if call.latent else None)
    every_key = mask.has_block_list or (part != SHARED_PART and all(x is None for x in narrowed))
    large = kv_bytes >= gpu_rates(query.device).tma_least_bytes
    tma = not INTERPRETED and has_tma(query.device) and large and not call.batch_invariant
    run_n = max(tiles.block_n, space.block_n)
    # The run of full blocks begins at any block, so that a longer tile of it may cross from one page to the next.
    box_per_tile = table is None or (key.shape[2] >= run_n == space.block_n and not part)
    tma = tma and every_key and box_per_tile and takes_tma(key) and takes_tma(value)
    if tma and (recording := recorder.get()) is not None and not recording.tma:
        # Kernels that Inductor defines don't use TMA: it would make descriptors in each call.
        recording.without_tma += kv_bytes
        tma = False
    assert space.programs % space.lanes == 0
    pdl = pdl and not INTERPRETED and has_early_launches(query.device)
    acc_dtype = accumulator_dtype(query.dtype)
    pair = (2,) if space.max_and_sum else ()
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": pdl}
    if tiles.registers is not None:
        options["maxnreg"] = tiles.registers
    launch = Launch(
        _decode_kernel,
        (space.programs,),
        options,
        strides=(query.stride(), key.stride(), value.stride(), rope_strides, mask.strides, _page_strides(stored)),
        block_list_stride=space.block_list_stride,
        scale=call.score_scale,
        softcap=call.softcap or 0.0,
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
        batch=states,
        lanes=space.lanes,
        KV_S=(_constant_stride(key), _constant_stride(value)),
        DIMS=(head_dim, value_dim, rope_dim),
        SPACE=space.constants,
        RUN_N=run_n,
        WINDOW=window is not None,
        SOFTCAP=call.softcap is not None,
        SCALES=(scale_kind(stored.key_scale), scale_kind(stored.value_scale)),
        PAGE=0 if table is None else key.shape[2],
        PART=part,
        LATENT=call.latent,
        FINAL=place.final,
        POSITIVE_SCALE=call.score_scale > 0,
        INT64_OFFSETS=max(x.stride(3) * x.shape[3] for x in (query, key, value)) >= 1 << 31,
        INT64_TILES=space.int64_tiles(batch),
        TMA=tma,
        PDL=pdl,
        WAIT_LAST=beside_previous,
    )
    return SegmentLaunch(
        space,
        launch,
        writes=(
            Dense.of(
                (states, q_heads, q_len, value_dim), (call.out_dtype or query.dtype) if place.final else acc_dtype
            ),
            Dense.of((states, q_heads, q_len, *(() if place.final else pair)), acc_dtype),
            Dense.of((space.slots, tiles.block_m, value_dim), acc_dtype),
            Dense.of((space.slots, tiles.block_m, *pair), acc_dtype),
        ),
        mask=mask,
        key_tiles=key_tiling(_tiled(key, table), run_n, block_d, table is not None) if tma else None,
        value_tiles=key_tiling(_tiled(value, table), run_n, block_dv, table is not None) if tma else None,
        sinks=sinks,
        part=part,
    )


@dataclass(frozen=True)
class DecodeAttention:
    """Computes attention to one segment, for calls of the layout that it was planned for."""

    segment: Callable[[AttentionCall, KeyValue], Partials]
    combine: Combine

    def __call__(self, call: AttentionCall) -> State:
        state = self.combine(self.segment(call, call.segments[0]))
        return state.out, state.lse


def plan_attention(call: AttentionCall, **options: Any) -> DecodeAttention:
    """Plan the two launches for a checked call of one segment; `options` are those of `plan_segment`."""
    (stored,) = call.segments
    segment = plan_segment(call, stored, **options)
    return DecodeAttention(segment, plan_combine(call.query, stored.value.shape[3], segment.tile_space))
