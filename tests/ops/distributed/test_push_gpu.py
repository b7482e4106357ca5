"""The push merge on GPUs that share memory is correct, bitwise equal on all ranks, and never waits forever."""

from __future__ import annotations

import datetime
import hashlib
import random
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from tatten.ops.distributed import communicator, push, push_layout
from tatten.ops.states import merge

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

RANKS = [n for n in (2, 3, 4, 8) if n <= GPUS]
REPLAYS = 10_000
LARGEST = torch.finfo(torch.float32).max
BF16 = torch.bfloat16

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...] = (1, 24, 1, 128)
    dtype: torch.dtype = BF16
    scatter: bool = False
    round_bytes: int = push_layout.ROUND_BYTES  # 0: two rounds, but for two ranks; very many: one

    def states(self, ranks: int, seed: int = 0) -> State:
        """The states of all ranks, known to each. Some are empty, some of these NaN; one row is empty on all ranks."""
        rng = torch.Generator().manual_seed(seed)
        out = torch.randn(ranks, *self.shape, generator=rng).to(self.dtype)
        lse = torch.randn(ranks, *self.shape[:-1], generator=rng) * 5
        for i, empty in enumerate((float("-inf"), float("inf"), float("nan"))):
            lse.view(-1)[i::11] = empty
        out[~(lse.abs() < float("inf"))] = float("nan")
        lse.view(ranks, -1)[:, -1] = float("-inf")
        return out.cuda(), lse.cuda()

    def merge(self, out: Tensor, lse: Tensor, group: str) -> State:
        push_layout.ROUND_BYTES = self.round_bytes
        return push.push_merge(out, lse, group, self.scatter)

    def check(self, got: State, out: Tensor, lse: Tensor) -> None:
        """Compare with a merge in float64 of all ranks' `out` and `lse`."""
        want = merge(out.double(), lse.double())
        if self.scatter:
            want = tuple(x.chunk(len(out), dim=1)[dist.get_rank()] for x in want)
        eps = torch.finfo(self.dtype).eps
        torch.testing.assert_close(got[0].double(), want[0], atol=4 * eps, rtol=2 * eps, msg=lambda x: f"{self}: {x}")
        torch.testing.assert_close(got[1].double(), want[1], atol=1e-5, rtol=1e-5, msg=lambda x: f"{self}: {x}")


SHAPES = [(1, 24, 1, 128), (8, 24, 1, 128), (3, 24, 5, 80), (1, 24, 1, 6), (171, 24, 1, 128), (2, 24, 3, 512)]
CASES = [
    *(Case(shape, round_bytes=size) for shape in SHAPES for size in (0, 1 << 40)),
    *(Case(shape, scatter=True) for shape in SHAPES),
    Case((2, 24, 1000, 64)),
    Case((2, 24, 1000, 64), scatter=True),
    Case((2, 24, 3000, 64), round_bytes=1 << 40),  # in several launches
    *(Case((5, 24, 3, 96), dtype, scatter) for dtype in (torch.float16, torch.float32) for scatter in (False, True)),
]


def start(seconds: float = 60) -> str:
    """Make a group of all ranks with NCCL as backend, but no NCCL communicator, and return its name."""
    torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(backend="nccl", timeout=datetime.timedelta(seconds=seconds))
    x = torch.zeros(1, 1, 1, 8, device="cuda")
    assert push.push_unsupported_reason(x, group.group_name) is None
    return group.group_name


