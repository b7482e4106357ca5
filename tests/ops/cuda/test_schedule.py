"""The stream-K schedule: every tile once, equal work, and FlashAttention-2 and FlashDecoding as special cases."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, product

import pytest

from tatten.ops.cuda.schedule import Schedule, Visit, flash_attention_2, flash_decoding


def small() -> list[Schedule]:
    """All ways to lay out up to 7 tiles in rows, on up to 9 programs."""

    def layouts(total: int) -> list[tuple[int, ...]]:
        return [(n, *rest) for n in range(1, total + 1) for rest in layouts(total - n)] if total else [()]

    lines = [tiles for total in range(1, 8) for tiles in layouts(total)]
    return [Schedule(*case) for case in product(lines, range(1, 10), range(1, 4))]


def ragged() -> list[Schedule]:
    choose = random.Random(0)
    return [
        Schedule.of_lengths(
            [int(2 ** choose.uniform(0, 17)) for _ in range(choose.randint(1, 40))],
            block_n=choose.choice((64, 128)),
            rows=choose.choice((1, 2, 8, 20)),
            programs=choose.choice((1, 7, 132, 264, 5000)),
            min_tiles=choose.choice((1, 2, 5)),
        )
        for _ in range(60)
    ]


@pytest.fixture(scope="module")
def schedules() -> list[Schedule]:
    return small() + ragged()


def test_every_tile_is_done_once(schedules: list[Schedule]) -> None:
    for s in schedules:
        done = Counter(
            (visit.row, tile)
            for program in range(s.programs)
            for visit in s.visits(program)
            for tile in range(visit.start, visit.stop)
        )
        assert done == Counter((row, tile) for row, n in enumerate(s.tiles) for tile in range(n)), s


def test_visits_follow_the_line(schedules: list[Schedule]) -> None:
    for s in schedules:
        for program in range(s.programs):
            visits = s.visits(program)
            covered = [(s.span(v.row)[0] + v.start, s.span(v.row)[0] + v.stop) for v in visits]
            assert all(stop == start for (_, stop), (start, _) in pairwise(covered)), s
            begin, end = s.bounds(program)
            assert (covered[0][0], covered[-1][1]) == (begin, end) if visits else begin == end, s


def test_work_is_equal_to_within_a_tile(schedules: list[Schedule]) -> None:
    for s in schedules:
        work = [stop - start for start, stop in map(s.bounds, range(s.programs))]
        assert sum(work) == s.total == sum(s.tiles)
        assert max(work[: s.used]) - min(work[: s.used]) <= 1, s
        assert not any(work[s.used :]), s


def test_only_as_many_programs_as_have_work_take_part(schedules: list[Schedule]) -> None:
    for s in schedules:
        least = min(stop - start for start, stop in map(s.bounds, range(s.used)))
        assert least >= min(s.min_tiles, s.total), s
        more = s.used + 1
        assert more > s.programs or s.total // more < s.min_tiles, s
    assert Schedule((2, 1), programs=8).used == 3
    assert Schedule((4, 4), programs=8, min_tiles=3).used == 2
    assert Schedule((1,), programs=8, min_tiles=3).used == 1


def test_owner_is_the_inverse_of_bounds(schedules: list[Schedule]) -> None:
    for s in schedules:
        owner = [program for program in range(s.programs) for _ in range(*s.bounds(program))]
        assert [s.owner(tile) for tile in range(s.total)] == owner, s


def test_owner_is_the_inverse_of_bounds_for_each_total_and_number_of_programs() -> None:
    for total, programs in product(range(1, 100), range(1, 120)):
        s = Schedule((total,), programs)
        assert [s.owner(tile) for tile in range(total)] == [p for p in range(s.used) for _ in range(*s.bounds(p))]


def test_owners_are_the_programs_that_visit_a_row(schedules: list[Schedule]) -> None:
    for s in schedules:
        visitors: list[list[int]] = [[] for _ in s.tiles]
        for program in range(s.programs):
            for visit in s.visits(program):
                visitors[visit.row].append(program)
        assert [list(s.owners(row)) for row in range(len(s.tiles))] == visitors, s


def test_each_part_of_a_row_has_a_slot_of_its_own(schedules: list[Schedule]) -> None:
    for s in schedules:
        visits = [(program, visit) for program in range(s.programs) for visit in s.visits(program)]
        slots = [visit.slot for _, visit in visits if visit.slot is not None]
        assert len(set(slots)) == len(slots) == s.fix_ups, s
        for program, visit in visits:
            assert visit.slot in (None, 2 * program, 2 * program + 1), s
            assert (visit.slot is None) == (len(s.owners(visit.row)) == 1), s


def test_the_slot_follows_from_where_row_and_program_begin(schedules: list[Schedule]) -> None:
    """As the program that merges computes it, for the others."""
    for s in schedules:
        for program in range(s.used):
            for visit in s.visits(program):
                if visit.slot is not None:
                    inherited = s.span(visit.row)[0] <= s.bounds(program)[0]
                    assert visit.slot == 2 * program + (0 if inherited else 1), s


def test_visits_of_the_papers_figure_1() -> None:
    """Two heads of five tiles on five SMs: two tiles each."""
    s = Schedule((5, 5), programs=5)
    assert [s.visits(program) for program in range(5)] == [
        [Visit(0, 0, 2, 0)],
        [Visit(0, 2, 4, 2)],
        [Visit(0, 4, 5, 4), Visit(1, 0, 1, 5)],
        [Visit(1, 1, 3, 6)],
        [Visit(1, 3, 5, 8)],
    ]
    assert s.fix_ups == 6


def test_tiles_are_laid_sequence_by_sequence() -> None:
    assert Schedule.of_lengths([0, 1, 128, 129], block_n=128, rows=2, programs=3).tiles == (1, 1, 1, 1, 1, 1, 2, 2)


def test_empty_sequences_are_visited() -> None:
    s = Schedule.of_lengths([0, 0, 0], block_n=64, rows=1, programs=2)
    assert [visit for program in range(2) for visit in s.visits(program)] == [
        Visit(row, 0, 1, None) for row in range(3)
    ]


@pytest.mark.parametrize("length", [0, 1, 64, 1000])
@pytest.mark.parametrize("batch, rows", [(1, 1), (3, 2), (7, 8)])
def test_flash_attention_2_gives_each_program_one_row(length: int, batch: int, rows: int) -> None:
    s = flash_attention_2([length] * batch, 64, rows)
    assert s.used == s.programs == batch * rows
    assert [s.visits(row) for row in range(batch * rows)] == [[Visit(row, 0, n, None)] for row, n in enumerate(s.tiles)]
    assert s.fix_ups == 0


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("tiles_per_split", [1, 2, 5])
@pytest.mark.parametrize("batch, rows", [(1, 1), (3, 2), (7, 8)])
def test_flash_decoding_gives_each_program_one_split(splits: int, tiles_per_split: int, batch: int, rows: int) -> None:
    s = flash_decoding([64 * tiles_per_split * splits] * batch, 64, rows, splits)
    assert s.used == s.programs == splits * batch * rows
    for row, split in product(range(batch * rows), range(splits)):
        program = row * splits + split
        start = tiles_per_split * split
        assert s.visits(program) == [Visit(row, start, start + tiles_per_split, 2 * program)]
    assert s.fix_ups == splits * batch * rows


def test_flash_decoding_never_crosses_rows_of_one_length() -> None:
    for tiles, splits in product(range(1, 12), range(1, 15)):
        s = flash_decoding([tiles] * 3, 1, 2, splits)
        visits = [s.visits(program) for program in range(s.used)]
        assert all(len(v) == 1 for v in visits)
        assert [v.row for (v,) in visits] == [row for row in range(6) for _ in range(min(splits, tiles))]


@pytest.mark.parametrize("name, case", [("tiles", ((), 1)), ("tiles", ((2, 0), 1)), ("programs", ((2,), 0))])
def test_what_cannot_be_laid_out_is_refused(name: str, case: tuple[tuple[int, ...], int]) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        Schedule(*case)
    with pytest.raises(ValueError, match="`min_tiles` must be at least 1, got 0"):
        Schedule((1,), 1, min_tiles=0)
