"""The combine of a mixed batch, apart from the kernels that leave partial states."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from tatten.ops.cuda.kernels.combine_blocks import fold_slots
from tatten.ops.cuda.kernels.online_softmax import finish_state

ROWS, DIM, BLOCK_DV = 16, 20, 32


@triton.jit
def _fold_kernel(
    partial_out, partial_lse, out, lse, first, base, distance, owners, n_rows, block_m, AT_ONCE: tl.constexpr
):
    rows, dims = tl.arange(0, 16), tl.arange(0, 32)
    slots = first, base, distance, owners
    acc, row_max, row_sum = fold_slots(
        tl.zeros([16, 32], tl.float32),
        tl.full([16], float("-inf"), tl.float32),
        tl.zeros([16], tl.float32),
        (partial_out, partial_lse),
        slots,
        rows,
        block_m,
        rows < n_rows,
        dims,
        20,
        AT_ONCE,
    )
    acc, log_sum = finish_state(acc, row_max, row_sum)
    tl.store(lse + rows, log_sum)
    tl.store(out + rows[:, None] * 32 + dims[None, :], acc)


@pytest.mark.parametrize("at_once", [4, 8])
@pytest.mark.parametrize("owners", [2, 4, 5, 8, 9, 20])
def test_fold_slots_adds_the_states_of_all_slots(owners: int, at_once: int) -> None:
    """Slots that are not read are NaN. States grow, so that sums are rescaled, and some are empty, also in a row."""
    torch.manual_seed(owners)
    first, base, distance, n_rows, block_m = 3, 0, 2, 13, 24
    slots = torch.tensor([first, *(base + distance * i for i in range(1, owners))])
    values = torch.randn(owners, ROWS, DIM)
    lse = torch.randn(owners, ROWS) * 3 + torch.arange(owners)[:, None] * 4
    lse[torch.rand(owners, ROWS) < 0.2] = -torch.inf
    lse[:, 5], lse[:at_once, 6] = -torch.inf, -torch.inf
    values[lse == -torch.inf] = 0
    partial_out = torch.full((2 * owners + 4, block_m, DIM), torch.nan)
    partial_lse = torch.full((2 * owners + 4, block_m), torch.nan)
    partial_out[slots, :n_rows], partial_lse[slots, :n_rows] = values[:, :n_rows], lse[:, :n_rows]

    out, got = torch.empty(ROWS, BLOCK_DV), torch.empty(ROWS)
    _fold_kernel[(1,)](partial_out, partial_lse, out, got, first, base, distance, owners, n_rows, block_m, at_once)

    want = lse.double().logsumexp(0)
    weights = (lse.double() - want).exp().nan_to_num(0)  # an empty state is (0, -inf)
    torch.testing.assert_close(got[:n_rows].double(), want[:n_rows], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        out[:n_rows, :DIM].double(), (weights[..., None] * values).sum(0)[:n_rows], rtol=1e-5, atol=1e-6
    )


GUARDED = """
import ctypes, mmap, sys
import torch
from tatten.ops.cuda import ragged
from tatten.ops.mixed_batch import MixedCall

memory = []

def before_a_guard(n):
    size = mmap.PAGESIZE
    memory.append(mmap.mmap(-1, 2 * size))
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory[-1]))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), size, 0) == 0
    return torch.frombuffer(memory[-1], dtype=torch.int64, offset=size - 8 * n, count=n)

def allocate(like, *layouts):
    return [
        before_a_guard(x.shape[0]) if x.dtype == torch.int64 else torch.empty_strided(x.shape, x.strides, dtype=x.dtype)
        for x in layouts
    ]

ragged.allocate = allocate
batch, kv_heads, dim, page = 12, 2, 16, 16
pool = torch.randn(batch * 4, page, kv_heads, dim)
table, ones = torch.arange(batch * 4).reshape(batch, 4).int(), torch.arange(batch + 1).int()
call = MixedCall(torch.randn(batch, 4, dim), pool, pool, table, ones, torch.full((batch,), 64).int())
out, _ = ragged.plan_ragged(call, programs=int(sys.argv[1]))(call)
assert len(memory) == 1 and not out.isnan().any()
"""


@pytest.mark.parametrize("programs", [8, 200])
def test_no_list_is_read_past_its_end(programs: int) -> None:
    """All sequences have one query: the class of many queries has room for blocks, but no block."""
    done = subprocess.run([sys.executable, "-c", GUARDED, str(programs)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
