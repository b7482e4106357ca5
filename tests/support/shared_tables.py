"""Random block tables whose sequences share pages: trees of prefixes, and tables that are no trees."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from paged_calls import make_pools
from torch import Tensor

import tatten
from tatten.ops.cpu import page_copies, page_joins
from tatten.ops.cpu import pages as pages_on_cpu
from tatten.ops.page_runs import (
    BEGINS,
    ENTRY_STOPS,
    LEADERS,
    LEVELS,
    ORDER,
    OWN,
    PLACES,
    ROWS_OF_GROUPING,
    STARTS,
    STOPS,
    TILE_ENDS,
    UNIT_KEYS,
    group_sizes,
)

STALE = (-1, 2**31 - 1, -(2**31), 0, 1)


@dataclass(frozen=True)
class Tables:
    table: Tensor
    lens: Tensor
    n_pages: int
    page: int

    @property
    def unit(self) -> int:
        """Pages of a unit, one at least."""
        return max(1, UNIT_KEYS // self.page)

    def units(self, q_length: int = 1) -> list[list[tuple[int, ...]]]:
        """The pages of each unit that all causal queries of a sequence attend to in full."""
        rows, keys = [], self.unit * self.page
        for row, n in zip(self.table.tolist(), self.lens.tolist(), strict=True):
            count = min(max(n - q_length + 1, 0) // keys, len(row) // self.unit)
            rows.append([tuple(row[i * self.unit : (i + 1) * self.unit]) for i in range(count)])
        return rows


def tree(rng: random.Random, batch: int, depth: int = 2, exits: bool = False) -> Tables:
    """A tree of prefixes of random lengths, in any order. With `exits` some sequences leave it early, or end in it."""
    page = rng.choice((1, 16, 32, 64, 128))
    unit = max(1, UNIT_KEYS // page)
    numbers = iter(range(1 << 30))
    paths: list[list[int]] = [[]]
    for _ in range(depth):
        longer = [[p] * rng.randint(1, 3) for p in paths]
        paths = [p + [next(numbers) for _ in range(rng.randint(1, 3 * unit))] for p in itertools.chain(*longer)]
    rows, lens = [], []
    for _ in range(batch):
        path = list(rng.choice(paths))
        if exits and rng.random() < 0.4:
            path = path[: rng.randint(1, len(path))]
        row = path + [next(numbers) for _ in range(rng.randint(0 if exits else unit, 2 * unit))]
        least = 1 if exits and rng.random() < 0.2 else (len(path) if not exits else len(row) - 1) * page + 1
        rows.append(row)
        lens.append(rng.randint(min(least, len(row) * page), len(row) * page))
    return made(rng, rows, lens, page, next(numbers))


def made(rng: random.Random, rows: list[list[int]], lens: list[int], page: int, used: int) -> Tables:
    """Tables of these rows, with their pages in random places of a pool, and stale entries beyond the rows."""
    n_pages, columns = used + rng.randint(1, 20), max(map(len, rows)) + rng.randint(0, 3)
    places = rng.sample(range(n_pages), n_pages)
    named = [[places[p] for p in row] + rng.choices(STALE, k=columns - len(row)) for row in rows]
    return Tables(torch.tensor(named, dtype=torch.int32), torch.tensor(lens), n_pages, page)


def scrambled(rng: random.Random, batch: int) -> Tables:
    """Tables that are no tree: few pages anywhere, some of them out of range, some of a sequence several times."""
    page, columns = rng.choice((16, 32, 64)), rng.randint(1, 12)
    few = rng.choice((2, 3, 12))
    rows = [[rng.randrange(few) for _ in range(columns)] for _ in range(batch)]
    for i in range(1, batch):
        if rng.random() < 0.5:  # a part of another row
            other, start = rows[rng.randrange(i)], rng.choice((0, 0, rng.randrange(columns)))
            stop = rng.randint(start, columns)
            rows[i][start:stop] = other[start:stop]
        if rng.random() < 0.1:
            rows[i][rng.randrange(columns)] = rng.choice((-1, few, 2**31 - 1))
    lens = [rng.randint(0, columns * page) for _ in range(batch)]
    return Tables(torch.tensor(rows, dtype=torch.int32), torch.tensor(lens), few, page)


def drawn(rng: random.Random, most: int = 24) -> Tables:
    batch = rng.randint(1, most)
    if rng.random() < 0.4:
        return scrambled(rng, batch)
    return tree(rng, batch, rng.randint(1, 4), exits=rng.random() < 0.7)


def inputs_of(
    tables: Tables, layout: str = "apart", dtype: torch.dtype = torch.float64, **shape: int
) -> dict[str, Any]:
    """Arguments of a call over random pools, with NaN in all keys that no length covers."""
    q_len, heads, kv_heads, dim = (
        shape.get(x, y) for x, y in (("q_len", 1), ("heads", 4), ("kv_heads", 2), ("dim", 8))
    )
    pools = make_pools(layout, tables.n_pages, tables.page, kv_heads, (dim, dim), dtype)
    read = torch.zeros(tables.n_pages, tables.page, dtype=torch.bool)
    for row, n in zip(tables.table, tables.lens.tolist(), strict=True):
        at = torch.arange(n)
        page = row[at // tables.page].long()
        named = (page >= 0) & (page < tables.n_pages)
        read[page[named], (at % tables.page)[named]] = True
    for pool in pools:
        pool.copy_(torch.where(read[..., None, None], torch.randn(pool.shape, dtype=torch.float64), torch.nan))
    return {
        "query": torch.randn(len(tables.lens), heads, q_len, dim, dtype=dtype),
        "key": pools[0],
        "value": pools[1],
        "block_table": tables.table,
        "kv_lens": tables.lens,
    }


def mixed_inputs(tables: Tables, q_lens: list[int], padding: int = 0, **shape: Any) -> dict[str, Any]:
    """Arguments of a mixed batch over random pools, as `inputs_of` makes them."""
    inputs = inputs_of(tables, **shape)
    heads, dim = inputs["query"].shape[1], inputs["query"].shape[3]
    query = torch.randn(max(1, sum(q_lens) + padding), heads, dim, dtype=inputs["query"].dtype)
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    return inputs | {"query": query, "cu_seqlens_q": starts}


def shared_of(tables: Tables, q_length: int = 1) -> tatten.SharedPages:
    given = {"n_pages": tables.n_pages, "page_size": tables.page, "q_length": q_length}
    return tatten.shared_pages(tables.table, tables.lens, **given)


def draw_softmax(rng: random.Random) -> dict[str, Any]:
    """Arguments of the softmax, each in some of the calls; sinks are for 4 heads."""
    variant: dict[str, Any] = {}
    if rng.random() < 0.3:
        variant["sinks"] = torch.randn(4, dtype=torch.float64)
    if rng.random() < 0.3:
        variant["softcap"] = 3.0
    if rng.random() < 0.3:
        variant["scale"] = -0.3
    return variant


def in_8_bits(inputs: dict[str, Any], per_key: bool) -> dict[str, Any]:
    """The same call over int8 pools, with a scale for each key or for each head."""
    for name in ("key", "value"):
        pool = inputs[name].nan_to_num(0.0).mul(20).to(torch.int8)
        inputs = inputs | {name: pool, f"{name}_scale": torch.rand(pool.shape[:3] if per_key else pool.shape[2:3])}
    return inputs


def check_shared_pages_are_refused(attend: Callable[..., Any], inputs: dict[str, Any], shared: Any) -> None:
    """`shared_pages` of another kind, table, page, shape, dtype or device are errors. The pages have 64 keys."""

    def says(error: type[Exception], *texts: str, **changed: Any) -> None:
        with pytest.raises(error) as raised:
            attend(**inputs | {"shared_pages": shared} | changed)
        assert not [x for x in ("`shared_pages`", *texts) if x not in str(raised.value)]

    data, columns = shared.data, shared.max_pages
    says(TypeError, "tatten.shared_pages", "got Tensor", shared_pages=data)
    narrow = inputs["block_table"][:, :3]
    says(ValueError, "3 pages", f"got one of {columns}", block_table=narrow, kv_lens=torch.tensor([1, 1]))
    pools = {name: inputs[name].view(-1, 32, 2, 8) for name in ("key", "value")}
    says(ValueError, "32 keys", "got one of 64", **pools)
    says(ValueError, "int32", "(18, 5)", "(18, 4)", shared_pages=tatten.SharedPages(data[:, :4], columns, 64))
    says(ValueError, "int32", "torch.int64", shared_pages=tatten.SharedPages(data.long(), columns, 64))
    says(ValueError, "on the device", "cpu", "got meta", shared_pages=tatten.SharedPages(data.to("meta"), columns, 64))


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tolerance: float = 1e-12) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


def keys_copied(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> list[int]:
    """Return the keys of each copy of a sequence's pages that decode steps make, from the first page's first key on."""
    copied: list[int] = []
    copy, join = page_copies.copy_pages, page_joins.call_of_join

    def counted(stored: Any, pages: Tensor, named: Tensor, keys: slice, room: Any) -> Any:
        copied.append(keys.stop)
        return copy(stored, pages, named, keys, room)

    def joined(*args: Any) -> Any:
        if (call := join(*args)) is not None:
            copied.extend(call.segments[0].kv_lens.tolist())
        return call

    with monkeypatch.context() as patch:
        patch.setattr(pages_on_cpu, "copy_pages", counted)
        patch.setattr(pages_on_cpu, "call_of_join", joined)
        run()
    return copied


Run = tuple[int, int, int, int]  # level, leader, first key, one past the last key


def runs_of(data: Tensor, batch: int, grouping: int = 0) -> Iterator[tuple[int, Run]]:
    """Each sequence with its runs, as the row groups of a grouping list them; checks what holds for row groups."""
    n, size = LEVELS * batch, group_sizes(batch)[grouping]
    data = data[grouping * ROWS_OF_GROUPING :][:ROWS_OF_GROUPING]
    rows = data.tolist()
    assert data.dtype == torch.int32
    assert data.shape == (ROWS_OF_GROUPING, n + 1)
    assert sorted(rows[ORDER][:n]) == list(range(n))
    n_groups, seen, tiles = rows[LEADERS][n], 0, 0
    assert n_groups <= batch
    for i in range(n_groups):
        begin, end = rows[BEGINS][i : i + 2]
        assert begin == seen
        assert 0 < end - begin <= size
        seen = end
        entries = rows[ORDER][begin:end]
        stops = [rows[ENTRY_STOPS][e] for e in entries]
        assert stops == sorted(stops, reverse=True)
        assert stops[0] == rows[STOPS][i]
        tiles += (stops[0] - rows[STARTS][i]) // UNIT_KEYS
        assert rows[TILE_ENDS][i] == tiles
        assert len({e // batch for e in entries}) == 1
        for slot, (e, stop) in enumerate(zip(entries, stops, strict=True)):
            assert rows[PLACES][e] == i * size + slot
            yield e % batch, (e // batch, rows[LEADERS][i], rows[STARTS][i], stop)
    assert all(x == seen for x in rows[BEGINS][n_groups : n + 1])
    assert all(x == tiles for x in rows[TILE_ENDS][n_groups : n + 1])
    others = rows[ORDER][seen:n]
    assert all(rows[PLACES][e] == -1 and rows[ENTRY_STOPS][e] == 0 for e in others)
    assert not any(rows[OWN][batch:])


def runs_by_hand(tables: Tables, least: int = 1, q_length: int = 1) -> dict[tuple[int, int], Run]:
    """The runs of each (level, sequence) by plain loops; `least`: units of a run that is worth sharing."""
    units, keys = tables.units(q_length), tables.unit * tables.page
    named = [[all(0 <= p < tables.n_pages for p in u) for u in row] for row in units]

    def leader(b: int, i: int) -> int:
        if i >= len(units[b]) or not named[b][i]:
            return b
        owners = [
            o for o, row in enumerate(units) if any(named[o][j] and u[-1] == units[b][i][-1] for j, u in enumerate(row))
        ]
        of = owners[0]
        return of if i < len(units[of]) and units[of][i] == units[b][i] else b

    def end(b: int, start: int) -> int:
        stop = start
        while stop < len(units[b]) and leader(b, stop) == leader(b, start):
            stop += 1
        return stop

    batch, found = len(units), {}
    starts = [0] * batch
    reading = set(range(batch))
    for level in range(LEVELS):
        ends = [end(b, starts[b]) for b in range(batch)]
        of = [leader(b, starts[b]) for b in range(batch)]
        joins: dict[int, list[int]] = {}
        for b in range(batch):
            o = of[b]
            if b in reading and o != b and o in reading and starts[o] == starts[b] and ends[b] - starts[b] >= least:
                joins.setdefault(o, []).append(b)
        now = set()
        for o, members in joins.items():
            for b, stop in [(o, max(ends[m] for m in members)), *((m, ends[m]) for m in members)]:
                found[level, b] = level, o, starts[b] * keys, stop * keys
                if stop == ends[b]:
                    now.add(b)
        reading, starts = now, ends
    return found
