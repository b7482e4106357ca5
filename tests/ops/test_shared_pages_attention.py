"""Attention with `shared_pages`: the same results as without, for any tables."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from paged_calls import POOLS
from shared_tables import (
    Tables,
    assert_same,
    check_shared_pages_are_refused,
    draw_softmax,
    drawn,
    in_8_bits,
    inputs_of,
    keys_copied,
    made,
    shared_of,
    tree,
)
from slow import slow_but
from torch import Tensor
from torch.library import opcheck

import tatten
from tatten.ops.cpu import thresholds
from tatten.ops.page_runs import OWN
from tatten.ops.reference import decode_attention_reference


@pytest.fixture(autouse=True)
def all_runs_are_worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds.CPU, "shared_bytes", 0)


@pytest.mark.parametrize("n", slow_but([150], [150, 2000]))
def test_random_tables(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, shared = random.Random(n), 0
    for seed in range(n):
        torch.manual_seed(seed)
        monkeypatch.setattr(thresholds.CPU, "shared_bytes", rng.choice((0, 0, 500, 5000, 1 << 19)))
        tables, q_len = drawn(rng, most=12), rng.choice((1, 1, 2, 3))
        inputs = inputs_of(tables, rng.choice(POOLS), q_len=q_len)
        variant = draw_softmax(rng)
        found = shared_of(tables, rng.choice((1, q_len)))
        got = tatten.decode_attention(**inputs, **variant, shared_pages=found, return_lse=True)
        assert_same(got, decode_attention_reference(**inputs, **variant))
        shared += int(found.data[OWN].any())
    assert shared > n // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    inputs = inputs_of(tables := tree(random.Random(1), 12), dtype=dtype)
    got = tatten.decode_attention(**inputs, shared_pages=shared_of(tables), return_lse=True)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    assert all(x.is_contiguous() for x in got)
    assert_same(got, decode_attention_reference(**inputs), 2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("per_key", [False, True])
def test_scales_of_keys_in_8_bits(per_key: bool) -> None:
    inputs = inputs_of(tables := tree(random.Random(2), 12))
    inputs = in_8_bits(inputs, per_key)
    got = tatten.decode_attention(**inputs, shared_pages=shared_of(tables), return_lse=True)
    assert_same(got, decode_attention_reference(**inputs))


def seen_keys(inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **variant: Any) -> int:
    """Return the number of keys that are copied."""
    return sum(keys_copied(monkeypatch, lambda: tatten.decode_attention(**inputs, **variant)))


def test_a_shared_page_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[0, 1, 2, 3 + b] for b in range(40)]
    tables = made(random.Random(0), rows, [200 + b for b in range(40)], 64, 50)
    inputs = inputs_of(tables)
    shared = shared_of(tables)
    assert seen_keys(inputs, monkeypatch, shared_pages=shared) == 128 + sum(72 + b for b in range(40))
    assert seen_keys(inputs, monkeypatch) == sum(200 + b for b in range(40))


KEY_BYTES = 2 * 2 * 8 * 8  # of a key and its value: 2 heads of 8 numbers in float64


def test_short_runs_are_read_for_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call over shared keys and a merge take longer than reading a few keys again."""
    tables = made(random.Random(0), [[0, 1, 2, 3 + b] for b in range(40)], [200] * 40, 64, 50)
    inputs, shared = inputs_of(tables), shared_of(tables)
    saved = 39 * 128 * KEY_BYTES
    monkeypatch.setattr(thresholds.CPU, "shared_bytes", saved // 44 - 1)
    assert seen_keys(inputs, monkeypatch, shared_pages=shared) == 128 + 40 * 72
    monkeypatch.setattr(thresholds.CPU, "shared_bytes", saved // 44 + 1)
    assert seen_keys(inputs, monkeypatch, shared_pages=shared) == 40 * 200


def test_each_part_of_a_group_counts_its_own_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences share 128 keys, and two of them 128 more."""
    rows = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 6, 7, 8]]
    tables = made(random.Random(0), rows, [300] * 3, 64, 9)
    inputs, shared = inputs_of(tables), shared_of(tables)
    saved, calls = (2 * 128 + 128) * KEY_BYTES, (3 + 4) + (2 + 4)
    monkeypatch.setattr(thresholds.CPU, "shared_bytes", saved // calls - 1)
    assert seen_keys(inputs, monkeypatch, shared_pages=shared) == 256 + 44 + 44 + 172
    monkeypatch.setattr(thresholds.CPU, "shared_bytes", saved // calls + 1)
    assert seen_keys(inputs, monkeypatch, shared_pages=shared) == 3 * 300


def test_a_small_group_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six sequences share 256 keys, two share 128 other keys, and two of the six share a second run."""
    rows = [[0, 1, 2, 3, 10 + b, 20] for b in range(4)] + [[0, 1, 2, 3, 30, 31, 40 + b] for b in range(2)]
    rows += [[50, 51, 60 + b] for b in range(2)]
    tables = made(random.Random(0), rows, [64 * len(row) for row in rows], 64, 70)
    inputs, shared = inputs_of(tables), shared_of(tables)
    least = 128 * KEY_BYTES // 6  # of two sequences that share 128 keys
    monkeypatch.setattr(thresholds.CPU, "shared_bytes", least + 1)
    assert seen_keys(inputs, monkeypatch, shared_pages=shared) == 256 + 4 * 128 + 2 * 192 + 2 * 192
    monkeypatch.setattr(thresholds.CPU, "shared_bytes", least - 1)
    assert seen_keys(inputs, monkeypatch, shared_pages=shared) == 256 + 4 * 128 + 128 + 2 * 64 + 128 + 2 * 64


def test_a_second_run_is_not_shared_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences share 128 keys with a third one, then 512 with each other."""
    rows = [[0, 1, 2, 3], [0, 1, *range(10, 18), 20], [0, 1, *range(10, 18), 21]]
    tables = made(random.Random(0), rows, [64 * len(row) for row in rows], 64, 30)
    inputs, shared = inputs_of(tables), shared_of(tables)
    assert seen_keys(inputs, monkeypatch, shared_pages=shared) == 128 + 128 + 512 + 2 * 64
    monkeypatch.setattr(thresholds.CPU, "shared_bytes", 2 * 128 * KEY_BYTES // 7 + 1)
    assert seen_keys(inputs, monkeypatch, shared_pages=shared) == sum(tables.lens.tolist())
    got = tatten.decode_attention(**inputs, shared_pages=shared, return_lse=True)
    assert_same(got, decode_attention_reference(**inputs))


def test_sequences_without_keys_take_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = made(random.Random(0), [[0, 1], [0, 2], [0, 3], [0, 4]], [0, 70, 0, 10], 64, 5)
    inputs = inputs_of(tables)
    assert sorted(keys_copied(monkeypatch, lambda: tatten.decode_attention(**inputs))) == [10, 70]
    got = tatten.decode_attention(**inputs, return_lse=True)
    assert_same(got, decode_attention_reference(**inputs))


@pytest.mark.parametrize("variant", [{"window": 100}, {"attn_mask": None}, {"batch_invariant": True}])
def test_calls_without_a_use_for_it_ignore_it(variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tables = made(random.Random(0), [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 2, 6]], [256, 256, 250], 64, 7)
    inputs = inputs_of(tables)
    if "attn_mask" in variant:
        variant = {"attn_mask": torch.rand(3, 1, 1, 64 * tables.table.shape[1]) > 0.3}
    given = variant | {"return_lse": True}
    with_it = tatten.decode_attention(**inputs, **given, shared_pages=shared_of(tables))
    assert all(torch.equal(x, y) for x, y in zip(with_it, tatten.decode_attention(**inputs, **given), strict=True))
    assert_same(with_it, decode_attention_reference(**inputs, **variant))
    without = seen_keys(inputs, monkeypatch, **given)
    assert seen_keys(inputs, monkeypatch, **given, shared_pages=shared_of(tables)) == without


def test_nan_of_a_sequence_that_goes_on_stays_its_own() -> None:
    tables = made(random.Random(0), [[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 2, 7]], [256, 256, 256], 64, 8)
    inputs = inputs_of(tables)
    inputs["value"][inputs["block_table"][0, 2].long()] = torch.nan
    out = tatten.decode_attention(**inputs, shared_pages=shared_of(tables))
    assert out[0].isnan().all()
    assert out[2].isnan().all()
    torch.testing.assert_close(out[1], decode_attention_reference(**inputs)[0][1])


def test_sequences_may_grow() -> None:
    tables = made(random.Random(0), [[0, 1, 2, 3], [0, 1, 4, 5]], [140, 160], 64, 6)
    shared, later = shared_of(tables), Tables(tables.table, tables.lens + 80, tables.n_pages, 64)
    inputs = inputs_of(later)
    got = tatten.decode_attention(**inputs, shared_pages=shared, return_lse=True)
    assert_same(got, decode_attention_reference(**inputs))


def test_pages_of_another_table_are_no_reason_to_read_beyond() -> None:
    rng = random.Random(3)
    for _ in range(30):
        tables = drawn(rng)
        inputs = inputs_of(tables) | {"key": torch.zeros(tables.n_pages, tables.page, 2, 8, dtype=torch.float64)}
        inputs["value"] = inputs["key"] + 1
        batch, columns = inputs["block_table"].shape
        rows = [list(range(columns * 2))] * batch
        lens = [columns * tables.page * 2] * batch
        data = shared_of(made(rng, rows, lens, tables.page, columns * 2)).data
        shared = tatten.SharedPages(data, columns, tables.page)
        out = tatten.decode_attention(**inputs, shared_pages=shared)
        assert ((out == 0) | ((out - 1).abs() < 1e-12)).all()


def test_bad_input() -> None:
    tables = made(random.Random(0), [[0, 1, 2, 3], [0, 1, 4, 5]], [140, 160], 64, 6)
    inputs = inputs_of(tables)
    check_shared_pages_are_refused(tatten.decode_attention, inputs, shared_of(tables))
    with pytest.raises(ValueError, match=r"`shared_pages` must come with the `block_table` .*, got None"):
        tatten.decode_attention(**inputs | {"shared_pages": shared_of(tables), "block_table": None})


def test_opcheck() -> None:
    tables = tree(random.Random(5), 5)
    inputs = inputs_of(tables)
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    given = inputs | {"shared_pages": shared_of(tables).data}
    opcheck(torch.ops.tatten.decode_attention.default, (query, key, value), given)


@pytest.mark.parametrize("backend", ["eager", "inductor", "tatten"])
def test_compiles(backend: str) -> None:
    def layers(n_pages: int, page: int, **inputs: Any) -> Tensor:
        given = {name: inputs[name] for name in ("block_table", "kv_lens")}
        shared = tatten.shared_pages(**given, n_pages=n_pages, page_size=page)
        inputs["query"] = tatten.decode_attention(**inputs, shared_pages=shared)
        return tatten.decode_attention(**inputs, shared_pages=shared)

    tables = tree(random.Random(6), 5)
    inputs = inputs_of(tables)
    with torch.no_grad():
        got = torch.compile(layers, backend=backend, fullgraph=True)(tables.n_pages, tables.page, **inputs)
    torch.testing.assert_close(got, layers(tables.n_pages, tables.page, **inputs))


def test_decomposes() -> None:
    tables = tree(random.Random(8), 5)
    inputs = inputs_of(tables)

    class Step(torch.nn.Module):
        def forward(self, inputs: dict[str, Any]) -> Any:
            given = {name: inputs[name] for name in ("block_table", "kv_lens")}
            shared = tatten.shared_pages(**given, n_pages=tables.n_pages, page_size=tables.page)
            return tatten.decode_attention(**inputs, shared_pages=shared, return_lse=True), shared.data

    with torch.no_grad():
        program = torch.export.export(Step(), (inputs,)).run_decompositions(tatten.decompositions())
    assert not [node for node in program.graph.nodes if "tatten" in str(node.target)]
    state, data = program.module()(inputs)
    assert_same(state, decode_attention_reference(**inputs))
    assert torch.equal(data, shared_of(tables).data)
