"""Mixed batches with shared pages, in Triton's interpreter: the lists that are kept, and attention as in float64."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from typing import Any

import pytest
import torch
from paged_calls import POOLS
from pages_kernel import assert_same_in_16_bits, install_pages_kernel
from poison import fresh_memory_is_poison
from shared_tables import (
    Tables,
    assert_same,
    draw_softmax,
    drawn,
    in_8_bits,
    made,
    mixed_inputs,
    runs_of,
    shared_of,
    tree,
)
from slow import slow_but
from torch import Tensor

from tatten.ops.cuda.kernels.query_blocks import CUTS_COLUMN
from tatten.ops.mixed_batch import MixedCall
from tatten.ops.page_runs import LEADERS, LEVELS, OWN, TILE_ENDS
from tatten.ops.reference import paged_attention_reference

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
Q_LENS = (0, 1, 1, 1, 2, 9)


def small_tiles(many_m: int = 32) -> Any:
    from tatten.ops.cuda.heuristics import Tiles

    return Tiles(16, 64, 4, 2), Tiles(many_m, 32, 4, 2)


def attend(inputs: dict[str, Any], shared: Tensor, tiles: Any = None, programs: int | None = None) -> Any:
    from tatten.ops.cuda.mixed_shared import AttendShared
    from tatten.ops.cuda.ragged import plan_ragged

    call = MixedCall(**inputs, shared_pages=shared)
    plan = plan_ragged(call, tiles=tiles, programs=programs)
    assert isinstance(plan, AttendShared)
    with fresh_memory_is_poison():
        return plan(call)


def kept_of(call: MixedCall) -> tuple[Tensor, Tensor]:
    """The shared pages of sequences with one query, and the queries, as the device makes them."""
    from tatten.ops.cuda.allocation import allocate
    from tatten.ops.cuda.ragged import plan_ragged

    plan: Any = plan_ragged(call, tiles=small_tiles())
    with fresh_memory_is_poison():
        _, _, scratch, blocks, ends, _, _, kept, queries = allocate(call.query, *plan.writes)
        plan.list_blocks(
            call.cu_seqlens_q, call.kv_lens, call.shared_pages, call.query, scratch, blocks, ends, kept, queries
        )
    return kept, queries


@pytest.mark.parametrize("n", slow_but([25], [25, 400]))
def test_runs_of_sequences_with_one_query_are_kept(n: int) -> None:
    rng, kept_some, left_some = random.Random(n), 0, 0
    for _ in range(n):
        tables = drawn(rng)
        if (batch := len(tables.lens)) < 2:
            continue
        q_lens = rng.choices(Q_LENS, k=batch)
        inputs = mixed_inputs(tables, q_lens, rng.choice((0, 3)), dtype=torch.float32)
        shared = shared_of(tables).data
        kept, queries = kept_of(MixedCall(**inputs, shared_pages=shared))
        want = [x for x in runs_of(shared, batch) if q_lens[x[0]] == 1]
        assert sorted(runs_of(kept, batch)) == sorted(want)
        one = torch.tensor([q_len == 1 for q_len in q_lens])
        assert kept[OWN, :batch].tolist() == torch.where(one, shared[OWN, :batch], 0).tolist()
        starts = inputs["cu_seqlens_q"].tolist()
        for b in {b for b, _ in want}:
            assert torch.equal(queries[b, :, 0], inputs["query"][starts[b]])
        kept_some += bool(want)
        left_some += len(want) < len([*runs_of(shared, batch)])
    assert min(kept_some, left_some) > n // 4


def test_groups_of_chunks_alone_do_no_work() -> None:
    rows = [[0, 1, 2, 3 + b] for b in range(3)] + [[6, 7, 8, 9 + b] for b in range(3)]
    tables = made(random.Random(0), rows, [256] * 6, 64, 20)
    inputs = mixed_inputs(tables, [3, 2, 2, 0, 1, 1], dtype=torch.float32)
    shared = shared_of(tables).data
    assert shared[LEADERS, -1] == 2
    kept, _ = kept_of(MixedCall(**inputs, shared_pages=shared))
    assert kept[LEADERS].tolist() == [3, *[0] * (LEVELS * 6 - 1), 1]  # the leader has no query, but its pages hold
    assert kept[TILE_ENDS].tolist() == [1] * (LEVELS * 6 + 1)
    got = attend(inputs, shared, small_tiles(), 3)
    assert_same(got, paged_attention_reference(**inputs), 1e-5)


@pytest.mark.parametrize("n", slow_but([8], [8, 200]))
def test_random_tables(n: int) -> None:
    rng, sharing = random.Random(n), 0
    for seed in range(n):
        torch.manual_seed(seed)
        tables = drawn(rng, most=6)
        while len(tables.lens) < 2:
            tables = drawn(rng, most=6)
        q_lens = rng.choices(Q_LENS, k=len(tables.lens))
        heads = rng.choice(({}, {}, {"heads": 20, "kv_heads": 1}, {"heads": 6, "kv_heads": 3}))
        inputs = mixed_inputs(
            tables, q_lens, rng.choice((0, 3)), layout=rng.choice(POOLS), dtype=torch.float32, **heads
        )
        inputs |= {name: x for name, x in draw_softmax(rng).items() if name != "sinks" or not heads}
        shared = shared_of(tables).data
        tiles = rng.choice((None, small_tiles(), small_tiles(16)))
        got = attend(inputs, shared, tiles, rng.choice((None, 1, 2, 3, 7, 30)))
        assert_same(got, paged_attention_reference(**inputs), 1e-5)
        sharing += any(q_len == 1 and own for q_len, own in zip(q_lens, shared[OWN].tolist(), strict=False))
    assert sharing > n // 4


@pytest.mark.parametrize("many_m", [16, 32, 64])
def test_a_query_may_fill_several_blocks(many_m: int) -> None:
    tables = made(random.Random(0), [[0, 1, *range(2 + 6 * b, 8 + 6 * b)] for b in range(3)], [400, 430, 500], 64, 20)
    inputs = mixed_inputs(tables, [1, 2, 1], 1, dtype=torch.float32, heads=40, kv_heads=1)
    got = attend(inputs, shared_of(tables).data, small_tiles(many_m), 19)
    assert_same(got, paged_attention_reference(**inputs), 1e-5)


def test_no_state_is_written_by_two_programs() -> None:
    """The result is the same if the programs that add runs come after those that combine blocks, and not before."""
    from tatten.ops.cuda.launcher import Launch
    from tatten.ops.cuda.ragged import plan_ragged

    tables = made(random.Random(0), [[0, 1, *range(2 + 6 * b, 8 + 6 * b)] for b in range(3)], [500] * 3, 64, 20)
    inputs = mixed_inputs(tables, [1, 1, 3], dtype=torch.float32)
    call = MixedCall(**inputs, shared_pages=shared_of(tables).data)
    plan: Any = plan_ragged(call, tiles=small_tiles(), programs=7)
    combine, changed = plan.combine, []

    def twice(blocks: Tensor, ends: Tensor, scratch: Tensor, out: Tensor, *rest: Any) -> None:
        sizes = combine.arguments
        adding = sizes["batch"] * sizes["kv_heads"] * -(-sizes["heads_per_kv"] // 16)  # the first programs
        combine(blocks, ends, scratch, out, *rest)
        before = out.clone()
        Launch(combine.kernel, (adding,), combine.options, **sizes)(blocks, ends, scratch, out, *rest)
        changed.append((out != before).any().item())

    dataclasses.replace(plan, combine=twice)(call)
    assert changed == [False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    tables = tree(random.Random(1), 5)
    inputs = mixed_inputs(tables, [1, 1, 5, 1, 1], 2, dtype=dtype)
    got = attend(inputs, shared_of(tables).data, small_tiles(), 3)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    assert all(x.is_contiguous() for x in got)
    assert_same(got, paged_attention_reference(**inputs), 2e-2)


@pytest.mark.parametrize("per_key", [False, True])
def test_scales_of_keys_in_8_bits(per_key: bool) -> None:
    tables = tree(random.Random(2), 5)
    inputs = in_8_bits(mixed_inputs(tables, [1, 1, 3, 1, 1], dtype=torch.float32), per_key)
    got = attend(inputs, shared_of(tables).data, None, 5)
    assert_same(got, paged_attention_reference(**inputs), 1e-4)


@pytest.mark.parametrize("lens", [[256, 256, 256], [256, 256, 259]])
def test_all_keys_of_a_sequence_may_be_shared(lens: list[int]) -> None:
    tables = made(random.Random(0), [[0, 1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 4, 3]], lens, 64, 9)
    inputs = mixed_inputs(tables, [1, 1, 1], 2, dtype=torch.float32) | {"sinks": torch.randn(4)}
    got = attend(inputs, shared_of(tables).data)
    assert_same(got, paged_attention_reference(**inputs), 1e-5)


@pytest.mark.parametrize("q_lens", [[1, 1, 1], [4, 1, 0], [2, 3, 4]])
def test_nothing_is_shared(q_lens: list[int]) -> None:
    tables = made(random.Random(0), [[3 * b, 3 * b + 1, 3 * b + 2] for b in range(3)], [150, 192, 0], 64, 9)
    shared = shared_of(tables).data
    assert not shared[OWN].any()
    inputs = mixed_inputs(tables, q_lens, dtype=torch.float32)
    got = attend(inputs, shared, small_tiles(), 4)
    assert_same(got, paged_attention_reference(**inputs), 1e-5)


@pytest.mark.slow
def test_full_row_groups_of_which_some_are_chunks() -> None:
    tables = made(random.Random(0), [[0, 1, 2 + b] for b in range(70)], [129 + b % 40 for b in range(70)], 64, 80)
    shared = shared_of(tables).data
    assert shared[LEADERS, -1] == 3
    q_lens = [2 if b % 5 == 0 else 1 for b in range(70)]
    inputs = mixed_inputs(tables, q_lens, dtype=torch.float32)
    assert_same(attend(inputs, shared, small_tiles(), 5), paged_attention_reference(**inputs), 1e-5)


def test_row_groups_of_heads_with_one_query_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of up to 64 sequences are kept, as the pages kernel takes them."""
    from tatten.ops.cuda.ragged import plan_ragged

    rows = [[0, *([1] if b % 9 else []), 2 + b] for b in range(40)]
    tables = made(random.Random(0), rows, [128 * len(row) - b % 5 for b, row in enumerate(rows)], 128, 42)
    inputs = mixed_inputs(tables, [1 + b % 2 * (b % 5 == 0) for b in range(40)], heads=2, kv_heads=2, dim=64)
    inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}
    call = MixedCall(**inputs, shared_pages=shared_of(tables).data)
    install_pages_kernel(monkeypatch, 0)
    plan = plan_ragged(call, programs=3)
    assert plan.shared_part.tile_space.seqs_per_kv == 64
    with fresh_memory_is_poison():
        got = plan(call)
    assert_same_in_16_bits(got, paged_attention_reference(**inputs))


