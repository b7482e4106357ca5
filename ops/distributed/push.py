"""The push merge on the host: which groups can do it, the memory their ranks share, and what was said of missing peers.

All use of PyTorch's symmetric memory is in this file. The protocol on that memory is told in `push_kernel.py`.
"""

from __future__ import annotations

import ctypes
import datetime
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tatten.ops.distributed.collectives import group_of
from tatten.ops.sizes import ceil_div, power_of_2

MAX_RANKS = 8  # what a node has, and what the kernel unrolls
FLAG_BYTES = 128  # of a channel: 8 bytes for each rank, on cache lines of their own
ROW_BYTES, LSE_ROWS = 8192, 32  # of a slot: what a program can keep in registers
SLOT_BYTES = ROW_BYTES + 4 * LSE_ROWS
CHANNEL_BYTES = FLAG_BYTES + 2 * MAX_RANKS * SLOT_BYTES

# What a rank could send in the time of one more round between ranks: 3 us at 400 GB/s, to be measured. Two rounds,
# which send 2 (n - 1) / n of the payload in place of n - 1 of it, are worth their time where they save more than this.
ROUND_BYTES = 1_200_000

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """How the rows of a state are shared out. A share is what one rank merges: everything, or every n-th run of rows.

    A program merges `block_rows` rows of the share; beyond `programs` of them, further launches go on.
    """

    ranks: int
    rows: int  # of the state
    merged_rows: int  # of the result
    share: int
    run: int  # rows of a share that lie side by side
    scatter: bool  # each rank has a share of its own
    gather: bool  # and sends what it merged to all
    block_rows: int
    programs: int
    num_warps: int

    @property
    def blocks(self) -> int:
        return ceil_div(self.share, self.block_rows)


