"""The pages kernel for Hopper: run on a CPU in many orders of its partitions, compiled, and what it is chosen for."""

from __future__ import annotations

import bisect
import itertools
import os
import random
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiled import TRITON_3_6, compile_in_subprocess
from mixed_calls import MixedBatch, batch_for_hopper
from pages_kernel import assert_same_in_16_bits, install_pages_kernel
from poison import fresh_memory_is_poison
from shared_tables import Tables, drawn, inputs_of, made, shared_of
from slow import slow_but

from tatten.ops.cuda.allocation import allocate
from tatten.ops.cuda.kernels.page_softmax import CONSUMER_ROWS
from tatten.ops.cuda.kernels.query_blocks import CUTS_COLUMN
from tatten.ops.kernel_signatures import decode_call
from tatten.ops.mixed_batch import MixedCall
from tatten.ops.page_runs import OWN, group_sizes
from tatten.ops.reference import decode_attention_reference

if TYPE_CHECKING:
    from tatten.ops.cuda.shared_attention import SharedAttention

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
HEADS = ((4, 2), (5, 1), (2, 2), (9, 1))


def assert_attends_to_batch(batch: MixedBatch, seed: int, programs: int) -> None:
    inputs, dense = batch.inputs()
    with pytest.MonkeyPatch.context() as patch, fresh_memory_is_poison():
        install_pages_kernel(patch, seed)
        from tatten.ops.cuda.ragged import plan_ragged

        out, lse = plan_ragged(MixedCall(**inputs), programs=programs)(MixedCall(**inputs))
    batch.check(out, lse, dense, parts=12)


@interpreted
@pytest.mark.parametrize("n", slow_but([4], [4, 60]))
def test_mixed_batches(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(n)
    for seed in range(n):
        assert_attends_to_batch(batch_for_hopper(rng), seed, rng.choice((1, 2, 3, 7, 30)))


def cuts_of(plan: Any, call: MixedCall) -> tuple[int, bool]:
    """Return the margin of work tiles, and True if programs take whole work tiles, as the first block says."""
    _, _, scratch, blocks, ends, *others = allocate(call.query, *plan.writes)
    inputs = call.cu_seqlens_q, call.kv_lens
    if call.shared_pages is None:
        plan.list_blocks(*inputs, scratch, blocks, ends)
    else:
        plan.list_blocks(*inputs, call.shared_pages, call.query, scratch, blocks, ends, *others[-2:])
    margin, whole = divmod(int(blocks[0, CUTS_COLUMN]), 2)
    return margin, bool(whole)


@interpreted
@pytest.mark.parametrize("n", slow_but([1], [1, 12]))
def test_each_way_to_cut_the_tiles(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take equal or whole work tiles, with margins or without. No tile is left out or computed twice."""
    import triton.language as tl

    from tatten.ops.cuda import ragged
    from tatten.ops.cuda.kernels import query_blocks

    rng, counts, draws = random.Random(n), Counter[tuple[int, bool]](), 0
    while len(counts) < 4 or min(counts.values()) < n:
        batch, programs = batch_for_hopper(rng, most=8), rng.choice((1, 2, 3, 4, 7, 12, 30))
        # Few tiles are a long part here: then margins are as long as parts, and leave programs without any tile.
        monkeypatch.setattr(query_blocks, "_LONG_PART", tl.constexpr(rng.choice((1, 8))))
        draws += 1
        inputs, dense = batch.inputs()
        call = MixedCall(**inputs)
        with pytest.MonkeyPatch.context() as patch, fresh_memory_is_poison():
            install_pages_kernel(patch, draws)
            plan = ragged.plan_ragged(call, programs=programs)
            cuts = cuts_of(plan, call)
            if counts[cuts] >= n:
                continue
            counts[cuts] += 1
            out, lse = plan(call)
        batch.check(out, lse, dense, parts=12)


def assert_attends(tables: Tables, seed: int, programs: int, **shape: int) -> SharedAttention:
    inputs = inputs_of(tables, dtype=torch.bfloat16, **shape)
    keys = inputs.pop("query"), inputs.pop("key"), inputs.pop("value"), None, inputs.pop("kv_lens"), None, None
    call = decode_call(*keys, **inputs, shared_pages=shared_of(tables, shape.get("q_len", 1)).data)
    with pytest.MonkeyPatch.context() as patch, fresh_memory_is_poison():
        install_pages_kernel(patch, seed)
        from tatten.ops.cuda.pages_sm90 import SharedSegment
        from tatten.ops.cuda.shared_attention import plan_shared_attention

        plan = plan_shared_attention(call, programs=programs)
        assert isinstance(plan.shared_part, SharedSegment)
        out, lse = plan(call)
    want = decode_attention_reference(keys[0], keys[1], keys[2], kv_lens=keys[4], **inputs)
    assert_same_in_16_bits((out, lse), want)
    return plan


@interpreted
@pytest.mark.parametrize("n", slow_but([3], [3, 40]))
def test_shared_pages(n: int) -> None:
    """Work tiles have one consumer, or two."""
    rng, counts = random.Random(n), Counter[bool]()
    while counts.total() < 2 * n:
        tables, (heads, kv_heads), q_len = drawn(rng, most=12), rng.choice(HEADS), rng.choice((1, 1, 2, 3))
        if len(tables.lens) < 2 or tables.page < 8 or not shared_of(tables, q_len).data[OWN].any():
            continue
        two_consumers = heads // kv_heads * group_sizes(len(tables.lens))[0] * q_len > CONSUMER_ROWS
        if counts[two_consumers] == n:
            continue
        counts[two_consumers] += 1
        programs = rng.choice((1, 2, 5, 30))
        assert_attends(tables, counts.total(), programs, heads=heads, kv_heads=kv_heads, dim=64, q_len=q_len)


@interpreted
@pytest.mark.parametrize(("heads", "members"), [(1, 64), (2, 32)], ids=["one head", "two heads"])
def test_row_groups_fit_into_a_consumer(heads: int, members: int) -> None:
    """With one query head for each kv head, row groups have up to 64 sequences. Programs share their work tiles."""
    rows = [[*range(5), *([5, 6, 7] if b % 9 else []), 8 + b] for b in range(70)]
    tables = made(random.Random(0), rows, [128 * len(row) - b % 5 for b, row in enumerate(rows)], 128, 78)
    plan = assert_attends(tables, 0, 5, heads=heads, kv_heads=1, dim=64)
    assert plan.shared_part.tile_space.seqs_per_kv == members


@interpreted
@pytest.mark.parametrize("programs", [1, 5])
def test_nothing_shared(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch over row groups returns before it looks for its tiles."""
    from tatten.ops.cuda.kernels import pages_sm90 as kernel

    def never(*_: Any) -> None:
        raise AssertionError("a program without tiles looked for them")

    monkeypatch.setattr(kernel, "share_of_program", never)
    tables = made(random.Random(0), [[0, 1, 2], [3, 4, 5], [6, 7, 8]], [150, 192, 0], 64, 9)
    assert not shared_of(tables).data[OWN].any()
    assert_attends(tables, 0, programs, heads=4, kv_heads=2, dim=64)


LEAVES_EARLY = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 5]], [400, 401, 200], 128, 6  # the third sequence leaves after a page
BY_HEADS = pytest.mark.parametrize("heads", [4, 40], ids=["one consumer", "two consumers"])


