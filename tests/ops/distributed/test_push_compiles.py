"""The push merge without a GPU: its kernel compiles for Hopper as it should, and ranks merge under the interpreter.

The interpreter runs the programs of a rank one after the other, and each waits only for the same program of other
ranks: so ranks that are processes and share files as memory run the very protocol, but for how flags are polled.
"""

from __future__ import annotations

import ctypes
import random
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compiled import compile_in_subprocess
from ranks import RankError, run_ranks, try_ranks
from slow import slow_but
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from tatten.ops.distributed import push, push_layout
from tatten.ops.distributed.communicator import Communicator, Workspace, unsupported_topology
from tatten.ops.states import merge

pytestmark = pytest.mark.drawn(1)

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs where the interpreter does")

SCRIPT = """
import json, sys
import torch
from compiled import Recorder, compile_launch
from tatten.ops.distributed import push, push_kernel, push_layout
from tatten.ops.distributed.communicator import Workspace

def meta(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")

launches, found = [], []
push_kernel.push_kernel = Recorder(push_kernel.push_kernel, launches)
for shape, dtype, ranks, scatter in json.loads(sys.argv[1]):
    dtype = getattr(torch, dtype)
    launches.clear()
    plan = push_layout.plan_push(torch.Size(shape), dtype.itemsize, ranks, scatter, 132)
    workspace = object.__new__(Workspace)
    workspace.buffer, workspace.addresses = meta(1, dtype=torch.uint8), meta(ranks, dtype=torch.int64)
    workspace.epochs, workspace.missing = meta(132, dtype=torch.int64), meta(1, dtype=torch.int32)
    workspace.rank, workspace.timeout_ns = 1, 600 * 10**9
    push.launch_push(meta(*shape, dtype=dtype), meta(*shape[:-1], dtype=torch.float32), plan, workspace)
    kernel, args, kwargs = launches[0]
    assert all(isinstance(x, torch.Tensor) for x in args)
    for param in kernel.params[len(args) :]:
        assert param.is_constexpr or param.do_not_specialize, param.name
    found.append({"gather": plan.gather, **compile_launch(kernel, args, kwargs, sass=True)})
print(json.dumps(found))
"""

# Shape, dtype, ranks, whether heads are scattered; then the bytes by which each thread loads and stores.
COMPILED = [
    ((1, 32, 1, 128), "bfloat16", 8, False, 8),
    ((8, 32, 1, 128), "bfloat16", 8, False, 16),
    ((128, 32, 1, 128), "bfloat16", 8, False, 16),
    ((1024, 32, 1, 128), "bfloat16", 8, False, 16),
    ((1024, 32, 1, 128), "bfloat16", 8, True, 16),
    ((1024, 32, 1, 128), "bfloat16", 2, False, 16),
    ((1024, 32, 1, 128), "float32", 8, False, 16),
    ((256, 32, 1, 80), "float16", 4, False, 16),
    ((1024, 4, 1, 512), "bfloat16", 3, False, 16),
]


