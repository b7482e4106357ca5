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


def group_size_and_rank(name: str) -> tuple[int, int]:
    """The size of a group, and this rank in it; for Dynamo a constant.

    What a decomposition rests on has to stand in the graph: AOTAutograd's cache is keyed on the graph, and other ranks
    and runs, which have groups of the same names, use the same cache.
    """
    group = group_of(name)
    return group.size(), group.rank()


# All that `torch.compiler.assume_constant_result` does, but for importing Dynamo, which takes seconds.
group_size_and_rank._dynamo_marked_constant = True  # type: ignore[attr-defined]


def all_reduce(x: Tensor, op: str, name: str) -> Tensor:
    """`x` reduced elementwise by `op`, "sum" or "max", over all ranks."""
    return _wait(_c10d.all_reduce(x, op, name))


def all_gather(x: Tensor, n: int, name: str) -> Tensor:
    """`[n * rows, ...]`: the `x`, `[rows, ...]` and contiguous, of all n ranks in order."""
    return _wait(_c10d.all_gather_into_tensor(x, n, name))


def reduce_scatter(x: Tensor, n: int, name: str) -> Tensor:
    """This rank's part, `[rows, ...]`, of the sum of `x`, `[n * rows, ...]` and contiguous, over all n ranks."""
    return _wait(_c10d.reduce_scatter_tensor(x, "sum", n, name))


def all_to_all(x: Tensor, n: int, name: str) -> Tensor:
    """`y` of the shape of `x`, `[n, ...]` and contiguous: `y[i]` on rank j of n is `x[j]` on rank i."""
    return _wait(_c10d.all_to_all_single(x, [1] * n, [1] * n, name))


def _wait(x: Tensor) -> Tensor:
    done: Tensor = _c10d.wait_tensor(x)
    return done
