"""The push merge on the device: ranks store states into each other's memory, wait for flags, and merge, in one kernel.

Program i of a rank exchanges states with programs i of the other ranks, through its channel of the shared memory that
`push_layout.py` describes.

A round on a channel takes the next epoch e. Each rank (1) stores its rows into the slots [e % 2][rank] of all ranks,
itself included, (2) releases the value e into flag [rank] of all ranks, (3) polls its own flags with acquire loads
until all n have reached e, (4) reads its own slots [e % 2]. The epoch is in device memory. Only its own program touches
it, in kernels that a stream orders. A kernel may start before the previous kernel has ended, but waits for that end
before its first access, as all kernels here that may start early do. So rounds need neither the host nor other
programs, and a CUDA graph replays them.

A small merge is one round, in which every rank gets and merges all rows. A merge that scatters heads is one round, too,
in which each rank gets its share. A large merge is two: each rank gets and merges its share, then sends the result to
all.

Nothing is overwritten before it has been read, with no barrier at the end. A rank stores into slots [e % 2] again in
round e + 2. By then it has acquired all flags of round e + 1, which each peer released after its reads of round e:
these come first in program order, or in stream order. Thus the reads of round e on every rank happen before the release
of e + 1, that before its acquire, and that before the stores of e + 2.

It can't deadlock: program i waits only for programs i of other ranks, which store and release before they wait. There
are no more programs than multiprocessors, so all of them are resident once other kernels have made room. Programs
that start early take no room from the previous kernel: they start once all of its programs have.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tatten.ops.distributed.push_layout import CHANNEL_BYTES, FLAG_BYTES, ROW_BYTES, SLOT_BYTES

_FLAG_BYTES, _SLOT_BYTES, _ROW_BYTES = tl.constexpr(FLAG_BYTES), tl.constexpr(SLOT_BYTES), tl.constexpr(ROW_BYTES)
_CHANNEL_BYTES = tl.constexpr(CHANNEL_BYTES)
_POLLS = tl.constexpr(4096)  # between two reads of the clock: a few milliseconds
_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def merge_received(out, lse, out_step, lse_step, rows, dims, row_ok, DIM: tl.constexpr, N: tl.constexpr):
    """Merge the states at `out + i * out_step` and `lse + i * lse_step` of ranks `i = 0 ... N - 1`, in that order.

    The loop over ranks is unrolled, so that all loads are in flight at once, and each thread merges its own loads.
    """
    ok = row_ok[:, None] & (dims < DIM)[None, :]
    lses, values = (), ()
    lse_max = tl.full([rows.shape[0]], float("-inf"), tl.float32)
    for i in tl.static_range(N):
        row_lse = tl.load(lse + i * lse_step + rows, mask=row_ok, other=float("-inf"), cache_modifier=".cg")
        row_lse = tl.where(row_lse < float("inf"), row_lse, float("-inf"))  # NaN compares false
        lse_max = tl.maximum(lse_max, row_lse)
        at = out + i * out_step + rows[:, None] * DIM + dims[None, :]
        lses += (row_lse,)
        values += (tl.load(at, mask=ok, other=0.0, cache_modifier=".cg"),)
    base = tl.where(lse_max == float("-inf"), 0.0, lse_max)
    weight_sum = tl.zeros([rows.shape[0]], tl.float32)
    acc = tl.zeros([rows.shape[0], dims.shape[0]], tl.float32)
    for i in tl.static_range(N):
        weights = tl.exp(lses[i] - base)
        weight_sum += weights
        # An empty state's out may be NaN, and NaN * 0 is NaN: select before multiplying.
        acc += weights[:, None] * tl.where(weights[:, None] > 0, values[i].to(tl.float32), 0.0)
    filled = weight_sum > 0
    divisor = tl.where(filled, weight_sum, 1.0)
    return acc / divisor[:, None], tl.where(filled, lse_max + tl.log(divisor), float("-inf"))


@triton.jit
def _pointer(address, dtype: tl.constexpr):
    """Make a pointer from an address. Without the alignment hint, no load or store would be 16 bytes wide."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _row_of(share_row, rank, run, N: tl.constexpr, SCATTER: tl.constexpr):
    """Return the row of the state for row `share_row` of the share of `rank`, which owns every n-th run."""
    if SCATTER:
        return share_row // run * (run * N) + rank * run + share_row % run
    else:
        return share_row


