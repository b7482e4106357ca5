"""The stream-K schedule: every tile once, equal work, and FlashAttention-2 and FlashDecoding as special cases."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest
import torch
from stream_k_schedule import Schedule, Visit, flash_attention_2, flash_decoding

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda import decode_grid, page_tiles
from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.cuda.heuristics import Tiles, combining_pays, latent_programs_for
from tatten.ops.cuda.mask_plan import MaskPlan
from tatten.ops.cuda.page_tiles import FEW_KEYS, FOUR_PER_SM, OF_32_ROWS, OF_64, OF_128, OF_LARGE_PAGES, ONE_PER_SM
from tatten.ops.cuda.recording import Recorder, recorder
from tatten.ops.cuda.tile_space import TileSpace

pytestmark = pytest.mark.drawn(9)


def small() -> list[Schedule]:
    """All ways to divide up to 7 tiles into work tiles, on up to 9 programs."""

    def layouts(total: int) -> list[tuple[int, ...]]:
        return [(n, *rest) for n in range(1, total + 1) for rest in layouts(total - n)] if total else [()]

    spaces = [tiles for total in range(1, 8) for tiles in layouts(total)]
    return [Schedule(*case) for case in product(spaces, range(1, 10), range(1, 4), (0, 2))]


def ragged() -> list[Schedule]:
    choose = random.Random(0)
    schedules = [
        Schedule.of_lengths(
            [int(2 ** choose.uniform(0, 17)) for _ in range(choose.randint(1, 40))],
            block_n=choose.choice((64, 128)),
            work_tiles=choose.choice((1, 2, 8, 20)),
            programs=choose.choice((1, 7, 132, 264, 5000)),
            min_tiles=choose.choice((1, 2, 5)),
        )
        for _ in range(60)
    ]
    return [replace(s, most_margin=choose.choice((0, 1, 4))) for s in schedules]


@pytest.fixture(scope="module")
def schedules() -> list[Schedule]:
    return small() + ragged()


def test_every_tile_is_done_once(schedules: list[Schedule]) -> None:
    for s in schedules:
        done = Counter(
            (visit.work_tile, tile)
            for program in range(s.programs)
            for visit in s.visits(program)
            for tile in range(visit.start, visit.stop)
        )
        assert done == Counter((work_tile, tile) for work_tile, n in enumerate(s.tiles) for tile in range(n)), s


def test_visits_follow_the_tile_space(schedules: list[Schedule]) -> None:
    """A program visits the work tiles of its range in order, and leaves out only margins."""
    for s in schedules:
        work_tiles = [s.tiles_of_work_tile(work_tile) for work_tile in range(len(s.tiles))]
        of_work_tiles = set(chain.from_iterable(work_tiles))
        assert len(of_work_tiles) == sum(s.tiles) == s.total_tiles - 2 * s.margin * len(s.tiles)
        for program in range(s.programs):
            visits = s.visits(program)
            covered = [tile for v in visits for tile in work_tiles[v.work_tile][v.start : v.stop]]
            assert covered == [tile for tile in s.tiles_of_program(program) if tile in of_work_tiles], s
            assert all(v.start < v.stop for v in visits)


def test_ranges_of_the_tile_space_are_equal_to_within_a_tile(schedules: list[Schedule]) -> None:
    for s in schedules:
        work = [len(tiles) for tiles in map(s.tiles_of_program, range(s.programs))]
        assert sum(work) == s.total_tiles
        assert max(work[: s.active_programs]) - min(work[: s.active_programs]) <= 1, s
        assert not any(work[s.active_programs :]), s


def test_margins_take_tiles_from_programs_with_many_work_tiles() -> None:
    lengths = (2, 2, 2, 2, 12)
    without, with_margins = Schedule(lengths, 2), Schedule(lengths, 2, most_margin=1)
    assert without.visits(0)[-1] == Visit(4, 0, 2, 1)
    assert with_margins.total_tiles == 20 + 2 * 5
    assert with_margins.visits(0) == [Visit(work_tile, 0, 2, None) for work_tile in range(4)]
    assert with_margins.visits(1) == [Visit(4, 0, 12, None)]


def test_margins_are_at_most_half_of_a_programs_tiles() -> None:
    margins = [Schedule((5, 15), programs, most_margin=4).margin for programs in (1, 2, 3, 5, 10, 11)]
    assert margins == [4, 4, 3, 2, 1, 0]
    assert Schedule((1, 19), programs=1, most_margin=4).margin == 4  # also in work tiles that are shorter
    assert Schedule((20, 20), programs=2, most_margin=4).margin == 0  # equal lengths are cut evenly without


@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_neighbouring_programs_go_through_the_same_keys(lanes: int) -> None:
    from tatten.ops.cuda.kernels.tile_scheduler import share_of_program

    rng = random.Random(lanes)
    for _ in range(20):
        lengths, programs = rng.choices(range(1, 900), k=rng.randint(1, 9)), lanes * rng.randint(1, 9)
        s = Schedule.of_lengths(lengths, 16, 8, programs, lanes=lanes, most_margin=rng.choice((0, 3)))
        shares = [share_of_program.fn(program, programs, lanes) for program in range(programs)]
        assert sorted(shares) == [*range(programs)]
        of_lane = len(s.tiles) // lanes
        for first in range(0, programs, lanes):
            visits = [s.visits(share) for share in shares[first : first + lanes]]
            if s.active_programs == programs:
                keys = [[(v.work_tile % of_lane, v.start, v.stop) for v in of_share] for of_share in visits]
                assert all(x == keys[0] for x in keys)
                assert all(v.work_tile // of_lane == i for i, of_share in enumerate(visits) for v in of_share)


def test_only_as_many_programs_as_have_work_take_part(schedules: list[Schedule]) -> None:
    for s in schedules:
        least = min(len(tiles) for tiles in map(s.tiles_of_program, range(s.active_programs)))
        assert least >= min(s.min_tiles, s.total_tiles), s
        more = s.active_programs + 1
        assert more > s.programs or s.total_tiles // more < s.min_tiles, s
    assert Schedule((2, 1), programs=8).active_programs == 3
    assert Schedule((4, 4), programs=8, min_tiles=3).active_programs == 2
    assert Schedule((1,), programs=8, min_tiles=3).active_programs == 1


def test_program_of_is_the_inverse_of_tiles_of_program(schedules: list[Schedule]) -> None:
    for s in schedules:
        owner = [program for program in range(s.programs) for _ in s.tiles_of_program(program)]
        assert [s.program_of(tile) for tile in range(s.total_tiles)] == owner, s


def test_program_of_is_the_inverse_of_tiles_of_program_for_each_total_and_number_of_programs() -> None:
    for total, programs in product(range(1, 100), range(1, 120)):
        s = Schedule((total,), programs)
        owner = [p for p in range(s.active_programs) for _ in s.tiles_of_program(p)]
        assert [s.program_of(tile) for tile in range(total)] == owner


def test_programs_of_a_work_tile_are_those_that_visit_it(schedules: list[Schedule]) -> None:
    for s in schedules:
        visitors: list[list[int]] = [[] for _ in s.tiles]
        for program in range(s.programs):
            for visit in s.visits(program):
                visitors[visit.work_tile].append(program)
        assert [list(s.programs_of(work_tile)) for work_tile in range(len(s.tiles))] == visitors, s


def test_each_partial_state_has_a_slot_of_its_own(schedules: list[Schedule]) -> None:
    for s in schedules:
        visits = [(program, visit) for program in range(s.programs) for visit in s.visits(program)]
        slots = [visit.slot for _, visit in visits if visit.slot is not None]
        assert len(set(slots)) == len(slots) == s.partial_states, s
        for program, visit in visits:
            assert visit.slot in (None, 2 * program, 2 * program + 1), s
            assert (visit.slot is None) == (len(s.programs_of(visit.work_tile)) == 1), s


def test_the_slot_follows_from_where_work_tile_and_program_begin(schedules: list[Schedule]) -> None:
    """As the combine kernel computes it, for all programs."""
    for s in schedules:
        for program in range(s.active_programs):
            for visit in s.visits(program):
                if visit.slot is not None:
                    inherited = s.tiles_of_work_tile(visit.work_tile).start <= s.tiles_of_program(program).start
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
    assert s.partial_states == 6


def test_tiles_are_laid_sequence_by_sequence() -> None:
    assert Schedule.of_lengths([0, 1, 128, 129], block_n=128, work_tiles=2, programs=3).tiles == (
        1,
        1,
        1,
        1,
        1,
        1,
        2,
        2,
    )


def test_empty_sequences_are_visited() -> None:
    s = Schedule.of_lengths([0, 0, 0], block_n=64, work_tiles=1, programs=2)
    assert [visit for program in range(2) for visit in s.visits(program)] == [
        Visit(work_tile, 0, 1, None) for work_tile in range(3)
    ]


@pytest.mark.parametrize("length", [0, 1, 64, 1000])
@pytest.mark.parametrize("batch, work_tiles", [(1, 1), (3, 2), (7, 8)])
def test_flash_attention_2_gives_each_program_one_work_tile(length: int, batch: int, work_tiles: int) -> None:
    s = flash_attention_2([length] * batch, 64, work_tiles)
    assert s.active_programs == s.programs == batch * work_tiles
    whole = [[Visit(work_tile, 0, n, None)] for work_tile, n in enumerate(s.tiles)]
    assert [s.visits(program) for program in range(s.programs)] == whole
    assert s.partial_states == 0


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("tiles_per_split", [1, 2, 5])
@pytest.mark.parametrize("batch, work_tiles", [(1, 1), (3, 2), (7, 8)])
def test_flash_decoding_gives_each_program_one_split(
    splits: int, tiles_per_split: int, batch: int, work_tiles: int
) -> None:
    s = flash_decoding([64 * tiles_per_split * splits] * batch, 64, work_tiles, splits)
    assert s.active_programs == s.programs == splits * batch * work_tiles
    for work_tile, split in product(range(batch * work_tiles), range(splits)):
        program = work_tile * splits + split
        start = tiles_per_split * split
        assert s.visits(program) == [Visit(work_tile, start, start + tiles_per_split, 2 * program)]
    assert s.partial_states == splits * batch * work_tiles


def test_flash_decoding_never_crosses_work_tiles_of_one_length() -> None:
    for tiles, splits in product(range(1, 12), range(1, 15)):
        s = flash_decoding([tiles] * 3, 1, 2, splits)
        visits = [s.visits(program) for program in range(s.active_programs)]
        assert all(len(v) == 1 for v in visits)
        assert [v.work_tile for (v,) in visits] == [
            work_tile for work_tile in range(6) for _ in range(min(splits, tiles))
        ]


@pytest.mark.parametrize("name, case", [("tiles", ((), 1)), ("tiles", ((2, 0), 1)), ("programs", ((2,), 0))])
def test_what_cannot_be_laid_out_is_refused(name: str, case: tuple[tuple[int, ...], int]) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        Schedule(*case)
    with pytest.raises(ValueError, match="`min_tiles` must be at least 1, got 0"):
        Schedule((1,), 1, min_tiles=0)


@pytest.mark.parametrize(
    "sequences, kv_heads, keys, pays",
    [(8, 32, 512, False), (16, 8, 1024, False), (1, 8, 128, False), (8, 8, 1024, True), (1, 32, 2048, True)],
)
def test_where_combining_pays_on_an_h200(sequences: int, kv_heads: int, keys: int, pays: bool) -> None:
    """As measured: where whole work tiles fill the GPU, or are short, they take no longer than equal shares."""
    h200 = GpuRates()
    tiles, tile_us = keys // 64, 264 * 64 * 256 * 2 / h200.read_bytes_per_us
    assert combining_pays(sequences * kv_heads, tiles, tile_us, 264, h200) == pays


@pytest.mark.parametrize("table, most", [(page_tiles.ON_H100, 1), (page_tiles.ON_H200, 8)], ids=["H100", "H200"])
def test_programs_go_through_the_heads_of_large_pools_in_step(
    table: page_tiles.PageTable, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_grid, "page_table", lambda device: table)

    def lanes(kv_heads: int = 8, programs: int = 264, keys: int = 1 << 17, block_m: int = 16, **variant: Any) -> int:
        dtype = variant.pop("dtype", torch.bfloat16)
        query = torch.empty(4, 8 * kv_heads, variant.pop("q_len", 1), 128, dtype=dtype, device="meta")
        pool = torch.empty(variant.pop("pages", 4 * keys // 16), 16, kv_heads, 128, dtype=dtype, device="meta")
        pool = pool.transpose(1, 2)
        if variant.pop("heads_first", False):
            pool = pool.contiguous()
        block_table = torch.empty(4, keys // 16, dtype=torch.int32, device="meta")
        in_order = torch.empty(4, kv_heads, keys, 128, dtype=dtype, device="meta")
        paged, shared = variant.pop("paged", True), block_table if variant.pop("shared", False) else None
        lens = torch.empty(4, dtype=torch.int32, device="meta")
        stored = (
            KeyValue(pool, pool, kv_lens=lens, block_table=block_table, shared_pages=shared)
            if paged
            else KeyValue(in_order, in_order, kv_lens=lens)
        )
        call = AttentionCall("decode_attention", query, (stored,), **variant)
        tiles = Tiles(block_m, 64, 4, 2)
        place = decode_grid.Place()
        return decode_grid.plan_tile_space(call, stored, MaskPlan(4, False), tiles, place, programs).lanes

    assert lanes() == lanes(dtype=torch.float16) == most
    assert [lanes(programs=programs) for programs in (396, 130, 131)] == [min(most, x) for x in (4, 2, 1)]
    assert [lanes(kv_heads) for kv_heads in (20, 6, 1, 16)] == [min(most, x) for x in (4, 2, 1, 8)]
    assert lanes(4, q_len=4) == most  # blocks of queries, too
    assert lanes(keys=1 << 15) == lanes(2, q_len=1) == lanes(paged=False) == lanes(shared=True) == 1
    assert lanes(heads_first=True) == lanes(pages=1000) == 1  # heads a page apart, and a smaller pool
    assert lanes(batch_invariant=True) == lanes(block_m=32) == lanes(dtype=torch.float32) == 1


@pytest.mark.parametrize("block_n, margin", [(32, 4), (64, 2), (128, 1), (256, 0)])
def test_sequences_with_lengths_of_their_own_have_margins(block_n: int, margin: int) -> None:
    """Other launches have equal work tiles, cuts that no other sequence moves, or no registers left."""

    def most_margin(groups: int = 4, block_m: int = 16, dim: int = 128, **variant: Any) -> int:
        dtype = variant.pop("dtype", torch.bfloat16)
        query = torch.empty(4, 8, 1, dim, dtype=dtype, device="meta")
        key = torch.empty(4, 8, 4096, dim, dtype=variant.pop("stored_dtype", dtype), device="meta")
        value = key[..., :1].expand(4, 8, 4096, variant.pop("value_dim", dim))
        shared = torch.empty(0, device="meta") if variant.pop("shared", False) else None
        lens = torch.empty(4, dtype=torch.int32, device="meta")
        stored = KeyValue(key, value, kv_lens=lens, shared_pages=shared)
        call = AttentionCall("decode_attention", query, (stored,), **variant)
        tiles, mask = Tiles(block_m, block_n, 4, 2), MaskPlan(groups, False)
        return decode_grid.plan_tile_space(call, stored, mask, tiles, decode_grid.Place(), 264).margin

    assert most_margin() == most_margin(dtype=torch.float16) == most_margin(shared=True) == margin
    assert most_margin(groups=1) == most_margin(batch_invariant=True) == 0
    assert most_margin(block_m=32) == most_margin(dim=192) == most_margin(value_dim=192) == 0
    assert most_margin(dtype=torch.float32) == most_margin(stored_dtype=torch.int8) == 0


WIDE_TILES, SHORT_TILES = Tiles(16, 128, 4, 2, 2), Tiles(16, 64, 4, 3)


@pytest.mark.parametrize(
    "changes, tiles, chosen",
    [
        ({}, WIDE_TILES, SHORT_TILES),
        ({"work_tiles": 128, "programs": 256}, WIDE_TILES, SHORT_TILES),
        ({"work_tiles": 12}, WIDE_TILES, SHORT_TILES),
        ({"work_tiles": 50}, WIDE_TILES, WIDE_TILES),  # 100 programs would leave SMs idle
        ({"work_tiles": 256}, WIDE_TILES, WIDE_TILES),
        ({"programs": 8}, WIDE_TILES, WIDE_TILES),  # whole work tiles
        ({"chunk": 8}, WIDE_TILES, WIDE_TILES),
        ({"row_groups": 3}, WIDE_TILES, WIDE_TILES),
        ({"has_lens": True}, WIDE_TILES, SHORT_TILES),  # one length
        ({"has_lens": True, "groups": 4}, WIDE_TILES, WIDE_TILES),
        ({"max_and_sum": True}, WIDE_TILES, WIDE_TILES),
        ({"has_block_list": True}, WIDE_TILES, Tiles(16, 64, 4, 2, 2)),
        ({"has_block_list": True, "groups": 2}, WIDE_TILES, SHORT_TILES),
        ({}, Tiles(64, 64, 4, 3, 2), Tiles(64, 64, 4, 3, 2)),
    ],
)
def test_tiles_are_shortened_where_programs_share_work_tiles(
    changes: dict[str, Any], tiles: Tiles, chosen: Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the 132 multiprocessors of an H100, for the shapes that `shortened` names."""
    monkeypatch.setattr(decode_grid, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(decode_grid, "gpu_rates", lambda device: GpuRates(short_tiles_most_bytes=1e6))
    space = replace(TileSpace(1, 8, 4096, 8, 1, 1, 264, 16, 128), **changes)
    assert decode_grid.shortened(tiles, space, torch.empty(1, 32, 1, 128), 1_000_000, paged=False) == chosen
    assert decode_grid.shortened(tiles, space, torch.empty(1, 32, 1, 128), 1_000_000, paged=True) == chosen
    assert decode_grid.shortened(tiles, space, torch.empty(1, 32, 1, 128), 1_000_001, paged=False) == tiles
    assert decode_grid.shortened(tiles, space, torch.empty(1, 32, 1, 64), 1_000_000, paged=False) == tiles


TILES_OF_64, HALF_TILES = Tiles(16, 128, 4, 3, 2), Tiles(16, 64, 4, 2, 2)


@pytest.mark.parametrize(
    "changes, dim, paged, chosen",
    [
        ({"has_block_list": True}, 64, False, HALF_TILES),
        ({"has_block_list": True, "work_tiles": 15}, 32, False, HALF_TILES),
        ({"has_lens": True}, 64, False, HALF_TILES),
        ({"has_lens": True, "kv_len": 8192}, 64, False, HALF_TILES),
        ({"has_lens": True, "kv_len": 8193}, 64, False, TILES_OF_64),
        ({"has_lens": True}, 64, True, TILES_OF_64),
        ({"has_lens": True, "groups": 2}, 64, False, TILES_OF_64),
        ({"has_block_list": True, "work_tiles": 16}, 64, False, TILES_OF_64),
        ({"has_block_list": True, "max_and_sum": True}, 64, False, TILES_OF_64),
        ({"has_block_list": True, "programs": 8}, 64, False, TILES_OF_64),  # whole work tiles
        ({}, 64, False, TILES_OF_64),
        ({"has_lens": True}, 128, False, TILES_OF_64),  # of keys in 8 bits
    ],
)
def test_tiles_of_narrow_heads_leave_room_for_the_l1(
    changes: dict[str, Any], dim: int, paged: bool, chosen: Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_grid, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(decode_grid, "gpu_rates", lambda device: GpuRates())
    space = replace(TileSpace(1, 8, 4096, 8, 1, 1, 264, 16, 128), **changes)
    query = torch.empty(1, 32, 1, dim)
    for hopper in (True, False):  # launches of older GPUs do not overlap
        monkeypatch.setattr(decode_grid, "has_large_shared_memory", lambda device, hopper=hopper: hopper)
        expected = chosen if hopper else TILES_OF_64
        assert decode_grid.shortened(TILES_OF_64, space, query, 1_000_000, paged) == expected


TWO_STAGES = Tiles(16, 64, 4, 2, 3, registers=160)
WIDE_64, SHORT_64, SHORTER_64 = (
    Tiles(16, 128, 4, 2, 3, registers=160),
    Tiles(16, 64, 4, 3, 3, registers=160),
    Tiles(16, 64, 4, 3, 4, registers=128),
)
VARIANTS: list[dict[str, Any]] = [
    {"window": 100},
    {"softcap": 3.0},
    {"dtype": torch.float32},
    {"masked": True},
    {"stored_dtype": torch.int8},
]


@pytest.mark.parametrize(
    "batch, kv_len, page, dim, tiles, on_h100, on_h200",
    [
        (1, 8192, 16, 128, OF_128, FEW_KEYS, FEW_KEYS),
        (1, 8512, 16, 128, OF_128, OF_128, FEW_KEYS),
        (1, 17024, 16, 128, OF_128, OF_128, FOUR_PER_SM),
        (4, 4096, 16, 128, OF_128, OF_128, OF_128),
        (1, 1024, 64, 128, OF_128, OF_128, OF_128),
        (1, 8192, 32, 128, OF_128, FEW_KEYS, FEW_KEYS),
        (1, 8192, 8, 128, OF_128, OF_128, OF_128),
        (4, 2048, 64, 128, OF_128, FEW_KEYS, FEW_KEYS),
        (9, 512, 64, 128, OF_128, OF_128, OF_128),  # states for more programs of the combine than fit beside
        (1, 4096, 1, 128, OF_128, OF_128, OF_128),
        (32, 4096, 16, 128, OF_128, OF_128, FOUR_PER_SM),
        (48, 4096, 16, 128, OF_128, FOUR_PER_SM, FOUR_PER_SM),
        (32, 4096, 1, 128, OF_128, FOUR_PER_SM, TWO_STAGES),
        (48, 2048, 1, 128, OF_128, FOUR_PER_SM, FOUR_PER_SM),
        (48, 4096, 1, 128, OF_128, FOUR_PER_SM, TWO_STAGES),
        (16, 8192, 1, 128, OF_128, TWO_STAGES, TWO_STAGES),
        (16, 8192, 8, 128, OF_128, TWO_STAGES, FOUR_PER_SM),
        (48, 4096, 32, 128, OF_128, OF_128, FOUR_PER_SM),
        (32, 4096, 32, 128, OF_128, OF_128, OF_128),
        (48, 4096, 64, 128, OF_128, OF_128, OF_128),
        (16, 8192, 64, 128, OF_128, OF_128, ONE_PER_SM),
        (16, 4096, 64, 128, OF_128, OF_128, OF_128),
        (17, 8192, 64, 128, OF_128, OF_128, OF_128),  # more work tiles than SMs
        (16, 4096, 256, 128, OF_LARGE_PAGES, OF_LARGE_PAGES, ONE_PER_SM),
        (16, 8192, 128, 128, OF_LARGE_PAGES, OF_LARGE_PAGES, ONE_PER_SM),
        (17, 8192, 256, 128, OF_LARGE_PAGES, OF_LARGE_PAGES, OF_LARGE_PAGES),
        (16, 8192, 0, 128, OF_LARGE_PAGES, OF_LARGE_PAGES, OF_LARGE_PAGES),
        (16, 8192, 64, 64, OF_64, FOUR_PER_SM, SHORT_64),
        (48, 4096, 64, 64, OF_64, FOUR_PER_SM, SHORTER_64),
        (48, 4096, 32, 64, OF_64, OF_64, SHORTER_64),
        (16, 8192, 32, 64, OF_64, OF_64, OF_64),
        (16, 8192, 256, 64, OF_64, OF_64, OF_64),
        (1, 8192, 64, 64, OF_64, OF_64, OF_64),
        (8, 262144, 16, 64, OF_64, SHORT_64, WIDE_64),
        (8, 262144, 1, 64, OF_64, OF_64, OF_64),
        (32, 262144, 16, 64, OF_64, OF_64, OF_64),
        (2, 8192, 0, 128, OF_32_ROWS, *[replace(OF_32_ROWS, registers=192)] * 2),
        (2, 8192, 16, 128, OF_32_ROWS, *[replace(OF_32_ROWS, registers=192)] * 2),
        (1, 8192, 16, 128, OF_32_ROWS, OF_32_ROWS, OF_32_ROWS),  # one sequence
        (2, 65536, 16, 128, OF_32_ROWS, OF_32_ROWS, OF_32_ROWS),
        (9, 1024, 0, 128, OF_32_ROWS, OF_32_ROWS, OF_32_ROWS),  # too many states, as above
        (1, 8192, 0, 128, OF_128, OF_128, OF_128),
    ],
)
@pytest.mark.parametrize("table", [page_tiles.ON_H100, page_tiles.ON_H200], ids=["H100", "H200"])
def test_tiles_are_resized_for_pages_and_lengths(
    batch: int,
    kv_len: int,
    page: int,
    dim: int,
    tiles: Tiles,
    on_h100: Tiles,
    on_h200: Tiles,
    table: page_tiles.PageTable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On 132 multiprocessors, where the block table and the lengths are all that keys come with."""
    chosen = on_h100 if table is page_tiles.ON_H100 else on_h200
    monkeypatch.setattr(decode_grid, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(decode_grid, "page_table", lambda device: table)

    def resized(chunk: int = 0, large_shared_memory: bool = True, **variant: Any) -> Tiles:
        monkeypatch.setattr(decode_grid, "has_large_shared_memory", lambda device: large_shared_memory)
        dtype = variant.pop("dtype", torch.bfloat16)
        stored_dtype = variant.pop("stored_dtype", dtype)
        table = torch.empty(batch, kv_len // page, dtype=torch.int32, device="meta") if page else None
        shape = (batch * kv_len // page, 8, page, dim) if page else (batch, 8, kv_len, dim)
        key = torch.empty(shape, dtype=stored_dtype, device="meta")
        mask = torch.empty(1, 1, 1, kv_len, dtype=torch.bool, device="meta") if variant.pop("masked", False) else None
        lens = torch.empty(batch, dtype=torch.int32, device="meta") if variant.pop("lens", True) else None
        call = AttentionCall(
            "decode_attention",
            torch.empty(batch, 32, 1, dim, dtype=dtype, device="meta"),
            (KeyValue(key, key, attn_mask=mask, kv_lens=lens, block_table=table),),
            **variant,
        )
        space = TileSpace(batch, 8, kv_len, 8, 1, 1, 264, tiles.block_m, tiles.block_n, has_lens=True, chunk=chunk)
        return decode_grid.resized(tiles, call, call.segments[0], space)

    assert resized() == chosen
    token = recorder.set(Recorder([]))  # for generated code that can't limit registers
    try:
        assert resized() == (chosen if chosen.registers is None else tiles)
    finally:
        recorder.reset(token)
    assert resized(chunk=1) == tiles  # work tiles that stay whole
    assert resized(large_shared_memory=False) == tiles
    assert [resized(**variant) for variant in VARIANTS] == [tiles] * len(VARIANTS)
    if page == 0:
        assert resized(lens=False) == tiles


@pytest.mark.parametrize(
    "name, table",
    [
        ("NVIDIA H100 80GB HBM3", "ON_H100"),
        ("NVIDIA H100 PCIe", "ON_H100"),
        ("NVIDIA B200", "ON_H100"),
        ("", "ON_H100"),
        ("NVIDIA H200", "ON_H200"),
        ("NVIDIA GH200 480GB", "ON_H200"),
    ],
)
def test_a_gpu_has_the_page_tiles_of_a_measured_one(name: str, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tiles, "device_name", lambda device: name)
    assert page_tiles.page_table(torch.device("meta")) is getattr(page_tiles, table)


@pytest.mark.parametrize("work_tiles, programs", [(1, 9), (2, 8), (3, 9), (4, 8), (4, 9), (8, 8)])
def test_equal_work_tiles_have_the_most_partials_that_is_estimated(work_tiles: int, programs: int) -> None:
    """No fewer: the combine would go round again. Where programs divide them evenly, no more: room would lie idle."""
    space = TileSpace(1, work_tiles, 64 * 40, 1, 1, 1, programs, 64, 64)
    found = []
    for n in range(1, 41):
        s = Schedule((n,) * work_tiles, programs)
        owners = Counter(visit.work_tile for program in range(programs) for visit in s.visits(program))
        found.append(max(owners.values()))
    for wide in (False, True):
        estimate = space.most_partials(1, wide)
        assert max(found) <= estimate
        assert max(found) == estimate or programs % work_tiles


@pytest.mark.parametrize(
    "work_tiles, tiles, programs",
    [
        (2, 128, 64),
        (2, 512, 128),
        (2, 2048, 128),
        (16, 64, 128),
        (16, 256, 128),
        (1, 2048, 128),
        (100, 1, 100),
        (128, 3, 128),
        (264, 1, 132),
        (2, 16, 32),
        (128, 64, 128),
    ],
)
def test_the_latent_kernel_cuts_work_tiles_where_it_pays(work_tiles: int, tiles: int, programs: int) -> None:
    """On the 132 multiprocessors of an H200, by `benchmarks/latent.py` and sweeps of the number of programs."""
    assert latent_programs_for(work_tiles, tiles, 132) == programs
