"""The tiles that each program of the pages kernel takes, and the partials that combines read: without any attention."""

from __future__ import annotations

import bisect
import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from gluon_interpreted import Interpreted, Pointer
from poison import fresh_memory_is_poison
from slow import slow_but
from torch import Tensor
from triton.experimental.gluon import language as gl

from tatten.ops.cuda.kernels.query_blocks import CUTS_COLUMN, _largest_part
from tatten.ops.cuda.kernels.tile_scheduler import programs_over_own_parts, programs_over_runs
from tatten.ops.mixed_batch import MixedCall
from tatten.ops.page_runs import LEVELS, ORDER, OWN, PLACES, ROWS, ROWS_OF_GROUPING, TILE_ENDS

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
BLOCK_M, BLOCK_N, DIM = 16, 128, 16
Tile = tuple[int, int, int]  # block, kv head and number


@dataclass(frozen=True)
class Case:
    """A call of so many blocks.

    Attributes:
        programs: the most programs.
        long_part: the tiles of a program from which on work tiles have margins.
        margin: the tiles that a margin counts.
        whole: whether programs take whole work tiles even if these are uneven.
        ends_at_once: the ends of blocks that a program loads at once.
    """

    call: MixedCall
    n_blocks: int
    programs: int
    long_part: int
    margin: int
    whole: bool
    ends_at_once: int


