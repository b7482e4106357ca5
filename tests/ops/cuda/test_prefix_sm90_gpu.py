"""The prefix kernel on Hopper, against float64: every state and slot that it writes, and when it starts and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from poison import fresh_memory_is_poison
from stream_k_schedule import Schedule
from torch import Tensor

from tatten.ops.states import merge

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("runs on a GPU of capability 9.0", allow_module_level=True)
pytestmark = pytest.mark.gpu
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from tatten.ops.cuda.prefix_sm90 import BLOCK_M, BLOCK_N, plan_prefix_attention  # noqa: E402

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    batch: int
    q_heads: int
    q_len: int
    kv_batch: int
    kv_heads: int
    kv_len: int
    dim: int = 128
    programs: int = 132
    dtype: torch.dtype = torch.bfloat16

    @property
    def packed(self) -> int:
        return self.q_heads // self.kv_heads * (self.batch // self.kv_batch) * self.q_len

    @property
    def q_blocks(self) -> int:
        return -(-self.packed // BLOCK_M)

    @property
    def schedule(self) -> Schedule:
        work_tiles = self.kv_heads * self.q_blocks
        return Schedule.of_lengths([self.kv_len] * self.kv_batch, BLOCK_N, work_tiles, self.programs)

    def places(self, work_tile: int) -> tuple[Tensor, Tensor, Tensor]:
        """The sequence, head and position of each packed query of a work tile."""
        shared, group = self.batch // self.kv_batch, self.q_heads // self.kv_heads
        b, kv_head = work_tile // (self.kv_heads * self.q_blocks), work_tile // self.q_blocks % self.kv_heads
        start = work_tile % self.q_blocks * BLOCK_M
        packed = torch.arange(start, min(start + BLOCK_M, self.packed), device="cuda")
        head, sequence = packed // (self.q_len * shared), packed // self.q_len % shared
        return b * shared + sequence, kv_head * group + head, packed % self.q_len


FP16 = torch.float16
CASES = [
    Case(1, 8, 1, 1, 8, 128),  # one tile each, whole; programs without work
    Case(1, 8, 1, 1, 8, 1),
    Case(4, 8, 2, 2, 1, 500),  # one kv head
    Case(64, 32, 1, 1, 8, 4096),  # two blocks of packed queries, all split
    Case(64, 32, 1, 1, 8, 4097),
    Case(64, 32, 1, 1, 8, 4000, programs=128),
    Case(4, 32, 3, 1, 8, 1000),  # 48 packed queries, three positions
    Case(4, 32, 3, 1, 8, 1000, programs=7),  # whole and split work tiles in a program
    Case(6, 24, 2, 3, 8, 777, programs=11, dtype=FP16),
    Case(24, 32, 5, 3, 4, 777, programs=11),  # 320 packed queries: three blocks
    Case(24, 32, 5, 3, 4, 777, 64, programs=11),
    Case(24, 32, 5, 3, 4, 777, 64, programs=11, dtype=FP16),
    Case(256, 32, 1, 1, 8, 300, programs=3),
    Case(256, 32, 1, 1, 8, 8192),
    Case(256, 32, 1, 1, 8, 8192, 64, dtype=FP16),
    Case(64, 32, 1, 1, 8, 32768),
]
LAYOUTS = ["dense", "strided"]


def inputs(case: Case, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    c = case

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=c.dtype)

    if layout == "dense":
        query = normal(c.batch, c.q_heads, c.q_len, c.dim)
        key, value = (normal(c.kv_batch, c.kv_heads, c.kv_len, c.dim) for _ in "kv")
    else:
        # [B, L, H, D] seen as [B, H, L, D]; "odd": with strides and an address that 16 bytes do not divide.
        padding = 4 if layout == "odd" else 8
        query = normal(c.batch, c.q_len, c.q_heads, c.dim + padding)[..., padding // 2 : -padding // 2].transpose(1, 2)
        both = normal(c.kv_batch, c.kv_len + 8, c.kv_heads, 2 * c.dim)
        both[:, c.kv_len :] = float("nan")  # what is beyond the keys is never read
        key, value = both[:, : c.kv_len].transpose(1, 2).split(c.dim, -1)
        if c.kv_batch == 1:  # then its stride means nothing
            key = key.as_strided(key.shape, (3, *key.stride()[1:]), key.storage_offset())
    query *= 3  # some rows all but one-hot
    return query, key, value


def run(case: Case, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with fresh_memory_is_poison():
        return plan_prefix_attention(query, key, value, case.dim**-0.5, case.programs)(query, key, value)


def reference(case: Case, query: Tensor, key: Tensor, value: Tensor) -> State:
    group, shared = case.q_heads // case.kv_heads, case.batch // case.kv_batch
    out = query.new_empty(query.shape, dtype=torch.float64)
    lse = query.new_empty(query.shape[:3], dtype=torch.float64)
    for b in range(case.kv_batch):
        sequences = slice(b * shared, (b + 1) * shared)
        for head in range(case.kv_heads):
            heads = slice(head * group, (head + 1) * group)
            scores = query[sequences, heads].double() @ key[b, head].double().T * case.dim**-0.5
            lse[sequences, heads] = torch.logsumexp(scores, -1)
            out[sequences, heads] = torch.softmax(scores, -1) @ value[b, head].double()
    return out, lse


def merged(case: Case, out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor) -> State:
    """Fill in the states of split work tiles, and check that each state was written in its place and nowhere else."""
    schedule = case.schedule
    slots: dict[int, list[int]] = {}
    for program in range(case.programs):
        for visit in schedule.visits(program):
            if visit.slot is not None:
                slots.setdefault(visit.work_tile, []).append(visit.slot)
    out, lse = out.double(), lse.double()
    written = torch.zeros(partial_lse.shape, dtype=torch.bool, device="cuda")
    for work_tile in range(len(schedule.tiles)):
        places = case.places(work_tile)
        if work_tile not in slots:
            assert not lse[places].isnan().any()
            continue
        assert lse[places].isnan().all(), "something of a split work tile is where whole ones are"
        assert out[places].isnan().all()
        n = len(places[0])
        written[slots[work_tile], :n] = True
        out[places], lse[places] = merge(
            partial_out[slots[work_tile], :n].double(), partial_lse[slots[work_tile], :n].double()
        )
    assert torch.equal(~partial_lse.isnan(), written)
    assert torch.equal(~partial_out.isnan(), written[..., None].expand_as(partial_out))
    return out, lse


def bits(states: tuple[Tensor, ...]) -> list[Tensor]:
    return [state.view(torch.int32) for state in states]


@pytest.mark.parametrize(
    ("case", "layout"),
    [(case, layout) for case in CASES for layout in LAYOUTS] + [(CASES[9], "odd"), (CASES[11], "odd")],
    ids=lambda x: x if isinstance(x, str) else "-".join(str(field) for field in vars(x).values()),
)
def test_against_float64(case: Case, layout: str) -> None:
    query, key, value = inputs(case, layout)
    states = run(case, query, key, value)
    out, lse = merged(case, *states)
    want_out, want_lse = reference(case, query, key, value)
    rounding = torch.finfo(case.dtype).eps  # of the weights
    assert ((out - want_out).abs().max() / want_out.abs().max()).item() < rounding
    assert (lse - want_lse).abs().max().item() < 1e-3
    again = run(case, query, key, value)
    assert all(map(torch.equal, bits(states), bits(again)))


def test_nan_comes_out_of_its_row_only() -> None:
    case = Case(64, 32, 1, 1, 8, 1000, programs=8)  # eight kv heads of two whole work tiles each
    query, key, value = inputs(case, "dense")
    want = run(case, query, key, value)[:2]
    query[5, 6, 0, 7] = float("nan")
    out, lse = run(case, query, key, value)[:2]
    assert lse[5, 6].isnan().all()
    assert out[5, 6].isnan().all()
    lse[5, 6], out[5, 6] = want[1][5, 6], want[0][5, 6]
    assert all(map(torch.equal, bits((out, lse)), bits(want)))


@pytest.mark.parametrize(
    "change, message",
    [
        ("float32", "must all be bfloat16 or all float16, got torch.float32"),
        ("mixed", "must all be bfloat16 or all float16, got torch.bfloat16, torch.bfloat16 and torch.float16"),
        ("head_dim", "must have one dense head_dim of 64 or 128, got shapes"),
        ("strided", "must have one dense head_dim of 64 or 128, got shapes"),
        ("scale", "must be above 0"),
    ],
)
def test_refuses(change: str, message: str) -> None:
    query, key, value = inputs(Case(2, 8, 1, 1, 8, 128), "dense")
    scale = 1.0
    if change == "float32":
        query, key, value = query.float(), key.float(), value.float()
    elif change == "mixed":
        value = value.half()
    elif change == "head_dim":
        query, key, value = query[..., :96], key[..., :96], value[..., :96]
    elif change == "strided":
        query = query.new_empty(2, 8, 128, 2).mT
    else:
        scale = 0.0
    with pytest.raises(ValueError, match=message):
        plan_prefix_attention(query, key, value, scale, 8)


@triton.jit
def _copy_late(source, target, nanoseconds, BLOCK: tl.constexpr):
    """Let the next kernel start, and write what it reads only later."""
    tl.extra.cuda.gdc_launch_dependents()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def _time_the_wait(waited):
    begin = tl.extra.cuda.globaltimer()
    tl.extra.cuda.gdc_wait()
    tl.store(waited, tl.extra.cuda.globaltimer() - begin)


def repeated(launches: Callable[[], None], graph: bool) -> Callable[[], None]:
    """The launches, compiled, and perhaps as a graph."""
    launches()
    torch.cuda.synchronize()
    if not graph:
        return launches
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        launches()
    return captured.replay


@pytest.mark.parametrize("graph", [False, True])
def test_waits_for_the_kernel_before(graph: bool) -> None:
    case = Case(64, 32, 1, 1, 8, 256, programs=16)  # whole work tiles; most multiprocessors are free to start it early
    query, key, value = inputs(case, "dense")
    late = torch.zeros_like(key)
    got: list[tuple[Tensor, ...]] = []
    plan = plan_prefix_attention(query, late, value, case.dim**-0.5, case.programs)

    def launches() -> None:
        _copy_late[(16,)](key, late, 1_000_000, BLOCK=key.numel() // 16, launch_pdl=True)
        got.append(plan(query, late, value))

    again = repeated(launches, graph)
    late.zero_()
    torch.cuda.synchronize()
    again()
    assert torch.equal(late, key)
    assert all(map(torch.equal, got[-1][:2], run(case, query, key, value)[:2]))


@pytest.mark.parametrize("graph", [False, True])
def test_the_next_kernel_may_start_early(graph: bool) -> None:
    case = Case(64, 32, 1, 1, 8, 65536, programs=8)  # over a millisecond, with most multiprocessors free
    query, key, value = inputs(case, "dense")
    waited = torch.zeros(1, dtype=torch.int64, device="cuda")
    plan = plan_prefix_attention(query, key, value, case.dim**-0.5, case.programs)

    def launches() -> None:
        plan(query, key, value)
        _time_the_wait[(1,)](waited, launch_pdl=True)

    again = repeated(launches, graph)
    waited.zero_()
    torch.cuda.synchronize()
    again()
    assert waited.item() > 200_000
