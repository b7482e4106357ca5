"""Tiles for keys in pages, or with lengths, that suit the numbers of work tiles and keys.

Short programs that share an SM hide the loads of the block table. A limit of registers makes room for them, or for the
combine, which else starts only when programs have ended. How many programs are best depends on the rate of the memory,
so each measured GPU has a table. Comments have microseconds with the tiles of `tiles_for` and with these, for bfloat16
and 32 query heads to 8 kv heads unless they name others, with Triton 3.6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import torch

from tatten.ops.cuda.gpu import device_name
from tatten.ops.cuda.heuristics import Tiles

OF_128, OF_64, OF_32_ROWS = Tiles(16, 64, 4, 3, 2), Tiles(16, 128, 4, 3, 2), Tiles(32, 64, 4, 3, 2)
OF_LARGE_PAGES = Tiles(16, 128, 4, 2, 2)  # of 128 keys or more, and head_dim 128
FOUR_PER_SM = Tiles(16, 32, 4, 3, 4, registers=128)
FEW_KEYS = Tiles(16, 32, 4, 4, 2)
ONE_PER_SM = Tiles(16, 64, 4, 4)


@dataclass(frozen=True)
class PageTiles:
    """Tiles for pages, and the launches that they are for; each range has its least and its greatest number.

    Attributes:
        tiles: the tiles.
        pages: the keys of a page.
        tiles_each: the tiles of a program, if all keys are in use, counted in tiles of `tiles_for`.
        work_tiles: the number of work tiles, divided by that of SMs.
        combine_fits: they need room for the combine beside the programs.
    """

    tiles: Tiles
    pages: tuple[float, float]
    tiles_each: tuple[float, float] = (0, inf)
    work_tiles: tuple[float, float] = (0, inf)
    combine_fits: bool = False


@dataclass(frozen=True)
class PageTable:
    """The tiles of a GPU for pages, by the tiles that they replace. The first that fit are taken.

    `most_lanes`: the most heads of a sequence that programs go through in step, see
    `tatten.ops.cuda.kernels.tile_scheduler`.
    """

    of_128: tuple[PageTiles, ...]
    of_64: tuple[PageTiles, ...]
    of_large_pages: tuple[PageTiles, ...] = ()
    most_lanes: int = 1


_OF_FEW_KEYS = (
    PageTiles(FEW_KEYS, (16, 32), tiles_each=(0, 4)),  # H100, 4 x 2048, page 16: 21.8, 19.8
    PageTiles(FEW_KEYS, (33, inf), tiles_each=(0, 4), combine_fits=True),  # H100, 4 of 256 to 2048, page 64: 13.4, 11.5
)
ON_H100 = PageTable(
    of_128=(
        *_OF_FEW_KEYS,
        PageTiles(FOUR_PER_SM, (16, 16), work_tiles=(2.9, inf)),  # 64 x 2048: 193.7, 188.7
        PageTiles(FOUR_PER_SM, (1, 15), work_tiles=(1.9, inf)),  # 64 x 2048, page 1: 203.7, 192.2
        PageTiles(Tiles(16, 64, 4, 2, 3, registers=160), (1, 15), tiles_each=(8, inf)),  # 16 x 8192, 1: 196.2, 189.5
    ),
    of_64=(
        # 64 x 2048: 108.1, 100.5; 56 heads, 1 x 65536: 336.2, 317.5
        PageTiles(FOUR_PER_SM, (64, 64), tiles_each=(16, inf)),
        # 56 heads, 1 x 65536: 347.1, 327.7
        PageTiles(Tiles(16, 64, 4, 3, 3, registers=160), (16, 16), tiles_each=(64, inf), work_tiles=(0, 1)),
    ),
)
ON_H200 = PageTable(
    of_128=(
        *_OF_FEW_KEYS,
        PageTiles(FEW_KEYS, (16, 16), tiles_each=(0, 8), work_tiles=(0, 0.2)),  # 2 x 8192: 28.2, 26.7
        # 32 heads each, 4 x 8192: 152.3, 135.0; 16 x 8192: 141.4, 136.3; 32 of 1024 to 65536: 478.5, 470.4
        PageTiles(FOUR_PER_SM, (8, 16), tiles_each=(8, inf)),
        PageTiles(FOUR_PER_SM, (8, 32), work_tiles=(2.9, inf)),  # 64 x 2048, page 32: 142.6, 134.1
        PageTiles(FOUR_PER_SM, (1, 7), tiles_each=(0, 80), work_tiles=(2.9, inf)),  # 64 x 2048, page 1: 161.7, 147.6
        # 16 x 8192, page 1: 153.4, 141.4; 32 of 1024 to 65536: 523.6, 486.5
        PageTiles(Tiles(16, 64, 4, 2, 3, registers=160), (1, 7), tiles_each=(8, inf)),
        # 16 x 8192: 133.1, 130.3; 32 heads each, 4 x 8192: 131.1, 128.6
        PageTiles(ONE_PER_SM, (64, 127), tiles_each=(60, inf), work_tiles=(0, 1)),
    ),
    of_64=(
        # 64 x 2048: pages of 16 84.7, 81.7; of 32 81.1, 76.9; of 64 80.1, 73.4
        PageTiles(Tiles(16, 64, 4, 3, 4, registers=128), (16, 64), tiles_each=(12, inf), work_tiles=(2.9, inf)),
        # 56 heads, 1 x 65536: 233.9, 219.1; 32 heads each, 4 x 4096: 40.1, 39.6
        PageTiles(Tiles(16, 64, 4, 3, 3, registers=160), (64, 64), tiles_each=(12, inf)),
        # 56 heads, 1 x 65536: 254.6, 239.5
        PageTiles(Tiles(16, 128, 4, 2, 3, registers=160), (16, 16), tiles_each=(64, inf), work_tiles=(0, 1)),
    ),
    # 16 x 16384: 261.0, 239.9; 16 x 8192: 131.5, 127.8; 4 x 4096: 25.3, 24.1; 16 of 1024 to 16384: 103.8, 104.8
    of_large_pages=(PageTiles(ONE_PER_SM, (128, inf), work_tiles=(0, 1)),),
    most_lanes=8,
)


def page_table(device: torch.device) -> PageTable:
    """Return the table of a device: that of an H200 for an H200 or GH200, and that of an H100 for all others."""
    return ON_H200 if "H200" in device_name(device) else ON_H100


def resized_tiles(
    tiles: Tiles,
    dims: set[int],
    page: int,
    table: PageTable,
    *,
    tiles_each: float,
    work_tiles: float,
    combine_fits: bool,
) -> Tiles:
    """Return the tiles for keys in pages, or with lengths.

    Args:
        tiles: the tiles of `tiles_for`.
        dims: the head_dims of keys and values.
        page: as for `tiles_for`.
        table: the tiles of the GPU.
        tiles_each, work_tiles: as for `PageTiles`.
        combine_fits: all programs of the combine fit beside those of this launch if these leave registers to them.
    """
    if dims == {128} and tiles == OF_32_ROWS and tiles_each < 16 and combine_fits:
        # H100, 32/1 heads, 4 x 8192: page 16 21.9, 18.8; in order 20.1, 15.9
        return replace(tiles, registers=192)
    if page == 0 or len(dims) > 1:
        return tiles
    choices = {(128, OF_128): table.of_128, (64, OF_64): table.of_64, (128, OF_LARGE_PAGES): table.of_large_pages}
    for choice in choices.get((max(dims), tiles), ()):
        sizes = (page, choice.pages), (tiles_each, choice.tiles_each), (work_tiles, choice.work_tiles)
        if all(least <= n <= most for n, (least, most) in sizes) and (combine_fits or not choice.combine_fits):
            return choice.tiles
    return tiles