def test_nan_of_a_sequence_stays_its_own() -> None:
    tables = made(random.Random(0), [[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 2, 7]], [256, 256, 256], 64, 8)
    inputs = mixed_inputs(tables, [5, 1, 1], dtype=torch.float32)
    inputs["value"][inputs["block_table"][0, 3].long()] = torch.nan  # a page of the chunk alone, which leads the others
    out, _ = attend(inputs, shared_of(tables).data, small_tiles(), 2)
    assert out[:5].isnan().all()
    torch.testing.assert_close(out[5:].double(), paged_attention_reference(**inputs)[0][5:], rtol=1e-5, atol=1e-5)


def test_sequences_may_grow_and_batches_may_change() -> None:
    """One plan, and with it one captured graph, serves any tables, lengths and starts of a shape."""
    from tatten.ops.cuda.ragged import plan_ragged

    rng, plan = random.Random(0), None
    rows = [[0, 1, 2, 3, 9], [0, 1, 4, 5, 10], [0, 1, 4, 7, 8]]
    for q_lens in ([1, 1, 1], [1, 4, 1], [5, 0, 1], [3, 3, 0], [0, 0, 0]):
        tables = made(rng, rows, [rng.randint(128, 200) for _ in rows], 64, 11)
        columns = 8 - tables.table.shape[1]
        tables = Tables(torch.nn.functional.pad(tables.table, (0, columns)), tables.lens, 40, 64)
        shared = shared_of(tables).data
        later = Tables(tables.table, tables.lens + 80, 40, 64)
        inputs = mixed_inputs(later, q_lens, 8 - sum(q_lens), dtype=torch.float32)
        call = MixedCall(**inputs, shared_pages=shared)
        plan = plan or plan_ragged(call, tiles=small_tiles(), programs=5)
        with fresh_memory_is_poison():
            got = plan(call)
        assert_same(got, paged_attention_reference(**inputs), 1e-5)


