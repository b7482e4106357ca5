"""The kernels for shared pages in Triton's interpreter: they find what plain PyTorch finds, and attend to it."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import pytest
import torch
from compiled import FUSIBLE, compile_in_subprocess, last_program_waits
from paged_calls import POOLS
from poison import fresh_memory_is_poison
from shared_tables import Tables, drawn, inputs_of, made, shared_of, tree
from slow import slow_but

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda import shared_attention
from tatten.ops.kernel_signatures import decode_call
from tatten.ops.page_runs import LEVELS, OWN, shared_pages_reference
from tatten.ops.reference import decode_attention_reference

SCRIPT = """
import json, torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import shared_pages
launches = []
for name in ("_free_pages_kernel", "_own_pages_kernel", "_runs_kernel", "_cut_runs_kernel"):
    setattr(shared_pages, name, Recorder(getattr(shared_pages, name), launches))
shared_pages.has_early_launches = lambda device: True
sizes = (256, 512, 16, torch.int32), (1024, 4096, 64, torch.int64), (2, 4096, 1, torch.int32)
for batch, columns, page, lens in sizes:
    table = torch.empty(batch, columns, dtype=torch.int32, device="meta")
    find = shared_pages.plan_shared_pages(table, 100_000, page, 1)
    find(table, torch.empty(batch, dtype=lens, device="meta"))
print(json.dumps([compile_launch(*x) for x in launches]))
"""

ATTEND = """
import json, sys, torch, triton
from compiled import Recorder, compile_launch
from tatten.ops.cuda import combine, decode, decode_grid, shared_attention
from tatten.ops.kernel_signatures import decode_call
launches, found = [], []
combine.multiprocessors = decode_grid.multiprocessors = shared_attention.multiprocessors = lambda device: 132
shared_attention.has_large_shared_memory = lambda device: True
for module in (decode, combine):
    for name, x in list(vars(module).items()):
        if isinstance(x, triton.JITFunction) and name.endswith("_kernel"):
            setattr(module, name, Recorder(x, launches))
def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")
for dtype, dim, heads, page, kv_dtype, batch in json.loads(sys.argv[1]):
    dtype, kv_dtype, columns = getattr(torch, dtype), getattr(torch, kv_dtype), 8192 // page
    pool = empty(batch * columns, page, 8, dim, dtype=kv_dtype)
    given = {
        "kv_lens": empty(batch, dtype=torch.int32),
        "block_table": empty(batch, columns, dtype=torch.int32),
        "shared_pages": empty(18, 2 * batch + 1, dtype=torch.int32),
    }
    if kv_dtype.itemsize == 1:
        scale = empty(batch * columns, page, 8, dtype=torch.float32)
        given |= {"key_scale": scale, "value_scale": scale}
    call = decode_call(empty(batch, heads, 1, dim, dtype=dtype), pool, pool, **given)
    launches.clear()
    shared_attention.plan_shared_attention(call)(call)
    found.append([compile_launch(*x) for x in launches])
