"""The stream-K schedule of Lean Attention (arXiv 2405.10480, section IV-C) in plain Python, as the kernel computes it.

A *row* is a (sequence, block of heads) with one output; its keys come in tiles of `block_n`. The tiles of all rows lie
on one line, sequence after sequence, and each program takes an equal share of the line, across the borders of rows. A
program that does all of a row writes the output; otherwise each program that owns a part of it leaves a partial state,
and the states are merged.
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
    """What a program does in a row: tiles `start` to `stop - 1` of the row.

    `slot` is where it leaves its partial state, or None if the row is whole and written at once.
    """

    row: int
    start: int
    stop: int
    slot: int | None


@dataclass(frozen=True)
class Schedule:
    """Rows of tiles, dealt out to programs.

    Attributes:
        tiles: the number of tiles of each row, at least 1, in the order of the line.
        programs: the number of programs launched.
        min_tiles: fewer programs take part rather than have them do less than this.
    """

    tiles: tuple[int, ...]
    programs: int
    min_tiles: int = 1

    def __post_init__(self) -> None:
        least = {"tiles": min(self.tiles, default=0), "programs": self.programs, "min_tiles": self.min_tiles}
        for name, value in least.items():
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], block_n: int, rows: int, programs: int, min_tiles: int = 1) -> Schedule:
        """For sequences of `lengths` keys, each with `rows` rows (kv heads times blocks of their queries).

        An empty sequence gets one tile for each row, as its output has to be written.
        """
        tiles = (max(1, ceil_div(length, block_n)) for length in lengths)
        return cls(tuple(n for n in tiles for _ in range(rows)), programs, min_tiles)

    @property
    def total(self) -> int:
        """Tiles on the line."""
        return self._ends[-1]

    @property
    def used(self) -> int:
        """Programs that take part: the first ones. The others do nothing."""
        return max(1, min(self.programs, self.total // self.min_tiles))

    @property
    def fix_ups(self) -> int:
        """Partial states to be merged."""
        return sum(len(owners) for owners in map(self.owners, range(len(self.tiles))) if len(owners) > 1)

    def bounds(self, program: int) -> tuple[int, int]:
        """The tiles `[start, stop)` of the line that `program` does."""
        if program >= self.used:
            return self.total, self.total
        return self.total * program // self.used, self.total * (program + 1) // self.used

    def span(self, row: int) -> tuple[int, int]:
        """The tiles `[start, stop)` of the line that make up `row`."""
        return self._ends[row] - self.tiles[row], self._ends[row]

    def owner(self, tile: int) -> int:
        """The program that does `tile` of the line: the inverse of `bounds`."""
        return ((tile + 1) * self.used - 1) // self.total

    def owners(self, row: int) -> range:
        """The programs that do partials of `row`."""
        start, stop = self.span(row)
        return range(self.owner(start), self.owner(stop - 1) + 1)

    def visits(self, program: int) -> list[Visit]:
        """What `program` does, in order.

        It leaves at most two partial states: slot `2 * program` is for the row that it finds begun or that begins with
        it, and slot `2 * program + 1` for a later one that it does not finish.
        """
        begin, end = self.bounds(program)
        visits = []
        while begin < end:
            row = bisect_right(self._ends, begin)
            first, last = self.span(row)
            stop = min(end, last)
            whole = begin == first and stop == last
            slot = None if whole else 2 * program + (first > self.bounds(program)[0])
            visits.append(Visit(row, begin - first, stop - first, slot))
            begin = stop
        return visits

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.tiles))


def flash_attention_2(lengths: Sequence[int], block_n: int, rows: int) -> Schedule:
    """One program for each row (arXiv 2307.08691). Where all lengths are equal no row is split."""
    return Schedule.of_lengths(lengths, block_n, rows, len(lengths) * rows)


def flash_decoding(lengths: Sequence[int], block_n: int, rows: int, splits: int) -> Schedule:
    """`splits` programs for each row (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

    Where all lengths are equal each program does one split of one row.
    """
    return Schedule.of_lengths(lengths, block_n, rows, splits * len(lengths) * rows)
