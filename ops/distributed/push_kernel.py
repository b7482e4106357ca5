"""The push merge: ranks store their states into each other's memory, wait for flags, and merge, in one Triton kernel.

A program exchanges states with that of the same number on each other rank, through its *channel* of a symmetric buffer,
one of `CHANNEL_BYTES` for each program:

    flags   int64 [8]: the last epoch for which rank i stored what it had to say
    slots   [2 parities][n ranks] of `SLOT_BYTES`: rows of `out` in its dtype, then their lse in float32

A round on a channel takes the next epoch e. Each rank (1) stores its rows into the slots [e % 2][rank] of all ranks,
its own among them, (2) releases the value e into all their flags [rank], (3) acquires its own flags until all n have
come to e, (4) reads its own slots [e % 2]. The epoch lies in device memory and only its own program touches it, in
kernels that are ordered by a stream: so rounds need neither the host nor other programs, and a CUDA graph replays them.

A merge of little is one round, in which all ranks get all rows and merge them; so is one that scatters heads, in which
each rank gets its share. A merge of much is two: each rank gets and merges its share, and sends that to all.

Why nothing is overwritten before it was read, without a barrier at the end. A rank stores into slots [e % 2] again in
round e + 2. It has then acquired all flags of round e + 1, and each peer released that flag behind its reads of round
e: they lie before it in the order of the peer's program, or its stream. Reads of round e of every rank happen before
the release of e + 1, this before its acquire, and this before the stores of e + 2.

Why it can't deadlock: program i waits for nothing but programs i of other ranks, which store and release before they
wait. There are no more programs than multiprocessors, so that all are resident once other kernels make room.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tatten.ops.distributed.push import CHANNEL_BYTES, FLAG_BYTES, ROW_BYTES, SLOT_BYTES, Link, Plan
from tatten.ops.sizes import power_of_2

_FLAG_BYTES, _SLOT_BYTES, _ROW_BYTES = tl.constexpr(FLAG_BYTES), tl.constexpr(SLOT_BYTES), tl.constexpr(ROW_BYTES)
_CHANNEL_BYTES = tl.constexpr(CHANNEL_BYTES)
_POLLS = tl.constexpr(4096)  # between two looks at the clock: some milliseconds
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def merge_received(out, lse, out_step, lse_step, rows, dims, row_ok, DIM: tl.constexpr, N: tl.constexpr):
    """Merge the states at `out + i * out_step` and `lse + i * lse_step` of each rank `i < N`, in that order.

    Ranks are unrolled, so that all loads are on their way at once, and each thread merges what it loaded.
    """
    ok = row_ok[:, None] & (dims < DIM)[None, :]
    log_sums, values = (), ()
    top = tl.full([rows.shape[0]], float("-inf"), tl.float32)
    for i in tl.static_range(N):
        log_sum = tl.load(lse + i * lse_step + rows, mask=row_ok, other=float("-inf"), cache_modifier=".cg")
        log_sum = tl.where(log_sum < float("inf"), log_sum, float("-inf"))  # NaN compares false
        top = tl.maximum(top, log_sum)
        at = out + i * out_step + rows[:, None] * DIM + dims[None, :]
        log_sums += (log_sum,)
        values += (tl.load(at, mask=ok, other=0.0, cache_modifier=".cg"),)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([rows.shape[0]], tl.float32)
    acc = tl.zeros([rows.shape[0], dims.shape[0]], tl.float32)
    for i in tl.static_range(N):
        weights = tl.exp(log_sums[i] - base)
        total += weights
        # An empty state's out may be NaN, and NaN * 0 is NaN: select before multiplying.
        acc += weights[:, None] * tl.where(weights[:, None] > 0, values[i].to(tl.float32), 0.0)
    filled = total > 0
    divisor = tl.where(filled, total, 1.0)
    return acc / divisor[:, None], tl.where(filled, top + tl.log(divisor), float("-inf"))


@triton.jit
def _at(address, dtype: tl.constexpr):
    """The pointer to what begins at an address; without the hint nothing is loaded or stored by 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _row_of(within, rank, run, N: tl.constexpr, SCATTER: tl.constexpr):
    """Which row of the state is row `within` of the share of `rank`: every n-th run is its own."""
    if SCATTER:
        return within // run * (run * N) + rank * run + within % run
    else:
        return within


