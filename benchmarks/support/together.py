"""Ranks that measure together: the slowest one counts, and a step that fails on one of them is skipped by all."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from support.command_line import first_line
from support.timing import seconds

Step = Callable[[], Tensor]


def join(device: str, timeout: datetime.timedelta) -> None:
    """Join the process group that torchrun announces, with this rank's GPU if there is one."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo", timeout=timeout)


class Ranks:
    """The first `size` ranks as a group, and the operations with which they measure together."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device
        self.group = dist.new_group(list(range(size)), timeout=datetime.timedelta(minutes=2))
        self.rank = dist.get_rank()

    def largest(self, x: float) -> float:
        x = torch.tensor(x, dtype=torch.float64, device=self.device)
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x.item()

    def seconds(self, step: Callable[[], object], repeats: int = 1) -> float:
        """Return the seconds of one step, on the slowest rank."""
        dist.barrier(self.group)
        return self.largest(seconds(step, self.device, repeats))

    def agree(self, reason: str | None) -> str | None:
        """Return the first reason of any rank, on all of them."""
        reasons: list[str | None] = [None] * self.size
        dist.all_gather_object(reasons, reason, self.group)
        return next(filter(None, reasons), None)

    def attempt(self, make: Callable[[], Step]) -> Step | str:
        """Return the result of `make`, or the reason why it fails on some rank."""
        reason = step = None
        try:
            step = make()
        except Exception as e:
            reason = first_line(e)
        return self.agree(reason) or step

    def tried(self, step: Step) -> Step | str:
        """Return the step if it runs on all ranks, or the reason why it fails."""
        return self.attempt(lambda: (step(), step)[1])


def say(*what: object) -> None:
    if dist.get_rank() == 0:
        print(*what, flush=True)
