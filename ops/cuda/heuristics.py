"""Sizes of tiles, and numbers of programs that share them.

Tiles belong to the kernels: they were measured on an H200 or an H100, and are used on all GPUs with as much shared
memory. `page_tiles` replaces some of them for keys in pages. Numbers of programs follow from the rates of each GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.row_groups import group_size, most_groups
from tatten.ops.sizes import ceil_div, power_of_2

MANY_KEYS = 1 << 30


@dataclass(frozen=True)
class Tiles:
    """Sizes that a kernel is compiled for.

    Attributes:
        block_m: the packed queries of a work tile.
        block_n: the keys of a tile. With a block list these are tiles of the run of full blocks, at least one block
            each; the other blocks come one by one.
        num_warps: the warps of a program.
        num_stages: the pipeline stages of its loop.
        per_sm: the programs that share an SM.
        registers: the most registers of a thread, if ptxas may not choose. More programs then fit into an SM.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int = 1
    registers: int | None = None


def tiles_for(
    q_rows: int,
    dim: int,
    element_size: int,
    kv_len: int = MANY_KEYS,
    *,
    has_block_list: bool = False,
    masked: bool = False,
    narrow: bool = False,
    page: int = 0,
    large_shared_memory: bool = True,
) -> Tiles:
    """Choose the fastest tiles that do not spill registers, as measured on an H200.

    Args:
        q_rows: the packed queries that read one kv head.
        dim: head_dim, padded to a power of two.
        element_size: the bytes of an element of the query.
        kv_len: the number of keys. With few keys a program mostly waits, and an SM needs many programs.
        has_block_list: the blocks of a mask are listed.
        masked: the mask itself is read, or key positions are computed for a window. It is set for 8 bits with lengths
            too, as that saves registers.
        narrow: keys and values are in 8 bits.
        page: the keys of a page, or 0 if keys are in order. Addresses of pages take registers.
        large_shared_memory: a program may have 227 KiB.
    """
    most_rows, paged = max(16, power_of_2(q_rows)), page > 0
    if element_size == 4:
        # With a block list at 128, 2 stages spill in Triton 3.9.
        stages = 3 if has_block_list and dim <= 128 and large_shared_memory and not paged else 2
        return Tiles(min(most_rows, 64, max(16, 2048 // dim)), 32, 8, stages)
    if 128 < dim <= 256 and q_rows <= 16 and large_shared_memory and not narrow:
        # 2 stages take up to 1.6 times as long.
        return Tiles(16, 64, 8 if paged or (has_block_list and masked) else 4, 3)
    if dim > 128:
        return Tiles(min(most_rows, (4096 if paged else 8192) // dim), 64 if dim <= 256 else 32, 8, 2)
    if q_rows <= 16 and narrow and paged:
        return Tiles(16, 64, 8, 4) if has_block_list else Tiles(16, 128, 4, 3, 2)
    if q_rows <= 16 and paged and (masked or (page < 128 and dim > 64)):
        return Tiles(16, 64, 4, 3, 2)
    if q_rows <= 16 and narrow:
        per_sm = 3 if dim <= 64 else 2
        return Tiles(16, 64, 4, 4, per_sm) if has_block_list or masked else Tiles(16, 128, 4, 3, per_sm)
    if kv_len <= 64 and not (has_block_list or masked or narrow):
        # 33 us for 512 sequences of 32 keys and 8 heads, where 4 warps take 80
        return Tiles(16, 32, 1, 2, 8) if q_rows <= 16 else Tiles(min(most_rows, 64), 32, 4, 2, 4)
    if q_rows <= 16:
        stages = 3 if dim <= 64 else 2  # at 64, 2 take 7% longer
        return Tiles(16, 64, 4, 2, 2) if masked and not has_block_list else Tiles(16, 128, 4, stages, 2)
    if masked and not has_block_list:
        return Tiles(min(most_rows, 64), 64, 8, 2)
    if q_rows <= 64 or paged:
        return Tiles(64, 64, 8, 3) if has_block_list and q_rows > 32 else Tiles(min(most_rows, 64), 64, 4, 3, 2)
    return Tiles(128, 64, 8, 3)


def latent_tiles_for(
    q_rows: int,
    rank: int,
    element_size: int,
    keys_per_sm: float,
    *,
    halves: bool,
    has_block_list: bool,
    large_shared_memory: bool,
    paged: bool = False,
) -> Tiles:
    """Choose tiles for latents, as measured on an H200 at rank 512. A tile of latents is both keys and values.

    Args:
        q_rows, rank, has_block_list, large_shared_memory: as for `tiles_for`.
        element_size: the bytes of an element of the latents.
        keys_per_sm: the keys of all sequences, divided by the number of SMs.
        halves: queries are in float32, and read in two halves.
        paged: latents are in pages, so that their addresses take registers. Not measured: these tiles spill least.
    """
    if element_size == 4 or not large_shared_memory:
        return Tiles(16, 32, 8 if element_size == 4 else 4, 2)
    if paged:
        return Tiles(16 if q_rows <= 16 else 32, 64, 8, 3)
    if q_rows > 16:
        if rank > 256 and (has_block_list or halves):
            # 128 heads, 1 x 32768: 62.4 us, and 73.6 with 64 rows, which spill, and whose float32 mask has no room;
            # 8 x 4096: 75.5 and 76.0; 32 heads: 29.3 and 45.1.
            return Tiles(32, 64, 8, 3)
        return Tiles(64, 64, 8 if rank > 128 else 4, 2 if rank > 256 else 3)
    if keys_per_sm <= 128 and not has_block_list:
        return Tiles(16, 128, 8, 2)  # 1 x 8192: 13.2 us, and 16.4 with 64 keys; 1 x 131072: 60 and 51 us
    return Tiles(16, 64, 4, 3)


def seqs_and_rows(query: Tensor, key: Tensor, has_row_groups: bool = False) -> tuple[int, int]:
    """Count the sequences that share a kv_row, and the kv_rows. With row groups, both are upper bounds."""
    batch, q_heads, q_len, _ = query.shape
    kv_batch, kv_heads = key.shape[:2]
    if not has_row_groups:
        return batch // kv_batch, kv_batch
    size = group_size(batch, kv_batch, q_heads // kv_heads * q_len)
    return size, most_groups(batch, kv_batch, size)


def packed_q_rows(query: Tensor, key: Tensor, has_row_groups: bool = False) -> int:
    """Count the queries that read one kv_row and kv head: query heads, times sequences, times positions."""
    return query.shape[1] // key.shape[1] * seqs_and_rows(query, key, has_row_groups)[0] * query.shape[2]


def splitting_pays(work_tiles: int, tiles: int, tile_us: float, n_states: int, most: int, rates: GpuRates) -> bool:
    """Return True if equal shares for all programs are estimated to save more time than partial states cost.

    Args:
        work_tiles, tiles, most: as for `programs_for`.
        tile_us: the time of a program for a tile.
        n_states: the number of output states. A state that may have partial states takes longer.
        rates: the rates of the GPU.
    """
    whole_us = ceil_div(work_tiles, most) * tiles * tile_us
    return work_tiles * tiles / most * tile_us + rates.partial_state_us * n_states < whole_us


def combining_pays(work_tiles: int, tiles: int, tile_us: float, most: int, rates: GpuRates) -> bool:
    """Return True if equal shares are estimated to save more time than the launch that combines them takes.

    Only the device knows how many of the `tiles` a mask or lengths leave. The estimate is for all of them, where equal
    shares of equal lengths save most. With an eighth of 512 keys in use, whole work tiles take 0.75 to 0.85 of the time
    (H200, 1 to 16 sequences of 8 or 32 kv heads). With all of 128 to 512 keys in use, the choice takes 0.64 to 1.05.

    Args:
        work_tiles, tiles, tile_us, most, rates: as for `splitting_pays`.
    """
    share = min(work_tiles, most) / most
    beside_us = tile_us * (share if share > 0.9 else rates.tile_beside_few * share)
    whole_us = ceil_div(work_tiles, most) * tiles * max(beside_us, rates.tile_alone * tile_us, rates.least_tile_us)
    return work_tiles * tiles / most * max(tile_us, rates.least_tile_us) + rates.combine_us < whole_us


def programs_for_whole_tiles(work_tiles: int, tiles: int, most: int) -> int:
    """Choose the number of programs so that each does equally many whole work tiles.

    Short work tiles get a program each: new programs start while others wait, so that loads overlap (133 and 145 us for
    512 sequences of 256 keys and 8 heads).
    """
    even = ceil_div(work_tiles, ceil_div(work_tiles, most))
    return even if tiles > 4 and work_tiles % even == 0 else work_tiles


def programs_for(work_tiles: int, tiles: int, most: int) -> int:
    """Choose the number of programs for work tiles of `tiles` tiles each, at most `most`.

    Up to a tenth fewer are launched if that cuts each work tile into fewer partials.
    """
    if work_tiles >= most:
        even = ceil_div(work_tiles, ceil_div(work_tiles, most))  # equally many whole work tiles for each program
        return even if even > 0.9 * most else most
    even = work_tiles * min(most // work_tiles, tiles)
    return even if even > 0.9 * most or tiles * work_tiles < most else most


def latent_programs_for(work_tiles: int, tiles: int, most: int) -> int:
    """Choose the number of programs of the latent_sm90 kernel, as `programs_for` does for other kernels.

    A partial state has 128 KiB. If work tiles are cut, half of the programs are faster than all of them with fewer than
    4 tiles each. The combine reads 64 partial states at once.
    """
    programs = programs_for(work_tiles, tiles, min(most, max(64, work_tiles, work_tiles * tiles // 4)))
    rounded = programs - programs % (64 * work_tiles)
    return rounded if rounded > 0.9 * programs else programs