print(json.dumps(found))
"""
VARIANTS = [
    ("bfloat16", 128, 32, 16, "bfloat16", 64),
    ("bfloat16", 128, 32, 16, "bfloat16", 8),  # fewer work tiles than SMs
    ("bfloat16", 128, 32, 16, "bfloat16", 256),  # a program of the combine has two states
    ("bfloat16", 128, 8, 64, "bfloat16", 64),
    ("bfloat16", 64, 64, 1, "bfloat16", 64),
    ("bfloat16", 256, 32, 256, "bfloat16", 64),
    ("float32", 128, 32, 16, "float32", 64),
    ("bfloat16", 128, 32, 16, "int8", 64),
]

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")


@interpreted
@pytest.mark.parametrize("n", slow_but([25], [25, 600]))
def test_finds_what_plain_pytorch_finds(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import shared_pages
    from tatten.ops.cuda.shared_pages import plan_shared_pages

    allocate = shared_pages.allocate
    monkeypatch.setattr(shared_pages, "allocate", lambda *args: [x.fill_(-12345) for x in allocate(*args)])
    rng = random.Random(n)
    for _ in range(n):
        tables, q_length = drawn(rng), rng.choice((1, 1, 2, 5))
        table, lens = tables.table, tables.lens.to(rng.choice((torch.int32, torch.int64)))
        if rng.random() < 0.3:
            table = torch.stack((table, table + 1), dim=2).transpose(0, 1).contiguous()[..., 0].T
        given = tables.n_pages, tables.page, q_length
        got = plan_shared_pages(table, *given)(table, lens)
        assert torch.equal(got, shared_pages_reference(table, lens, *given))


@interpreted
def test_rows_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import shared_pages

    monkeypatch.setattr(shared_pages, "MOST_UNITS", 16)
    table = torch.arange(70, dtype=torch.int32).repeat(5, 1)
    table[3, 40:] += 100
    table[4, 50:] += 200
    lens = torch.tensor([70 * 64, 69 * 64, 33 * 64 + 5, 70 * 64, 16 * 64])
    got = shared_pages.plan_shared_pages(table, 300, 64, 1)(table, lens)
    assert torch.equal(got, shared_pages_reference(table, lens, 300, 64, 1))


@interpreted
def test_many_sequences() -> None:
    from tatten.ops.cuda.shared_pages import plan_shared_pages

    tables = tree(random.Random(0), 300)
    given = tables.n_pages, tables.page, 1
    got = plan_shared_pages(tables.table, *given)(tables.table, tables.lens)
    assert torch.equal(got, shared_pages_reference(tables.table, tables.lens, *given))


def assert_attends(tables: Tables, dtype: torch.dtype = torch.float32, **variant: Any) -> None:
    """Attention by the launches that are planned, in numbers of programs that cut work tiles, is that of float64."""
    from tatten.ops.cuda.shared_attention import plan_shared_attention

    programs, shape = variant.pop("programs", None), variant.pop("shape", {})
    inputs = inputs_of(tables, variant.pop("layout", "apart"), dtype, **shape)
    call = decode_call(**inputs, **variant, shared_pages=shared_of(tables).data)
    with fresh_memory_is_poison():
        got = plan_shared_attention(call, programs=programs)(call)
    assert got[0].dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for x, want in zip(got, decode_attention_reference(**inputs, **variant), strict=True):
        torch.testing.assert_close(x.double(), want, rtol=tolerance, atol=tolerance)


@interpreted
@pytest.mark.parametrize("n", slow_but([6], [6, 150]))
def test_attends_as_float64_does(n: int) -> None:
    rng, shared = random.Random(n), 0
    for seed in range(n):
        torch.manual_seed(seed)
        tables = drawn(rng, most=5)
        while len(tables.lens) < 2:
            tables = drawn(rng, most=5)
        variant: dict[str, Any] = {"layout": rng.choice(POOLS), "shape": {"q_len": rng.choice((1, 1, 2))}}
        if rng.random() < 0.3:
            variant["sinks"] = torch.randn(4)
        if rng.random() < 0.3:
            variant["softcap"] = 3.0
        assert_attends(tables, programs=rng.choice((None, 1, 2, 3, 7, 30)), **variant)
        shared += int(shared_of(tables).data[OWN].any())
    assert shared > n // 4


@pytest.mark.parametrize(
    "batch, kv_heads, programs",
    [(66, 8, None), (67, 8, 536), (256, 8, 2048), (128, 20, 2112), (257, 8, None), (4, 8, None)],
)
def test_programs_over_own_parts(
    batch: int, kv_heads: int, programs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each work tile beyond four on each of 132 SMs, up to 2112, for up to 256 sequences."""
    from tatten.ops.cuda.heuristics import Tiles

    monkeypatch.setattr(shared_attention, "multiprocessors", lambda device: 132)
    pool = torch.empty(8, kv_heads, 16, 128, dtype=torch.bfloat16, device="meta")
    query = torch.empty(batch, 4 * kv_heads, 1, 128, dtype=torch.bfloat16, device="meta")
    call = AttentionCall("decode_attention", query, (KeyValue(pool, pool),))
    assert shared_attention._own_part_programs(call, Tiles(16, 32, 2, 3, 4)) == programs
    assert shared_attention._own_part_programs(call, None) is None


