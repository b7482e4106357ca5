"""`paged_attention` with `shared_pages`: the same results as without, for any tables and any numbers of queries."""

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
    keys_copied,
    made,
    mixed_inputs,
    shared_of,
    tree,
)
from slow import slow_but
from torch import Tensor
from torch.library import opcheck

import tatten
from tatten.ops.cpu import thresholds
from tatten.ops.page_runs import OWN
from tatten.ops.reference import paged_attention_reference


@pytest.fixture(autouse=True)
def all_runs_are_worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds.CPU, "shared_bytes", 0)


@pytest.mark.parametrize("n", slow_but([150], [150, 2000]))
def test_random_tables(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, sharing_decodes = random.Random(n), 0
    for seed in range(n):
        torch.manual_seed(seed)
        monkeypatch.setattr(thresholds.CPU, "shared_bytes", rng.choice((0, 0, 500, 5000, 1 << 19)))
        tables = drawn(rng, most=12)
        q_lens = rng.choices((0, 1, 1, 1, 2, 20), k=len(tables.lens))
        inputs = mixed_inputs(tables, q_lens, rng.choice((0, 0, 3)), layout=rng.choice(POOLS))
        variant = draw_softmax(rng)
        shared = shared_of(tables)
        got = tatten.paged_attention(**inputs, **variant, shared_pages=shared, return_lse=True)
        assert_same(got, paged_attention_reference(**inputs, **variant))
        own = shared.data[OWN].tolist()
        sharing_decodes += any(q_len == 1 and own[b] for b, q_len in enumerate(q_lens))
    assert sharing_decodes > n // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    tables = tree(random.Random(1), 12)
    inputs = mixed_inputs(tables, [1] * 11 + [20], dtype=dtype)
    got = tatten.paged_attention(**inputs, shared_pages=shared_of(tables), return_lse=True)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    assert all(x.is_contiguous() for x in got)
    assert_same(got, paged_attention_reference(**inputs), 2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("per_key", [False, True])
def test_scales_of_keys_in_8_bits(per_key: bool) -> None:
    inputs = mixed_inputs(tables := tree(random.Random(2), 6), [1, 1, 3, 1, 1, 1])
    inputs = in_8_bits(inputs, per_key)
    got = tatten.paged_attention(**inputs, shared_pages=shared_of(tables), return_lse=True)
    assert_same(got, paged_attention_reference(**inputs))


def seen_keys(inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **variant: Any) -> int:
    """Return the number of keys that decode steps copy."""
    return sum(keys_copied(monkeypatch, lambda: tatten.paged_attention(**inputs, **variant)))


CHUNKS = [  # the numbers of queries of 6 sequences: where the chunk is the leader, in the middle, or absent
    [20, 1, 1, 1, 1, 1],
    [5, 1, 1, 1, 1, 1],
    [1, 1, 0, 20, 1, 1],
    [1, 5, 0, 20, 5, 1],
    [1] * 6,
]


@pytest.mark.parametrize("q_lens", CHUNKS)
def test_decode_steps_read_a_shared_page_once(q_lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tables = made(random.Random(0), [[0, 1, 2, 3 + b] for b in range(6)], [200 + b for b in range(6)], 64, 10)
    inputs, decodes = mixed_inputs(tables, q_lens), [b for b in range(6) if q_lens[b] == 1]
    few = sum(200 + b for b in range(6) if q_lens[b] == 5)  # keys of sequences that read all of their pages themselves
    assert seen_keys(inputs, monkeypatch) == few + sum(200 + b for b in decodes)
    shared = shared_of(tables)
    assert seen_keys(inputs, monkeypatch, shared_pages=shared) == few + 128 + sum(72 + b for b in decodes)
    got = tatten.paged_attention(**inputs, shared_pages=shared, return_lse=True)
    assert_same(got, paged_attention_reference(**inputs))


def test_keys_that_only_chunks_share_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[0, 1, 2, 3, 4, 5, 6 + b] for b in range(2)] + [[0, 1, 10 + b] for b in range(4)]
    tables = made(random.Random(0), rows, [64 * len(row) for row in rows], 64, 20)
    inputs = mixed_inputs(tables, [20, 20, 1, 1, 1, 1])
    assert seen_keys(inputs, monkeypatch, shared_pages=shared_of(tables)) == 128 + 4 * 64


@pytest.mark.parametrize("variant", [{"window": 100}, {"batch_invariant": True}])
def test_calls_without_a_use_for_it_ignore_it(variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tables = made(random.Random(0), [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 2, 6]], [256, 256, 250], 64, 7)
    inputs = mixed_inputs(tables, [1, 1, 4]) | variant
    with_it = tatten.paged_attention(**inputs, shared_pages=shared_of(tables), return_lse=True)
    without = tatten.paged_attention(**inputs, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(with_it, without, strict=True))
    copied = seen_keys(inputs, monkeypatch)
    assert seen_keys(inputs, monkeypatch, shared_pages=shared_of(tables)) == copied


def test_nan_of_a_sequence_stays_its_own() -> None:
    tables = made(random.Random(0), [[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 2, 7]], [256, 256, 256], 64, 8)
    inputs = mixed_inputs(tables, [30, 1, 1])
    inputs["value"][inputs["block_table"][0, 3].long()] = torch.nan  # a page of the chunk alone, which leads the others
    out = tatten.paged_attention(**inputs, shared_pages=shared_of(tables))
    assert out[:30].isnan().all()
    want, _ = paged_attention_reference(**inputs)
    torch.testing.assert_close(out[30:], want[30:])


def test_sequences_may_grow() -> None:
    tables = made(random.Random(0), [[0, 1, 2, 3], [0, 1, 4, 5]], [140, 160], 64, 6)
    shared, later = shared_of(tables), Tables(tables.table, tables.lens + 80, tables.n_pages, 64)
    inputs = mixed_inputs(later, [1, 1])
    got = tatten.paged_attention(**inputs, shared_pages=shared, return_lse=True)
    assert_same(got, paged_attention_reference(**inputs))


def test_bad_input() -> None:
    tables = made(random.Random(0), [[0, 1, 2, 3], [0, 1, 4, 5]], [140, 160], 64, 6)
    inputs = mixed_inputs(tables, [1, 1])
    check_shared_pages_are_refused(tatten.paged_attention, inputs, shared_of(tables))


def test_opcheck() -> None:
    tables = tree(random.Random(5), 5)
    inputs = mixed_inputs(tables, [1, 3, 1, 0, 1])
    names = "query", "key", "value", "block_table", "cu_seqlens_q", "kv_lens"
    shared = {"shared_pages": shared_of(tables).data}
    opcheck(torch.ops.tatten.paged_attention.default, tuple(inputs[name] for name in names), shared)


@pytest.mark.parametrize("backend", ["eager", "inductor", "tatten"])
def test_compiles(backend: str) -> None:
    def layers(n_pages: int, page: int, **inputs: Any) -> Tensor:
        pages = {name: inputs[name] for name in ("block_table", "kv_lens")}
        shared = tatten.shared_pages(**pages, n_pages=n_pages, page_size=page)
        inputs["query"] = tatten.paged_attention(**inputs, shared_pages=shared)
        return tatten.paged_attention(**inputs, shared_pages=shared)

    tables = tree(random.Random(6), 5)
    inputs = mixed_inputs(tables, [1, 3, 1, 0, 1])
    with torch.no_grad():
        got = torch.compile(layers, backend=backend, fullgraph=True)(tables.n_pages, tables.page, **inputs)
    torch.testing.assert_close(got, layers(tables.n_pages, tables.page, **inputs))


def test_decomposes() -> None:
    tables = tree(random.Random(8), 5)
    inputs = mixed_inputs(tables, [1, 3, 1, 0, 1])

    class Step(torch.nn.Module):
        def forward(self, inputs: dict[str, Any]) -> Any:
            pages = {name: inputs[name] for name in ("block_table", "kv_lens")}
            shared = tatten.shared_pages(**pages, n_pages=tables.n_pages, page_size=tables.page)
            return tatten.paged_attention(**inputs, shared_pages=shared, return_lse=True)

    with torch.no_grad():
        program = torch.export.export(Step(), (inputs,)).run_decompositions(tatten.decompositions())
    assert not [node for node in program.graph.nodes if "tatten" in str(node.target)]
    assert_same(program.module()(inputs), paged_attention_reference(**inputs))