@triton.jit
def _store_rows(slot, values, log_sums, rows, dims, row_ok, DIM: tl.constexpr):
    """Store rows into the slot at an address, perhaps of a peer."""
    ok = row_ok[:, None] & (dims < DIM)[None, :]
    tl.store(_at(slot, values.dtype) + rows[:, None] * DIM + dims[None, :], values, mask=ok)
    tl.store(_at(slot + _ROW_BYTES, tl.float32) + rows, log_sums, mask=row_ok)


@triton.jit
def _release_flags(flags, flags_ok, epoch):
    """Tell all ranks at once, by the flags at 8 addresses, that this program's rows of a round have come."""
    # A release orders what its own thread stored, and what that saw stored at a barrier: without this one, which Triton
    # 3.6 does not add, rows that other threads store may come after the flag. Reads of the round before, too.
    tl.debug_barrier()
    flags = flags.to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(flags, tl.zeros([8], tl.int64) + epoch, mask=flags_ok, sem="release", scope="sys")


@triton.jit
def _acquire_flags(flags, epoch, deadline, patience, N: tl.constexpr, THREADS: tl.constexpr):
    """Wait until all flags have come to `epoch`. Returns bits of the ranks that are missing, and the deadline.

    Every thread polls one flag, and what it finds is reduced over all of them: so all take the same way, though a flag
    may come between the polls of two. `deadline` is 0 until the clock, in ns, had to be looked at.
    """
    threads = tl.arange(0, THREADS)
    addresses = flags + (threads % N) * 8
    seen = tl.zeros([THREADS], tl.int64)
    waiting = 1  # 2: no longer, though some are missing
    missing = 0
    while waiting == 1:
        polls = 0
        while (waiting == 1) & (polls < _POLLS):
            seen = tl.inline_asm_elementwise(
                "ld.acquire.sys.global.b64 $0, [$1];", "=l,l,~{memory}", [addresses], tl.int64, is_pure=False, pack=1
            )
            waiting = tl.max((seen < epoch).to(tl.int32), axis=0)
            polls += 1
        if waiting == 1:
            clock = tl.inline_asm_elementwise(
                "{ .reg .b64 t; mov.u64 t, %globaltimer; add.s64 $0, t, $1; }",
                "=l,l",
                [tl.zeros([THREADS], tl.int64)],
                tl.int64,
                is_pure=False,
                pack=1,
            )
            now = tl.max(clock, axis=0)
            deadline = tl.where(deadline == 0, now + patience, deadline)
            if now >= deadline:
                waiting = 2
                late = (seen < epoch) & (threads < N)
                missing = tl.sum(tl.where(late, 1 << (threads % N), 0), axis=0)
    # The reads of slots that follow come behind the acquires of all threads, not only of their own.
    tl.debug_barrier()
    return missing, deadline