def digest(state: State) -> str:
    return "".join(hashlib.sha256(x.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest() for x in state)


def own(state: State) -> State:
    return state[0][dist.get_rank()], state[1][dist.get_rank()]


def merge_cases() -> list[str]:
    group, found = start(), []
    for case in CASES:
        for connected in communicator._communicators.values():
            connected.plans.clear()  # of the same shape with other rounds
        out, lse = case.states(dist.get_world_size())
        got = case.merge(*own((out, lse)), group)
        case.check(got, out, lse)
        for _ in range(3):
            assert digest(case.merge(*own((out, lse)), group)) == digest(got), case
        found.append("" if case.scatter else digest(got))
    torch.cuda.synchronize()
    push.check_push(group)
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_merges(ranks: int) -> None:
    """Results match float64, and are bitwise equal on all ranks and in every run."""
    results = run_ranks(ranks, merge_cases, seconds=300)
    assert all(result == results[0] for result in results)


def merge_strided() -> None:
    group, case = start(), Case((2, 24, 3, 64))
    out, lse = case.states(dist.get_world_size())
    want = case.merge(*own((out, lse)), group)
    mine, mine_lse = own((out, lse))
    views = mine.transpose(1, 2).contiguous().transpose(1, 2), mine_lse.transpose(0, 2).contiguous().transpose(0, 2)
    assert not views[0].is_contiguous()
    assert digest(case.merge(*views, group)) == digest(want)
    none = push.push_merge(mine[:0], mine_lse[:0], group, False)
    assert [x.shape for x in none] == [(0, 24, 3, 64), (0, 24, 3)]


def test_strides_and_an_empty_batch() -> None:
    run_ranks(2, merge_strided)


def capture(job: Any) -> torch.cuda.CUDAGraph:
    job()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job()
    return graph


def replay_late() -> int:
    """Replay a graph of several merges with changing inputs, while any rank is late now and then."""
    group, n, rank = start(), dist.get_world_size(), dist.get_rank()
    cases = [Case(round_bytes=1 << 40), Case((4, 24, 7, 128), round_bytes=0), Case((4, 24, 1, 80), scatter=True)]
    inputs: list[State] = []
    wanted: list[State] = []
    for case in cases:
        tables = [case.states(n, seed) for seed in range(16)]
        merged = [case.merge(*own(x), group) for x in tables]
        for got, x in zip(merged, tables, strict=True):
            case.check(got, *x)
        inputs.append(tuple(torch.stack([own(x)[i] for x in tables]) for i in (0, 1)))
        wanted.append(tuple(torch.stack([x[i] for x in merged]) for i in (0, 1)))
    place, wrong = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))

    def step() -> None:
        place.add_(1).remainder_(16)
        for case, given, want in zip(cases, inputs, wanted, strict=True):
            got = case.merge(*(x.index_select(0, place)[0] for x in given), group)
            for x, y in zip(got, want, strict=True):
                wrong.add_((x != y.index_select(0, place)[0]).any())

    graph = capture(step)
    choose = random.Random(0)
    for _ in range(REPLAYS):
        late, cycles = choose.randrange(5 * n), choose.randrange(1, 200_000)  # up to 0.1 ms; the same on all ranks
        if late == rank:
            torch.cuda._sleep(cycles)
        graph.replay()
    torch.cuda.synchronize()
    push.check_push(group)
    return int(wrong)


@pytest.mark.parametrize("ranks", RANKS)
def test_replays_with_late_ranks(ranks: int) -> None:
    assert run_ranks(ranks, replay_late, seconds=300) == [0] * ranks


def merge_in_two_groups() -> None:
    groups, case = [start(), start()], Case((4, 24, 1, 128))
    tables = [case.states(dist.get_world_size(), seed) for seed in range(2)]
    for table, group in zip(tables, groups, strict=True):
        case.merge(*own(table), group)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in groups]
    got: list[list[State]] = [[], []]
    for _ in range(300):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(case.merge(*own(tables[i]), groups[i]))
    torch.cuda.synchronize()
    for states, table in zip(got, tables, strict=True):
        case.check(states[0], *table)
        assert {digest(x) for x in states} == {digest(states[0])}


@pytest.mark.parametrize("ranks", RANKS[:1])
def test_two_groups_at_once(ranks: int) -> None:
    run_ranks(ranks, merge_in_two_groups)


