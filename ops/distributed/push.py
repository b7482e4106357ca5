"""The push merge on the host: its limits, its plans and launches, and its errors.

Only this file uses PyTorch's symmetric memory. `push_layout.py` describes that memory, `push_kernel.py` the protocol
by which ranks use it, and `communicator.py` their agreement on the host.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tatten.ops.cuda.gpu import has_early_launches
from tatten.ops.distributed.communicator import Communicator, Workspace, connect, connected
from tatten.ops.distributed.push_layout import CHANNEL_BYTES, ROW_BYTES, PushPlan, plan_push
from tatten.ops.moved import moved
from tatten.ops.sizes import power_of_2
from tatten.ops.states import State


def push_unsupported_reason(out: Tensor, group: str) -> str | None:
    """Return the reason why `push_merge` can't merge this, the same on all ranks; None if it can.

    It reads no data, so `out` may be fake. The first call for a group on CUDA is a collective on the host,
    through the group's store; later calls use its result.
    """
    if out.device.type != "cuda":
        return f"symmetric memory needs CUDA tensors, and `out` is on {out.device.type}"
    if out.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernel supports float16, bfloat16 and float32, not {out.dtype}"
    if power_of_2(out.shape[-1]) * out.element_size() > ROW_BYTES:
        return f"a row of `out` must fit into {ROW_BYTES} bytes, and head_dim is {out.shape[-1]}"
    try:
        _symmetric_memory()
        return connect(group, out.device).unsupported_reason
    except NotImplementedError as error:  # the same on all ranks: they have one PyTorch
        return str(error)


def push_merge(out: Tensor, lse: Tensor, group: str, scatter_heads: bool) -> State:
    """Merge the states of all ranks in the order of ranks, bitwise equal on all of them: `tatten::push_merge`.

    It is a collective on the current stream: all ranks call it with the same shapes, in the same order, and on one
    stream for each group. At the first call for a shape, ranks agree on it on the host. At the first call on a device,
    they allocate shared memory, once for all shapes. Neither call can be captured in a CUDA graph; all later ones can.
    The host never waits for the device.

    The kernel waits for a missing peer as long as the timeout of the group. Then this merge and all later ones of the
    group return out = NaN with the largest finite lse, which is neither a valid state nor an empty one.
    Kernels don't trap, which would destroy the whole CUDA context. Instead, the next call raises the error, or
    `check_push` after a synchronisation, as when a graph is replayed. From then on the group can't be used for push
    merges.

    Args:
        out: `[batch, heads, q_length, head_dim]`, or any `[..., head_dim]` if heads are not scattered; any strides.
        lse: float32 `out.shape[:-1]`.
        group: the name of a process group for which `push_unsupported_reason` is None.
        scatter_heads: return only the heads `rank * heads / n ... (rank + 1) * heads / n - 1`.

    Raises:
        ValueError: ranks disagree on shape, dtype or `scatter_heads`. All ranks raise it, and the message has each
            one's values.
        RuntimeError: a peer was missing; or the first call for a shape is being captured in a CUDA graph.
    """
    communicator = connect(group, out.device)
    shape = out.shape
    with torch.cuda.device(out.device):
        key = (out.device, shape, out.dtype, scatter_heads)
        plan = communicator.plans.get(key) or _agree_on_plan(communicator, key, out, scatter_heads)
        workspace = communicator.workspaces[out.device]
        _check(communicator, workspace)
        if lse.numel() == 0:
            merged = out.new_empty(0), lse.new_empty(0)
        else:
            merged = launch_push(out.contiguous(), lse.contiguous(), plan, workspace)
    if scatter_heads:
        shape = torch.Size((shape[0], shape[1] // communicator.size, *shape[2:]))
    return merged[0].view(shape), merged[1].view(shape[:-1])


def launch_push(out: Tensor, lse: Tensor, plan: PushPlan, workspace: Workspace) -> State:
    """Launch the kernel on contiguous tensors. The results are `[plan.merged_rows, d]` and `[plan.merged_rows]`."""
    from tatten.ops.distributed.push_kernel import INTERPRETED, push_kernel

    pdl = not INTERPRETED and has_early_launches(out.device)
    dim = out.shape[-1]
    merged_out = out.new_empty(plan.merged_rows, dim)
    merged_lse = lse.new_empty(plan.merged_rows)
    for first_block in range(0, plan.blocks, plan.programs):
        push_kernel[(min(plan.programs, plan.blocks - first_block),)](
            out,
            lse,
            merged_out,
            merged_lse,
            workspace.buffer,
            workspace.addresses,
            workspace.epochs,
            workspace.missing,
            rank=workspace.rank,
            first_block=first_block,
            rows=plan.rows,
            share=plan.share,
            run=plan.run,
            timeout_ns=workspace.timeout_ns,
            DIM=dim,
            BLOCK_D=power_of_2(dim),
            BLOCK_R=plan.block_rows,
            N=plan.ranks,
            SCATTER=plan.scatter,
            GATHER=plan.gather,
            THREADS=32 * plan.num_warps,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=plan.num_warps,
        )
    return merged_out, merged_lse


def check_push(group: str) -> None:
    """Raise RuntimeError if a push merge over this group has missed a peer on the device so far.

    Call it after `torch.cuda.synchronize()` to check all merges so far, including those of replayed graphs.
    """
    communicator = connected(group)
    if communicator is not None:
        for workspace in communicator.workspaces.values():
            _check(communicator, workspace)


def _check(communicator: Communicator, workspace: Workspace) -> None:
    missing = workspace.missing_ranks
    if missing:
        raise RuntimeError(communicator.missing_peers(missing, "at an earlier merge"))


def _agree_on_plan(communicator: Communicator, key: tuple[object, ...], out: Tensor, scatter_heads: bool) -> PushPlan:
    """Return the plan for a shape at its first use, after all ranks have confirmed that they have the same shape."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "tatten.tree_merge, strategy 'push', can't be captured in a CUDA graph at its first call for a shape: "
            f"run it once before capture (`out` {tuple(out.shape)}, {out.dtype}, group {communicator.name!r})"
        )
    programs = torch.cuda.get_device_properties(out.device).multi_processor_count
    scattered = ", heads scattered" if scatter_heads else ""
    shape_here = f"{tuple(out.shape)} {out.dtype}{scattered}, {programs} multiprocessors"
    shapes = communicator.exchange("a shape", shape_here)
    if len(set(shapes)) > 1:
        by_rank = "; ".join(f"rank {rank}: {x}" for rank, x in enumerate(shapes))
        raise ValueError(f"`out` must have the same shape, dtype and scattering on all ranks of a group, got {by_rank}")
    if scatter_heads and (out.dim() != 4 or out.shape[1] % communicator.size):
        wanted = f"[batch, heads, q_length, head_dim] with heads divisible by {communicator.size} ranks"
        raise ValueError(f"`out` must be {wanted} to be scattered, got shape {tuple(out.shape)}")
    if out.device not in communicator.workspaces:
        # Another thread allocates: this thread may be allocating from the pool of one of Inductor's CUDA graphs, which
        # reports memory that outlives a step as a leak.
        with ThreadPoolExecutor(1) as thread:
            workspace = thread.submit(_allocate_workspace, communicator, out.device, programs).result()
            communicator.workspaces[out.device] = workspace
    plan = plan_push(out.shape, out.element_size(), communicator.size, scatter_heads, programs)
    communicator.plans[key] = plan
    return plan


