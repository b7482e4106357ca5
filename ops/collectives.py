"""Collectives of a process group, given by its name, as functions of tensors: eager, compiled and captured alike.

All use of PyTorch's functional collectives is in this file. They are ops of its dispatcher, `_c10d_functional`, which
AOTAutograd traces and Inductor lowers; each is followed by its wait.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

_c10d = torch.ops._c10d_functional


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of that name, to which this rank belongs."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def all_reduce(x: Tensor, op: str, name: str) -> Tensor:
    """`x` reduced elementwise by `op`, "sum" or "max", over all ranks."""
    return _wait(_c10d.all_reduce(x, op, name))


def all_gather(x: Tensor, name: str) -> Tensor:
    """`[n * rows, ...]`: the `x`, `[rows, ...]` and contiguous, of all ranks in order."""
    return _wait(_c10d.all_gather_into_tensor(x, group_of(name).size(), name))


def reduce_scatter(x: Tensor, name: str) -> Tensor:
    """This rank's part, `[rows, ...]`, of the sum of `x`, `[n * rows, ...]` and contiguous, over all ranks."""
    return _wait(_c10d.reduce_scatter_tensor(x, "sum", group_of(name).size(), name))


def all_to_all(x: Tensor, name: str) -> Tensor:
    """`y` of the shape of `x`, `[n, ...]` and contiguous: `y[i]` on rank j is `x[j]` on rank i."""
    ones = [1] * group_of(name).size()
    return _wait(_c10d.all_to_all_single(x, ones, ones, name))


def _wait(x: Tensor) -> Tensor:
    done: Tensor = _c10d.wait_tensor(x)
    return done