@interpreted
@BY_HEADS
@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_sequence_that_leaves_early(programs: int, heads: int, seed: int) -> None:
    assert_attends(made(random.Random(0), *LEAVES_EARLY), seed, programs, heads=heads, kv_heads=2, dim=64)


@interpreted
@BY_HEADS
@pytest.mark.parametrize("seed", [0, 2])
def test_more_tiles_than_stages(heads: int, seed: int) -> None:
    """A buffer that is released too early is filled before its product has read it, in some orders."""
    tables = made(random.Random(0), [[*range(9), 9 + b] for b in range(3)], [1200, 1201, 1202], 128, 12)
    assert_attends(tables, seed, 1, heads=heads, kv_heads=2, dim=64)


@interpreted
@BY_HEADS
@pytest.mark.parametrize("page", [1, 2])
def test_keys_that_others_have_do_not_leak(heads: int, page: int) -> None:
    """A sequence that leaves a prefix early reads nothing of the pages that the others go on with, which are NaN."""
    tables = made(random.Random(0), *LEAVES_EARLY)
    shared = shared_of(tables).data
    assert shared[OWN, :3].tolist() == [384, 384, 128]
    inputs = inputs_of(tables, dtype=torch.bfloat16, dim=64, heads=heads)
    want, want_lse = decode_attention_reference(**inputs)
    for name in ("key", "value"):
        inputs[name][tables.table[0, page].long()] = torch.nan
    call = decode_call(**inputs, shared_pages=shared)
    with pytest.MonkeyPatch.context() as patch, fresh_memory_is_poison():
        install_pages_kernel(patch, 0)
        from tatten.ops.cuda.shared_attention import plan_shared_attention

        out, lse = plan_shared_attention(call, programs=1)(call)
    assert out[:2].isnan().all()
    assert_same_in_16_bits((out[2], lse[2]), (want[2], want_lse[2]))