@functools.cache  # each merge calls it
def _symmetric_memory() -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """Return PyTorch's functions that allocate symmetric memory and exchange its addresses.

    Raises:
        NotImplementedError: they have moved.
    """
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        inspect.signature(rendezvous).bind("a tensor", "a group")
        _ = [getattr(_SymmetricMemory, name) for name in ("rank", "world_size", "buffer_ptrs")]
        return _SymmetricMemory.empty_strided_p2p, rendezvous
    except Exception as error:
        note = moved("torch.distributed._symmetric_memory", error, "states are not merged by `push`")
        raise NotImplementedError(note) from error


def _allocate_workspace(communicator: Communicator, device: torch.device, programs: int) -> Workspace:
    """Allocate this rank's channels, and exchange their addresses with the other ranks."""
    empty, rendezvous = _symmetric_memory()
    torch.cuda.set_device(device)  # for this thread
    # No memory pool is used: it may return memory at different offsets on different ranks.
    size = programs * CHANNEL_BYTES
    buffer = empty((size,), (1,), torch.uint8, device)
    buffer.zero_()
    torch.cuda.synchronize()  # before a peer can store into it
    handle = rendezvous(buffer, communicator.name)
    addresses = list(handle.buffer_ptrs)
    same_group = (handle.rank, handle.world_size) == (communicator.rank, communicator.size)
    if not same_group or 0 in addresses or addresses[communicator.rank] != buffer.data_ptr():
        raise RuntimeError(
            f"symmetric memory has another group named {communicator.name!r}: rank {handle.rank} of "
            f"{handle.world_size}, where this is rank {communicator.rank} of {communicator.size}; was a group of that "
            "name destroyed?"
        )
    workspace = Workspace(
        buffer,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros(programs, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int32, pin_memory=True),
        communicator.rank,
        int(communicator.timeout.total_seconds() * 1e9),
    )
    torch.cuda.synchronize()
    communicator.exchange("shared memory", "ready")
    return workspace