@triton.jit
def _store_rows(slot, values, lses, rows, dims, row_ok, DIM: tl.constexpr):
    """Store rows into a slot of this rank or of a peer, at an address."""
    ok = row_ok[:, None] & (dims < DIM)[None, :]
    tl.store(_pointer(slot, values.dtype) + rows[:, None] * DIM + dims[None, :], values, mask=ok)
    tl.store(_pointer(slot + _ROW_BYTES, tl.float32) + rows, lses, mask=row_ok)


@triton.jit
def _release_flags(flags, flags_ok, epoch):
    """Signal to all ranks, through the flags at 8 addresses, that this program has delivered its rows of a round."""
    # A release orders the stores of its own thread, and those of other threads only across a barrier. Triton 3.6 adds
    # none here, and without it rows of other threads may arrive after the flag. The barrier orders the last round's
    # reads, too.
    tl.debug_barrier()
    flags = flags.to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(flags, tl.zeros([8], tl.int64) + epoch, mask=flags_ok, sem="release", scope="sys")


@triton.jit
def _acquire_flags(flags, epoch, deadline, timeout_ns, N: tl.constexpr, THREADS: tl.constexpr):
    """Wait until all flags have reached `epoch`. Return a bit mask of missing ranks, and the deadline.

    Every thread polls one flag, and the results are reduced over all threads. So all threads take the same branch, even
    if a flag changes between the polls of two threads. `deadline` is in ns, and 0 until the clock has been read.
    """
    threads = tl.arange(0, THREADS)
    flag_addresses = flags + (threads % N) * 8
    flag_values = tl.zeros([THREADS], tl.int64)
    waiting = 1  # 0: all have arrived; 2: timed out
    missing = 0
    while waiting == 1:
        polls = 0
        while (waiting == 1) & (polls < _POLLS):
            flag_values = tl.inline_asm_elementwise(
                "ld.acquire.sys.global.b64 $0, [$1];",
                "=l,l,~{memory}",
                [flag_addresses],
                tl.int64,
                is_pure=False,
                pack=1,
            )
            waiting = tl.max((flag_values < epoch).to(tl.int32), axis=0)
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
            deadline = tl.where(deadline == 0, now + timeout_ns, deadline)
            if now >= deadline:
                waiting = 2
                late = (flag_values < epoch) & (threads < N)
                missing = tl.sum(tl.where(late, 1 << (threads % N), 0), axis=0)
    # The barrier orders later reads of slots after the acquires of all threads, not only of their own thread.
    tl.debug_barrier()
    return missing, deadline


