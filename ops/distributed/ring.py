"""A ring of ranks that pass tensors from neighbour to neighbour, point to point, on gloo or NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ring:
    """The ranks in their order around the ring, as one of them sees it.

    Attributes:
        ranks: the global ranks.
        rank: this rank's place among them.
        group: a process group with all of them; None for the default group.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None

    def travel(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield `(place, tensors)` of each rank, this rank's own first.

        It is a collective: all ranks pass tensors of the same shapes and dtypes. Each pair is passed on while the
        caller computes on it, and may be overwritten once the caller asks for the next one. A rank holds at most two
        beside its own, and sends `len(ranks) - 1` times the bytes of its own.

        Raises:
            RuntimeError: a neighbour is gone or did not come within the timeout of the group; the message names both.
                On NCCL, the watchdog ends the process instead.
        """
        size = len(self.ranks)
        current = tensors if size == 1 else tuple(tensor.contiguous() for tensor in tensors)
        spare = [tuple(map(torch.empty_like, current)) for _ in range(min(2, size - 1))]
        for hop in range(size):
            last = hop == size - 1
            works = [] if last else self._pass_on(current, spare[hop % 2])
            yield (self.rank - hop) % size, current
            if not last:
                self._wait(works)
                current = spare[hop % 2]

    def _pass_on(self, outgoing: tuple[Tensor, ...], incoming: tuple[Tensor, ...]) -> list[dist.Work]:
        ops = [dist.P2POp(dist.isend, tensor, self._neighbour(1), self.group) for tensor in outgoing]
        ops += [dist.P2POp(dist.irecv, tensor, self._neighbour(-1), self.group) for tensor in incoming]
        try:
            works: list[dist.Work] = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._broken(error) from error
        return works

    def _wait(self, works: list[dist.Work]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"rank {self.ranks[self.rank]} waited in vain for keys and values from rank {self._neighbour(-1)}, or for "
            f"rank {self._neighbour(1)} to take some, of the ring of ranks {list(self.ranks)}: {error}"
        )

    def _neighbour(self, step: int) -> int:
        return self.ranks[(self.rank + step) % len(self.ranks)]