def plan(shape: torch.Size, element_size: int, ranks: int, scatter_heads: bool, programs: int) -> Plan:
    """The plan for `out` of this shape, `[batch, heads, q_length, head_dim]` where heads are scattered."""
    rows, dim = math.prod(shape[:-1]), shape[-1]
    saved = (ranks - 1) * (ranks - 2) / ranks * rows * (dim * element_size + 4)
    gather = not scatter_heads and saved > ROUND_BYTES
    share, run = rows, rows
    if scatter_heads:
        share, run = rows // ranks, shape[1] // ranks * shape[2]
    elif gather:
        share = run = ceil_div(rows, ranks)
    row_bytes = power_of_2(dim) * element_size
    most = min(LSE_ROWS, ROW_BYTES // row_bytes)
    block_rows = min(most, power_of_2(ceil_div(share, programs)))
    num_warps = max(1, min(8, block_rows * row_bytes // 512))  # 16 bytes for each thread
    merged = share if scatter_heads else rows
    return Plan(ranks, rows, merged, share, run, scatter_heads or gather, gather, block_rows, programs, num_warps)


@dataclass
class Link:
    """What the ranks of a group share on a device, and the state of this rank.

    Attributes:
        buffer: this rank's channels, bytes in symmetric memory.
        peers: int64 `[ranks]`, the addresses of all ranks' channels.
        epochs: int64 `[programs]`, the last round on each channel; -1 after a peer was missing.
        error: int32 `[1]` in pinned host memory, into which kernels write bits of the ranks that were missing.
    """

    buffer: Tensor
    peers: Tensor
    epochs: Tensor
    error: Tensor
    rank: int
    patience_ns: int
    programs: int

    def __post_init__(self) -> None:
        self._word = ctypes.c_int32.from_address(self.error.data_ptr())

    @property
    def missing(self) -> list[int]:
        """The ranks that did not come, as far as the device got; does not wait for it."""
        return [rank for rank in range(MAX_RANKS) if self._word.value >> rank & 1]


@dataclass
class Peers:
    """The ranks of one process group."""

    name: str
    rank: int
    size: int
    store: dist.Store
    timeout: datetime.timedelta
    exchanges: int = 0
    unsupported_reason: str | None = None
    links: dict[torch.device, Link] = field(default_factory=dict)
    plans: dict[tuple[object, ...], Plan] = field(default_factory=dict)

    def exchange(self, what: str, mine: str) -> list[str]:
        """What each rank has to say, through the store of the group: a collective on the host, bounded by its timeout.

        Raises:
            RuntimeError: a rank did not come; the message names it.
        """
        key = f"tatten.push/{self.exchanges}"
        self.exchanges += 1
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], mine)
        try:
            self.store.wait(keys, self.timeout)
        except RuntimeError as error:
            missing = [rank for rank, x in enumerate(keys) if not self.store.check([x])]
            raise RuntimeError(self.missing_peers(missing, f"at its first use, to agree on {what}")) from error
        said = [self.store.get(x).decode() for x in keys]
        # The last one to read clears up: a later group of the same name may get the same store.
        if self.store.add(f"{key}/read", 1) == self.size:
            for x in (*keys, f"{key}/read"):
                self.store.delete_key(x)
        return said

    def missing_peers(self, missing: list[int], when: str) -> str:
        who = " and ".join(map(str, missing)) or "unknown"
        return (
            f"tatten.tree_merge, strategy 'push': rank {who} of the {self.size} of group {self.name!r} did not come "
            f"within {self.timeout.total_seconds():g} s {when} (this is rank {self.rank})"
        )


_peers: WeakKeyDictionary[dist.ProcessGroup, Peers] = WeakKeyDictionary()


def push_unsupported_reason(out: Tensor, lse: Tensor, group: str) -> str | None:
    """Why `push_merge` can't do this, the same on all ranks; None if it can. Reads no data, so fake tensors will do.

    The first question about a group on CUDA is a collective on the host, through the group's store; its answer is kept.
    """
    if out.device.type != "cuda":
        return f"symmetric memory is for CUDA tensors, and `out` is on {out.device.type}"
    if out.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernel takes float16, bfloat16 and float32, not {out.dtype}"
    if power_of_2(out.shape[-1]) * out.element_size() > ROW_BYTES:
        return f"a row of `out` must fit {ROW_BYTES} bytes, and head_dim is {out.shape[-1]}"
    return _peers_of(group, out.device).unsupported_reason


def push_merge(out: Tensor, lse: Tensor, group: str, scatter_heads: bool) -> State:
    """`tatten::push_merge`: the states of all ranks, merged in the order of ranks; equal to the bit on all of them.

    A collective on the current stream: all ranks call it with the same shapes, in the same order, and on one stream for
    each group. The first call for a shape agrees on it on the host, and the first on a device allocates what its ranks
    share, once for all shapes; neither can be captured in a CUDA graph, everything later can. The host never waits for
    the device.

    A peer that does not come is waited for as long as the timeout of the group. Then this merge, and all later ones of
    the group, give out = NaN with the largest finite lse: never something that passes for a state or for an empty one.
    Kernels don't trap, which would take the whole CUDA context along; the error is raised by the next call, or by
    `check_push` after a synchronisation, as when a graph is replayed. The group can't be used for this any more.

    Args:
        out: `[batch, heads, q_length, head_dim]`, or any `[..., head_dim]` if heads are not scattered; any strides.
        lse: float32 `out.shape[:-1]`.
        group: the name of a process group for which `push_unsupported_reason` is None.
        scatter_heads: return only the heads `rank * heads / n ... (rank + 1) * heads / n - 1`.

    Raises:
        ValueError: ranks disagree on shape, dtype or `scatter_heads`; on all ranks, and it names them.
        RuntimeError: a peer was missing; or this is the first call for its shape, and in a CUDA graph's capture.
    """
    from tatten.ops.distributed.push_kernel import launch_push

    peers = _peers_of(group, out.device)
    shape = out.shape
    with torch.cuda.device(out.device):
        key = (out.device, shape, out.dtype, scatter_heads)
        planned = peers.plans.get(key) or _agree(peers, key, out, scatter_heads)
        link = peers.links[out.device]
        _check(peers, link)
        if lse.numel() == 0:
            merged = out.new_empty(0), lse.new_empty(0)
        else:
            merged = launch_push(out.contiguous(), lse.contiguous(), planned, link)
    if scatter_heads:
        shape = torch.Size((shape[0], shape[1] // peers.size, *shape[2:]))
    return merged[0].view(shape), merged[1].view(shape[:-1])


def check_push(group: str) -> None:
    """Raise RuntimeError if a push merge over this group missed a peer, as far as the device got.

    Call it after `torch.cuda.synchronize()` to know of all merges so far, those of replayed graphs among them.
    """
    peers = _peers.get(group_of(group))
    if peers is not None:
        for link in peers.links.values():
            _check(peers, link)


def _check(peers: Peers, link: Link) -> None:
    missing = link.missing
    if missing:
        raise RuntimeError(peers.missing_peers(missing, "to a merge that was launched before"))


def _peers_of(group: str, device: torch.device) -> Peers:
    """Kept for as long as the group lives, not for its name: groups are destroyed, and names used again."""
    process_group = group_of(group)
    peers = _peers.get(process_group)
    if peers is None:
        peers = _peers[process_group] = connect(group, process_group)
        backend = process_group._get_backend(torch.device("cuda")).name()
        if backend != "nccl":
            peers.unsupported_reason = f"group {group!r} has backend {backend!r} for CUDA tensors, not 'nccl'"
        elif peers.size > MAX_RANKS:
            peers.unsupported_reason = f"group {group!r} has {peers.size} ranks, more than the {MAX_RANKS} of a node"
        else:
            peers.unsupported_reason = unsupported_topology(peers.exchange("where ranks are", _place(device)))
    return peers


def connect(name: str, group: dist.ProcessGroup) -> Peers:
    """The ranks of a group, of which nothing is known yet."""
    device = torch.device("cuda" if "cuda" in map(str, group._device_types) else "cpu")
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", c10d.default_pg_timeout)
    return Peers(name, group.rank(), group.size(), c10d._get_process_group_store(group), timeout)


def _place(device: torch.device) -> str:
    """Node, GPU, and whether it reaches all other GPUs that this process sees."""
    mine = torch.cuda.current_device() if device.index is None else device.index
    others = [i for i in range(torch.cuda.device_count()) if i != mine]
    reaches = all(torch.cuda.can_device_access_peer(mine, i) for i in others)
    with open("/proc/sys/kernel/random/boot_id") as boot:  # containers of one node may have names of their own
        node = boot.read().strip()
    return f"{node} {socket.gethostname()} {torch.cuda.get_device_properties(mine).uuid} {int(reaches)}"


def unsupported_topology(places: list[str]) -> str | None:
    """Why ranks at these places can't share memory; each is what `_place` returned on a rank."""
    nodes, hosts, gpus, reach = zip(*(place.split() for place in places), strict=True)
    if len(set(nodes)) > 1:
        return f"its ranks are on several nodes: {', '.join(dict.fromkeys(hosts))}"
    if len(set(gpus)) < len(gpus):
        return "two of its ranks share a GPU"
    if "0" in reach:
        return f"the GPU of rank {reach.index('0')} can't reach the memory of all others"
    return None


def _agree(peers: Peers, key: tuple[object, ...], out: Tensor, scatter_heads: bool) -> Plan:
    """The plan for a shape that all ranks found they have in common, at its first use."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "tatten.tree_merge, strategy 'push', can't be captured in a CUDA graph at its first use for a shape: "
            f"run it once before capture (`out` {tuple(out.shape)}, {out.dtype}, group {peers.name!r})"
        )
    programs = torch.cuda.get_device_properties(out.device).multi_processor_count
    scattered = ", heads scattered" if scatter_heads else ""
    said = peers.exchange("a shape", f"{tuple(out.shape)} {out.dtype}{scattered}, {programs} multiprocessors")
    if len(set(said)) > 1:
        each = "; ".join(f"rank {rank}: {x}" for rank, x in enumerate(said))
        raise ValueError(f"`out` must be the same in shape, dtype and scattering on all ranks of a group, got {each}")
    if scatter_heads and (out.dim() != 4 or out.shape[1] % peers.size):
        wanted = f"[batch, heads, q_length, head_dim] with heads divisible by {peers.size} ranks"
        raise ValueError(f"`out` must be {wanted} to be scattered, got shape {tuple(out.shape)}")
    if out.device not in peers.links:
        # On a thread of its own, as this one may be allocating from the pool of one of Inductor's CUDA graphs, which
        # takes what outlives a step for a leak.
        with ThreadPoolExecutor(1) as thread:
            peers.links[out.device] = thread.submit(_connect, peers, out.device, programs).result()
    peers.plans[key] = plan(out.shape, out.element_size(), peers.size, scatter_heads, programs)
    return peers.plans[key]


def _connect(peers: Peers, device: torch.device, programs: int) -> Link:
    """Allocate this rank's channels and learn where those of the others are."""
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import rendezvous

    torch.cuda.set_device(device)  # of this thread
    # Of no memory pool, which may hand out what was used before at other offsets on other ranks.
    size = programs * CHANNEL_BYTES
    buffer = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
    buffer.zero_()
    torch.cuda.synchronize()  # before a peer can store into it
    handle = rendezvous(buffer, peers.name)  # type: ignore[arg-type]
    addresses = list(handle.buffer_ptrs)
    fits = (handle.rank, handle.world_size) == (peers.rank, peers.size)
    if not fits or 0 in addresses or addresses[peers.rank] != buffer.data_ptr():
        raise RuntimeError(
            f"symmetric memory knows group {peers.name!r} as another one: rank {handle.rank} of {handle.world_size}, "
            f"where this is rank {peers.rank} of {peers.size}; was a group of that name destroyed?"
        )
    error = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    link = Link(
        buffer,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros(programs, dtype=torch.int64, device=device),
        error,
        peers.rank,
        int(peers.timeout.total_seconds() * 1e9),
        programs,
    )
    torch.cuda.synchronize()
    peers.exchange("memory", "ready")
    return link
