"""Of what size tiles are, and how many programs share them: as measured on an H200."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.sizes import ceil_div, power_of_2


@dataclass(frozen=True)
class Tiles:
    """What is compiled: packed query rows and keys of a tile, warps, pipeline stages; and programs on each SM.

    Where a mask is listed `block_n` is of its run of full blocks, at least one block; the others come one by one.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int = 1


def tiles_for(
    rows: int,
    dim: int,
    element_size: int,
    *,
    listed: bool = False,
    masked: bool = False,
    float8: bool = False,
    roomy: bool = True,
) -> Tiles:
    """The tiles for `rows` packed queries and a padded head_dim: as measured on an H200, and without spills.

    `roomy`: a program may have 227 KiB of shared memory. `listed`: the blocks of a mask are listed; `masked`: the mask
    itself is read, or places are computed for a window; `float8`: keys and values are. Their callers set `masked` for
    lengths too, which saves registers. `element_size` is that of the query.
    """
    at_most = max(16, power_of_2(rows))
    if element_size == 4:
        return Tiles(min(at_most, 64, max(16, 2048 // dim)), 32, 8, 2)
    if 128 < dim <= 256 and rows <= 16 and roomy and not float8:
        return Tiles(16, 64, 8 if listed and masked else 4, 3)  # with 2 stages up to 1.6 times as long
    if dim > 128:
        return Tiles(min(at_most, 8192 // dim), 64 if dim <= 256 else 32, 8, 2)
    if rows <= 16 and float8:
        per_sm = 3 if dim <= 64 else 2
        return Tiles(16, 64, 4, 4, per_sm) if listed or masked else Tiles(16, 128, 4, 3, per_sm)
    if rows <= 16:
        stages = 3 if dim <= 64 else 2  # at 64, 2 take 7% longer
        return Tiles(16, 64, 4, 2, 2) if masked and not listed else Tiles(16, 128, 4, stages, 2)
    if masked and not listed:
        return Tiles(min(at_most, 64), 64, 8, 2)
    if rows <= 64:
        return Tiles(64, 64, 8, 3) if listed and rows > 32 else Tiles(min(at_most, 64), 64, 4, 3, 2)
    return Tiles(128, 64, 8, 3)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def roomy(device: torch.device) -> bool:
    """Whether a program may have 227 KiB of shared memory: datacentre GPUs since Hopper."""
    return capability(device)[0] in (9, 10)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; from (9, 0) on programs overlap and TMA fetches tiles, so also where we only compile."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def packed_rows(query: Tensor, key: Tensor) -> int:
    """The queries that read one row and kv head of `key`: heads of its group, sequences that share it, positions."""
    batch, q_heads, q_len, _ = query.shape
    return q_heads // key.shape[1] * (batch // key.shape[0]) * q_len


def programs_for(rows: int, tiles: int, most: int) -> int:
    """How many of at most `most` programs: rather a few less than leave each row to be merged from one part more."""
    if rows >= most:
        even = ceil_div(rows, ceil_div(rows, most))  # as many whole rows for each, if they divide
        return even if even > 0.9 * most else most
    even = rows * min(most // rows, tiles)
    return even if even > 0.9 * most or tiles * rows < most else most
