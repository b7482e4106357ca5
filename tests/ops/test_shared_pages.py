"""`shared_pages`: equal pages of different sequences are found, whatever tables hold."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from shared_tables import Tables, drawn, runs_by_hand, runs_of, tree
from slow import slow_but
from torch.library import opcheck

import tatten
from tatten.ops.page_runs import LEADERS, OWN, ROWS_OF_GROUPING, group_sizes, least_units, shared_pages_reference


def found(tables: Tables, q_length: int = 1) -> torch.Tensor:
    given = {"n_pages": tables.n_pages, "page_size": tables.page, "q_length": q_length}
    return tatten.shared_pages(tables.table, tables.lens, **given).data


def keys_read(tables: Tables) -> int:
    """Keys in whole units that attention reads."""
    data, batch, keys = found(tables), len(tables.lens), tables.unit * tables.page
    read = {}
    for _, (level, leader, start, stop) in runs_of(data, batch):
        read[level, leader] = max(read.get((level, leader), 0), stop - start)
    own = data[OWN, :batch].tolist()
    return sum(read.values()) + sum(len(u) * keys - o for u, o in zip(tables.units(), own, strict=True))


def once(tables: Tables) -> int:
    different = {(i, u) for row in tables.units() for i, u in enumerate(row)}
    return len(different) * tables.unit * tables.page


@pytest.mark.parametrize("n", slow_but([200], [200, 3000]))
def test_runs_are_those_of_plain_loops(n: int) -> None:
    rng = random.Random(n)
    for _ in range(n):
        tables, q_length = drawn(rng), rng.choice((1, 1, 2, 5))
        data, batch = found(tables, q_length), len(tables.lens)
        runs = {(run[0], b): run for b, run in runs_of(data, batch)}
        assert runs == runs_by_hand(tables, least_units(tables.page, q_length), q_length)
        units, keys = tables.units(q_length), tables.unit * tables.page
        for b in range(batch):
            at = 0
            for level in range(2):
                if (level, b) in runs:
                    _, leader, start, stop = runs[level, b]
                    assert start == at
                    assert stop % keys == 0
                    at = stop
                    pages = slice(start // tables.page, stop // tables.page)
                    assert torch.equal(tables.table[leader, pages], tables.table[b, pages])
                    assert ((tables.table[b, pages] >= 0) & (tables.table[b, pages] < tables.n_pages)).all()
            assert at == data[OWN, b]
            assert at <= len(units[b]) * keys


def test_sizes_of_row_groups() -> None:
    sizes = {1: [1, 1], 32: [32, 32], 33: [32, 64], 65: [32, 64], 200: [32, 64]}
    assert {batch: group_sizes(batch) for batch in sizes} == sizes


def test_row_groups_of_each_grouping_have_the_same_runs() -> None:
    rng, larger = random.Random(0), 0
    for _ in range(50):
        tables = tree(rng, rng.randint(1, 200), depth=rng.choice((1, 2)))
        data, batch = found(tables), len(tables.lens)
        small, large = (sorted(runs_of(data, batch, grouping)) for grouping in range(2))
        assert small == large
        assert torch.equal(data[OWN], data[ROWS_OF_GROUPING + OWN])
        larger += int(data[ROWS_OF_GROUPING + LEADERS, -1] < data[LEADERS, -1])
    assert larger > 10


def test_each_page_is_read_once_where_two_levels_suffice() -> None:
    rng, saved = random.Random(0), 0
    for _ in range(200):
        tables = tree(rng, rng.randint(1, 80), depth=rng.choice((1, 2)))
        assert keys_read(tables) == once(tables)
        saved += sum(map(len, tables.units())) * tables.unit * tables.page - once(tables)
    assert saved > 0


def test_deeper_trees_are_read_less_than_without() -> None:
    rng = random.Random(0)
    for _ in range(100):
        tables = drawn(rng)
        assert once(tables) <= keys_read(tables) <= sum(map(len, tables.units())) * tables.unit * tables.page


def test_more_queries_need_longer_runs() -> None:
    table = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]], dtype=torch.int32)
    lens = torch.full((2,), 256)

    def own(q_length: int, n: int = 256) -> list[int]:
        tables = Tables(table, torch.full((2,), n), 6, 64)
        return found(tables, q_length)[OWN, :2].tolist()

    assert lens.tolist() == [256, 256]
    assert own(1) == own(2) == [128, 128]
    assert own(3) == [0, 0]
    assert own(1, 128) == [128, 128]
    assert own(2, 128) == [0, 0]  # a causal query would not see the last key of the second page


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_opcheck_and_strides(dtype: torch.dtype) -> None:
    tables = drawn(random.Random(7))
    table = torch.stack((tables.table, tables.table + 1), dim=2).transpose(0, 1).contiguous()[..., 0].T
    args = table, tables.lens.to(dtype), tables.n_pages, tables.page, 1
    opcheck(torch.ops.tatten.shared_pages.default, args)
    assert torch.equal(torch.ops.tatten.shared_pages(*args), found(tables))


def test_compiles_with_dynamic_shapes() -> None:
    def find(table: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return tatten.shared_pages(table, lens, n_pages=100, page_size=16).data

    compiled = torch.compile(find, backend="eager", dynamic=True, fullgraph=True)
    for batch, columns in ((3, 9), (6, 12), (2, 4)):
        table = torch.arange(columns, dtype=torch.int32).repeat(batch, 1)
        lens = torch.randint(0, columns * 16, (batch,))
        assert torch.equal(compiled(table, lens), shared_pages_reference(table, lens, 100, 16, 1))


TABLE, LENS = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([3, 4])
BAD: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"block_table": TABLE.long()}, TypeError, ["`block_table`", "int32", "torch.int64"]),
    ({"block_table": TABLE[0]}, ValueError, ["`block_table`", "[batch, max_pages]", "(3,)"]),
    ({"kv_lens": LENS.float()}, TypeError, ["`kv_lens`", "int32 or int64", "torch.float32"]),
    ({"kv_lens": LENS[:1]}, ValueError, ["`kv_lens`", "(2,)", "(1,)"]),
    ({"n_pages": 0}, ValueError, ["`n_pages`", "at least 1", "got 0"]),
    ({"page_size": 48}, ValueError, ["`page_size`", "power of two", "256", "got 48"]),
    ({"q_length": 0}, ValueError, ["`q_length`", "at least 1", "got 0"]),
]


@pytest.mark.parametrize(("change", "error", "says"), BAD)
def test_bad_input(change: dict[str, Any], error: type[Exception], says: list[str]) -> None:
    given = {"block_table": TABLE, "kv_lens": LENS, "n_pages": 5, "page_size": 16} | change
    table, lens = given.pop("block_table"), given.pop("kv_lens")
    with pytest.raises(error) as raised:
        tatten.shared_pages(table, lens, **given)
    missing = [text for text in says if text not in str(raised.value)]
    assert not missing, f"{raised.value} lacks {missing}"