@interpreted
def test_each_grouping_has_its_own_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs that cut runs go on side by side. Each of them keeps the longest runs and the last starts."""
    from tatten.ops.cuda import shared_pages

    kept: list[torch.Tensor] = []
    allocate = shared_pages.allocate

    def poisoned(*args: Any) -> list[torch.Tensor]:
        kept[:] = [x.fill_(-12345) for x in allocate(*args)]
        return kept

    monkeypatch.setattr(shared_pages, "allocate", poisoned)
    tables = tree(random.Random(0), 40)
    plan = shared_pages.plan_shared_pages(tables.table, tables.n_pages, tables.page, 1)
    plan(tables.table, tables.lens)
    first, second = kept[1][2 * LEVELS :].split(LEVELS + 1)
    assert torch.equal(first, second)
    assert (first >= -1).all()


@interpreted
def test_own_parts_have_their_choice_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = made(random.Random(0), LONG_OWN_PARTS, [500, 530, 560], 64, 24)
    call = decode_call(**inputs_of(tables), shared_pages=shared_of(tables).data)
    monkeypatch.setattr(shared_attention, "_own_part_programs", lambda *_: 77)
    assert shared_attention.plan_shared_attention(call).own_part.tile_space.programs == 77
    assert shared_attention.plan_shared_attention(call, programs=3).own_part.tile_space.programs == 3


LONG_OWN_PARTS = [[0, 1, *range(2 + 7 * b, 9 + 7 * b)] for b in range(3)]  # pages of 64 keys; the first two are shared


@interpreted
@pytest.mark.parametrize("programs", [21, 29, 38])
def test_equal_shares_of_own_parts(programs: int) -> None:
    """78 tiles are the shares of 20 or 26 programs, so the combine must know how many of the others are idle."""
    assert_attends(made(random.Random(0), LONG_OWN_PARTS, [500, 530, 560], 64, 24), programs=programs)


@interpreted
def test_two_states_for_a_program_of_the_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 15 states, so the last program has one."""
    from tatten.ops.cuda import combine

    states, launch = [], combine.Launch

    def planned(*args: Any, **sizes: Any) -> Any:
        states.append(sizes["BLOCK_STATES"])
        return launch(*args, **sizes)

    monkeypatch.setattr(combine, "MOST_SINGLE_STATES", 4)
    monkeypatch.setattr(combine, "Launch", planned)
    tables = made(random.Random(0), LONG_OWN_PARTS, [500, 130, 560], 64, 24)
    assert_attends(tables, programs=7, shape={"heads": 5, "kv_heads": 1})
    assert states == [2]


@interpreted
@pytest.mark.parametrize("programs", [1, 5, 40])
def test_attends_where_nothing_is_shared(programs: int) -> None:
    rows = [[3 * b, 3 * b + 1, 3 * b + 2] for b in range(3)]
    tables = made(random.Random(0), rows, [150, 192, 0], 64, 9)
    assert not shared_of(tables).data[OWN].any()
    assert_attends(tables, programs=programs)


@interpreted
@pytest.mark.parametrize("lens", [[256, 256, 256], [256, 256, 259]])
def test_attends_where_all_is_shared(lens: list[int]) -> None:
    tables = made(random.Random(0), [[0, 1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 4, 3]], lens, 64, 9)
    assert shared_of(tables).data[OWN, :3].tolist() == [256] * 3
    assert_attends(tables, sinks=torch.randn(4))


