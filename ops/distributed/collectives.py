"""Process groups by name, and their collectives as functions of tensors: eager, compiled and captured alike.

All use of PyTorch's functional collectives and of the internals of `torch.distributed` is in this file. The collectives
are dispatcher ops of `_c10d_functional`, which AOTAutograd traces and Inductor lowers; each is followed by its wait.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_c10d = torch.ops._c10d_functional


def group_of(name: str) -> dist.ProcessGroup:
    """The process group with this name, of which this rank is a member."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_size_and_rank(name: str) -> tuple[int, int]:
    """The size of a group and this rank in it; a constant to Dynamo.

    AOTAutograd caches by graph, and other ranks and runs have groups with the same names. So everything that a
    decomposition depends on has to be in the graph.
    """
    group = group_of(name)
    return group.size(), group.rank()


# What `torch.compiler.assume_constant_result` does, without importing Dynamo, which takes seconds.
group_size_and_rank._dynamo_marked_constant = True  # type: ignore[attr-defined]


def group_backend(group: dist.ProcessGroup, device_type: str) -> str:
    """The name of the backend that a group uses for tensors on this type of device, such as "nccl"."""
    name: str = group._get_backend(torch.device(device_type)).name()
    return name


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    """The time that a collective of a group waits for its peers."""
    device = torch.device("cuda" if "cuda" in map(str, group._device_types) else "cpu")
    options = getattr(group._get_backend(device), "options", None)
    timeout: datetime.timedelta = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return timeout


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store through which the ranks of a group found each other."""
    return distributed_c10d._get_process_group_store(group)


def all_reduce(x: Tensor, op: str, name: str) -> Tensor:
    """`x` reduced elementwise by `op`, "sum" or "max", over all ranks."""
    return _wait(_c10d.all_reduce(x, op, name))


def all_gather(x: Tensor, n: int, name: str) -> Tensor:
    """The `x`, `[rows, ...]` and contiguous, of all n ranks in order: `[n * rows, ...]`."""
    return _wait(_c10d.all_gather_into_tensor(x, n, name))


def reduce_scatter(x: Tensor, n: int, name: str) -> Tensor:
    """This rank's part, `[rows, ...]`, of the sum of `x`, `[n * rows, ...]` and contiguous, over all n ranks."""
    return _wait(_c10d.reduce_scatter_tensor(x, "sum", n, name))


def all_to_all(x: Tensor, n: int, name: str) -> Tensor:
    """Exchange rows: `y[i]` on rank j is `x[j]` on rank i. Both are `[n, ...]`, and `x` is contiguous."""
    return _wait(_c10d.all_to_all_single(x, [1] * n, [1] * n, name))


def _wait(x: Tensor) -> Tensor:
    done: Tensor = _c10d.wait_tensor(x)
    return done
