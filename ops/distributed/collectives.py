"""Process groups by name, and their collectives as functions of tensors: eager, compiled and captured alike.

Only this file uses PyTorch's functional collectives and the internals of `torch.distributed`. The collectives are
dispatcher ops of `_c10d_functional`, which AOTAutograd traces and Inductor lowers; each is followed by its wait.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tatten.ops.moved import moved

_c10d = torch.ops._c10d_functional
_ARGUMENTS = {  # the number of arguments that each collective takes
    "all_reduce": 3,
    "all_gather_into_tensor": 3,
    "reduce_scatter_tensor": 4,
    "all_to_all_single": 4,
    "wait_tensor": 1,
}
_INSTEAD = "states are not merged over ranks, and SDPA over DTensors is PyTorch's own"


@functools.cache
def collectives_problem() -> str | None:
    """Return the reason why states can't be merged over ranks with this PyTorch; None if they can."""
    try:
        resolve = distributed_c10d._resolve_process_group
        if dist.group.WORLD is not None:
            resolve(dist.group.WORLD.group_name)
    except Exception as error:
        return moved("torch.distributed.distributed_c10d._resolve_process_group", error, _INSTEAD)
    for name, arguments in _ARGUMENTS.items():
        try:
            schema = getattr(_c10d, name).default._schema
        except Exception as error:
            return moved(f"torch.ops._c10d_functional.{name}", error, _INSTEAD)
        if len(schema.arguments) != arguments:
            return moved(f"torch.ops._c10d_functional.{name}", f"its schema is {schema}", _INSTEAD)
    return None


def group_of(name: str) -> dist.ProcessGroup:
    """Return the process group with this name, of which this rank is a member.

    Raises:
        NotImplementedError: PyTorch's collectives have moved.
    """
    if problem := collectives_problem():
        raise NotImplementedError(problem)
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_size_and_rank(name: str) -> tuple[int, int]:
    """Return the size of a group and this rank in it; a constant to Dynamo.

    AOTAutograd caches by graph, and other ranks and runs have groups with the same names. So everything that a
    decomposition depends on has to be in the graph.
    """
    group = group_of(name)
    return group.size(), group.rank()


# `torch.compiler.assume_constant_result` would do the same, but imports Dynamo, which takes seconds.
group_size_and_rank._dynamo_marked_constant = True  # type: ignore[attr-defined]


def group_backend(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the name of the backend that a group uses for tensors on this type of device, such as "nccl"."""
    with _for_push("torch.distributed.ProcessGroup._get_backend"):
        name: str = group._get_backend(torch.device(device_type)).name()
        return name


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    """Return the time that a collective of a group waits for its peers."""
    with _for_push("torch.distributed.ProcessGroup._device_types"):
        device = torch.device("cuda" if "cuda" in map(str, group._device_types) else "cpu")
        options = getattr(group._get_backend(device), "options", None)
        timeout: datetime.timedelta = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
        return timeout


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the key-value store through which the ranks of a group found each other."""
    with _for_push("torch.distributed.distributed_c10d._get_process_group_store"):
        return distributed_c10d._get_process_group_store(group)


@contextmanager
def _for_push(name: str) -> Iterator[None]:
    """Turn an error of a private API that only the push merge needs into a NotImplementedError that names the API."""
    try:
        yield
    except Exception as error:
        raise NotImplementedError(moved(name, error, "states are not merged by `push`")) from error


def all_reduce(x: Tensor, op: str, name: str) -> Tensor:
    """Reduce `x` elementwise by `op`, "sum" or "max", over all ranks."""
    return _wait(_c10d.all_reduce(x, op, name))


def all_gather(x: Tensor, n: int, name: str) -> Tensor:
    """Gather `x`, `[rows, ...]` and contiguous, of all n ranks in order: `[n * rows, ...]`."""
    return _wait(_c10d.all_gather_into_tensor(x, n, name))


def reduce_scatter(x: Tensor, n: int, name: str) -> Tensor:
    """Sum `x`, `[n * rows, ...]` and contiguous, over all n ranks, and return this rank's part, `[rows, ...]`."""
    return _wait(_c10d.reduce_scatter_tensor(x, "sum", n, name))


def all_to_all(x: Tensor, n: int, name: str) -> Tensor:
    """Exchange rows: `y[i]` on rank j is `x[j]` on rank i. Both are `[n, ...]`, and `x` is contiguous."""
    return _wait(_c10d.all_to_all_single(x, [1] * n, [1] * n, name))


def _wait(x: Tensor) -> Tensor:
    done: Tensor = _c10d.wait_tensor(x)
    return done