def faults(built: dict, ranks: int, width: int) -> list[str]:
    """Faults of a compiled kernel, which has one round or two."""
    ptx, rounds = built["ptx"], 1 + built["gather"]
    found = []
    if built["stack"] > 16:
        found.append(f"{built['stack']} bytes of stack: registers spill")
    if -(-built["registers"] // 8) * 8 * built["threads"] > 65536:
        found.append(f"{built['registers']} registers for {built['threads']} threads do not fit")
    fused, in_ptx = (len(re.findall(x, code)) for x, code in ((r"\bFFMA\b", built["sass"]), (r"\bfma\.rn\b", ptx)))
    if fused != in_ptx:  # of kernels for other sizes ptxas might fuse others, so that a row would have other bits
        found.append(f"{fused} fused products, and {in_ptx} in PTX")
    if not built["launch_pdl"] or not -1 < ptx.find("griddepcontrol.wait") < ptx.find("ld.global"):
        found.append("something is read before the kernel before this one is done")
    vector = {8: ".v2.b32", 16: ".v4.b32"}[width]
    received, sent = (len(re.findall(re.escape(x + vector), ptx)) for x in ("ld.global.cg", "st.global"))
    if received < rounds * ranks or sent < rounds * ranks + 1:
        found.append(f"{received} loads and {sent} stores of {width} bytes")
    # In the order of the program: rows, barrier, flags; then polls, barrier, rows of all ranks.
    steps = r"st\.global|bar\.sync|atom\.global\.sys\.release|ld\.acquire\.sys|ld\.global\.cg"
    order = re.findall(steps, ptx)
    releases = [i for i, x in enumerate(order) if x.startswith("atom")]
    acquires = [i for i, x in enumerate(order) if x == "ld.acquire.sys"]
    if len(releases) != rounds or len(acquires) != rounds:
        found.append(f"{len(releases)} releases, {len(acquires)} acquires")
    for release, acquire in zip(releases, acquires, strict=False):
        if order[release - 1] != "bar.sync":
            found.append("no barrier between rows and flags")
        load = order.index("ld.global.cg", acquire)
        if not release < acquire < load or "bar.sync" not in order[acquire:load]:
            found.append("no barrier between polls and rows")
    return found


@pytest.mark.slow
def test_compiles_for_sm_90() -> None:
    built = compile_in_subprocess(SCRIPT, [x[:4] for x in COMPILED])
    found = [
        f"{case}: {fault}"
        for case, kernel in zip(COMPILED, built, strict=True)
        for fault in faults(kernel, case[2], case[4])
    ]
    assert not found, "\n".join(found)
    assert {kernel["gather"] for kernel in built} == {True, False}


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("round_bytes", [0, 1 << 40])
def test_each_row_is_merged_once(ranks: int, scatter: bool, round_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.distributed.push_kernel import _row_of

    row_of = getattr(_row_of, "fn", _row_of)
    monkeypatch.setattr(push_layout, "ROUND_BYTES", round_bytes)
    for shape in ((1, 8 * 7 * 3, 1, 128), (5, 8 * 7 * 3, 3, 80), (64, 8 * 7 * 3, 16, 64)):
        plan = push_layout.plan_push(torch.Size(shape), 2, ranks, scatter, 132)
        within = torch.arange(plan.share)
        rows = [row_of(within, rank, plan.run, ranks, plan.scatter) for rank in range(ranks)]
        if plan.scatter:
            rows = [x[x < plan.rows] for x in rows]
            assert torch.equal(torch.cat(rows).sort().values, torch.arange(plan.rows))
        else:
            assert all(torch.equal(x, torch.arange(plan.rows)) for x in rows)
        if scatter:
            state = torch.arange(plan.rows).view(shape[:-1])
            for x, want in zip(rows, state.chunk(ranks, dim=1), strict=True):
                assert torch.equal(x, want.flatten())
        assert plan.block_rows * 128 * 2 <= push_layout.ROW_BYTES
        assert plan.block_rows <= push_layout.LSE_ROWS


def test_reasons() -> None:
    x = torch.zeros(1, 2, 3, 4)
    assert "CUDA" in (push.push_unsupported_reason(x, "0") or "")
    locations = ["n0 host0 gpu0 1", "n0 host0 gpu1 1", "n1 host1 gpu0 1"]
    assert unsupported_topology(locations[:2]) is None
    assert unsupported_topology(locations) == "its ranks are on several nodes: host0, host1"
    assert "share a GPU" in (unsupported_topology([locations[0]] * 2) or "")
    assert "rank 1" in (unsupported_topology([locations[0], "n0 host0 gpu1 0"]) or "")


def exchange_twice() -> list[list[str]]:
    communicator = Communicator.of(dist.group.WORLD)
    return [communicator.exchange(topic, f"{communicator.rank}{topic}") for topic in "ab"]


def exchange_late() -> None:
    if dist.get_rank() == 1:
        time.sleep(6)
    Communicator.of(dist.group.WORLD).exchange("something", "x")


def test_ranks_exchange_strings() -> None:
    assert run_ranks(3, exchange_twice) == [[["0a", "1a", "2a"], ["0b", "1b", "2b"]]] * 3


@pytest.mark.slow
def test_a_rank_that_does_not_arrive_is_named() -> None:
    results = try_ranks(3, exchange_late, timeout=2)
    for rank in (0, 2):
        assert isinstance(results[rank], RankError)
        assert "rank 1 of the 3 of group '0' did not arrive within 2 s" in str(results[rank])


def states(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """The states of all ranks. Some are empty, some of these NaN; one row is empty on all ranks."""
    rng = torch.Generator().manual_seed(seed)
    out = torch.randn(ranks, *shape, generator=rng).to(dtype)
    lse = torch.randn(ranks, *shape[:-1], generator=rng) * 5
    for i, empty in enumerate((float("-inf"), float("inf"), float("nan"))):
        lse.view(-1)[i::11] = empty
    out[~(lse.abs() < float("inf"))] = float("nan")
    lse.view(ranks, -1)[:, -1] = float("-inf")
    return out, lse


class Ranks:
    """One of several ranks that share files as memory and merge under the interpreter."""

    def __init__(self, folder: str, programs: int, timeout: float) -> None:
        from tatten.ops.distributed import push_kernel

        self.rank, self.size, self.programs = dist.get_rank(), dist.get_world_size(), programs
        nbytes = programs * push_layout.CHANNEL_BYTES
        self.buffers = [
            torch.from_file(f"{folder}/{i}", shared=True, size=nbytes, dtype=torch.uint8) for i in range(self.size)
        ]
        self.workspace = Workspace(
            self.buffers[self.rank],
            torch.tensor([x.data_ptr() for x in self.buffers]),
            torch.zeros(programs, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int32),
            self.rank,
            int(timeout * 1e9),
        )
        push_kernel._acquire_flags = self.acquire_flags  # inline PTX is not for the interpreter
        self.choose = random.Random(self.rank)
        dist.barrier()

    def acquire_flags(self, flags, epoch, deadline, timeout_ns, n: int, threads: int):  # type: ignore[no-untyped-def]
        addresses = (ctypes.c_int64 * n).from_address(int(flags.handle.data.item()))
        wanted = int(epoch.handle.data.item())
        end = time.monotonic() + self.workspace.timeout_ns / 1e9
        missing = 1
        while missing and time.monotonic() < end:
            missing = sum(1 << i for i in range(n) if addresses[i] < wanted)
            time.sleep(1e-4)
        if self.choose.random() < 0.1:
            time.sleep(0.01)
        return missing, deadline

    def merge(self, out: Tensor, lse: Tensor, scatter: bool = False) -> tuple[Tensor, Tensor]:
        plan = push_layout.plan_push(out.shape, out.element_size(), self.size, scatter, self.programs)
        return push.launch_push(out.contiguous(), lse.contiguous(), plan, self.workspace)


def merge_all(folder: str) -> tuple[list[tuple[Tensor, Tensor]], list[int]]:
    """Merge states of several shapes, scattered or not, one after the other on the same channels."""
    ranks = Ranks(folder, programs=3, timeout=60)
    results = []
    for i, (shape, dtype, scatter, round_bytes) in enumerate(MERGES):
        push_layout.ROUND_BYTES = round_bytes
        out, lse = states(ranks.size, shape, dtype, i)
        results.append(ranks.merge(out[ranks.rank], lse[ranks.rank], scatter))
    return results, ranks.workspace.epochs.tolist()


# Triton 3.6 interprets no constants of bfloat16.
HALF = torch.bfloat16 if hasattr(InterpreterBuilder, "get_bf16") else torch.float16
MERGES = [
    ((1, 12, 1, 16), torch.float32, False, 1 << 40),
    ((1, 12, 2, 80), torch.float32, True, 1 << 40),
    ((2, 12, 5, 10), torch.float32, False, 0),  # in two rounds, but for two ranks
    ((1, 12, 1, 128), HALF, False, 1 << 40),
    ((1, 12, 11, 24), torch.float16, False, 0),
    ((5, 12, 7, 33), torch.float32, True, 0),  # in several launches
    ((1, 12, 1, 5), torch.float32, False, 0),
]


@interpreted
@pytest.mark.parametrize("ranks", slow_but([2], [1, 2, 3, 4]))
def test_ranks_merge(ranks: int, tmp_path: Path) -> None:
    results = run_ranks(ranks, merge_all, str(tmp_path))
    assert all(epochs == results[0][1] for _, epochs in results)
    for i, (shape, dtype, scatter, _) in enumerate(MERGES):
        out, lse = states(ranks, shape, dtype, i)
        want_out, want_lse = merge(out.double(), lse.double())
        for rank, (merged, _) in enumerate(results):
            wanted = [x.chunk(ranks, dim=1)[rank] if scatter else x for x in (want_out, want_lse)]
            got_out, got_lse = (x.view(y.shape) for x, y in zip(merged[i], wanted, strict=True))
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(got_out.double(), wanted[0], atol=8 * eps, rtol=4 * eps)
            torch.testing.assert_close(got_lse.double(), wanted[1], atol=1e-5, rtol=1e-5)
            if not scatter:
                assert all(torch.equal(x, y) for x, y in zip(merged[i], results[0][0][i], strict=True))


def merge_but_one(folder: str, round_bytes: int) -> tuple[list[tuple[Tensor, Tensor]], list[int], float]:
    """Rank 1 leaves after the first of three merges."""
    ranks = Ranks(folder, programs=2, timeout=1)
    push_layout.ROUND_BYTES = round_bytes
    out, lse = (x[ranks.rank] for x in states(ranks.size, (1, 2, 1, 16), torch.float32, 0))
    start = time.monotonic()
    merged = [ranks.merge(out, lse) for _ in range(1 if ranks.rank == 1 else 3)]
    return merged, ranks.workspace.missing_ranks, time.monotonic() - start


@interpreted
@pytest.mark.parametrize("round_bytes", slow_but([0], [0, 1 << 40]))
def test_a_missing_rank_is_named_and_its_merge_is_poison(round_bytes: int, tmp_path: Path) -> None:
    results = run_ranks(3, merge_but_one, str(tmp_path), round_bytes)
    for rank in (0, 2):
        merged, missing, seconds = results[rank]
        assert missing == [1]
        assert seconds < 20
        assert merged[0][1][0].isfinite()
        for out, lse in merged[1:]:
            assert out.isnan().all()
            assert (lse == torch.finfo(torch.float32).max).all()
            # A later merge can't take it for an empty state.
            later = merge(torch.stack((out, torch.zeros_like(out))), torch.stack((lse, torch.zeros_like(lse))))
            assert later[0].isnan().all()
    assert results[1][1] == []
