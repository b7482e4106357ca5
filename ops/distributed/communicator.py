"""The ranks of a process group: their exchanges on the host, and their shared memory for push merges."""

from __future__ import annotations

import ctypes
import datetime
import socket
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tatten.ops.distributed.collectives import group_backend, group_of, group_store, group_timeout
from tatten.ops.distributed.host_exchange import MissingError, exchange
from tatten.ops.distributed.push_layout import MAX_RANKS, PushPlan


@dataclass
class Workspace:
    """The memory that the ranks of a group share on one device, as this rank sees it.

    Attributes:
        buffer: this rank's channels, bytes in symmetric memory.
        addresses: int64 `[ranks]`, the addresses of all ranks' channels.
        epochs: int64 `[programs]`, the last round on each channel; -1 after a peer was missing.
        missing: int32 `[1]` in pinned host memory: kernels set bit i if rank i did not arrive.
        rank: this rank.
        timeout_ns: the time that a kernel waits for its peers.
    """

    buffer: Tensor
    addresses: Tensor
    epochs: Tensor
    missing: Tensor
    rank: int
    timeout_ns: int

    def __post_init__(self) -> None:
        self._missing_bits = ctypes.c_int32.from_address(self.missing.data_ptr())

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks that kernels have reported missing so far. Reading it does not wait for the device."""
        return [rank for rank in range(MAX_RANKS) if self._missing_bits.value >> rank & 1]


@dataclass
class Communicator:
    """The ranks of one process group, and the state on which they agree.

    Attributes:
        exchanges: number of exchanges so far, the same on all ranks between exchanges.
        unsupported_reason: the reason why the push merge does not work in this group; None if it does.
        workspaces: the workspace of each device.
        plans: the plans by device, shape, dtype and whether heads are scattered.
    """

    name: str
    rank: int
    size: int
    store: dist.Store
    timeout: datetime.timedelta
    exchanges: int = 0
    unsupported_reason: str | None = None
    workspaces: dict[torch.device, Workspace] = field(default_factory=dict)
    plans: dict[tuple[object, ...], PushPlan] = field(default_factory=dict)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Communicator:
        """Return the communicator of a group, before any exchange."""
        return cls(group.group_name, group.rank(), group.size(), group_store(group), group_timeout(group))

    def exchange(self, topic: str, value: str) -> list[str]:
        """Exchange strings with all ranks through the group's store: a collective on the host, bounded by its timeout.

        Raises:
            RuntimeError: a rank did not arrive; the message names it and the topic.
        """
        key = f"tatten.push/{self.exchanges}"
        self.exchanges += 1
        try:
            return exchange(self.store, key, self.rank, self.size, value, self.timeout)
        except MissingError as error:
            raise RuntimeError(self.missing_peers(error.missing, f"at its first use, to agree on {topic}")) from error

    def missing_peers(self, missing: list[int], when: str) -> str:
        """Return the error message for peers that did not arrive."""
        ranks = " and ".join(map(str, missing)) or "unknown"
        return (
            f"tatten.tree_merge, strategy 'push': rank {ranks} of the {self.size} of group {self.name!r} did not "
            f"arrive within {self.timeout.total_seconds():g} s {when} (this is rank {self.rank})"
        )


# The key is the group and not its name: a name may be reused after its group is destroyed.
_communicators: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()


def connected(group: str) -> Communicator | None:
    """Return the communicator of a group if `connect` has made one, else None."""
    return _communicators.get(group_of(group))


def connect(group: str, device: torch.device) -> Communicator:
    """Return the communicator of a group, which is kept as long as the group lives. The first call is a collective."""
    process_group = group_of(group)
    communicator = _communicators.get(process_group)
    if communicator is None:
        communicator = _communicators[process_group] = Communicator.of(process_group)
        backend = group_backend(process_group, "cuda")
        if backend != "nccl":
            communicator.unsupported_reason = f"group {group!r} has backend {backend!r} for CUDA tensors, not 'nccl'"
        elif communicator.size > MAX_RANKS:
            communicator.unsupported_reason = (
                f"group {group!r} has {communicator.size} ranks, more than the {MAX_RANKS} of a node"
            )
        else:
            locations = communicator.exchange("the topology", _location(device))
            communicator.unsupported_reason = unsupported_topology(locations)
    return communicator


def _location(device: torch.device) -> str:
    """Describe node, host name, GPU, and whether the GPU reaches all other GPUs that this process sees."""
    gpu = torch.cuda.current_device() if device.index is None else device.index
    others = [i for i in range(torch.cuda.device_count()) if i != gpu]
    reaches = all(torch.cuda.can_device_access_peer(gpu, i) for i in others)
    with open("/proc/sys/kernel/random/boot_id") as boot:  # containers on one node may have different host names
        node = boot.read().strip()
    return f"{node} {socket.gethostname()} {torch.cuda.get_device_properties(gpu).uuid} {int(reaches)}"


def unsupported_topology(locations: list[str]) -> str | None:
    """Return the reason why ranks at these locations can't share memory; None if they can.

    `locations` has the `_location` of each rank.
    """
    nodes, hosts, gpus, reach = zip(*(location.split() for location in locations), strict=True)
    if len(set(nodes)) > 1:
        return f"its ranks are on several nodes: {', '.join(dict.fromkeys(hosts))}"
    if len(set(gpus)) < len(gpus):
        return "two of its ranks share a GPU"
    if "0" in reach:
        return f"the GPU of rank {reach.index('0')} can't access the memory of all others"
    return None