@interpreted
@pytest.mark.parametrize(
    "batch",
    [
        MixedBatch(((1, 328),), window=200, page=128, heads=(2, 2), dims=(64, 64), dtype=torch.bfloat16),
        MixedBatch(((40, 126),), page=128, heads=(1, 1), dims=(64, 64), dtype=torch.bfloat16),
    ],
    ids=["window", "last key"],
)
def test_a_mask_begins_at_the_first_key_of_a_tile(batch: MixedBatch) -> None:
    assert_attends_to_batch(batch, 0, programs=1)


SCRIPT = """
import json, sys
import torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import pages_sm90
from tatten.ops.kernel_signatures import decode_call
from tatten.ops.mixed_batch import MixedCall

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

launches = []
pages_sm90._pages_kernel = Recorder(pages_sm90._pages_kernel, launches)
dim, page, variant = map(json.loads, sys.argv[1:])
i32, f32 = torch.int32, torch.float32
pool = empty(100, page, 8, dim)
few = 2 if "few" in variant else 32
if "shared" in variant:
    query, lens, table = empty(few, 32, 1, dim), empty(few, dtype=torch.int64), empty(few, 64, dtype=i32)
    call = decode_call(query, pool, pool, None, lens, 0.1, None, block_table=table)
    stored = call.segments[0]._replace(kv_lens=None, row_groups=empty(18, 2 * few + 1, dtype=i32))
    pages_sm90.plan_shared_segment(call, stored, 132)(call, stored)
else:
    given = {"window": 100} if "window" in variant else {}
    tensors = empty(700, 32, dim), pool, pool, empty(16, 64, dtype=i32), empty(17, dtype=i32), empty(16, dtype=i32)
    call = MixedCall(*tensors, sinks=empty(32), **given)
    outputs = tensors[0], empty(700, 32, dtype=f32), empty(264 * 128, dim, dtype=f32), empty(264 * 128, dtype=f32)
    attend = pages_sm90.plan_blocks(call, call.window, 64 if "few" in variant else 128, 30, 132)
    attend(call, empty(30, 7, dtype=i32), empty(30, dtype=torch.int64), call.sinks, outputs)
print(json.dumps(compile_launch(*launches[-1])))
"""
VARIANTS = [
    (d, page, x)
    for d in (64, 128)
    for page in (8, 16, 256)
    for x in ("shared", "shared few", "mixed window", "mixed few")
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_compiles_for_sm_90(variant: tuple[int, int, str]) -> None:
    built = compile_in_subprocess(SCRIPT, *variant)
    # Words at the ends of a visit, and with pages of 8 words of the producer, which has 16 entries of each of 3 tiles
    # in 56 registers. No consumer spills in its loop under Triton 3.6. Triton 3.9 spills more.
    of_pages_of_8 = 184 if variant[2] == "shared few" else 160
    most = (of_pages_of_8 if variant[1] == 8 else 56) if TRITON_3_6 else 320
    assert built["stack"] <= most, "registers spill to local memory"
    assert built["shared"] <= 227 * 1024
    assert built["launch_pdl"], "griddepcontrol.wait would not wait"
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16", built["ptx"])
    page = variant[1]
    # K and V in the loop, and V of the last tile; of boxes of 128 columns the halves are copied apart.
    copies = 3 * (128 // min(page, 128)) * variant[0] // 64
    assert built["ptx"].count("cp.async.bulk.tensor.4d.shared") >= copies


@pytest.mark.parametrize(
    "change",
    [{"softcap": 5.0}, {"batch_invariant": True}, {"scale": -0.1}, {"page": 4}, {"dim": 96}, {"dtype": torch.float32}],
    ids=str,
)
def test_what_it_is_not_chosen_for(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the change it is chosen on Hopper."""
    from tatten.ops.cuda import pages_sm90, ragged

    monkeypatch.setattr(pages_sm90, "_on_hopper", lambda x: True)
    for given, chosen in (({}, True), (change, False)):
        options = dict(given)
        page, dim, dtype = (options.pop(x, y) for x, y in (("page", 16), ("dim", 64), ("dtype", torch.bfloat16)))
        pool, query = torch.zeros(9, page, 2, dim, dtype=dtype), torch.zeros(5, 4, dim, dtype=dtype)
        table, starts = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        call = MixedCall(query, pool, pool, table, starts, starts[:2], **options)
        assert ragged._takes_pages_kernel(call) == chosen


def test_it_is_not_chosen_for_more_tiles_than_32_bits_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block has a tile even if there are no keys, and two margins."""
    from tatten.ops.cuda import pages_sm90, ragged

    monkeypatch.setattr(pages_sm90, "_on_hopper", lambda x: True)
    pool, starts = torch.empty(9, 16, 1, 64, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    most = (2**31 // 3 - 2) * 64  # a block for every 64 tokens, one more for the sequence, and one for padding
    for n_tokens, columns, chosen in ((most, 0, True), (most, 8, True), (most, 9, False), (most + 64, 0, False)):
        query = torch.zeros(1, 1, 64, dtype=torch.bfloat16).expand(n_tokens, 1, 64)
        call = MixedCall(query, pool, pool, torch.zeros(1, columns, dtype=torch.int32), starts, starts[:1])
        assert ragged._takes_pages_kernel(call) == chosen


def whole_parts(tiles: list[int], kv_heads: int, programs: int) -> list[int]:
    """The tiles of each program that takes the nearest whole work tiles, margins included."""
    ends = [kv_heads * end for end in itertools.accumulate(tiles)]
    total = ends[-1]
    active, cuts = max(1, min(programs, total)), []
    for program in range(active):
        place = total * program // active
        block = bisect.bisect_right(ends, place)
        in_block = place - (ends[block] - tiles[block] * kv_heads)
        cuts.append(place - in_block + (in_block + tiles[block] // 2) // tiles[block] * tiles[block])
    return [stop - start for start, stop in itertools.pairwise([*cuts, total])]


@interpreted
@pytest.mark.parametrize("n", slow_but([12], [12, 200]))
def test_no_program_takes_much_more_than_the_others(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are drawn so that whole work tiles are as even as equal parts, and so that they are not."""
    from tatten.ops.cuda import pages_sm90, ragged

    monkeypatch.setattr(pages_sm90, "takes_pages_kernel", lambda *_: True)
    rng, counts = random.Random(n), Counter[bool]()
    for _ in range(n):
        most, batch, programs = rng.choice((300, 3000)), rng.randint(2, 12), rng.choice((3, 7, 30, 132))
        lens = rng.choices((most, most - 200) if rng.random() < 0.5 else range(1, most), k=batch)
        pool, width = torch.empty(1, 256, 2, 64, dtype=torch.bfloat16), -(-most // 256)
        call = MixedCall(
            torch.empty(batch + 2, 4, 64, dtype=torch.bfloat16), pool, pool, torch.zeros(batch, width).int(),
            torch.arange(batch + 1).int(), torch.tensor(lens).int(),
        )  # fmt: skip
        plan = ragged.plan_ragged(call, programs=programs)
        with fresh_memory_is_poison():
            margin, whole = cuts_of(plan, call)
        sizes = [tiles + 2 * margin for tiles in [*(-(-x // 128) for x in lens), 1]]
        parts = whole_parts(sizes, 2, min(programs, plan.launches[0].launch.grid[0]))
        largest = max(parts) * len(parts) / sum(parts)
        counts[whole] += 1
        assert not whole or largest <= 1.1, (lens, programs)
    assert min(counts[True], counts[False]) > 0


BENCHMARK = {  # of benchmarks/mixed.py: numbers of queries, keys before them, and how their tiles are cut
    "31 decodes and a chunk": ([1] * 31 + [2048], [8191] * 31 + [8192], (1, True)),
    "8 chunks": ([512] * 8, [4096] * 8, (1, True)),
    "64 x 5 queries": ([5] * 64, [4096] * 64, (1, True)),
    "16 decodes, short chunk": ([1] * 16 + [512], [2047] * 16 + [2048], (1, False)),
    "a chunk": ([512], [8192], (1, True)),
    "5 queries": ([5], [8192], (0, False)),
    "4 x 5 queries": ([5] * 4, [8192] * 4, (1, False)),
}


@interpreted
@pytest.mark.parametrize("q_lens, pasts, cuts", BENCHMARK.values(), ids=BENCHMARK)
def test_how_tiles_of_the_benchmark_are_cut(
    q_lens: list[int], pasts: list[int], cuts: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the 132 multiprocessors of an H100, large batches take whole work tiles. 5 queries alone are short parts."""
    from tatten.ops.cuda import pages_sm90, ragged

    monkeypatch.setattr(pages_sm90, "takes_pages_kernel", lambda *_: True)
    pool = torch.empty(1, 256, 8, 128, dtype=torch.bfloat16)
    lens = [q_len + past for q_len, past in zip(q_lens, pasts, strict=True)]
    starts = torch.tensor([0, *itertools.accumulate(q_lens)]).int()
    call = MixedCall(
        torch.empty(sum(q_lens), 32, 128, dtype=torch.bfloat16), pool, pool,
        torch.zeros(len(lens), -(-max(lens) // 256)).int(), starts, torch.tensor(lens).int(),
    )  # fmt: skip
    assert cuts_of(ragged.plan_ragged(call, programs=132), call) == cuts


@pytest.mark.parametrize("sms, programs", [(132, 120), (114, 114), (78, 72), (20, 20)])
def test_row_groups_leave_sms_to_the_own_parts(sms: int, programs: int) -> None:
    from tatten.ops.cuda.pages_sm90 import shared_programs

    assert shared_programs(sms) == programs