@dataclass(frozen=True)
class Work:
    """Blocks of so many tiles each, and how programs share them: a plain model of the kernels."""

    n_tiles: list[int]
    kv_heads: int
    programs: int
    margin: int
    whole: bool

    def tiles(self) -> Iterator[Tile]:
        """The tiles in their order."""
        for block, n in enumerate(self.n_tiles):
            yield from itertools.product([block], range(self.kv_heads), range(n))

    def owners(self) -> list[int]:
        """The program of each tile: the one at its place, or at the middle of its work tile if this is not cut."""
        sizes = [n + 2 * self.margin for n in self.n_tiles for _ in range(self.kv_heads)]
        total = sum(sizes)
        active = min(self.programs, total)
        begins, owners = [total * program // active for program in range(active)], []
        for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
            middle = end - size // 2 - 1
            places = range(end - size + self.margin, end - self.margin)
            owners += [bisect.bisect_right(begins, middle if self.whole else place) - 1 for place in places]
        return owners

    def would_be_cut(self) -> set[tuple[int, int]]:
        """The block and kv head of each work tile that several programs have if they take equal parts."""
        owners = zip(self.tiles(), replace(self, whole=False).owners(), strict=True)
        several = Counter(work_tile for work_tile, _ in {((block, head), owner) for (block, head, _), owner in owners})
        return {work_tile for work_tile, n in several.items() if n > 1}

    def parts_if_whole(self) -> list[int]:
        """The tiles and margins of each program that has any, if all take whole work tiles."""
        parts = Counter[int]()
        for owner, (_, _, number) in zip(replace(self, whole=True).owners(), self.tiles(), strict=True):
            parts[owner] += 1 + 2 * self.margin * (number == 0)
        return [*parts.values()]


@triton.jit
def _largest_part_kernel(blocks, ends, room, active, total, kv_heads, margin, result, BLOCK: tl.constexpr):
    tl.store(result, _largest_part(blocks, ends, room, active, total, kv_heads, margin, BLOCK))


class Attend:
    """Stands for a launch of the pages kernel, and takes its parts and visits. A tile's state is a random number."""

    def __init__(self, case: Case, numbers: Tensor, room: int, programs: int, kernel: Any) -> None:
        """Make it for `numbers[token, q_head, tile, dim]`."""
        self.case, self.numbers, self.room, self.programs, self.kernel = case, numbers, room, programs, kernel

    def __call__(
        self, call: MixedCall, blocks: Tensor, ends: Tensor, sinks: Tensor | None, outputs: tuple[Tensor, ...]
    ) -> None:
        self.blocks, self.kv_heads, self.outputs = blocks, call.key.shape[2], outputs
        margin, whole = divmod(int(blocks[0, CUTS_COLUMN]), 2)
        self.work = Work(blocks[: self.case.n_blocks, 6].tolist(), self.kv_heads, self.programs, margin, bool(whole))
        self.check_choices(ends)
        if self.case.whole:
            blocks[0, CUTS_COLUMN] |= 1
            self.work = replace(self.work, whole=True)
        self.end = 0
        taken = [(program, tile) for program in range(self.programs) for tile in self.take(program, ends)]
        assert taken == [*zip(self.work.owners(), self.work.tiles(), strict=True)]
        assert self.end == len(taken)

    def check_choices(self, ends: Tensor) -> None:
        """Compare the margin, the largest part of whole work tiles, and the choice that follows from it."""
        is_long = len([*self.work.tiles()]) >= self.case.long_part * self.programs
        assert self.work.margin == (self.case.margin if is_long else 0)
        parts, result = self.work.parts_if_whole(), torch.zeros(1, dtype=torch.int64)
        total, active = sum(parts), min(self.programs, sum(parts))
        sizes = self.room, active, total, self.kv_heads, self.work.margin
        _largest_part_kernel[(1,)](self.blocks, ends, *sizes, result, BLOCK=4)
        assert int(result) == max(parts)
        largest = max(self.work.n_tiles) + 2 * self.work.margin
        of_one_size = largest * -(-total // (active * largest))  # a program has as many if all work tiles are as large
        assert self.work.whole == (100 * active * max(max(parts), of_one_size) <= 110 * total)

    def take(self, program: int, ends: Tensor) -> Iterator[Tile]:
        """Write the states of a program's visits, and yield their tiles."""
        from tatten.ops.cuda.kernels.page_blocks import keys_of, load_ends, share_of_program, visit_at

        lists: Any = Pointer(self.blocks)
        self.kernel.program = program
        at = Pointer(ends), 1, self.room
        share = share_of_program(load_ends(*at), self.programs, lists, self.kv_heads, False)
        begin, end, block, block_end = map(int, share)
        assert begin == self.end
        self.end = end
        place, n_tiles = begin, int(keys_of(lists, block, 0, 0, False)[3])
        while place < end:  # as in the kernel
            kv_head, _, first, stop = map(int, visit_at(place, end, block_end, n_tiles, self.kv_heads, 1))
            slot = None if stop - first == n_tiles else 2 * program + (place - first > begin)
            self.write(block, kv_head, first, stop, slot)
            yield from itertools.product([block], [kv_head], range(first, stop))
            place += stop - first
            if place >= block_end and place < end:
                block += 1
                n_tiles = int(keys_of(lists, block, 0, 0, False)[3])
                block_end += n_tiles * self.kv_heads

    def write(self, block: int, kv_head: int, first: int, stop: int, slot: int | None) -> None:
        """Write the state of some tiles, the mean of their numbers and the log of how many they are."""
        out, lse, partial_out, partial_lse = self.outputs
        row, token, head = self.queries(block, kv_head)
        mean = self.numbers[token, head, first:stop].mean(1)
        log = torch.tensor(float(stop - first)).log()
        if slot is None:
            out[token, head], lse[token, head] = mean, log
        else:
            partial_out[slot * BLOCK_M + row], partial_lse[slot * BLOCK_M + row] = mean, log

    def queries(self, block: int, kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of a block, and the token and head of each."""
        _, first, start, q_len, *_ = self.blocks[block].tolist()
        heads_per_kv = self.numbers.shape[1] // self.kv_heads
        row = torch.arange(min(BLOCK_M, q_len * heads_per_kv - first))
        return row, start + (first + row) // heads_per_kv, kv_head * heads_per_kv + (first + row) % heads_per_kv

    def is_own_part(self, block: int) -> bool:
        """True if the block is a sequence with one query whose first keys may be shared."""
        sequence, _, _, q_len, *_ = self.blocks[block].tolist()
        shared = self.case.call.shared_pages
        return shared is not None and q_len == 1 and sequence < self.case.call.batch and bool(shared[OWN, sequence])

    def check(self, out: Tensor, lse: Tensor) -> None:
        """Compare the result of a combine with the states of all tiles."""
        want, want_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
        for block, n in enumerate(self.work.n_tiles):
            for kv_head in range(self.kv_heads):
                _, token, head = self.queries(block, kv_head)
                want[token, head] = self.numbers[token, head, :n].mean(1)
                want_lse[token, head] = torch.tensor(float(n)).log()
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def draw(rng: random.Random, shares: bool) -> Case:
    """Draw a call with a few tiles for each block."""
    batch, most = rng.randint(2, 6), rng.choice((2, 12, 12))
    heads, kv_heads = rng.choice(((2, 2), (4, 2), (5, 1), (3, 3), (20, 1)))
    q_lens = rng.choices((0, 1, 1, 1, 5, 9), k=batch) if rng.random() < 0.5 else [1] * batch
    padding = rng.choice((0, 0, 2)) if any(q_lens) else 1
    n_tiles = [most] * batch if rng.random() < 0.4 else [rng.randint(0, most) for _ in range(batch)]
    shared = torch.zeros(ROWS, LEVELS * batch + 1).int() if shares else None
    if shared is not None:  # no sequence has a run, but own parts begin as if it had
        shared[ORDER, :-1], shared[PLACES, :-1] = torch.arange(LEVELS * batch), -1
        shared[OWN, :batch] = BLOCK_N * torch.tensor([rng.choice((0, 1, 1)) if n else 0 for n in n_tiles])
    pool = torch.empty(1, BLOCK_N, kv_heads, DIM, dtype=torch.bfloat16)
    call = MixedCall(
        torch.empty(sum(q_lens) + padding, heads, DIM), pool, pool, torch.zeros(batch, most).int(),
        torch.tensor([0, *itertools.accumulate(q_lens)]).int(), BLOCK_N * torch.tensor(n_tiles).int(),
        shared_pages=shared,
    )  # fmt: skip
    n_blocks = sum(-(-q_len * (heads // kv_heads) // BLOCK_M) for q_len in (*q_lens, padding))
    # Few tiles are a long part here, and margins are as long as parts: they leave programs without any tile.
    programs, long_part, margin = rng.choice((3, 8, 13, 21)), rng.choice((1, 1, 8)), rng.choice((1, 1, 3))
    return Case(call, n_blocks, programs, long_part, margin, rng.random() < 0.2, rng.choice((2, 1024)))


@triton.jit
def _programs_kernel(programs, tiles, result):
    tl.store(result, programs_over_runs(programs, tiles))


def over_runs(programs: int, tiles: int) -> int:
    """A plain model of `programs_over_runs`."""
    few = programs * (4 + math.isqrt(min(tiles, 1 << 16))) // 45 // 8 * 8
    return min(programs, tiles, max(few, programs * 8 // 15 // 8 * 8, 8))


@triton.jit
def _own_programs_kernel(programs, tiles, result):
    tl.store(result, programs_over_own_parts(programs, tiles))


@pytest.mark.parametrize("programs", [1, 7, 120, 792])
def test_programs_over_own_parts(programs: int) -> None:
    """Up to 4 tiles each, all have equally many, but for the last one; with more, all programs take part."""
    result = torch.zeros(1, dtype=torch.int64)
    for tiles in (1, 2, programs, programs + 1, 3 * programs, 4 * programs, 4 * programs + 1, 9 * programs):
        _own_programs_kernel[(1,)](programs, tiles, result)
        each = math.ceil(tiles / programs)
        assert int(result) == (math.ceil(tiles / each) if tiles <= 4 * programs else programs)


@pytest.mark.parametrize("at_once", [2, 1024], ids=["some ends", "all ends"])
@pytest.mark.parametrize("programs", [1, 7, 20, 120, 264])
def test_programs_over_runs(programs: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's and Gluon's arithmetic is that of a plain model, and programs take each tile of the runs once."""
    from tatten.ops.cuda.kernels import page_blocks

    monkeypatch.setattr(page_blocks, "_ENDS_AT_ONCE", gl.constexpr(at_once))
    kernel, result = Interpreted(monkeypatch, 0, "share_of_program", page_blocks), torch.zeros(1, dtype=torch.int64)
    roots = itertools.chain.from_iterable((n * n - 1, n * n) for n in range(2, 41))
    for tiles in (0, 1, 2, *roots, 4096, 70000, 3 << 20):
        _programs_kernel[(1,)](programs, tiles, result)
        assert int(result) == over_runs(programs, tiles)
        entries, end = 4, 0
        shared = torch.zeros(ROWS_OF_GROUPING, entries + 1, dtype=torch.int32)
        shared[TILE_ENDS] = tiles
        ends, lists = Pointer(shared[TILE_ENDS]), Pointer(shared)
        for program in range(programs if tiles else 0):
            kernel.program = program
            at = ends, 1, entries
            share = page_blocks.share_of_program(page_blocks.load_ends(*at), programs, lists, 1, True)
            begin, stop = map(int, share[:2])
            assert begin == end
            assert (stop > begin) == (program < over_runs(programs, tiles))
            end = stop
        assert end == tiles


def test_programs_over_runs_on_an_h200() -> None:
    """The numbers of programs that were among the fastest."""
    assert [over_runs(120, tiles) for tiles in (64, 256, 512, 1024, 4096)] == [64, 64, 64, 96, 120]


def no_states(_: object, stored: Any) -> Any:
    """Stands for the launch over row groups, of which there are none."""
    from tatten.ops.cuda.combine import Partials

    nothing = torch.zeros(0)
    return Partials(nothing, nothing, nothing, nothing, row_groups=stored.row_groups, shared_pages=stored.row_groups)


def computed(case: Case) -> tuple[Attend, Tensor, Tensor]:
    """Compute a call as on Hopper, but for attention. Memory that nobody writes has NaN."""
    from tatten.ops.cuda import mixed_shared, pages_sm90, ragged
    from tatten.ops.cuda.heuristics import Tiles
    from tatten.ops.cuda.kernels import page_blocks, query_blocks

    call, launches = case.call, []
    numbers = torch.randn(*call.query.shape[:2], call.block_table.shape[1] + 1, DIM)
    with pytest.MonkeyPatch.context() as patch, fresh_memory_is_poison():
        patch.setattr(page_blocks, "_ENDS_AT_ONCE", gl.constexpr(case.ends_at_once))
        patch.setattr(pages_sm90, "takes_pages_kernel", lambda *_: True)
        patch.setattr(ragged, "hopper_tiles", lambda _: Tiles(BLOCK_M, BLOCK_N, 8, 2))
        patch.setattr(query_blocks, "_LONG_PART", tl.constexpr(case.long_part))
        patch.setattr(query_blocks, "_MARGIN", tl.constexpr(case.margin))
        kernel = Interpreted(patch, 0, "share_of_program", page_blocks)

        def launch(_: MixedCall, few: Any, many: Any, *__: Any, **___: Any) -> list[Attend]:
            assert few.room == 0
            launches.append(Attend(case, numbers, many.room, many.programs, kernel))
            return launches

        for module in (ragged, mixed_shared):
            patch.setattr(module, "attend_launches", launch)
        plan: Any = ragged.plan_ragged(call, programs=case.programs)
        if call.shared_pages is not None:
            plan = replace(plan, shared_part=no_states)
        return launches[0], *plan(call)


@pytest.mark.parametrize("n", slow_but([30], [30, 400]))
@pytest.mark.parametrize("shares", [False, True], ids=["mixed", "shared"])
def test_combines_read_what_programs_write(shares: bool, n: int) -> None:
    """Programs take the tiles of a plain model, each once and in order, and a combine finds all of their states."""
    rng, counts, own_parts = random.Random(n), Counter[tuple[bool, bool]](), Counter[bool]()
    for _ in range(n):
        attend, out, lse = computed(draw(rng, shares))
        attend.check(out, lse)
        counts[attend.work.margin > 0, attend.work.whole] += 1
        own_parts[attend.work.whole] += any(attend.is_own_part(block) for block, _ in attend.work.would_be_cut())
    assert len(counts) == 4
    assert min(counts.values()) >= n // 20
    assert not shares or min(own_parts[True], own_parts[False]) >= n // 20
