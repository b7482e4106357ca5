"""Levels of a tree that one launch does together: which ones, and the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.combine import INTERPRETED, Partials, TileSpace
from tatten.ops.cuda.heuristics import capability, multiprocessors, packed_q_rows
from tatten.ops.cuda.kernels.levels import _levels_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.states import accumulator_dtype

# Estimates for an H200, in units per us: products of the levels kernel and of one for a level alone, bytes of the L2
# and of memory. And what a launch takes beyond them: to start, to wait for its first loads, and to store.
LEVELS_FLOPS, LEVEL_FLOPS, L2_BYTES, BYTES = 450e6, 700e6, 5e6, 4.4e6
LAUNCH_US, BLOCK_US = 5.0, 0.6  # BLOCK_US: of `BLOCK_N` keys, one block after the other
BLOCK_M, BLOCK_N, PER_SM = 64, 32, 2
LEAST_QUERIES = 32  # that share a row of the finest level: with fewer, ancestors are read again for too few


@dataclass(frozen=True)
class LevelsLaunch:
    """A launch of the levels kernel for tensors of the layout that it was planned for."""

    tile_space: TileSpace  # of one tile for each work tile
    launch: Launch
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Partials:
        """The states of all sequences, all whole."""
        out = query.new_empty(self.out_shape, dtype=self.dtype)
        lse = query.new_empty(self.lse_shape, dtype=self.dtype)
        self.launch(query, tuple(keys), tuple(values), out, lse)
        none = out.new_empty(0)
        return Partials(out, lse, none, none)


def plan_levels(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
    *,
    max_and_sum: bool = False,
    follows: bool = False,
    pdl: bool = True,
) -> LevelsLaunch:
    """Plan attention to nested levels, the finest last: the batch of each divides that of the next.

    Args:
        query, keys, values, scale: as `tatten.bifurcated_attention` takes them, without masks; `scale` is above 0, and
            all levels have equally many kv heads.
        max_and_sum, follows, pdl: as for `tatten.ops.cuda.decode.plan_segment`.
    """
    batch, q_heads, q_len, head_dim = query.shape
    rows, kv_heads, value_dim = keys[-1].shape[0], keys[-1].shape[1], values[-1].shape[3]
    packed = packed_q_rows(query, keys[-1])
    block_m = min(BLOCK_M, max(16, power_of_2(packed)))
    q_blocks = ceil_div(packed, block_m)
    pdl = pdl and not INTERPRETED and capability(query.device) >= (9, 0)
    work_tiles = rows * kv_heads * q_blocks
    sizes = 1, work_tiles, 0, kv_heads, batch // rows, q_blocks, work_tiles, block_m, BLOCK_N
    launch = Launch(
        _levels_kernel,
        (work_tiles,),
        {"num_warps": 4, "num_stages": 3, "launch_pdl": pdl},
        query_strides=query.stride(),
        key_strides=tuple(key.stride() for key in keys),
        value_strides=tuple(value.stride() for value in values),
        kv_lens=tuple(key.shape[2] for key in keys),
        rows_below=tuple(rows // key.shape[0] for key in keys),
        scale=scale,
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
        BLOCK_N=BLOCK_N,
        MAX_AND_SUM=max_and_sum,
        PDL=pdl,
        WAIT_LAST=follows,
        FLOAT32_DOTS=INTERPRETED,
    )
    shape = batch, q_heads, q_len
    pair = (2,) if max_and_sum else ()
    return LevelsLaunch(
        TileSpace(*sizes, max_and_sum=max_and_sum),
        launch,
        (*shape, value_dim),
        (*shape, *pair),
        accumulator_dtype(query.dtype),
    )


def choose_levels(query: Tensor, keys: dict[int, Tensor]) -> tuple[int, ...]:
    """Choose segments for one launch, coarse to fine, so that the estimate for all is least; none if that is no gain.

    `keys` are those of the segments that the kernel can take, by the number of each.
    """
    best: tuple[int, ...] = ()
    gain = 0.0
    by_rows = sorted(keys, key=lambda i: keys[i].shape[0])
    for n, i in enumerate(by_rows):
        finest = keys[i]
        if packed_q_rows(query, finest) < LEAST_QUERIES:
            break
        chosen: tuple[int, ...] = (i,)
        saved = _alone_us(query, finest) - _together_us(query, finest, finest)
        for j in reversed(by_rows[:n]):
            nested = keys[chosen[0]].shape[0] % keys[j].shape[0] == 0 and keys[j].shape[1] == finest.shape[1]
            more = _alone_us(query, keys[j]) - _together_us(query, keys[j], finest)
            if nested and more > 0:
                chosen, saved = (j, *chosen), saved + more
        if len(chosen) > 1 and saved > gain:
            best, gain = chosen, saved
    return best


def _flops(query: Tensor, key: Tensor) -> float:
    """Those of all queries; values are taken to be as wide as keys."""
    batch, q_heads, q_len, head_dim = query.shape
    return 4.0 * batch * q_heads * q_len * head_dim * key.shape[2]


def _alone_us(query: Tensor, key: Tensor) -> float:
    """Estimate a launch for one level, its states and reading them again included."""
    states = 8 * query.numel()
    return (
        max(_flops(query, key) / LEVEL_FLOPS, 2 * key.numel() * key.element_size() / BYTES) + states / BYTES + LAUNCH_US
    )


def _together_us(query: Tensor, key: Tensor, finest: Tensor) -> float:
    """Estimate what a level adds to a launch for levels down to `finest`; that one itself brings the launch."""
    _, kv_heads, kv_len, head_dim = key.shape
    work_tiles = finest.shape[0] * kv_heads * ceil_div(packed_q_rows(query, finest), BLOCK_M)
    read = 2 * work_tiles * kv_len * head_dim * key.element_size()
    waves = ceil_div(work_tiles, PER_SM * multiprocessors(query.device))
    one_by_one = waves * ceil_div(kv_len, BLOCK_N) * BLOCK_US
    launch = LAUNCH_US + 8 * query.numel() / BYTES if key is finest else 0.0
    return max(_flops(query, key) / LEVELS_FLOPS, read / L2_BYTES, one_by_one) + launch
