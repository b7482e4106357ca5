"""Lean Attention's stream-K schedule (arXiv 2405.10480, section IV-C) in plain Python, as the kernels compute it.

A *work tile* is the block of output states of one kv_row (a row of K and V), one kv head and one block of packed
queries. Its keys come in *tiles* of `block_n`. The *tile space* numbers the tiles of all work tiles consecutively. Each
program takes an equal, contiguous range of it, across the borders of work tiles. A program that computes a whole work
tile writes its output. Programs that compute parts of a work tile leave a partial state each, and these are combined.
With margins, each work tile counts as some tiles longer at each end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from tatten.ops.sizes import ceil_div


@dataclass(frozen=True)
class Visit:
    """A program's part of a work tile: tiles `start` to `stop - 1` of it.

    `slot` is the place of the partial state, or None if the program computes the whole work tile and writes the output.
    """

    work_tile: int
    start: int
    stop: int
    slot: int | None


@dataclass(frozen=True)
class Schedule:
    """The distribution of work tiles over programs.

    Attributes:
        tiles: the number of tiles of each work tile, at least 1, in the order of the tile space.
        programs: the number of programs launched.
        min_tiles: the least number of tiles of a program; fewer programs take part if there are too few tiles.
        most_margin: the most tiles by which a work tile counts as longer at each end.
    """

    tiles: tuple[int, ...]
    programs: int
    min_tiles: int = 1
    most_margin: int = 0

    def __post_init__(self) -> None:
        least = {"tiles": min(self.tiles, default=0), "programs": self.programs, "min_tiles": self.min_tiles}
        for name, value in least.items():
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")

    @classmethod
    def of_lengths(
        cls,
        lengths: Sequence[int],
        block_n: int,
        work_tiles: int,
        programs: int,
        min_tiles: int = 1,
        *,
        lanes: int = 1,
        most_margin: int = 0,
    ) -> Schedule:
        """Schedule kv_rows of `lengths` keys, each with `work_tiles` work tiles: kv heads times blocks of queries.

        The work tiles of an empty kv_row get one tile each, as their output has to be written. The tile space has
        `lanes` parts, and each of them has every `lanes`-th work tile of each kv_row.
        """
        lane = [max(1, ceil_div(length, block_n)) for length in lengths for _ in range(work_tiles // lanes)]
        return cls(tuple(lanes * lane), programs, min_tiles, most_margin)

    @cached_property
    def margin(self) -> int:
        """The tiles by which each work tile counts as longer at each end: none if work tiles have equal lengths.

        At most half of a program's tiles.
        """
        even = min(self.tiles) == max(self.tiles)
        return 0 if even else min(self.most_margin, sum(self.tiles) // (2 * self.programs))

    @property
    def total_tiles(self) -> int:
        """The size of the tile space, with margins."""
        return self._ends[-1]

    @property
    def active_programs(self) -> int:
        """The number of programs that take part: the first ones. The others do nothing."""
        return max(1, min(self.programs, self.total_tiles // self.min_tiles))

    @property
    def partial_states(self) -> int:
        """The number of partial states to be combined."""
        return sum(len(owners) for owners in map(self.programs_of, range(len(self.tiles))) if len(owners) > 1)

    def tiles_of_program(self, program: int) -> range:
        """The range of the tile space that `program` computes."""
        total, active = self.total_tiles, self.active_programs
        if program >= active:
            return range(total, total)
        return range(total * program // active, total * (program + 1) // active)

    def tiles_of_work_tile(self, work_tile: int) -> range:
        """The range of the tile space that makes up `work_tile`, without its margins."""
        stop = self._ends[work_tile] - self.margin
        return range(stop - self.tiles[work_tile], stop)

    def program_of(self, tile: int) -> int:
        """The program that computes `tile` of the tile space: the inverse of `tiles_of_program`."""
        return ((tile + 1) * self.active_programs - 1) // self.total_tiles

    def programs_of(self, work_tile: int) -> range:
        """The programs that share `work_tile`."""
        tiles = self.tiles_of_work_tile(work_tile)
        return range(self.program_of(tiles.start), self.program_of(tiles.stop - 1) + 1)

    def visits(self, program: int) -> list[Visit]:
        """The visits of `program`, in order.

        It leaves at most two partial states: slot `2 * program` is for a work tile that begins before its range or with
        it, and slot `2 * program + 1` for a later one that it does not finish.
        """
        mine = self.tiles_of_program(program)
        tile = mine.start
        visits = []
        while tile < mine.stop:
            work_tile = bisect_right(self._ends, tile)
            tiles = self.tiles_of_work_tile(work_tile)
            start, stop = max(tile, tiles.start), min(mine.stop, tiles.stop)
            slot = None if range(start, stop) == tiles else 2 * program + (tiles.start > mine.start)
            if start < stop:
                visits.append(Visit(work_tile, start - tiles.start, stop - tiles.start, slot))
            tile = self._ends[work_tile]
        return visits

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(n + 2 * self.margin for n in self.tiles))


def flash_attention_2(lengths: Sequence[int], block_n: int, work_tiles: int) -> Schedule:
    """One program for each work tile (arXiv 2307.08691). If all lengths are equal, no work tile is split."""
    return Schedule.of_lengths(lengths, block_n, work_tiles, len(lengths) * work_tiles)


def flash_decoding(lengths: Sequence[int], block_n: int, work_tiles: int, splits: int) -> Schedule:
    """`splits` programs for each work tile (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

    If all lengths are equal, each program does one split of one work tile.
    """
    return Schedule.of_lengths(lengths, block_n, work_tiles, splits * len(lengths) * work_tiles)