# Nothing is specialised on the rank: every rank runs the same code, and gets the same bits.
@triton.jit(do_not_specialize=["rank", "first", "rows", "share", "run", "patience"])
def _push_kernel(
    out,
    lse,
    merged_out,
    merged_lse,
    buffer,
    peers,
    epochs,
    error,
    rank,
    first,
    rows,
    share,
    run,
    patience,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    N: tl.constexpr,
    SCATTER: tl.constexpr,
    GATHER: tl.constexpr,
    THREADS: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    STEP: tl.constexpr = _SLOT_BYTES // (DTYPE.primitive_bitwidth // 8)
    program = tl.program_id(0)
    channel = program.to(tl.int64) * _CHANNEL_BYTES
    own = buffer.to(tl.int64) + channel
    at, dims = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    within = (first + program) * BLOCK_R + at
    dim_ok = (dims < DIM)[None, :]

    # All that is loaded comes before what is stored: no load moves ahead of a store that may be to the same address.
    # The epoch is -1 once a peer was missing: from then on this program neither stores, which might harm a peer that
    # is still reading, nor waits.
    epoch = tl.load(epochs + program) + 1
    flags_ok = tl.arange(0, 8) < N
    peer_flags = tl.load(peers + tl.arange(0, 8), mask=flags_ok, other=0) + channel + rank * 8
    bases, sent, sent_lse, sent_ok = (), (), (), ()
    for i in tl.static_range(N):
        peer = (rank + 1 + i) % N  # each rank begins with another one
        bases += (tl.load(peers + peer) + channel + _FLAG_BYTES,)
        if SCATTER or i == 0:
            row = _row_of(within, peer, run, N, SCATTER)
            row_ok = (within < share) & (row < rows)
            row = row.to(tl.int64)
            log_sum = tl.load(lse + row, mask=row_ok, other=0.0)
            values = tl.load(out + row[:, None] * DIM + dims[None, :], mask=row_ok[:, None] & dim_ok, other=0.0)
        sent += (values,)
        sent_lse += (log_sum,)
        sent_ok += (row_ok,)

    slot = ((epoch & 1) * N + rank) * _SLOT_BYTES
    for i in tl.static_range(N):
        _store_rows(bases[i] + slot, sent[i], sent_lse[i], at, dims, tl.where(epoch > 0, sent_ok[i], False), DIM)
    _release_flags(peer_flags, tl.where(epoch > 0, flags_ok, False), epoch)
    missing, deadline = _acquire_flags(own, epoch, tl.zeros([], tl.int64), patience, N, THREADS)
    late = (missing != 0) | (epoch <= 0)

    mine = _row_of(within, rank, run, N, SCATTER)
    mine_ok = (within < share) & (mine < rows)
    slots = own + _FLAG_BYTES + (epoch & 1) * (N * _SLOT_BYTES)
    received, received_lse = _at(slots, DTYPE), _at(slots + _ROW_BYTES, tl.float32)
    acc, log_sum = merge_received(received, received_lse, STEP, _SLOT_BYTES // 4, at, dims, mine_ok, DIM, N)
    values = acc.to(DTYPE)
    merged, merged_log_sums = (values,), (log_sum,)

    if GATHER:
        epoch = tl.where(late, 0, epoch + 1)
        slot = ((epoch & 1) * N + rank) * _SLOT_BYTES
        for i in tl.static_range(N):
            _store_rows(bases[i] + slot, values, log_sum, at, dims, tl.where(epoch > 0, mine_ok, False), DIM)
        _release_flags(peer_flags, tl.where(epoch > 0, flags_ok, False), epoch)
        missing_now, deadline = _acquire_flags(own, epoch, deadline, patience, N, THREADS)
        missing |= missing_now
        late = (missing != 0) | (epoch <= 0)
        slots = own + _FLAG_BYTES + (epoch & 1) * (N * _SLOT_BYTES)
        received, received_lse = _at(slots, DTYPE), _at(slots + _ROW_BYTES, tl.float32)
        merged, merged_log_sums = (), ()
        for i in tl.static_range(N):
            row_ok = (within < share) & (_row_of(within, i, run, N, SCATTER) < rows)
            values_at = received + i * STEP + at[:, None] * DIM + dims[None, :]
            log_sums_at = received_lse + i * (_SLOT_BYTES // 4) + at
            merged += (tl.load(values_at, mask=row_ok[:, None] & dim_ok, other=0.0, cache_modifier=".cg"),)
            merged_log_sums += (tl.load(log_sums_at, mask=row_ok, other=0.0, cache_modifier=".cg"),)

    for i in tl.static_range(N if GATHER else 1):
        # Scattered heads are written as they lie in the share, what was gathered where it lies in the state.
        row = _row_of(within, i, run, N, GATHER)
        row_ok = ((within < share) & (row < rows)) if GATHER else mine_ok
        row = row.to(tl.int64)
        to = merged_out + row[:, None] * DIM + dims[None, :]
        # What is not known must not pass for an empty state in a later merge, as lse -inf, +inf or NaN would.
        tl.store(to, tl.where(late, float("nan"), merged[i]), mask=row_ok[:, None] & dim_ok)
        tl.store(merged_lse + row, tl.where(late, _LARGEST, merged_log_sums[i]), mask=row_ok)
    if missing != 0:
        tl.store(error, missing)
    tl.store(epochs + program, tl.where(late, -1, epoch))


def launch_push(out: Tensor, lse: Tensor, plan: Plan, link: Link) -> tuple[Tensor, Tensor]:
    """`tatten::push_merge` of contiguous tensors; the merged ones have the rows of `plan`, `[rows, d]` and `[rows]`."""
    dim = out.shape[-1]
    merged_out = out.new_empty(plan.merged_rows, dim)
    merged_lse = lse.new_empty(plan.merged_rows)
    for first in range(0, plan.blocks, plan.programs):
        _push_kernel[(min(plan.programs, plan.blocks - first),)](
            out,
            lse,
            merged_out,
            merged_lse,
            link.buffer,
            link.peers,
            link.epochs,
            link.error,
            link.rank,
            first,
            plan.rows,
            plan.share,
            plan.run,
            link.patience_ns,
            DIM=dim,
            BLOCK_D=power_of_2(dim),
            BLOCK_R=plan.block_rows,
            N=plan.ranks,
            SCATTER=plan.scatter,
            GATHER=plan.gather,
            THREADS=32 * plan.num_warps,
            num_warps=plan.num_warps,
        )
    return merged_out, merged_lse