# The kernel is not specialised on the rank, so that every rank runs the same code and gets the same bits.
@triton.jit(do_not_specialize=["rank", "first_block", "rows", "share", "run", "timeout_ns"])
def push_kernel(
    out,
    lse,
    merged_out,
    merged_lse,
    buffer,
    addresses,
    epochs,
    missing_out,
    rank,
    first_block,
    rows,
    share,
    run,
    timeout_ns,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    N: tl.constexpr,
    SCATTER: tl.constexpr,
    GATHER: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    STEP: tl.constexpr = _SLOT_BYTES // (DTYPE.primitive_bitwidth // 8)
    program = tl.program_id(0)
    channel = program.to(tl.int64) * _CHANNEL_BYTES
    local_channel = buffer.to(tl.int64) + channel
    at, dims = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    share_row = (first_block + program) * BLOCK_R + at
    dim_ok = (dims < DIM)[None, :]
    if PDL:
        # No load comes before the wait, not even of `epochs`: the previous kernel may be a merge.
        tl.extra.cuda.gdc_wait()

    # All loads come before the first store: the compiler moves no load ahead of a store that may alias it.
    # `epochs` holds -1 once a peer was missing. From then on this program does not wait, nor store, which could
    # overwrite what a peer is still reading.
    epoch = tl.load(epochs + program) + 1
    flags_ok = tl.arange(0, 8) < N
    peer_flags = tl.load(addresses + tl.arange(0, 8), mask=flags_ok, other=0) + channel + rank * 8
    bases, sent, sent_lse, sent_ok = (), (), (), ()
    for i in tl.static_range(N):
        peer = (rank + 1 + i) % N  # each rank starts with a different peer
        bases += (tl.load(addresses + peer) + channel + _FLAG_BYTES,)
        if SCATTER or i == 0:
            row = _row_of(share_row, peer, run, N, SCATTER)
            row_ok = (share_row < share) & (row < rows)
            row = row.to(tl.int64)
            row_lse = tl.load(lse + row, mask=row_ok, other=0.0)
            values = tl.load(out + row[:, None] * DIM + dims[None, :], mask=row_ok[:, None] & dim_ok, other=0.0)
        sent += (values,)
        sent_lse += (row_lse,)
        sent_ok += (row_ok,)

    slot = ((epoch & 1) * N + rank) * _SLOT_BYTES
    for i in tl.static_range(N):
        _store_rows(bases[i] + slot, sent[i], sent_lse[i], at, dims, tl.where(epoch > 0, sent_ok[i], False), DIM)
    _release_flags(peer_flags, tl.where(epoch > 0, flags_ok, False), epoch)
    missing, deadline = _acquire_flags(local_channel, epoch, tl.zeros([], tl.int64), timeout_ns, N, THREADS)
    failed = (missing != 0) | (epoch <= 0)

    own_row = _row_of(share_row, rank, run, N, SCATTER)
    own_ok = (share_row < share) & (own_row < rows)
    slots = local_channel + _FLAG_BYTES + (epoch & 1) * (N * _SLOT_BYTES)
    received, received_lse = _pointer(slots, DTYPE), _pointer(slots + _ROW_BYTES, tl.float32)
    acc, row_lse = merge_received(received, received_lse, STEP, _SLOT_BYTES // 4, at, dims, own_ok, DIM, N)
    values = acc.to(DTYPE)
    merged, merged_lses = (values,), (row_lse,)

    if GATHER:
        epoch = tl.where(failed, 0, epoch + 1)
        slot = ((epoch & 1) * N + rank) * _SLOT_BYTES
        for i in tl.static_range(N):
            _store_rows(bases[i] + slot, values, row_lse, at, dims, tl.where(epoch > 0, own_ok, False), DIM)
        _release_flags(peer_flags, tl.where(epoch > 0, flags_ok, False), epoch)
        missing_now, deadline = _acquire_flags(local_channel, epoch, deadline, timeout_ns, N, THREADS)
        missing |= missing_now
        failed = (missing != 0) | (epoch <= 0)
        slots = local_channel + _FLAG_BYTES + (epoch & 1) * (N * _SLOT_BYTES)
        received, received_lse = _pointer(slots, DTYPE), _pointer(slots + _ROW_BYTES, tl.float32)
        merged, merged_lses = (), ()
        for i in tl.static_range(N):
            row_ok = (share_row < share) & (_row_of(share_row, i, run, N, SCATTER) < rows)
            values_at = received + i * STEP + at[:, None] * DIM + dims[None, :]
            lse_at = received_lse + i * (_SLOT_BYTES // 4) + at
            merged += (tl.load(values_at, mask=row_ok[:, None] & dim_ok, other=0.0, cache_modifier=".cg"),)
            merged_lses += (tl.load(lse_at, mask=row_ok, other=0.0, cache_modifier=".cg"),)

    for i in tl.static_range(N if GATHER else 1):
        # Rows of scattered heads stay in the order of the share; gathered rows go to their place in the state.
        row = _row_of(share_row, i, run, N, GATHER)
        row_ok = ((share_row < share) & (row < rows)) if GATHER else own_ok
        row = row.to(tl.int64)
        out_at = merged_out + row[:, None] * DIM + dims[None, :]
        # A later merge must not take a failed one for an empty state, as it would with lse -inf, +inf or NaN.
        tl.store(out_at, tl.where(failed, float("nan"), merged[i]), mask=row_ok[:, None] & dim_ok)
        tl.store(merged_lse + row, tl.where(failed, _FLOAT32_MAX, merged_lses[i]), mask=row_ok)
    if missing != 0:
        tl.store(missing_out, missing)
    tl.store(epochs + program, tl.where(failed, -1, epoch))


INTERPRETED = not isinstance(push_kernel, triton.JITFunction)