@pytest.mark.parametrize("change", [{"window": 100}, {"batch_invariant": True}])
def test_other_calls_ignore_them(change: dict[str, Any]) -> None:
    from tatten.ops.cuda.mixed import _plan

    tables = made(random.Random(0), [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 2, 6]], [256, 256, 250], 64, 7)
    inputs = mixed_inputs(tables, [1, 1, 4], dtype=torch.float32) | change
    shared = shared_of(tables).data
    assert shared[OWN].any()
    calls = MixedCall(**inputs), MixedCall(**inputs, shared_pages=shared)
    states = [_plan(*call)(call) for call in calls]
    assert all(torch.equal(x, y) for x, y in zip(*states, strict=True))
    with pytest.raises(ValueError, match="`shared_pages` must be int32 of shape"):
        _plan(*calls[0]._replace(shared_pages=shared[:, 1:]))


def test_starts_that_do_not_add_up() -> None:
    tables = made(random.Random(0), [[0, 1, 2], [0, 1, 3], [0, 1, 4]], [150, 160, 170], 64, 5)
    inputs, shared = mixed_inputs(tables, [1, 4, 1], dtype=torch.float32), shared_of(tables).data
    for given, read in itertools.product([[7, 1, 2, 40]], [[0, 1, 2, 6]]):
        got = attend(inputs | {"cu_seqlens_q": torch.tensor(given).int()}, shared, small_tiles())
        want = paged_attention_reference(**inputs | {"cu_seqlens_q": torch.tensor(read).int()})
        assert_same(got, want, 1e-5)