@interpreted
@pytest.mark.slow
def test_attends_with_full_row_groups_and_many_heads() -> None:
    tables = made(random.Random(0), [[0, 1, 2 + b] for b in range(35)], [129 + b for b in range(35)], 64, 37)
    assert shared_of(tables).data[0, -1] == 2
    assert_attends(tables, torch.bfloat16, programs=3, shape={"heads": 4, "kv_heads": 1, "dim": 16})


@interpreted
def test_a_value_that_is_nan_spoils_no_other_sequence() -> None:
    from tatten.ops.cuda.shared_attention import plan_shared_attention

    tables = made(random.Random(0), [[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 2, 7]], [256, 256, 256], 64, 8)
    inputs = inputs_of(tables, dtype=torch.float32)
    inputs["value"][inputs["block_table"][0, 2].long()] = torch.nan
    call = decode_call(**inputs, shared_pages=shared_of(tables).data)
    out, _ = plan_shared_attention(call)(call)
    assert out[0].isnan().all()
    assert out[2].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize("batch, large, few_warps", [(64, True, True), (16, True, False), (64, False, False)])
def test_own_parts_have_few_warps_where_many_programs_gain(
    batch: int, large: bool, few_warps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the 132 multiprocessors of an H200, with 8 kv heads."""
    monkeypatch.setattr(shared_attention, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(shared_attention, "has_large_shared_memory", lambda device: large)
    pool = torch.empty(64, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    lens = torch.empty(batch, dtype=torch.int32, device="meta")
    table = torch.empty(batch, 32, dtype=torch.int32, device="meta")
    query = torch.empty(batch, 32, 1, 128, dtype=torch.bfloat16, device="meta")
    call = decode_call(query, pool, pool, kv_lens=lens, block_table=table)
    tiles = shared_attention._own_part_tiles(call)
    assert tiles is not None
    assert (tiles.num_warps, tiles.per_sm) == ((2, 4) if few_warps else (4, 6))


@pytest.mark.drawn(2, "compiled for Hopper")
def test_finding_compiles_for_sm_90() -> None:
    kernels = compile_in_subprocess(SCRIPT)
    assert len(kernels) == 12
    for kernel in kernels:
        assert kernel["stack"] == 0, kernel["kernel"]
        wait, release = (kernel["ptx"].find(x) for x in ("griddepcontrol.wait", "griddepcontrol.launch"))
        memory = re.search(r"(ld|st|atom|red)\.(relaxed\.gpu\.)?global", kernel["ptx"])
        assert memory is not None
        assert -1 < wait < release < memory.start(), kernel["kernel"]


@pytest.mark.drawn(2, "compiled for Hopper")
@pytest.mark.parametrize("variants", slow_but([VARIANTS[:1]], [[x] for x in VARIANTS]))
def test_attention_compiles_for_sm_90(variants: list[tuple[str, int, int, int, str, int]]) -> None:
    for variant, kernels in zip(variants, compile_in_subprocess(ATTEND, variants), strict=True):
        assert [x["kernel"] for x in kernels] == ["_decode_kernel", "_decode_kernel", "_combine_kernel"]
        for i, kernel in enumerate(kernels):
            ptx, what = kernel["ptx"], f"{variant}, launch {i}"
            assert kernel["stack"] <= (136 if variant[4] == "int8" and i < 2 else 16), what
            assert kernel["shared"] <= 227 << 10, what
            assert not FUSIBLE.search(ptx), what
            wait, release, load = (ptx.find(x) for x in ("griddepcontrol.wait", "griddepcontrol.launch", "ld.global"))
            if i == 1:  # it runs beside the first one
                assert -1 < release < load < ptx.rfind("st.global") < wait, what
                assert last_program_waits(ptx), what
            elif i == 0:
                assert -1 < wait < release < load, what
            assert i == 2 or "cp.async.cg" in ptx, what
            assert i == 2 or variant[0] == "float32" or "mma" in ptx, what
