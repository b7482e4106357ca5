"""Bytes between ranks: counted at the calls of collectives, and by the driver's counters of NVLink."""

from __future__ import annotations

import re
import subprocess

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.together import Ranks, Step
from tatten.ops.distributed.push_layout import plan_push


class Wire(TorchDispatchMode):
    """Counts the numbers and bytes that this rank sends: at each collective the tensor's, times a factor."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.numbers: float | None = 0.0  # None if some were packed into bytes
        self.bytes = 0.0
        self.calls: list[str] = []
        to_others = (n - 1) / n
        self.factors = {  # of what a rank hands in; as NCCL's ring algorithms send it, which is the least there is
            "c10d::send": 1.0,
            "c10d::recv_": 0.0,
            "_c10d_functional::all_reduce": 2 * to_others,  # equation 12
            "_c10d_functional::all_gather_into_tensor": n - 1.0,
            "_c10d_functional::reduce_scatter_tensor": to_others,
            "_c10d_functional::all_to_all_single": to_others,
            "_c10d_functional::wait_tensor": 0.0,
        }
        self.ranks = n

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        factor = self.factors.get(name)
        if name == "tatten::push_merge":  # all rows to all peers, or in two rounds
            two = plan_push(args[0].shape, args[0].element_size(), self.ranks, False, 1).gather
            factor = self.factors["_c10d_functional::all_reduce"] if two else self.ranks - 1.0
        if factor:
            sent = [x for each in args for x in (each if isinstance(each, list) else [each]) if isinstance(x, Tensor)]
            self.bytes += factor * sum(x.nbytes for x in sent)
            packed = self.numbers is None or any(x.dtype == torch.uint8 for x in sent)
            self.numbers = None if packed else self.numbers + factor * sum(x.numel() for x in sent)
            self.calls.append(name.split("::")[1])
        elif name not in self.factors and name.split("::")[0] in ("c10d", "_c10d_functional", "symm_mem"):
            raise NotImplementedError(f"no rule for the bytes that {name} sends")
        return func(*args, **(kwargs or {}))


def nvlink_kib() -> int | None:
    """Return the KiB that this GPU has sent over all its links so far, by the driver; None if it does not count."""
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    try:
        shown = subprocess.run(["nvidia-smi", "nvlink", "-gt", "d", "-i", uuid], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return None
    kib_of_links = re.findall(r"Data Tx:\s*(\d+)\s*KiB", shown)
    return sum(map(int, kib_of_links)) if kib_of_links else None


def nvlink_bytes(step: Step, ranks: Ranks, times: int) -> float | None:
    """Return the bytes that this GPU sends over its links in one step, the mean of `times`; None without counters."""
    torch.cuda.synchronize()
    before = nvlink_kib()
    dist.barrier(ranks.group)
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    dist.barrier(ranks.group)
    after = nvlink_kib()
    return None if before is None or after is None else (after - before) * 1024 / times