@pytest.mark.parametrize("n", slow_but([3], [3, 40]))
def test_the_pages_kernel(n: int) -> None:
    from tatten.ops.cuda import ragged

    rng, sharing = random.Random(n), 0
    while sharing < n:
        tables = drawn(rng, most=8)
        q_lens = rng.choices(Q_LENS, k=len(tables.lens))
        shared = shared_of(tables).data
        own = [own for q_len, own in zip(q_lens, shared[OWN].tolist(), strict=False) if q_len == 1]
        if len(q_lens) < 2 or tables.page < 8 or not any(own):
            continue
        heads, kv_heads = rng.choice(((4, 2), (5, 1), (2, 2)))
        inputs = mixed_inputs(tables, q_lens, 2, dtype=torch.bfloat16, heads=heads, kv_heads=kv_heads, dim=64)
        if rng.random() < 0.5:
            inputs["sinks"] = torch.randn(heads)
        with pytest.MonkeyPatch.context() as patch:
            install_pages_kernel(patch, sharing, rng.choice((1, 8)))
            assert ragged._takes_pages_kernel(MixedCall(**inputs))
            got = attend(inputs, shared, None, rng.choice((1, 2, 5, 30)))
        assert_same_in_16_bits(got, paged_attention_reference(**inputs))
        sharing += 1


@pytest.mark.parametrize(
    "n_tiles, long_part, margin", [((4, 4, 2), 8, 0), ((6, 6, 1), 1, 1)], ids=["tiles alone", "margins"]
)
def test_own_parts_that_equal_parts_would_cut_stay_whole(
    n_tiles: tuple[int, int, int], long_part: int, margin: int
) -> None:
    """With so many tiles each, equal parts of three programs would end within some, and whole work tiles are even."""
    from tatten.ops.cuda.ragged import plan_ragged

    lens = [128 * (1 + n) - b for b, n in enumerate(n_tiles)]
    rows = [[0, *range(1 + 10 * b, 11 + 10 * b)] for b in range(3)]
    tables = made(random.Random(0), rows, lens, 128, 31)
    inputs = mixed_inputs(tables, [1, 1, 1], 2, dtype=torch.bfloat16, heads=5, kv_heads=1, dim=64)
    shared = shared_of(tables).data
    assert shared[OWN, :3].tolist() == [128] * 3
    call, cut = MixedCall(**inputs, shared_pages=shared), []
    with pytest.MonkeyPatch.context() as patch, fresh_memory_is_poison():
        install_pages_kernel(patch, 0, long_part)
        plan: Any = plan_ragged(call, programs=3)

        def combine(blocks: Tensor, ends: Tensor, *rest: Any) -> None:
            assert blocks[:3, 6].tolist() == [*n_tiles]
            assert blocks[0, CUTS_COLUMN] == 2 * margin + 1
            begins = [int(ends[-1]) * program // 3 for program in range(3)]
            for end, n in zip(ends.tolist(), n_tiles, strict=False):
                cut.append(any(end - margin - n < begin < end - margin for begin in begins))
            plan.combine(blocks, ends, *rest)

        got = dataclasses.replace(plan, combine=combine)(call)
    assert any(cut)
    assert_same_in_16_bits(got, paged_attention_reference(**inputs))