def merge_over_mesh() -> None:
    """Merges over a mesh of two by two, inner first, equal one merge of all ranks."""
    torch.cuda.set_device(dist.get_rank())
    mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("node", "gpu"))
    case = Case((4, 24, 1, 128), torch.float32)
    out, lse = case.states(4)
    state = own((out, lse))
    for dim in ("gpu", "node"):
        state = case.merge(*state, mesh.get_group(dim).group_name)
    case.check(state, out, lse)


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
def test_a_mesh_of_two_dims() -> None:
    run_ranks(4, merge_over_mesh)


def error_of(fn: Any, kind: type[Exception]) -> str:
    try:
        fn()
    except kind as error:
        return str(error)
    return "no error"


def merge_without_one(round_bytes: int) -> list[str]:
    """Rank 1 misses a merge and arrives too late."""
    group, case = start(seconds=4), Case(round_bytes=round_bytes)
    out, lse = own(case.states(dist.get_world_size()))
    job = partial(case.merge, out, lse, group)
    graph = capture(job)
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(8)
        job()  # the others had stored their rows before they gave up, but for a second round
        torch.cuda.synchronize()
        if not round_bytes and dist.get_world_size() > 2:
            return [error_of(partial(push.check_push, group), RuntimeError)]
        graph.replay()
    else:
        poison = job()
        for _ in range(100):
            graph.replay()  # waits no more
        torch.cuda.synchronize()
        assert poison[0].isnan().all()
        assert (poison[1] == LARGEST).all()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 20
    return [error_of(partial(push.check_push, group), RuntimeError), error_of(job, RuntimeError)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("round_bytes", [0, 1 << 40])
def test_a_missing_rank_is_an_error_on_all(ranks: int, round_bytes: int) -> None:
    for rank, errors in enumerate(run_ranks(ranks, merge_without_one, round_bytes)):
        missing = "1" if rank != 1 else " and ".join(str(i) for i in range(ranks) if i != 1)
        for error in errors:
            assert f"tatten.tree_merge, strategy 'push': rank {missing} of the {ranks} of group" in error
            assert "did not arrive within 4 s" in error


def disagree() -> list[str]:
    group, rank = start(seconds=20), dist.get_rank()
    x = torch.zeros(1, 8 + 8 * (rank == 1), 1, 64, device="cuda", dtype=BF16)
    shapes = error_of(lambda: push.push_merge(x, x[..., 0].float(), group, False), ValueError)
    y = torch.zeros(1, 8, 1, 64, device="cuda", dtype=BF16 if rank else torch.float16)
    dtypes = error_of(lambda: push.push_merge(y, y[..., 0].float(), group, False), ValueError)
    z = torch.ones(1, 8, 1, 64, device="cuda", dtype=BF16)
    out, _ = push.push_merge(z, z[..., 0].float(), group, False)  # the group can still be used
    assert (out == 1).all()
    return [shapes, dtypes]


def test_ranks_that_disagree() -> None:
    for shapes, dtypes in run_ranks(2, disagree):
        assert "rank 0: (1, 8, 1, 64) torch.bfloat16" in shapes
        assert "rank 1: (1, 16, 1, 64) torch.bfloat16" in shapes
        assert "rank 0: (1, 8, 1, 64) torch.float16" in dtypes


def capture_at_first_use() -> str:
    group, case = start(), Case()
    out, lse = own(case.states(dist.get_world_size()))

    def first() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            case.merge(out, lse, group)

    return error_of(first, RuntimeError)


def test_first_use_in_a_capture() -> None:
    assert all("run it once before capture" in x for x in run_ranks(2, capture_at_first_use))


def use_a_name_again() -> None:
    case = Case()
    for i in range(3):
        group = start()
        out, lse = case.states(dist.get_world_size(), i)
        case.check(case.merge(*own((out, lse)), group), out, lse)
        torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group(dist.distributed_c10d._resolve_process_group(group))


def test_groups_come_and_go() -> None:
    run_ranks(2, use_a_name_again)
