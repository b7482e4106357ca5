"""Plan calls with `indices`: a launch for each segment, which gathers its picked keys, and a combine of all states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.combine import INTERPRETED, combine_block
from tatten.ops.cuda.decode import scale_kind
from tatten.ops.cuda.gpu import has_early_launches, has_large_shared_memory, has_wgmma, multiprocessors
from tatten.ops.cuda.heuristics import Tiles
from tatten.ops.cuda.kernels.picked import _picked_kernel
from tatten.ops.cuda.kernels.picked_states import _combine_splits_kernel, _rest_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.recording import may_take_gluon
from tatten.ops.cuda.tma import takes_tma
from tatten.ops.row_groups import rows_of
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.states import State, accumulator_dtype

INVARIANT_PICKS = 512  # picked keys of a split with `batch_invariant`
GATHERED_TILES = Tiles(64, 64, 12, 2)  # tiles of the kernel for Hopper
MOST_TILES = 4  # tiles of a split, if programs share an SM: a program that ends early makes room for another
STATES_PER_TILE = 1500  # partial states that are stored and combined in the time in which a program gathers a tile


@dataclass(frozen=True)
class Split:
    """The picked keys of a segment, cut into splits of `tiles` tiles each."""

    tiles: int
    splits: int


@dataclass(frozen=True)
class AttendPicked:
    """Computes calls of the layout that it was planned for.

    Attributes:
        launches: one for each segment, in order.
        combine: None if there is one split, whose state is the result.
        rest: None without `rest_bias`.
        writes: out and lse of the result, then those of partial states.
    """

    launches: tuple[Launch, ...]
    combine: Launch | None
    rest: Launch | None
    writes: tuple[Dense, ...]

    def __call__(self, call: AttentionCall) -> State:
        out, lse, *partials = allocate(call.query, *self.writes)
        for launch, stored in zip(self.launches, call.segments, strict=True):
            launch(
                call.query,
                stored.key,
                stored.value,
                stored.indices,
                _bool_as_bytes(stored.attn_mask),
                _contiguous(stored.kv_lens),
                rows_of(call.query, stored),
                _contiguous(call.sinks),
                _contiguous(stored.key_scale),
                _contiguous(stored.value_scale),
                () if stored.rope is None else (call.query_rope, stored.rope),
                *(partials or (out, lse)),
            )
        if self.combine is not None:
            self.combine(*partials, out, lse)
        if self.rest is not None:
            stored = call.segments[0]
            lens, scale = _contiguous(stored.kv_lens), _contiguous(stored.value_scale)
            self.rest(stored.value, stored.indices, _bool_as_bytes(stored.attn_mask), lens, scale, out, lse)
        return out, lse


def _bool_as_bytes(mask: Tensor | None) -> Tensor | None:
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def _contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.contiguous()


def picked_tiles(call: AttentionCall, stored: KeyValue) -> Tiles:
    """Choose the query heads and the picked keys of a tile, as measured on an H100 and an H200.

    A program takes fewer heads if the programs then still run at once: each reads its rows from the L2.
    """
    query, heads, n_keys = call.query, call.query.shape[1] // stored.key.shape[1], _picked_length(call, stored)
    dim = power_of_2(max(query.shape[3], stored.value.shape[3]))
    block_m = max(16, min(64, power_of_2(heads)))
    if query.element_size() == 4 or not has_large_shared_memory(query.device):
        return Tiles(16, 32, 8 if dim > 256 else 4, 2)
    if dim <= 256:
        return Tiles(16, 128, 4, 2, 2) if dim <= 128 and heads <= 16 else Tiles(block_m, 64, 4, 2)
    tiles = query.shape[0] * query.shape[2] * ceil_div(n_keys, 64)
    while (
        not call.batch_invariant
        and block_m > 16
        and tiles * ceil_div(heads, block_m // 2) <= multiprocessors(query.device)
    ):
        block_m //= 2
    return Tiles(block_m, 64, 8, 2)


def _takes_sm90(call: AttentionCall) -> bool:
    """Return True if the kernel for Hopper can compute this. Its copies need the alignment that TMA needs."""
    query, query_rope, stored = call.query, call.query_rope, call.segments[0]
    latent, rope, mask = stored.key, stored.rope, stored.attn_mask
    return (
        call.latent
        and len(call.segments) == 1
        and not INTERPRETED
        and has_wgmma(query.device)
        and stored.indices is not None
        and call.index_block == 1
        and (call.window, call.softcap, call.sinks) == (None, None, None)
        and call.score_scale > 0
        and query.shape[1] >= 8  # fewer were not measured
        and query.dtype == latent.dtype
        and latent.element_size() == 2
        and query_rope is not None
        and rope is not None
        and (latent.shape[3], rope.shape[3]) == (512, 64)
        and query.stride(3) == query_rope.stride(3) == 1
        and (mask is None or (mask.element_size() == 1 and _mask_strides(call, stored)[2] == 0))
        and takes_tma(latent)
        and takes_tma(rope)
        and may_take_gluon("picked_sm90")
    )


def _picked_length(call: AttentionCall, stored: KeyValue) -> int:
    """Return the largest number of keys that a row of picks names."""
    return stored.key.shape[2] if stored.indices is None else stored.indices.shape[3] * call.index_block


def split_picks(call: AttentionCall, stored: KeyValue, tiles: Tiles) -> Split:
    """Cut the picked keys of a segment so that all programs fill the GPU once."""
    batch, q_heads, q_len, _ = call.query.shape
    kv_heads, n_tiles = stored.key.shape[1], max(1, ceil_div(_picked_length(call, stored), tiles.block_n))
    if call.batch_invariant:
        tiles_per_split = INVARIANT_PICKS // tiles.block_n
    else:
        work = batch * q_len * kv_heads * ceil_div(q_heads // kv_heads, tiles.block_m)
        splits = max(1, tiles.per_sm * multiprocessors(call.query.device) // (work * len(call.segments)))
        tiles_per_split = ceil_div(n_tiles, splits)
        if tiles.per_sm > 1:
            tiles_per_split = min(tiles_per_split, MOST_TILES)
        elif tiles is GATHERED_TILES:
            tiles_per_split = _cheapest_tiles(n_tiles, tiles_per_split, batch * q_heads * q_len)
    return Split(tiles_per_split, ceil_div(n_tiles, tiles_per_split))


def _cheapest_tiles(n_tiles: int, least: int, states: int) -> int:
    """Choose the tiles of a split that cost least, the partial states of several splits included."""

    def cost(tiles: int) -> float:
        splits = ceil_div(n_tiles, tiles)
        return tiles + (splits * states / STATES_PER_TILE if splits > 1 else 0)

    return min(range(least, n_tiles + 1), key=cost)


def plan_picked(call: AttentionCall, tiles: Tiles | None = None, split: Split | None = None) -> AttendPicked:
    """Plan a function that computes a valid call with `indices`, in any dtype but float64.

    `tiles` and `split` replace the choices of `picked_tiles` and `split_picks`, for sweeps. With `tiles` the kernel is
    always `_picked_kernel`.
    """
    query, (batch, q_heads, q_len, _) = call.query, call.query.shape
    value_dim = call.segments[0].value.shape[3]
    gathers = tiles is None and _takes_sm90(call)
    tiles = GATHERED_TILES if gathers else tiles
    chosen = [tiles or picked_tiles(call, x) for x in call.segments]
    splits = [
        split or split_picks(call, x, segment_tiles) for x, segment_tiles in zip(call.segments, chosen, strict=True)
    ]
    all_splits = sum(x.splits for x in splits)
    acc, pdl = accumulator_dtype(query.dtype), not INTERPRETED and has_early_launches(query.device)
    states = batch, q_heads, q_len
    writes = [Dense.of((*states, value_dim), call.out_dtype or query.dtype), Dense.of(states, acc)]
    combine = None
    if all_splits > 1:
        writes += [Dense.of((*states, all_splits, value_dim), acc), Dense.of((*states, all_splits, 2), acc)]
        partials = min(64, power_of_2(all_splits))
        block_dv, warps = combine_block(partials, 1, max(16, power_of_2(value_dim)))
        combine = Launch(
            _combine_splits_kernel,
            (batch * q_heads * q_len * ceil_div(value_dim, block_dv),),
            {"num_warps": warps, "launch_pdl": pdl},
            splits=all_splits,
            VALUE_DIM=value_dim,
            BLOCK_DV=block_dv,
            PARTIALS=partials,
            PDL=pdl,
        )
    launches, first = [], 0
    for stored, segment_tiles, segment_split in zip(call.segments, chosen, splits, strict=True):
        if gathers:
            from tatten.ops.cuda.picked_sm90 import plan_gather

            launches.append(plan_gather(call, segment_split.tiles, segment_split.splits, _mask_strides(call, stored)))
        else:
            launches.append(_plan_launch(call, stored, segment_tiles, segment_split, first, all_splits, pdl))
        first += segment_split.splits
    rest = None if call.rest_bias is None else _plan_rest(call, call.segments[0], call.rest_bias)
    return AttendPicked(tuple(launches), combine, rest, tuple(writes))


def _plan_launch(
    call: AttentionCall,
    stored: KeyValue,
    tiles: Tiles,
    split: Split,
    first_split: int,
    all_splits: int,
    pdl: bool,
) -> Launch:
    """Plan the launch for a segment, whose splits are numbered from `first_split` among `all_splits`."""
    query, key, value, rope = call.query, stored.key, stored.value, stored.rope
    batch, q_heads, q_len, head_dim = query.shape
    kv_batch, kv_heads, kv_len, _ = key.shape
    heads_per_kv = q_heads // kv_heads
    head_blocks = ceil_div(heads_per_kv, tiles.block_m)
    rope_strides = () if rope is None or call.query_rope is None else (call.query_rope.stride(), rope.stride())
    mask_strides = _mask_strides(call, stored)
    return Launch(
        _picked_kernel,
        (split.splits * kv_heads * head_blocks * batch * q_len,),
        {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": pdl},
        strides=(query.stride(), key.stride(), value.stride(), rope_strides, mask_strides, _index_strides(stored)),
        scale=call.score_scale,
        softcap=call.softcap or 0.0,
        n_picks=kv_len if stored.indices is None else stored.indices.shape[3],
        kv_len=kv_len,
        q_len=q_len,
        heads_per_kv=heads_per_kv,
        kv_heads=kv_heads,
        head_blocks=head_blocks,
        seqs_per_kv=max(1, batch // kv_batch),  # unused with row groups
        tiles=split.tiles,
        splits=split.splits,
        first_split=first_split,
        all_splits=all_splits,
        DIMS=(head_dim, value.shape[3], 0 if rope is None else rope.shape[3]),
        TILE=(tiles.block_m, tiles.block_n),
        INDEX_BLOCK=1 if stored.indices is None else call.index_block,
        SOFTCAP=call.softcap is not None,
        SCALES=(scale_kind(stored.key_scale), scale_kind(stored.value_scale)),
        LATENT=call.latent,
        POSITIVE_SCALE=call.score_scale > 0,
        MASK_HEADS=mask_strides[2] != 0,
        INT64_OFFSETS=max(x.stride(3) * x.shape[3] for x in (query, key, value)) >= 1 << 31,
        MAX_AND_SUM=all_splits > 1,
        PDL=pdl,
    )


def _plan_rest(call: AttentionCall, stored: KeyValue, rest_bias: float) -> Launch:
    batch, q_heads, q_len, _ = call.query.shape
    kv_batch, kv_heads, kv_len, value_dim = stored.value.shape
    assert stored.indices is not None
    return Launch(
        _rest_kernel,
        (batch * q_heads * q_len,),
        {"num_warps": 4},
        strides=(stored.value.stride(), _mask_strides(call, stored), _index_strides(stored)),
        rest=rest_bias,
        n_picks=stored.indices.shape[3],
        kv_len=kv_len,
        q_heads=q_heads,
        heads_per_kv=q_heads // kv_heads,
        q_len=q_len,
        seqs_per_kv=batch // kv_batch,
        VALUE_DIM=value_dim,
        BLOCK_DV=power_of_2(value_dim),
        BLOCK_N=32,
        INDEX_BLOCK=call.index_block,
        VALUE_SCALE=scale_kind(stored.value_scale),
    )


def _mask_strides(call: AttentionCall, stored: KeyValue) -> tuple[int, int, int, int, int]:
    """Return the strides of the mask over kv_rows, sequences, heads, queries and keys."""
    mask, (batch, q_heads, q_len, _) = stored.attn_mask, call.query.shape
    if mask is None:
        return (0, 0, 0, 0, 0)
    rows = mask.shape[0] if mask.dim() == 4 else 1
    b, h, n, s = mask.expand(rows, q_heads, q_len, stored.key.shape[2]).stride()
    return (0, 0, h, n, s) if rows == 1 else (0, b, h, n, s) if rows == batch else (b, 0, h, n, s)


def _index_strides(stored: KeyValue) -> tuple[int, int, int, int]:
    """Return the strides of the indices over sequences, kv heads, queries and picks."""
    if stored.indices is None:
        return (0, 0, 0, 0)
    b, h, n, s = stored.indices.stride()
    return b, 0 if stored.indices.shape[1] == 1 else h, n, s
