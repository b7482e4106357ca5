"""Levels of a tree in one launch: the choice of the levels, and the plan of the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.combine import INTERPRETED, Partials
from tatten.ops.cuda.decode_grid import Place
from tatten.ops.cuda.gpu import has_early_launches, multiprocessors
from tatten.ops.cuda.gpu_rates import GpuRates, LevelsTile
from tatten.ops.cuda.heuristics import packed_q_rows
from tatten.ops.cuda.kernels.levels import _levels_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.tile_space import TileSpace
from tatten.ops.cuda.tuning import gpu_rates
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.states import accumulator_dtype


@dataclass(frozen=True)
class LevelsLaunch:
    """A launch of the levels kernel for tensors of the layout that it was planned for."""

    tile_space: TileSpace  # one tile for each work tile
    launch: Launch
    writes: tuple[Dense, Dense, Dense]  # out, lse, and an empty tensor in the place of partials

    def __call__(self, call: AttentionCall, *levels: KeyValue) -> Partials:
        """Return the states of all sequences. There are no partials."""
        out, lse, no_partials = allocate(call.query, *self.writes)
        self.launch(call.query, tuple([x.key for x in levels]), tuple([x.value for x in levels]), out, lse)
        return Partials(out, lse, no_partials, no_partials)


def plan_levels(call: AttentionCall, levels: Sequence[KeyValue], tile: LevelsTile, place: Place) -> LevelsLaunch:
    """Plan attention to nested levels, the finest last: the batch of each divides that of the next.

    Args:
        call: a checked call, whose `scale` is above 0.
        levels: the segments to launch together, without masks, all with equally many kv heads.
        tile: the tile that `choose_levels` chose.
        place: the place of the launch among others.
    """
    query, keys, values = call.query, [x.key for x in levels], [x.value for x in levels]
    batch, q_heads, q_len, head_dim = query.shape
    rows, kv_heads, value_dim = keys[-1].shape[0], keys[-1].shape[1], values[-1].shape[3]
    packed = packed_q_rows(query, keys[-1])
    block_m, block_n = _block_m(packed, tile), tile.block_n
    q_blocks = ceil_div(packed, block_m)
    pdl = not INTERPRETED and has_early_launches(query.device)
    work_tiles = rows * kv_heads * q_blocks
    sizes = 1, work_tiles, 0, kv_heads, batch // rows, q_blocks, work_tiles, block_m, block_n
    launch = Launch(
        _levels_kernel,
        (work_tiles,),
        {"num_warps": tile.warps, "num_stages": 3, "launch_pdl": pdl},
        query_strides=query.stride(),
        key_strides=tuple(key.stride() for key in keys),
        value_strides=tuple(value.stride() for value in values),
        kv_lens=tuple(key.shape[2] for key in keys),
        rows_below=tuple(rows // key.shape[0] for key in keys),
        scale=call.score_scale,
        seqs_per_kv=batch // rows,
        kv_heads=kv_heads,
        heads_per_kv=q_heads // kv_heads,
        q_len=q_len,
        q_blocks=q_blocks,
        LEVELS=len(keys),
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=max(16, power_of_2(head_dim)),
        BLOCK_DV=max(16, power_of_2(value_dim)),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        MAX_AND_SUM=place.max_and_sum,
        PDL=pdl,
        WAIT_LAST=place.beside_previous,
        FLOAT32_DOTS=INTERPRETED,
    )
    shape, acc_dtype = (batch, q_heads, q_len), accumulator_dtype(query.dtype)
    pair = (2,) if place.max_and_sum else ()
    return LevelsLaunch(
        TileSpace(*sizes, max_and_sum=place.max_and_sum),
        launch,
        (
            Dense.of((*shape, value_dim), query.dtype if place.final else acc_dtype),
            Dense.of((*shape, *pair), acc_dtype),
            Dense.of((0,), acc_dtype),
        ),
    )


@dataclass(frozen=True)
class Levels:
    """Segments for one launch, coarse to fine, by their numbers."""

    segments: tuple[int, ...]
    tile: LevelsTile


def choose_levels(query: Tensor, keys: dict[int, Tensor]) -> Levels | None:
    """Choose the levels and the tile with the least estimated time for all segments; None if one launch saves no time.

    `keys` are the keys of the segments that the kernel supports, by the number of each segment.
    """
    best, most, rates = None, 0.0, gpu_rates(query.device)
    by_rows = sorted(keys, key=lambda i: keys[i].shape[0])
    candidates = [i for i in by_rows if packed_q_rows(query, keys[i]) >= rates.levels_least_queries]
    for n, i in enumerate(candidates):
        finest = keys[i]
        for tile in _tiles(packed_q_rows(query, finest), rates):
            chosen: tuple[int, ...] = (i,)
            saved = (
                _alone_us(query, finest, rates) - _together_us(query, finest, finest, tile) - _launch_us(query, rates)
            )
            for j in reversed(candidates[:n]):
                nested = keys[chosen[0]].shape[0] % keys[j].shape[0] == 0 and keys[j].shape[1] == finest.shape[1]
                saved_by_level = _alone_us(query, keys[j], rates) - _together_us(query, keys[j], finest, tile)
                if nested and saved_by_level > 0:
                    chosen, saved = (j, *chosen), saved + saved_by_level
            if len(chosen) > 1 and saved > most:
                best, most = Levels(chosen, tile), saved
    return best


def _block_m(packed: int, tile: LevelsTile) -> int:
    return min(tile.block_m, max(16, power_of_2(packed)))


def _tiles(packed: int, rates: GpuRates) -> list[LevelsTile]:
    """Return the tiles that `packed` queries fill; the first one shrinks with them."""
    first, *others = rates.levels_tiles
    return [first, *(tile for tile in others if tile.block_m <= packed)]


def _flops(query: Tensor, kv_len: int) -> float:
    """Count the products of all queries; values are assumed to be as wide as keys."""
    batch, q_heads, q_len, head_dim = query.shape
    return 4.0 * batch * q_heads * q_len * head_dim * kv_len


def _launch_us(query: Tensor, rates: GpuRates) -> float:
    """Estimate the time of a launch without that of its keys: its states are written and read again."""
    return rates.launch_us + 8 * query.numel() / rates.read_bytes_per_us


def _alone_us(query: Tensor, key: Tensor, rates: GpuRates) -> float:
    """Estimate the time of a launch for one level."""
    read_us = 2 * key.numel() * key.element_size() / rates.read_bytes_per_us
    return max(_flops(query, key.shape[2]) / rates.level_flops_per_us, read_us) + _launch_us(query, rates)


def _together_us(query: Tensor, key: Tensor, finest: Tensor, tile: LevelsTile) -> float:
    """Estimate the time that a level adds to a launch for levels down to `finest`."""
    _, kv_heads, kv_len, head_dim = key.shape
    packed, blocks = packed_q_rows(query, finest), ceil_div(kv_len, tile.block_n)
    block_m = _block_m(packed, tile)
    q_blocks = ceil_div(packed, block_m)
    work_tiles = finest.shape[0] * kv_heads * q_blocks
    products = _flops(query, blocks * tile.block_n) * q_blocks * block_m / packed
    read = 2 * work_tiles * kv_len * head_dim * key.element_size()
    waves = ceil_div(work_tiles, tile.per_sm * multiprocessors(query.device))
    bound_us = max(products / tile.flops_per_us, read / tile.l2_bytes_per_us, waves * blocks * tile.block_us)
    return bound_us + waves * tile.level_us
